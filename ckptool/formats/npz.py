"""Archives of numpy's (`numpy.savez`), as JAX models are published: each array a record of a zip.

A record is called NAME.npy, NAME any text (`Transformer/encoderblock_0/LayerNorm_0/bias`), stored
or deflated (`savez_compressed`). After numpy/lib/_npyio_impl.py (`_savez`). An array for whose
element type torch has one is a tensor; one of objects is a pickle, read as any other; the rest
(text, dates, records) is named among what the file holds beside the tree.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ckptool.checkpoint import Checkpoint, Details
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile
from ckptool.formats.archive import ARRAY
from ckptool.formats.base import Archive, Probe, Record
from ckptool.formats.legacy_stream import NestedStreams
from ckptool.formats.npy_header import ArrayHeader, read_array_header
from ckptool.limits import Limits
from ckptool.model import OrderedMap, Storage, TensorRef, row_major_strides
from ckptool.symbolic import Unpickled, unpickle
from ckptool.symbolic.arrays import ELEMENT_TYPES
from ckptool.words import printable

__all__ = ["NPZ", "NumpyArchive"]

_CODE = re.compile(r"([<>|=]?)([A-Za-z]\d*)")


class NumpyArchive:
    """The format `npz`: read only."""

    name = "npz"

    def recognise(self, probe: Probe) -> bool:
        """Whether it is a zip in which every record is called after an array."""
        archive = probe.archive
        return (
            not probe.is_folder
            and archive is not None
            and bool(archive.records)
            and all(name.endswith(ARRAY) for name in archive.records)
        )

    def read(self, probe: Probe) -> Checkpoint:
        """The arrays by name, over the directory and the header of each.

        Raises:
            CorruptFile: a record is no array, or not as long as its header says.
            LimitExceeded: a header, or the pickle of an array of objects, is beyond `probe.limits`.
        """
        archive = probe.archive
        if archive is None:
            raise CorruptFile("this is no zip", file=probe.path)
        root, pickles, others = OrderedMap(), list[Unpickled](), list[str]()
        for record in archive.records.values():
            name = record.name.removesuffix(ARRAY)
            header = read_array_header(record)
            if header.descr in ("|O", "O"):
                pickles.append(_objects(record, header, probe.limits))
                root[name] = pickles[-1].root
            elif (tensor := _tensor(record, header)) is not None:
                root[name] = tensor
            else:
                others.append(_told(name, header))
        details = _details(archive, root, pickles, others)
        return Checkpoint(root, self.name, probe.path, details, sources=archive.sources)


NPZ = NumpyArchive()


def _tensor(record: Record, header: ArrayHeader) -> TensorRef | None:
    """The array as a tensor; None where torch has no such element type."""
    code = _CODE.fullmatch(header.descr)
    dtype = ELEMENT_TYPES.get(code[2]) if code else None
    if code is None or dtype is None:
        return None
    shape = header.shape
    nbytes = math.prod(shape) * BY_NAME[dtype].itemsize
    if nbytes != record.data.length - header.length:
        raise CorruptFile(
            f"array '{printable(record.name)}' of {dtype} and shape {list(shape)} takes {nbytes:,} "
            f"bytes, but {record.data.length - header.length:,} are there",
            file=record.data.source.name,
        )
    stride = row_major_strides(shape)
    if header.fortran_order:
        stride = row_major_strides(shape[::-1])[::-1]
    data = record.data.slice(header.length, nbytes)
    order = "big" if code[1] == ">" else "little"
    storage = Storage(record.name, data, nbytes, byteorder=order)
    return TensorRef(dtype, shape, stride, 0, storage, "cpu")


def _objects(record: Record, header: ArrayHeader, limits: Limits) -> Unpickled:
    """An array of objects, which numpy pickles whole."""
    nested = NestedStreams(record.data.source.name, limits, record.data.length)
    return unpickle(record.data, nested=nested.load, limits=limits, start=header.length)


def _told(name: str, header: ArrayHeader) -> str:
    return (
        f"array '{printable(name)}' of shape {list(header.shape)} and numpy's type "
        f"{printable(header.descr[:100])} is no tensor: torch has no such type"
    )


def _details(
    archive: Archive, root: dict[str, Any], pickles: list[Unpickled], others: list[str]
) -> Details:
    storages = [leaf.storage for leaf in root.values() if isinstance(leaf, TensorRef)]
    compressed = any(record.compressed for record in archive.records.values())
    return Details(
        size=archive.size,
        writer="numpy.savez_compressed" if compressed else "numpy.savez",
        protocol=max((found.protocol for found in pickles), default=None),
        globals=tuple(dict.fromkeys(name for found in pickles for name in found.globals)),
        tidy=all(found.tidy for found in pickles),
        framed=all(found.framed for found in pickles),
        storage_bytes=sum(storage.nbytes for storage in storages if storage),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=tuple(others),
    )
