"""The header of one array of numpy's: its element type, order and shape, as text before its bytes.

After numpy/lib/format.py (versions 1.0, 2.0, 3.0): a magic string, two bytes of version, the
length of the text, and a Python dict that is read here by what may stand in it, and not evaluated.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import InflatedSource
from ckptool.formats.base import Record
from ckptool.words import printable

__all__ = ["ArrayHeader", "read_array_header"]

_MAGIC = b"\x93NUMPY"
_LENGTHS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
"""Where the length of the text stands behind the version, by its major number."""
_FIRST = 256
"""Bytes read at first: numpy pads headers to multiples of 64, most have 128."""
_LONGEST = 1 << 16
"""Of the text; numpy itself reads 10,000 characters of a file that it does not trust."""
_FIELD = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>descr|fortran_order|shape)(?P=quote)\s*:\s*"""
    r"""(?P<value>'[^']*'|"[^"]*"|True|False|\([^()]*\)|\[.*\])\s*(?:,|(?=\}))""",
    re.DOTALL,
)
_SIZES = re.compile(r"\(\s*(?:\d{1,19}L?\s*,\s*)*(?:\d{1,19}L?\s*)?\)")


class ArrayHeader(NamedTuple):
    """What stands before the elements of an array."""

    descr: str
    """The element type as numpy spells it, `<f4`; for a structured one the list of its fields."""
    fortran_order: bool
    shape: tuple[int, ...]
    length: int
    """Bytes before the first element."""


def read_array_header(record: Record) -> ArrayHeader:
    """The header of the array in a record.

    Raises:
        CorruptFile: it is none, or it does not say type, order and shape once each.
        LimitExceeded: it is longer than any that numpy writes.
    """
    head = _head(record, _FIRST)
    known = _LENGTHS.get(head[6]) if len(head) > 6 and head.startswith(_MAGIC) else None
    start = 8 + known.size if known is not None else 0
    if known is None or len(head) < start:
        raise _corrupt(record, "does not begin as an array of numpy's")
    (length,) = known.unpack_from(head, 8)
    if length > _LONGEST:
        raise LimitExceeded(
            f"array '{printable(record.name)}' has a header of {length:,} bytes; "
            f"{_LONGEST:,} are allowed",
            file=record.data.source.name,
        )
    if len(head) < start + length:
        head = _head(record, start + length)
    text = head[start : start + length].decode("utf-8" if head[6] == 3 else "latin-1", "replace")
    if len(head) < start + length:
        raise _corrupt(record, "ends within its header")
    fields = _fields(text)
    shape = fields.get("shape", "")
    if fields.keys() != {"descr", "fortran_order", "shape"} or not _SIZES.fullmatch(shape):
        raise _corrupt(record, f"has a header that says '{printable(text.strip()[:100])}'")
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    return ArrayHeader(fields["descr"], fields["fortran_order"] == "True", sizes, start + length)


def _fields(text: str) -> dict[str, str]:
    """The fields of the dict, quotes off; none where anything else stands in it."""
    text = text.strip()
    fields: dict[str, str] = {}
    position = 1
    while match := _FIELD.match(text, position):
        if match["key"] in fields:
            return {}
        fields[match["key"]] = match["value"].strip("'\"")
        position = match.end()
    closed = text.startswith("{") and text[position:].strip() == "}"
    return fields if closed else {}


def _head(record: Record, length: int) -> bytes:
    """The first bytes of a record, fewer of a shorter one."""
    length = min(length, record.data.length)
    source = record.data.source
    if isinstance(source, InflatedSource):
        return source.head(length)
    return record.data.read(0, length)


def _corrupt(record: Record, fact: str) -> CorruptFile:
    return CorruptFile(f"array '{printable(record.name)}' {fact}", file=record.data.source.name)
