"""The records behind a zip's directory: where each payload lies, and that none share bytes."""

from __future__ import annotations

import struct
from operator import attrgetter

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import ByteRange, InflatedSource
from ckptool.formats.base import Record
from ckptool.formats.zip_directory import DEFLATED, End, Entry
from ckptool.limits import Limits

__all__ = ["payload_offsets", "record_of"]

_LOCAL = struct.Struct("<4s5H3I2H")
_WINDOW = 64 << 10
"""Bytes read at once where small records lie close together."""
_CLOSE = 4 << 10
"""Distance of two local headers up to which reading what lies between is cheaper than a call."""
_DESCRIPTOR, _DESCRIPTOR64 = 16, 24
_FAR = 0xFFFFFFFF


def payload_offsets(data: ByteRange, entries: list[Entry], end: End) -> tuple[dict[int, int], int]:
    """Payload offset by header offset, and the bytes that no record accounts for.

    Each local header is read: its name must be the directory's, and its record must end before
    the next one begins.

    Raises:
        CorruptFile: a record outside the file, two that overlap, a header that is none.
    """
    ordered = sorted(entries, key=attrgetter("header"))
    offsets: dict[int, int] = {}
    window, window_start = b"", 0
    previous_end, dead = 0, 0
    previous: Entry | None = None
    starts = [*(entry.header for entry in ordered), end.offset]
    for entry, following in zip(ordered, starts[1:], strict=True):
        header = entry.header
        if header < previous_end:
            raise _overlap(data, previous, entry)
        length = _LOCAL.size + len(entry.raw_name)
        at = header - window_start
        if at + length > len(window):
            if header + length > end.offset:
                raise _outside(data, entry, end)
            reach = _WINDOW if following - header < _CLOSE else length
            window = data.read(header, min(reach, end.offset - header))
            window_start, at = header, 0
        extra = _check_header(data, entry, window, at)
        payload = header + length + extra
        offsets[header] = payload
        record_end = payload + entry.packed
        if record_end > end.offset:
            raise _outside(data, entry, end)
        dead += header - previous_end
        if entry.descriptor and following > record_end:
            wide = entry.size >= _FAR or header >= _FAR
            record_end += min(following - record_end, _DESCRIPTOR64 if wide else _DESCRIPTOR)
        previous, previous_end = entry, record_end
    return offsets, dead + end.offset - previous_end


def _check_header(data: ByteRange, entry: Entry, window: bytes, at: int) -> int:
    """Bytes of the local header's extra field, which need not be the directory's."""
    fields = _LOCAL.unpack_from(window, at)
    name_length = len(entry.raw_name)
    start = at + _LOCAL.size
    if (
        fields[0] != b"PK\x03\x04"
        or fields[9] != name_length
        or window[start : start + name_length] != entry.raw_name
    ):
        raise CorruptFile(
            f"there is no record {entry.name!r} at offset {entry.header:,}, "
            "where the zip directory puts it",
            file=data.source.name,
        )
    extra: int = fields[10]
    return extra


def record_of(data: ByteRange, entry: Entry, payload: int, name: str, limits: Limits) -> Record:
    """The record of an entry whose payload begins at `payload`.

    Raises:
        LimitExceeded: it would inflate to more than `limits` allows.
    """
    packed = ByteRange(data.source, data.offset + payload, entry.packed)
    crc = entry.crc32 if entry.crc32 or not entry.size else None
    if entry.method != DEFLATED:
        return Record(name, packed, crc, entry.header)
    if entry.size > entry.packed * limits.max_inflation:
        raise LimitExceeded(
            f"record {entry.name!r} of {entry.packed:,} bytes claims to inflate to "
            f"{entry.size:,}, more than {limits.max_inflation:,} times as much",
            file=data.source.name,
        )
    inflated = ByteRange(InflatedSource(packed, entry.size), 0, entry.size)
    return Record(name, inflated, crc, entry.header, compressed=True)


def _overlap(data: ByteRange, one: Entry | None, two: Entry) -> CorruptFile:
    first = one.name if one else "the directory"
    return CorruptFile(
        f"records {first!r} and {two.name!r} overlap at offset {two.header:,}",
        file=data.source.name,
    )


def _outside(data: ByteRange, entry: Entry, end: End) -> CorruptFile:
    return CorruptFile(
        f"record {entry.name!r} of {entry.packed:,} bytes at offset {entry.header:,} reaches "
        f"beyond the zip directory at {end.offset:,}",
        file=data.source.name,
    )
