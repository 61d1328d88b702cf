"""TensorFlow checkpoints: an index of variables, and files with their bytes.

`model.ckpt-1.index` is a LevelDB table of protocol buffer messages; the bytes are in
`model.ckpt-1.data-00000-of-00001`. A SavedModel has both in its folder `variables`. Sources:
tensorflow/core/util/tensor_bundle (tensor_bundle.cc, naming.cc), core/protobuf/tensor_bundle.proto,
core/util/saved_tensor_slice_util.cc, core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.finding import Finding
from ckptool.core.model import (
    Global,
    Opaque,
    OrderedMap,
    TensorRef,
    find_tensors,
    make_plain_tensor,
)
from ckptool.core.sections import MODEL_MARK
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, CorruptFile, FileMissing, UnsupportedFormat
from ckptool.files import ByteRange, MemorySource, Source
from ckptool.files.checksums import crc32c
from ckptool.files.local import Place
from ckptool.files.place import place_of
from ckptool.files.system import allow_open_files
from ckptool.files.tiled import Tile, join_tiles
from ckptool.formats.base import (
    Checksum,
    Findings,
    Format,
    Probe,
    Refusal,
    add_error_context,
    check_limit,
    require_package,
)
from ckptool.formats.foreign.leveldb import (
    MAGIC,
    Message,
    mask_crc,
    read_table,
    read_varint,
    unmask_crc,
)
from ckptool.limits import Limits
from ckptool.words import listed, printable, shell

_FILE_NAME = re.compile(r"(?P<prefix>.+)\.(?:index|data-\d{5}-of-\d{5})", re.DOTALL)
_LATEST_PATH = re.compile(rb'^model_checkpoint_path: "([^"\n]+)"', re.MULTILINE)
_LATEST_FILE = "checkpoint"
_MAX_LATEST_BYTES = 1 << 20
_VARIABLES = "variables"
_ATTRIBUTE = re.compile(r"/\.ATTRIBUTES/VARIABLE_VALUE$|/\.ATTRIBUTES(?=/)")
_SLOT = "/.OPTIMIZER_SLOT/"
_OPTIMIZER_NAME = re.compile(
    r"(\w*optimizer|opt)/(?!_trainable_variables/)|(.*/)?beta[12]_power(_\d+)?$"
)
"""Matches variables of an optimizer; Keras 3 also stores the weights of its model below it."""
_AVERAGE_NAME = "ExponentialMovingAverage"
_FRAMEWORK_RECORDS = ("_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter/.ATTRIBUTES/VARIABLE_VALUE")
_STRING_TYPE = 7
_STRING_CLASS = Global("tensorflow", "string")
_DTYPE_BY_CODE = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
}
"""The dtypes by number in `DataType` (core/framework/types.proto)."""
_COPY_AGAIN = "copy the whole checkpoint again: the index and all data files of one save"


class _Entry(NamedTuple):
    """The index entry of a variable, or of one part of it."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int
    """The CRC-32C as stored (masked)."""
    slices: tuple[tuple[tuple[int, int], ...], ...]
    """The position of each part of a partitioned variable: start and count per axis."""


class _Index(NamedTuple):
    """The content of an index file."""

    path: str
    source: Source
    entries: Mapping[bytes, _Entry]
    shards: int
    byteorder: str


class TensorFlow(Format):
    """The format `tensorflow`: read only."""

    name = "tensorflow"
    layout = "TensorFlow"
    refusal = Refusal(
        "tensorflow",
        "it is a TensorFlow checkpoint, not a torch.save file",
        None,
        "tf.train.load_checkpoint",
        "convert it with ckptool; torch.load only opens files of torch.save",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for an index, a data file next to one, or a folder with one."""
        return bool(_find_indexes(probe))

    def read(self, probe: Probe) -> Checkpoint:
        """Return the variables by name, from the index; those of an optimizer are a section.

        The names are shortened with `_clean_name`, if that does not make two equal.
        """
        index, data = probe.compute_once(_read_index), probe.compute_once(_open_data)
        model, optimizer = OrderedMap(), OrderedMap()
        unread: list[str] = []
        key_by_name = {  # without the parts of variables, whose keys begin with a zero byte
            _decode_name(key): key for key in index.entries if not key.startswith(b"\0")
        }
        for name, key in key_by_name.items():
            if name in _FRAMEWORK_RECORDS:
                continue
            entry = index.entries[key]
            leaf = data.make_leaf(key, entry)
            if leaf is None:
                kind = f"TensorFlow type {entry.dtype}"
                unread.append(f"{printable(name)!r} of {kind} is not a tensor")
                continue
            section = optimizer if _is_slot(name, key_by_name) else model
            clean_name = _clean_name(name)
            section[name if clean_name in section else clean_name] = leaf
        if optimizer:  # marks which of the two sections is the model
            model.attributes[MODEL_MARK] = {}
        return Checkpoint(
            {"state_dict": model, "optimizer": optimizer} if optimizer else model,
            self.name,
            index.path,
            Details(
                size=index.source.size + sum(source.size for source in data.sources),
                writer="TensorFlow",
                byteorder=index.byteorder,
                storage_bytes=sum(tensor.nbytes for tensor in find_tensors([model, optimizer])),
                notes=tuple(_describe_framework_records(key_by_name)),
                left_behind=tuple(unread),
                # The texts of a variable are an object, read on demand.
                late=any(isinstance(leaf, Opaque) for leaf in model.values()),
            ),
            sources=(index.source, *data.sources),
        )

    def collect_findings(self, probe: Probe) -> Findings:
        """Return the CRC-32C that the index states of each variable.

        Errors of the index are reported when it is opened.
        """
        try:
            data = probe.compute_once(_open_data)
        except CheckpointError:
            return Findings()
        results = list(data.list_checksums())
        return Findings(
            tuple(result for result in results if isinstance(result, Finding)),
            checksums=tuple(result for result in results if isinstance(result, Checksum)),
        )


TENSORFLOW = TensorFlow()


def is_index(path: str) -> bool:
    """Return True if a file is a TensorFlow index, by its name and its last bytes."""
    return path.endswith(".index") and _is_table(place_of(path), path)


def _decode_name(key: bytes) -> str:
    """Return the key of a variable as text, from which any bytes can be restored."""
    return key.decode("utf-8", "surrogateescape")


def _clean_name(name: str) -> str:
    """Return the name of a variable without the markers of the object graph.

    `model/layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE -> layer_with_weights-0/kernel`
    A name without markers, which is not from an object graph, is unchanged.
    """
    clean = _ATTRIBUTE.sub("", name.replace(_SLOT, "/"))
    return name if clean == name else re.sub(r"\A(model|optimizer)/", "", clean)


def _is_table(place: Place, path: str) -> bool:
    """Return whether a file ends like a LevelDB table."""
    if not place.is_file(path):
        return False
    with closing(place.open(path)) as source:
        start = source.size - len(MAGIC)
        return start >= 0 and source.read(start, len(MAGIC)) == MAGIC


def _find_indexes(probe: Probe) -> list[str]:
    """Return the path of the index, or of each index in a folder; empty if there is none.

    A data file, and the folder of a SavedModel, stand for their index. If a folder states which
    index is the latest, it is the only one; that file may be missing.
    """
    if not probe.is_folder:
        match = _FILE_NAME.fullmatch(probe.path)
        paths = [f"{match['prefix']}.index"] if match else []
    elif _VARIABLES in probe.entries and "saved_model.pb" in probe.entries:
        paths = [os.path.join(probe.path, _VARIABLES, f"{_VARIABLES}.index")]
    else:
        names = sorted(name for name in probe.entries if name.endswith(".index"))
        paths = [os.path.join(probe.path, name) for name in names]
    paths = [path for path in paths if _is_table(probe.place, path)]
    latest = _find_latest_index(probe) if paths else None
    return [latest] if latest else paths


def _find_latest_index(probe: Probe) -> str | None:
    """Return the path of the latest index of a folder, if its file `checkpoint` states one."""
    path = os.path.join(probe.path, _LATEST_FILE)
    if _LATEST_FILE not in probe.entries or not probe.place.is_file(path):
        return None
    with closing(probe.place.open(path)) as source:
        match = _LATEST_PATH.search(source.read(0, min(source.size, _MAX_LATEST_BYTES)))
    if match is None:
        return None
    # The folder may have been moved: only the name is used.
    name = _decode_name(match[1]).replace("\\", "/").split("/")[-1]
    return os.path.join(probe.path, f"{name}.index")


def _read_index(probe: Probe) -> _Index:
    """Return the index of a probe that `recognize` accepts, if it has only one.

    It is opened, and closed with the probe.
    """
    paths = _find_indexes(probe)
    if len(paths) > 1:
        subject = f"has several checkpoints: {listed([os.path.basename(path) for path in paths])}"
        hint = f"give one: ckptool list {shell(paths[-1])}"
        raise UnsupportedFormat(subject, file=probe.path, hint=hint)
    path = paths[0]
    if not probe.place.is_file(path):
        name = os.path.basename(path)
        subject = f"lacks {name}, the latest checkpoint in its file `{_LATEST_FILE}`"
        raise FileMissing(
            subject, file=probe.path, hint="copy it as well, or give another checkpoint"
        )
    source = probe.source if probe.path == path else None
    if source is None:  # the probe is a data file or a folder
        source = probe.place.open(path)
        probe.on_close(source.close)
    with (
        require_package("google-crc32c", "is a TensorFlow index with checksums", source.name),
        add_error_context(source.name, hint=_COPY_AGAIN),
    ):
        table = read_table(source, probe.limits)
        header = Message(table.pop(b"", b""))
        entries = {key: _parse_entry(key, raw, probe.limits) for key, raw in table.items()}
    # The fields of BundleHeaderProto: 1 num_shards, 2 endianness.
    order = "big" if header.get_number(2) else "little"
    return _Index(path, source, entries, header.get_number(1), order)


def _parse_entry(key: bytes, raw: bytes, limits: Limits) -> _Entry:
    """Return the entry of a key from its message, checked.

    The fields have the numbers of `BundleEntryProto` (core/protobuf/tensor_bundle.proto). A part
    without a count along an axis (-1) has the full axis.
    """
    fields, subject = Message(raw), f"variable {_describe_key(key)}"
    shape = tuple(  # TensorShapeProto: its field 2 has the axes, their field 1 the size
        axis.get_number(1) for proto in fields.get_messages(2) for axis in proto.get_messages(2)
    )
    check_limit(f"{subject} has", len(shape), "dimensions", limits.max_dimensions)
    slices = tuple(  # TensorSliceProto: its field 1 has the axes, their fields start and count
        tuple((axis.get_number(1), axis.get_number(2, -1)) for axis in extents.get_messages(1))
        for extents in fields.get_messages(7)
    )
    if any(len(extents) != len(shape) for extents in slices):
        raise CorruptFile(f"{subject} and its parts have different numbers of dimensions")
    dtype, shard, offset, size, crc = (fields.get_number(field) for field in (1, 3, 4, 5, 6))
    if min(*shape, shard, offset, size, 0) < 0:
        raise CorruptFile(f"{subject} has a negative size or position")
    return _Entry(dtype, shape, shard, offset, size, crc, slices)


def _describe_key(key: bytes) -> str:
    r"""Return the name in a key, for a message; a part has the key `\0NAME\0\1...`."""
    name, _, part = key.lstrip(b"\0").partition(b"\0\1")
    return f"{printable(name.decode('utf-8', 'replace'))!r}" + (" (a part)" if part else "")


def _open_data(probe: Probe) -> _Data:
    """Return the data files of the index of a probe; a function for `Probe.compute_once`."""
    return _Data(probe, probe.compute_once(_read_index))


class _Data:
    """The data files of an index, and their content."""

    def __init__(self, probe: Probe, index: _Index) -> None:
        """Open the files that the index refers to.

        Raises:
            FileMissing: if one is missing.
            CorruptFile: if a file number is invalid.
        """
        self._index = index
        self._files: dict[int, Source] = {}
        """The data files, by their number."""
        prefix = index.path.removesuffix(".index")
        # The entry of a partitioned variable has no bytes, only those of its parts.
        used = {entry.shard for entry in index.entries.values() if not entry.slices}
        allow_open_files(len(used))
        for shard in sorted(used):
            path = f"{prefix}.data-{shard:05d}-of-{index.shards:05d}"
            if shard >= index.shards:
                message = f"the index needs data file {shard:,} of {index.shards:,}"
                raise CorruptFile(message, file=index.path, hint=_COPY_AGAIN)
            if not probe.place.is_file(path):
                message = f"the data file {printable(os.path.basename(path))} is missing"
                raise FileMissing(message, file=index.path, hint=_COPY_AGAIN)
            self._files[shard] = probe.place.open(path)
            probe.on_close(self._files[shard].close)
        self.sources = tuple(self._files.values())

    def make_leaf(self, key: bytes, entry: _Entry) -> TensorRef | Opaque | None:
        """Return a variable: a tensor, or a value that is read later. None: torch lacks the dtype.

        Raises:
            CorruptFile: if its bytes are not in the file, or its parts do not cover it.
        """
        if entry.dtype == _STRING_TYPE and not entry.slices:
            # Until the texts are read, `stored` is shown as the type, and the file as the value.
            # Divided texts are left out, as other variables of a dtype that torch lacks.
            type_and_value = "stored", os.path.basename(self._files[entry.shard].name)
            read_texts = cache(partial(self._read_texts, key, entry))
            return Opaque(_STRING_CLASS, plain=type_and_value, find=read_texts)
        dtype = _DTYPE_BY_CODE.get(entry.dtype)
        if dtype is None:
            return None
        order = self._index.byteorder
        with add_error_context(self._index.path, hint=_COPY_AGAIN):
            data = (
                self._join_parts(key, entry, dtype) if entry.slices else self._locate_bytes(entry)
            )
            return make_plain_tensor(_decode_name(key), dtype, entry.shape, data, byteorder=order)

    def _locate_bytes(self, entry: _Entry) -> ByteRange:
        """Return the bytes of a variable, or of one part of it."""
        return ByteRange(self._files[entry.shard], entry.offset, entry.size)

    def _join_parts(self, key: bytes, entry: _Entry, dtype: str) -> ByteRange:
        """Return the bytes of a partitioned variable, joined from its parts.

        The entry of the variable has the position of each part: start and count per axis (-1: the
        full axis). The part itself is another entry of the index.
        """
        tiles = []
        with add_error_context(None, f"variable {_describe_key(key)}"):
            for extents in entry.slices:
                offsets = tuple(start for start, _ in extents)
                sizes = tuple(
                    full_size if count < 0 else count
                    for (_, count), full_size in zip(extents, entry.shape, strict=True)
                )
                part = self._index.entries.get(_make_part_key(key, extents))
                if part is None or (part.dtype, part.shape) != (entry.dtype, sizes) or part.slices:
                    problem = "is missing" if part is None else "has another shape or type"
                    raise CorruptFile(
                        f"the part of shape {list(sizes)} at offset {list(offsets)} {problem}"
                    )
                # As a tensor, which raises if its bytes are too few or too many.
                data = make_plain_tensor("its part", dtype, sizes, self._locate_bytes(part)).data
                tiles.append(Tile(offsets, sizes, data))
            return join_tiles(self._index.path, entry.shape, BY_NAME[dtype].itemsize, tiles)

    def _read_texts(self, key: bytes, entry: _Entry) -> Any:
        """Return the texts of a variable, in nested lists by its shape; a text for a scalar.

        A text that is not UTF-8 is returned as bytes.
        """
        lengths, checked_bytes = self._read_strings(key, entry)
        if mask_crc(crc32c(checked_bytes)) != entry.crc32c:
            message = f"variable {_describe_key(key)} is damaged (checksum mismatch)"
            raise CorruptFile(message, file=self._files[entry.shard].name, hint=_COPY_AGAIN)
        nodes: list[Any] = []
        at = len(checked_bytes) - sum(lengths)  # the texts are at the end, without separators
        for length in lengths:
            nodes.append(_decode_text(checked_bytes[at : at + length]))
            at += length
        if not nodes:
            return []
        for size in reversed(entry.shape):  # from the last axis on, `size` nodes become one
            nodes = [nodes[start : start + size] for start in range(0, len(nodes), size)]
        return nodes[0]

    def _read_strings(self, key: bytes, entry: _Entry) -> tuple[list[int], bytes]:
        """Return the lengths of the texts of a variable, and the bytes covered by its CRC-32C.

        In the file, the lengths are varints; four bytes with their checksum and the texts follow.
        The CRC-32C covers the lengths as numbers of four bytes (eight if necessary), and the rest.
        """
        data = self._locate_bytes(entry)
        count = prod(entry.shape)
        raw, at, lengths = data.read(), 0, list[int]()
        if count <= len(raw):  # each length has a byte or more
            for _ in range(count):
                length, at = read_varint(raw, at)
                lengths.append(length)
        if len(lengths) != count or at + 4 + sum(lengths) != len(raw):
            message = f"variable {_describe_key(key)} has strings that do not match their lengths"
            raise CorruptFile(message, file=data.source.name, hint=_COPY_AGAIN)
        fixed_lengths = b"".join(
            length.to_bytes(4 if length < 1 << 32 else 8, "little") for length in lengths
        )
        return lengths, fixed_lengths + raw[at:]

    def list_checksums(self) -> Iterator[Checksum | Finding]:
        """Yield the stated CRC-32C of each variable or part, with its bytes.

        A finding for one with bytes outside its file, or damaged texts.
        """
        for key, entry in self._index.entries.items():
            if entry.slices:
                continue  # its parts have entries of their own
            try:
                data = self._locate_bytes(entry)
                if entry.dtype == _STRING_TYPE:
                    _, checked_bytes = self._read_strings(key, entry)
                    source = MemorySource(checked_bytes, data.source.name)
                    data = ByteRange(source, 0, source.size)
            except CheckpointError as error:
                yield Finding("corrupt", error.message, (_describe_key(key),), hint=error.hint)
                continue
            yield Checksum(_describe_key(key), data, unmask_crc(entry.crc32c), castagnoli=True)


def _decode_text(raw: bytes) -> str | bytes:
    """Return text, or bytes that are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _make_part_key(key: bytes, extents: tuple[tuple[int, int], ...]) -> bytes:
    """Return the key of a part of a variable: name, rank, and start and count per axis.

    See `EncodeTensorNameSlice` (core/util/saved_tensor_slice_util.cc): after a zero, the name ends
    with a zero and a one, and a number of one byte (the rank) follows its length.
    """
    encoded_extents = b"".join(_encode_ordered(number) for axis in extents for number in axis)
    return b"\0" + key + b"\0\1" + bytes((1, len(extents))) + encoded_extents


def _encode_ordered(number: int) -> bytes:
    """Return a number, -1 or more, as in LevelDB keys, so that bytes sort like the numbers.

    As many bits are set at the start as there are bytes; then a sign bit and the number follow, 7
    bits per byte in all (core/lib/strings/ordered_code.cc).
    """
    if number < 64:
        return bytes((0x80 ^ number & 0xFF,))
    width = (number.bit_length() + 1 + 6) // 7  # with the sign bit, rounded up
    if width > 8:
        raise CorruptFile(f"a part begins or ends at {number:,}")
    first_byte = 0xFF << (8 - width) & 0xFF
    return (number ^ first_byte << 8 * (width - 1)).to_bytes(width, "big")


def _is_slot(name: str, names: Collection[str]) -> bool:
    """Return True for an optimizer's variable.

    TensorFlow 1 puts slots below their variable, `dense/kernel/Adam`; averages of the model are
    there, too.
    """
    if _SLOT in name or _OPTIMIZER_NAME.match(name):
        return True
    variable, _, last_part = name.rpartition("/")
    return variable in names and last_part != _AVERAGE_NAME


def _describe_framework_records(names: Collection[str]) -> Iterator[str]:
    """Yield a note on the records that TensorFlow writes for itself, if any."""
    records = [name.partition("/")[0] for name in _FRAMEWORK_RECORDS if name in names]
    if records:
        yield f"records of TensorFlow itself: {listed(records)}"
