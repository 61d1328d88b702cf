"""HDF5 files of Keras (.h5, .weights.h5, and inside .keras): datasets by path.

h5py finds the datasets; the bytes of contiguous ones are read without it. Sources:
keras/src/saving/saving_lib.py (`H5IOStore`, bfloat16 as two bytes with an attribute), h5py's
`DatasetID.get_offset`.
"""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, TensorRef, find_tensors, make_plain_tensor
from ckptool.core.sections import MODEL_MARK
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange, MemorySource, Source
from ckptool.files.tiled import make_late_range
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Format, Probe, Refusal, check_limit, require_package
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.words import listed, printable

_MAGIC = b"\x89HDF\r\n\x1a\n"
_WEIGHTS_RECORD = "model.weights.h5"
_CONFIG_RECORD = "config.json"
_MODEL_SECTION = "state_dict"
_DATASET_COST = 50
"""The cost of a dataset relative to an entry of a zip directory."""


class Hdf5(Format):
    """The format `hdf5`: read only."""

    name = "hdf5"
    layout = "Keras"
    refusal = Refusal(
        "keras",
        "it is a Keras file (HDF5), not a torch.save file",
        quote("weights-only"),
        "Keras",
        "read the weights with h5py, or the whole model with Keras",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file begins with the signature."""
        return probe.head.startswith(_MAGIC)

    def read(self, probe: Probe) -> Checkpoint:
        """Return the datasets by path, with those of an optimizer in a separate section."""
        source = probe.require_source()
        data = ByteRange(source, 0, source.size)
        return _read_checkpoint(probe, self.name, data, (source,), source.size)


class Keras(Hdf5):
    """The format `keras`: a zip with an HDF5 file."""

    name = "keras"

    def recognize(self, probe: Probe) -> bool:
        """Return True for a zip with the configuration and weights of a model."""
        return {_WEIGHTS_RECORD, _CONFIG_RECORD} <= probe.compute_once(open_archive).records.keys()

    def read(self, probe: Probe) -> Checkpoint:
        """Return the datasets by path, like `Hdf5.read`."""
        archive = probe.compute_once(open_archive)
        data = archive.records[_WEIGHTS_RECORD].data
        return _read_checkpoint(probe, self.name, data, archive.sources, archive.size)


HDF5, KERAS = Hdf5(), Keras()


class _Stream(io.RawIOBase):
    """A range of bytes as a file object for h5py."""

    def __init__(self, data: ByteRange) -> None:
        """Start at the first byte of `data`."""
        self._data, self._position = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.length}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, less at the end; return the number of bytes."""
        count = max(0, min(len(buffer), self._data.length - self._position))
        self._data.read_into(memoryview(buffer)[:count], self._position)
        self._position += count
        return count


@contextmanager
def _open_hdf5(data: ByteRange) -> Iterator[Any]:
    """Open the file with h5py, and translate its errors."""
    path = data.source.name
    with require_package("h5py", "is HDF5", path):
        import h5py
    try:
        with h5py.File(_Stream(data), "r") as file:
            yield file
    except CheckpointError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise CorruptFile(f"h5py cannot read it ({error})", file=path) from error


def _read_checkpoint(
    probe: Probe, format: str, data: ByteRange, sources: tuple[Source, ...], size: int
) -> Checkpoint:
    """Return the checkpoint of an HDF5 file of `size` bytes in `data`.

    Its root is one flat dict of datasets by path; with an optimizer, `_split_sections` divides it.
    """
    unread: list[str] = []
    with _open_hdf5(data) as file:
        flat = OrderedMap(_walk_datasets(file, data, unread, probe.limits))
        attributes = sorted(file.attrs)
    root = _split_sections(flat)
    if attributes:
        unread.append(f"attributes of the file: {listed(map(printable, attributes))}")
    details = Details(
        size=size,
        writer="Keras (HDF5)",
        storage_bytes=sum(tensor.nbytes for tensor in find_tensors([root])),
        left_behind=tuple(unread),
    )
    return Checkpoint(root, format, probe.path, details, sources=sources)


def _split_sections(flat: OrderedMap) -> dict[Any, Any]:
    """Return a section for each group at the top, if one is an optimizer; else `flat`.

    Keras writes a model with layers as attributes into several groups: these are one section
    `state_dict`, marked as the model.
    """
    groups = dict.fromkeys(path.partition("/")[0] for path in flat)
    model_groups = [group for group in groups if not group.startswith("optimizer")]
    if not 0 < len(model_groups) < len(groups):  # only a model, or only an optimizer
        return flat
    root: dict[Any, Any] = {}
    for path, tensor in flat.items():
        section, _, key = path.partition("/")
        if len(model_groups) > 1 and section in model_groups:
            section, key = _MODEL_SECTION, path
        root.setdefault(section, OrderedMap())[key] = tensor
    if _MODEL_SECTION in root:
        root[_MODEL_SECTION].attributes[MODEL_MARK] = {}
    return root


def _walk_datasets(
    file: Any, data: ByteRange, unread: list[str], limits: Limits
) -> Iterator[tuple[str, TensorRef]]:
    """Yield each dataset with its path, as a tensor; only hard links are followed.

    A phrase on any other link, or on a dataset that is not a tensor, is added to `unread`.
    """
    import h5py

    max_nodes, bytes_left = limits.max_records // _DATASET_COST, limits.max_header_bytes
    count = 0
    queue = deque([("", file)])
    # A hard link may lead back up. The ids of one group, opened twice, have equal hashes.
    seen_groups = {hash(file.id)}
    while queue:
        prefix, group = queue.popleft()
        for name in group:
            path = f"{prefix}{name}"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                unread.append(f"a link at {printable(path)!r} (not followed)")
                continue
            node = group[name]
            count += 1
            check_limit("has", count, "datasets and groups", max_nodes)
            bytes_left -= len(path)
            if bytes_left < 0:
                raise LimitExceeded("the names of its datasets need too much memory")
            if isinstance(node, h5py.Group):
                if hash(node.id) not in seen_groups:
                    seen_groups.add(hash(node.id))
                    queue.append((f"{path}/", node))
                continue
            # The third kind of node is a named type.
            is_dataset = isinstance(node, h5py.Dataset)
            tensor = _make_tensor(path, node, data, limits) if is_dataset else None
            if tensor is not None:
                yield path, tensor
            else:
                unread.append(f"{printable(path)!r} of type {node.dtype} is not a tensor")


def _make_tensor(path: str, node: Any, data: ByteRange, limits: Limits) -> TensorRef | None:
    """Return a dataset as a tensor; None if torch lacks the dtype.

    A contiguous one is a range of the file; a compressed or chunked one is read with h5py on
    demand. Keras stores bfloat16 as two raw bytes, with an attribute.
    """
    is_two_raw_bytes = node.dtype.kind == "V" and node.dtype.itemsize == 2
    if is_two_raw_bytes and node.attrs.get("dtype") == "bfloat16":
        dtype = "bfloat16"
    else:
        dtype = str(node.dtype.newbyteorder("="))
    if dtype not in BY_NAME or node.shape is None:
        return None
    file = data.source.name
    if node.external or node.is_virtual:
        raise UnsupportedFormat(f"{printable(path)!r} is in another file", file=file)
    size = prod(node.shape) * BY_NAME[dtype].itemsize
    offset, stored_size = node.id.get_offset(), node.id.get_storage_size()
    # A dataset that is compressed or not filled may state any size.
    if size > max(limits.max_repeated_bytes // 4, stored_size * limits.max_inflation):
        message = f"{printable(path)!r} has {size:,} bytes, but only {stored_size:,} in the file"
        raise LimitExceeded(message, file=file)
    is_contiguous = offset is not None and stored_size == size
    if size and not is_contiguous:
        content = make_late_range(data.source.name, size, partial(_read_dataset, data, path))
    else:
        content = data.slice(offset or 0, size)
    order = {">": "big", "<": "little"}.get(node.dtype.byteorder, sys.byteorder)
    return make_plain_tensor(path, dtype, node.shape, content, byteorder=order)


def _read_dataset(data: ByteRange, path: str) -> tuple[ByteRange, None]:
    """Return all elements of a chunked or compressed dataset, in memory; no CRC-32 is known."""
    with _open_hdf5(data) as file:
        raw = file[path][()].tobytes()
    return ByteRange(MemorySource(raw, data.source.name), 0, len(raw)), None
