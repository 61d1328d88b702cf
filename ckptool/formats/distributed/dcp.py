"""A folder of torch.distributed.checkpoint (DCP), written by several processes.

`.metadata` is a pickle with the file and offset of each chunk of each tensor. A chunk in a
`.distcp` file is a complete torch.save file. Only `.metadata` is read before the first use of a
tensor or value. Sources: torch/distributed/checkpoint/metadata.py, filesystem.py and
_nested_dict.py, torch 2.0 to 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.finding import Finding
from ckptool.core.model import MAX_ELEMENTS, Global, Opaque, TensorRef, make_plain_tensor
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange, MemorySource, Source
from ckptool.files.tiled import Tile, join_tiles, make_late_range
from ckptool.formats.archive import read_zip
from ckptool.formats.base import (
    Archive,
    Checksum,
    Findings,
    FolderFormat,
    Probe,
    Record,
    WritePlan,
    add_error_context,
    check_limit,
    distributed_refusal,
    require_package,
)
from ckptool.formats.distributed.placements import attributes_of, check_ranks, row_major_data
from ckptool.formats.registry import ZIP_MAGIC
from ckptool.formats.torch_zip import TORCH_ZIP, open_member, read_contents
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.symbolic import unpickle
from ckptool.words import counted, listed, printable

_METADATA = ".metadata"
_RANK_INDEX_NAME = re.compile(r"__(\d+)\.metadata")
"""The index of each rank if they wrote without collectives (torch 2.9 and later)."""
_VALUE_DESCRIPTION = Global("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
_EXTRA_FILES = ("meta.pt", "common.pt")
"""Additional torch.save files of Lightning and Megatron, each with a dict."""
_MEGATRON_SHAPE_KEY = "nd_reformulated_orig_global_shape"
_ACCELERATE_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
"""The DCP folders inside one of accelerate; with a second model, they are not joined."""
_ZSTD_TRANSFORM = "stream.zstd/1"
_MAX_SAVE_OVERHEAD = 64 << 10
"""The most bytes that torch.save writes around the elements of one tensor."""
_MAX_FETCHED_ITEM = 64 << 20
"""The most bytes of a remote item to fetch at once, instead of on each read."""
_COPY_AGAIN = "copy the whole folder again, or use an earlier checkpoint of the run"


class _Item(NamedTuple):
    """The place of one chunk of a tensor, or of one object."""

    path: str
    offset: int
    length: int
    packed: tuple[str, ...] = ()
    """How it was compressed: `stream.zstd/1`."""
    element_bytes: int = 0
    """Bytes of its elements, by the index; compressed zeros are much smaller."""


class _Chunk(NamedTuple):
    """The box of a tensor that one item contains."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: _Item


class _Tensor(NamedTuple):
    """The dtype, shape and chunks of a tensor in the index."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class Index(NamedTuple):
    """The content of `.metadata`, or of the indexes of all ranks together."""

    tensors: Mapping[str, _Tensor]
    values: Mapping[str, _Item]
    order: tuple[str, ...]
    """The flat names, in the order of the index."""
    paths: Mapping[str, tuple[Any, ...]]
    """The path of each flat name in the saved tree."""
    sources: tuple[Source, ...]
    reshaped: tuple[str, ...] = ()
    """Tensors that Megatron before 0.15 stored in a different shape. They are not read."""

    def items(self) -> Iterator[tuple[str, _Item, _Chunk | None]]:
        """Yield the flat name and item of every entry, with the chunk if it is a tensor."""
        for name, tensor in self.tensors.items():
            yield from ((name, chunk.item, chunk) for chunk in tensor.chunks)
        yield from ((name, item, None) for name, item in self.values.items())


class Dcp(FolderFormat):
    """The format `dcp`."""

    name = "dcp"
    index_name = _METADATA
    refusal = distributed_refusal(
        "it is a folder of torch.distributed.checkpoint, written by several processes",
        "torch.distributed.checkpoint.load",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for a folder with a DCP index, the index, or one of its shards."""
        return bool(_find_indexes(probe))

    def read(self, probe: Probe) -> Checkpoint:
        """Return the saved tree, from `.metadata` only: no tensor or value is read yet.

        The dict that Lightning or Megatron saves next to the tensors is part of the root.
        """
        index = probe.compute_once(read_index)
        folder = probe.path if probe.is_folder else os.path.dirname(probe.path)
        leaves: dict[str, TensorRef | Opaque] = {}
        for name, tensor in index.tensors.items():
            leaves[name] = _make_tensor(name, tensor, probe.limits)
        for name, item in index.values.items():
            leaves[name] = _make_value(name, item, probe.limits)
        extras = _read_extras(folder, probe)
        tree: dict[Any, Any] = {}
        for name in index.order:
            # Without a stated path, the flat name is a key of the root.
            _insert_leaf(tree, index.paths.get(name, (name,)), leaves[name], len(index.order))
        # A file is at least as long as the end of its last item.
        least_sizes: dict[str, int] = {}  # by the path of a file
        for _, item, _ in index.items():
            end = item.offset + item.length
            least_sizes[item.path] = max(least_sizes.get(item.path, 0), end)
        file_sizes: Iterable[int] = least_sizes.values()
        if not any(source.is_far for source in index.sources):  # each size costs a request
            file_sizes = map(probe.place.size, filter(probe.place.is_file, least_sizes))
        reshaped = f"tensors with a changed shape ({_MEGATRON_SHAPE_KEY})"
        return Checkpoint(
            {**(extras.root if extras else {}), **tree},
            self.name,
            folder or ".",
            Details(
                size=sum(source.size for source in index.sources) + sum(file_sizes),
                writer="torch.distributed.checkpoint",
                storage_bytes=sum(
                    prod(tensor.shape) * BY_NAME[tensor.dtype].itemsize
                    for tensor in index.tensors.values()
                ),
                notes=(f"{counted(len(least_sizes), 'file')} of torch.distributed.checkpoint",),
                left_behind=(f"{reshaped}: {listed(index.reshaped)}",) if index.reshaped else (),
                late=bool(index.values),
            ),
            sources=(
                *index.sources,
                *(extras.sources if extras else ()),
                *([probe.source] if probe.source else []),
            ),
        )

    def plan(self, checkpoint: Checkpoint, max_bytes: int | None = None) -> WritePlan:
        """Plan `.metadata` and files of at most `max_bytes`; paths are relative to the folder."""
        from ckptool.formats.distributed.dcp_writer import plan_folder  # reading does not need it

        return plan_folder(checkpoint, self, max_bytes)

    def plan_edit(self, checkpoint: Checkpoint) -> WritePlan:
        """Plan a new `.metadata` over the existing items."""
        from ckptool.formats.distributed.dcp_writer import plan_edit, unwritable_error

        source = checkpoint.sources[0]
        if checkpoint.details.left_behind:
            raise unwritable_error(checkpoint, f"it has {listed(checkpoint.details.left_behind)}")
        index = unpickle(ByteRange(source, 0, source.size), limits=DEFAULT_LIMITS).root
        return plan_edit(checkpoint, self, index)

    def collect_findings(self, probe: Probe) -> Findings:
        """Return the stated checksums of all items, and a problem for each item that is damaged.

        Errors of the index are reported when the folder is opened.
        """
        try:
            index = probe.compute_once(read_index)
        except CheckpointError:
            return Findings()
        problems, checksums, record_count = [], list[Checksum](), 0
        for name, item, chunk in index.items():
            label = f"{os.path.basename(item.path)}: {name}"
            try:
                archive = _open_item(item, probe.limits)
                if chunk is not None:
                    _read_elements(name, index.tensors[name].dtype, chunk, probe.limits, archive)
            except CheckpointError as error:
                problems.append(Finding("corrupt", error.message, (label,), hint=error.hint))
                continue
            record_count += len(archive.records)
            for record in archive.records.values():
                if record.crc32 is not None:
                    # The inflated bytes of all items would not fit in memory.
                    data = (
                        _inflate_again(item, record, probe.limits) if item.packed else record.data
                    )
                    checksums.append(Checksum(f"{label}: {record.name}", data, record.crc32))
        return Findings(tuple(problems), (), tuple(checksums), record_count)


DCP = Dcp()


def _inflate_again(item: _Item, record: Record, limits: Limits) -> ByteRange:
    """Return a record of a compressed item, inflated on each read."""

    def locate() -> tuple[ByteRange, int | None]:
        """Open the item again, and return the bytes of the record."""
        return _open_item(item, limits).records[name].data, None  # without a CRC-32

    name = record.name
    return make_late_range(item.path, record.data.length, locate)


def _read_extras(folder: str, probe: Probe) -> Checkpoint | None:
    """Return the dict that Lightning or Megatron saves next to the tensors.

    None if there is no such file, or it has something else. The probe closes the file.
    """
    paths = (os.path.join(folder, name) for name in _EXTRA_FILES)
    path = next(filter(probe.place.is_file, paths), None)
    if path is None:
        return None
    inner = Probe(path, probe.limits)
    probe.on_close(inner.close)
    with add_error_context(path):
        checkpoint = TORCH_ZIP.read(inner) if TORCH_ZIP.recognize(inner) else None
    if checkpoint is None or not isinstance(checkpoint.root, dict):
        inner.close()
        return None
    return checkpoint


def _find_indexes(probe: Probe) -> list[str]:
    """Return the paths of the index files; empty if it is not DCP.

    A folder has one `.metadata`, or one index per rank, in the order of the ranks. A folder of
    accelerate has one index in each of `_ACCELERATE_FOLDERS`; with a second model, none is used. A
    file must be an index or a `.distcp` file: then its folder is searched.
    """
    folder, name = (probe.path, "") if probe.is_folder else os.path.split(probe.path)
    is_index = name == _METADATA or _RANK_INDEX_NAME.fullmatch(name)
    if not (probe.is_folder or is_index or name.endswith(".distcp")):
        return []
    names = probe.entries if probe.is_folder else probe.place.list_names(folder)
    if _METADATA in names:
        indexes = [_METADATA]
    elif probe.place.is_file(os.path.join(folder, _ACCELERATE_FOLDERS[0], _METADATA)):
        if "pytorch_model_fsdp_1" in names:  # a second model
            return []
        indexes = [
            os.path.join(entry, _METADATA) for entry in _ACCELERATE_FOLDERS if entry in names
        ]
    elif any(entry.endswith(".distcp") for entry in names):
        indexes = sorted(filter(_RANK_INDEX_NAME.fullmatch, names), key=_parse_rank)
    else:
        return []
    return [os.path.join(folder, entry) for entry in indexes]


def _parse_rank(index_name: str) -> int:
    """Return the rank in the name of an index: 12 for `__12.metadata`."""
    return int(index_name.removeprefix("__").removesuffix(_METADATA))


def read_index(probe: Probe) -> Index:
    """Return the index of a folder: `.metadata`, or the indexes of all ranks together.

    The probe closes their files.

    Raises:
        CorruptFile, FileMissing, UnsupportedFormat, LimitExceeded: as in `Dcp.read`.
    """
    paths = _find_indexes(probe)
    names = map(os.path.basename, paths)
    ranks = [_parse_rank(name) for name in names if _RANK_INDEX_NAME.fullmatch(name)]
    world = max(ranks, default=-1) + 1  # 0 for `.metadata`, which is complete
    check_ranks(ranks, world, "__{rank}.metadata", probe.path, _COPY_AGAIN)
    sources: list[Source] = []
    for path in paths:
        sources.append(probe.place.open(path))
        probe.on_close(sources[-1].close)
    indexes = [_parse_index(source, probe.limits) for source in sources]
    return indexes[0] if len(indexes) == 1 else _merge_indexes(indexes, probe.path)


def _merge_indexes(indexes: Sequence[Index], folder: str) -> Index:
    """Return one index for the chunks and values of all ranks.

    A chunk in several indexes is read from the last one, a value from the first.
    """
    tensors: dict[str, _Tensor] = {}
    for index in indexes:
        for name, tensor in index.tensors.items():
            earlier = tensors.get(name, tensor)
            if (earlier.dtype, earlier.shape) != (tensor.dtype, tensor.shape):
                raise CorruptFile(f"the ranks differ in {printable(name)!r}", file=folder)
            chunks = (*earlier.chunks, *tensor.chunks)
            chunk_by_box = {(chunk.offsets, chunk.sizes): chunk for chunk in chunks}
            tensors[name] = tensor._replace(chunks=tuple(chunk_by_box.values()))
    return Index(
        tensors,
        values={name: item for index in reversed(indexes) for name, item in index.values.items()},
        order=tuple(dict.fromkeys(name for index in indexes for name in index.order)),
        paths={name: path for index in indexes for name, path in index.paths.items()},
        sources=tuple(source for index in indexes for source in index.sources),
        reshaped=tuple(name for index in indexes for name in index.reshaped),
    )


def _parse_index(source: Source, limits: Limits) -> Index:
    """Return the content of an index file, with the places of all items.

    Each described tensor and value must have its items. The tensors that Megatron stored in another
    shape are only listed by name. Entries of the pickle are removed to free memory.
    """
    pickle = unpickle(ByteRange(source, 0, source.size), limits=limits)
    attributes = attributes_of(pickle.root)
    described, stored = attributes.get("state_dict_metadata"), attributes.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise UnsupportedFormat(
            "the index is not a `Metadata` object of torch.distributed.checkpoint",
            file=source.name,
            hint="PaddlePaddle and others write similar folders; load it with the library that "
            "wrote it",
        )
    folder = os.path.dirname(source.name)
    if "all_tensor_metadata" in attributes:
        raise UnsupportedFormat(
            "the index is from ByteCheckpoint, which is not supported",
            file=source.name,
            hint="load it with bytecheckpoint.load, or merge it into safetensors with its scripts",
        )
    with add_error_context(source.name, rules_of="DCP"):
        megatron = attributes.get("mcore_data") or {}  # by name, facts about a tensor
        reshaped = {name for name in described if _MEGATRON_SHAPE_KEY in (megatron.get(name) or ())}
        described = {
            name: description for name, description in described.items() if name not in reshaped
        }
        items = {}  # by name and offsets
        while stored:  # popped to free memory: a large run has millions of chunks
            key, info = stored.popitem()
            items[_parse_key(key)] = _parse_item(folder, info)
        tensors: dict[str, _Tensor] = {}
        values: dict[str, _Item] = {}
        for name, description in described.items():
            state = attributes_of(description)
            if "chunks" in state:
                tensors[name] = _parse_tensor(name, state, items)
            elif (name, None) in items:  # a value has no offsets
                values[name] = items[name, None]
            else:
                raise CorruptFile(f"{printable(name)!r} is not in any file")
        # Names are joined paths: the saved dict is restored by the paths that the planner stored.
        path_by_name = attributes.get("planner_data") or {}
        paths = {
            name: _check_path(path) for name, path in path_by_name.items() if name in described
        }
    return Index(tensors, values, tuple(described), paths, (source,), tuple(sorted(reshaped)))


def _parse_key(node: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name and offsets in a `MetadataIndex`; the offsets of a value are None."""
    state = attributes_of(node)
    offset = state.get("offset")
    return state["fqn"], None if offset is None else tuple(offset)


def _check_path(path: Any) -> tuple[Any, ...]:
    """Return the path of an entry; refuse items other than strings and integers."""
    if not isinstance(path, tuple) or not path or not {str, int}.issuperset(map(type, path)):
        raise CorruptFile(f"the index has the invalid path {printable(repr(path))}")
    return path


def _parse_item(folder: str, info: Any) -> _Item:
    """Return the item of a `_StorageInfo`; its file must be inside the folder."""
    state = attributes_of(info)
    name, offset, length = state["relative_path"], state["offset"], state["length"]
    parts = str(name).replace("\\", "/").split("/")
    is_inside = isinstance(name, str) and not os.path.isabs(name) and ".." not in parts
    if not is_inside or b"\0" in os.fsencode(name):
        raise CorruptFile(f"the index points to {printable(repr(name))}, outside the folder")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptFile(
            f"the index has invalid bounds for {printable(name)!r} (offset {offset!r})"
        )
    # The extensions of DCP that changed its bytes, for example `stream.zstd`.
    packed = tuple(map(str, state.get("transform_descriptors") or ()))
    return _Item(os.path.join(folder, name), offset, length, packed)


def _parse_tensor(
    name: str, state: Mapping[Any, Any], items: Mapping[tuple[str, Any], _Item]
) -> _Tensor:
    """Return the tensor of a `TensorStorageMetadata` with this `state`, and the item of each chunk.

    `items` are by name and offsets. Dtype, sizes and offsets are checked.
    """
    properties = state["properties"]
    # TensorProperties.__getstate__ returns a tuple that begins with the dtype.
    dtype, *_ = properties.state if isinstance(properties, Opaque) else properties
    if not isinstance(dtype, Global) or dtype.name not in BY_NAME:
        raise UnsupportedFormat(f"{printable(name)!r} has an unknown dtype")
    chunks, itemsize, shape = [], BY_NAME[dtype.name].itemsize, tuple(state["size"])
    subject = f"{printable(name)!r} has"
    check_limit(subject, len(shape), "dimensions", DEFAULT_LIMITS.max_dimensions)
    for chunk in state["chunks"]:
        attributes = attributes_of(chunk)
        offsets, sizes = tuple(attributes["offsets"]), tuple(attributes["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise CorruptFile(
                f"{printable(name)!r} and its chunks have different numbers of dimensions"
            )
        if (name, offsets) not in items:
            raise CorruptFile(
                f"the chunk at {list(offsets)} of {printable(name)!r} is not in any file"
            )
        item = items[name, offsets]._replace(element_bytes=prod(sizes) * itemsize)
        chunks.append(_Chunk(offsets, sizes, item))
    all_sizes = (shape, *(chunk.offsets for chunk in chunks), *(chunk.sizes for chunk in chunks))
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for sizes in all_sizes for n in sizes):
        raise CorruptFile(f"{printable(name)!r} has an invalid size or offset")
    return _Tensor(dtype.name, shape, tuple(chunks))


def _make_tensor(name: str, tensor: _Tensor, limits: Limits) -> TensorRef:
    """Return a tensor whose bytes are joined from its chunks when they are read.

    Only then the file of each chunk is opened.
    """
    itemsize = BY_NAME[tensor.dtype].itemsize

    def locate_chunk(chunk: _Chunk) -> ByteRange:
        """Return the bytes of a chunk, which is read on first use."""
        find = partial(_read_elements, name, tensor.dtype, chunk, limits)
        return make_late_range(chunk.item.path, prod(chunk.sizes) * itemsize, find)

    tiles = [
        Tile(chunk.offsets, chunk.sizes, partial(locate_chunk, chunk)) for chunk in tensor.chunks
    ]
    file = tensor.chunks[0].item.path if tensor.chunks else name
    with add_error_context(None, f"tensor {printable(name)!r}", hint=_COPY_AGAIN):
        data = join_tiles(file, tensor.shape, itemsize, tiles)
    return make_plain_tensor(name, tensor.dtype, tensor.shape, data)


def _make_value(name: str, item: _Item, limits: Limits) -> Opaque:
    """Return a value that is read from its item on demand; until then it shows its file."""
    shown = "stored", os.path.basename(item.path)
    read = cache(partial(_read_item, name, item, limits))
    return Opaque(_VALUE_DESCRIPTION, plain=shown, find=read)


def _read_elements(
    name: str, dtype: str, chunk: _Chunk, limits: Limits, archive: Archive | None = None
) -> tuple[ByteRange, int | None]:
    """Return the elements of a chunk, in row-major order, and their CRC-32 or None.

    The CRC-32 is known if the elements are all bytes of a storage. `archive` is the item of the
    chunk, if it is already open.

    Raises:
        CorruptFile: the item is not a tensor with the dtype and shape of the index.
    """
    content = _read_item(name, chunk.item, limits, archive)
    label = f"the chunk at {list(chunk.offsets)} of {printable(name)!r}"
    if not isinstance(content, TensorRef):
        raise CorruptFile(f"{label} is not a tensor", file=chunk.item.path, hint=_COPY_AGAIN)
    if (content.dtype, content.shape) != (dtype, chunk.sizes):
        raise CorruptFile(
            f"{label} is a {content.dtype} tensor of shape {list(content.shape)}, expected "
            f"{dtype} of shape {list(chunk.sizes)}",
            file=chunk.item.path,
            hint="the files are from different saves: " + _COPY_AGAIN,
        )
    data = row_major_data(content, label, chunk.item.path)
    is_full_storage = (
        content.is_verbatim
        and content.storage is not None
        and data.length == content.storage.nbytes
    )
    return data, content.storage.crc32 if content.storage and is_full_storage else None


def _read_item(name: str, item: _Item, limits: Limits, archive: Archive | None = None) -> Any:
    """Return the object that torch.save wrote into an item."""
    with add_error_context(item.path, repr(printable(name))):
        return read_contents(archive or _open_item(item, limits), limits).unpickled.root


def _open_item(item: _Item, limits: Limits) -> Archive:
    """Return the zip in an item, decompressed if necessary.

    Raises:
        CorruptFile: the item is outside its file, or damaged.
        UnsupportedFormat: it is not a zip.
    """
    with add_error_context(item.path, "an item of the index", hint=_COPY_AGAIN):
        data = open_member(item.path).slice(item.offset, item.length)
    if data.source.is_far and data.length <= _MAX_FETCHED_ITEM:
        # One request for the item is faster than many for its parts.
        data = ByteRange(MemorySource(data.read(), item.path), 0, data.length)
    if item.packed:
        data = _decompress(data, item, limits)
    if data.read(0, min(data.length, 4)) != ZIP_MAGIC:
        raise UnsupportedFormat(
            "contains an item that torch.save did not write",
            file=item.path,
            hint="load it with torch.distributed.checkpoint, or copy the folder again",
        )
    return read_zip(data, limits)


def _decompress(data: ByteRange, item: _Item, limits: Limits) -> ByteRange:
    """Return the content of an item compressed with zstd, the only supported method.

    The content may be as long as its elements by the index, with those bytes that torch.save adds,
    or `limits.max_inflation` times the compressed size: the larger is the limit.
    """
    file = data.source.name
    if item.packed != (_ZSTD_TRANSFORM,):
        raise UnsupportedFormat(
            f"is compressed ({listed(item.packed)}), which is not supported",
            file=file,
            hint="load it with torch.distributed.checkpoint, and save it without an extension",
        )
    with require_package("zstandard", "is compressed with zstd", file):
        import zstandard
    # The index is not trusted without a limit either.
    stated_length = min(item.element_bytes, limits.max_repeated_bytes) + _MAX_SAVE_OVERHEAD
    max_length = max(data.length * limits.max_inflation, stated_length)
    try:
        with zstandard.ZstdDecompressor().stream_reader(data.read()) as stream:
            raw = stream.read(max_length + 1)  # one more shows that it is too long
    except zstandard.ZstdError as error:
        raise CorruptFile(f"is damaged: {error}", file=file, hint=_COPY_AGAIN) from error
    if len(raw) > max_length:
        raise LimitExceeded(
            f"{data.length:,} bytes inflate to more than {limits.max_inflation:,} times their size",
            file=file,
        )
    return ByteRange(MemorySource(raw, file), 0, len(raw))


def _insert_leaf(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any, max_items: int) -> None:
    """Put a leaf at its path, creating dicts and lists; an int in a path is a list index.

    Raises:
        CorruptFile: the path has another leaf, or an index that is not below `max_items`.
    """
    node: Any = tree
    for key, next_key in zip(path, (*path[1:], None), strict=True):
        if isinstance(node, list):
            if type(key) is not int or not 0 <= key < max_items:
                raise CorruptFile(f"the index has the invalid path {printable(repr(path))}")
            node.extend([None] * (key + 1 - len(node)))
            child = node[key]
        else:
            child = node.get(key)
        child_type = list if type(next_key) is int else dict
        if child is None:  # nothing is here yet
            node[key] = leaf if next_key is None else child_type()
        elif next_key is None or not isinstance(child, child_type):
            raise CorruptFile(f"the index has two entries at {printable(repr(path))}")
        node = node[key]
