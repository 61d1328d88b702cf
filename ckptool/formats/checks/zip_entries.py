"""A zip's headers as they stand, taken at their word: what the directory says, what records say.

The reader (`zip_directory`, `zip_records`) keeps to the directory and refuses what cannot be; here
is everything else that is written down twice, so that one can be held against the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckptool.errors import CheckpointError
from ckptool.files import ByteRange
from ckptool.formats.zip_directory import End, raw_entries

__all__ = [
    "ZIP64",
    "Central",
    "Fields",
    "Local",
    "directory_entries",
    "local_header",
    "wide_values",
]

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FIELD = struct.Struct("<2H")
_FAR = 0xFFFFFFFF
ZIP64 = 1
"""The extra field with sizes and offset as numbers of 64 bits."""
_LIKELY = 256
"""Bytes read at once of a local header: more is rarely there."""


Fields = list[tuple[int, bytes]]
"""Extra fields: number and content."""


class Shared(NamedTuple):
    """What both headers of a record state."""

    needed: int
    """The version of the format that a reader must know."""
    flags: int
    method: int
    time: int
    date: int


class Central(NamedTuple):
    """An entry of the directory, sizes and offset as wide as they are."""

    shared: Shared
    made_by: int
    crc32: int
    packed: int
    size: int
    header: int
    disk: int
    internal: int
    external: int
    name: bytes
    fields: Fields | None
    """Of the extra area; None where it is damaged."""
    comment: bytes


class Local(NamedTuple):
    """The header before a record's bytes; sizes as written."""

    shared: Shared
    crc32: int
    packed: int
    size: int
    name: bytes
    fields: Fields | None
    """Of the extra area; None where it is damaged."""
    payload: int
    """Offset of the record's bytes."""


def directory_entries(data: ByteRange, end: End) -> Iterator[Central]:
    """The entries of a directory, those left out whose 64-bit field is too short.

    Raises:
        CheckpointError: the directory lies outside the file.
        struct.error: it ends within an entry.
    """
    for raw in raw_entries(data, end):
        fixed = _CENTRAL.unpack_from(raw)
        _, made_by, *shared, crc, packed, size = fixed[:10]
        name_length, extra_length, _, disk, internal, external, header = fixed[10:]
        start = _CENTRAL.size
        name, extra, comment = (
            raw[start : start + name_length],
            raw[start + name_length : start + name_length + extra_length],
            raw[start + name_length + extra_length :],
        )
        values = [size, packed, header]
        fields = extra_fields(extra)
        wide = iter(wide_values(fields))
        for index, value in enumerate(values):
            if value == _FAR:
                values[index] = next(wide, -1)
        if -1 not in values:
            size, packed, header = values
            yield Central(
                Shared(*shared), made_by, crc, packed, size, header, disk, internal, external,
                name, fields, comment,
            )  # fmt: skip


def local_header(data: ByteRange, offset: int, name_length: int) -> Local | None:
    """The local header at `offset`; None where there is none, or it reaches outside the file."""
    try:
        raw = data.read(offset, min(_LOCAL.size + name_length + _LIKELY, data.length - offset))
        signature, *shared, crc, packed, size, length, extra_length = _LOCAL.unpack_from(raw)
        whole = _LOCAL.size + length + extra_length
        if whole > len(raw):
            raw = data.read(offset, whole)
    except (CheckpointError, struct.error):
        return None
    if signature != b"PK\x03\x04":
        return None
    name, extra = raw[_LOCAL.size : _LOCAL.size + length], raw[_LOCAL.size + length : whole]
    fields = extra_fields(extra)
    return Local(Shared(*shared), crc, packed, size, name, fields, offset + whole)


def extra_fields(extra: bytes) -> Fields | None:
    """The fields of an extra area by number; None where they do not fill it.

    Up to three zero bytes may be left over, as some tools pad.
    """
    fields: Fields = []
    position = 0
    while position + _FIELD.size <= len(extra):
        number, length = _FIELD.unpack_from(extra, position)
        position += _FIELD.size
        if position + length > len(extra):
            return None
        fields.append((number, extra[position : position + length]))
        position += length
    return None if extra[position:].strip(b"\0") else fields


def wide_values(fields: Fields | None) -> list[int]:
    """The numbers of the zip64 field, empty where there is none."""
    content = next((content for number, content in fields or () if number == ZIP64), b"")
    whole = len(content) - len(content) % 8
    return [value for (value,) in struct.iter_unpack("<Q", content[:whole])]
