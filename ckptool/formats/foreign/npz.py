"""numpy's .npz: arrays and pickled objects in a zip."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, TensorRef, make_plain_tensor, row_major_strides
from ckptool.errors import CorruptFile
from ckptool.files import InflatedSource
from ckptool.formats.archive import ARRAY_EXTENSION, open_archive
from ckptool.formats.base import Archive, Format, Probe, Record, Refusal, check_limit
from ckptool.formats.legacy_stream import unpickle_outer
from ckptool.limits import DEFAULT_LIMITS
from ckptool.symbolic import Unpickled
from ckptool.symbolic.calls import ELEMENT_TYPES
from ckptool.words import printable

_MAGIC = b"\x93NUMPY"
_LENGTH_BY_VERSION = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
"""The layout of the text length after the version, by major version."""
_HEAD_BYTES = 256
"""Bytes read at first: numpy pads headers to multiples of 64, most have 128."""
_MAX_HEADER_BYTES = 1 << 16
"""The longest text; numpy itself reads 10,000 characters of an untrusted file."""
_FIELD = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>descr|fortran_order|shape)(?P=quote)\s*:\s*"""
    r"""(?P<value>'[^']*'|"[^"]*"|True|False|\([^()]*\)|\[.*\])\s*(?:,|(?=\}))""",
    re.DOTALL,
)
_SHAPE = re.compile(r"\(\s*(?:\d{1,19}L?\s*,\s*)*(?:\d{1,19}L?\s*)?\)")


class ArrayHeader(NamedTuple):
    """The header before the elements of an array."""

    descr: str
    """The dtype in numpy's form, `<f4`; for a structured dtype the list of its fields."""
    fortran_order: bool
    shape: tuple[int, ...]
    length: int
    """Bytes before the first element."""


def read_array_header(record: Record) -> ArrayHeader:
    """Return the header of the array in a record.

    Raises:
        CorruptFile: if it is not a header, or does not have dtype, order and shape once each.
        LimitExceeded: if it is longer than any header from numpy.
    """
    subject = f"array '{printable(record.name)}'"
    head = _read_head(record, _HEAD_BYTES)
    # It is the magic, the major and the minor version, the length of a text, and the text.
    version = head[6] if len(head) > 6 and head.startswith(_MAGIC) else 0
    length_layout = _LENGTH_BY_VERSION.get(version)
    if length_layout is None or len(head) < 8 + length_layout.size:
        raise CorruptFile(f"{subject} does not begin like a numpy array")
    (length,) = length_layout.unpack_from(head, 8)
    check_limit(f"{subject} has a header of", length, "bytes", _MAX_HEADER_BYTES)
    start = 8 + length_layout.size
    end = start + length
    if len(head) < end:
        head = _read_head(record, end)
    if len(head) < end:
        raise CorruptFile(f"{subject} ends within its header")
    text = head[start:end].decode("utf-8" if version == 3 else "latin-1", "replace")
    fields = _parse_fields(text)
    shape = fields.get("shape", "")
    if fields.keys() != {"descr", "fortran_order", "shape"} or not _SHAPE.fullmatch(shape):
        raise CorruptFile(f"{subject} has the header '{printable(text.strip()[:100])}'")
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    check_limit(f"{subject} has", len(sizes), "dimensions", DEFAULT_LIMITS.max_dimensions)
    return ArrayHeader(fields["descr"], fields["fortran_order"] == "True", sizes, end)


def _parse_fields(text: str) -> dict[str, str]:
    """Return the fields of a Python dict in a header, without quotes around keys and texts.

    Empty if the text contains anything else. It is parsed, not evaluated.
    """
    text = text.strip()
    fields: dict[str, str] = {}
    position = 1  # after the brace
    while match := _FIELD.match(text, position):
        if match["key"] in fields:
            return {}
        fields[match["key"]] = match["value"].strip("'\"")
        position = match.end()
    is_closed = text.startswith("{") and text[position:].strip() == "}"
    return fields if is_closed else {}


def _read_head(record: Record, length: int) -> bytes:
    """Return the first bytes of a record, fewer if it is shorter; of a compressed one, inflated."""
    length = min(length, record.data.length)
    source = record.data.source
    if isinstance(source, InflatedSource):
        return source.read_head(length)
    return record.data.read(0, length)


_CODE = re.compile(r"(?P<order>[<>|=]?)(?P<type>[A-Za-z]\d*)")
"""A plain dtype in numpy's form: byte order and type, `<f4`."""


class NumpyArchive(Format):
    """The format `npz`: read only."""

    name = "npz"
    refusal = Refusal(
        "numpy",
        "it is a numpy archive (numpy.savez), not a torch.save file",
        None,
        "numpy.load",
        "read it with numpy.load; torch.load only opens archives of torch.save",
    )
    unsafe_loader = "numpy.load(FILE, allow_pickle=True)"

    def recognize(self, probe: Probe) -> bool:
        """Return True for a zip in which every record has the name of an array."""
        names = probe.compute_once(open_archive).records
        return (
            not probe.is_folder
            and bool(names)
            and all(name.endswith(ARRAY_EXTENSION) for name in names)
        )

    def read(self, probe: Probe) -> Checkpoint:
        """Return the arrays by name, from the directory and the header of each.

        An array of objects is unpickled as data. An array with another dtype than torch's is only
        listed in `left_behind`.
        """
        archive = probe.compute_once(open_archive)
        root, pickles, others = OrderedMap(), list[Unpickled](), list[str]()
        for record in archive.records.values():
            name = record.name.removesuffix(ARRAY_EXTENSION)
            header = read_array_header(record)
            if header.descr in ("|O", "O"):  # objects: a pickle follows the header
                pickles.append(unpickle_outer(record.data, probe.limits, start=header.length))
                root[name] = pickles[-1].root
            elif (tensor := _make_tensor(record, header)) is not None:
                root[name] = tensor
            else:
                kind = printable(header.descr[:100])
                others.append(f"{printable(name)!r} of type {kind} is not a tensor")
        details = _describe_file(archive, root, pickles, others)
        return Checkpoint(root, self.name, probe.path, details, sources=archive.sources)


NPZ = NumpyArchive()


def _make_tensor(record: Record, header: ArrayHeader) -> TensorRef | None:
    """Return the array as a tensor; None if torch lacks the dtype."""
    code = _CODE.fullmatch(header.descr)
    dtype = ELEMENT_TYPES.get(code["type"]) if code else None
    if code is None or dtype is None:
        return None
    data = record.data.slice(header.length, record.data.length - header.length)
    order = "big" if code["order"] == ">" else "little"
    tensor = make_plain_tensor(record.name, dtype, header.shape, data, byteorder=order)
    if not header.fortran_order:
        return tensor
    column_major_stride = row_major_strides(header.shape[::-1])[::-1]
    return replace(tensor, stride=column_major_stride)


def _describe_file(
    archive: Archive, root: dict[str, Any], pickles: list[Unpickled], left_behind: list[str]
) -> Details:
    """Return the details of an archive, over its arrays and pickled objects.

    `left_behind` describes the members that are not read.
    """
    storages = [leaf.storage for leaf in root.values() if isinstance(leaf, TensorRef)]
    compressed = any(record.compressed for record in archive.records.values())
    return Details(
        size=archive.size,
        writer="numpy.savez_compressed" if compressed else "numpy.savez",
        protocol=max((pickle.protocol for pickle in pickles), default=None),
        globals=tuple(dict.fromkeys(name for pickle in pickles for name in pickle.globals)),
        tidy=all(pickle.tidy for pickle in pickles),
        framed=all(pickle.framed for pickle in pickles),
        storage_bytes=sum(storage.nbytes for storage in storages if storage),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=tuple(left_behind),
    )
