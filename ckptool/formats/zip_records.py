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

_LOCAL = struct.Struct("<4s22x2H")
"""Of the local header, what the directory does not tell: lengths of name and extra field."""
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
    headers = _LocalHeaders(data, end.offset)
    ordered = sorted(entries, key=attrgetter("header"))
    starts = [*(entry.header for entry in ordered), end.offset]
    offsets: dict[int, int] = {}
    dead = reached = 0
    before = ""
    for entry, following in zip(ordered, starts[1:], strict=True):
        header = entry.header
        if header < reached:
            raise CorruptFile(
                f"records {before!r} and {entry.name!r} overlap at offset {header:,}",
                file=data.source.name,
            )
        dead += header - reached
        offsets[header] = payload = headers.payload(entry, following)
        reached = payload + entry.packed
        if entry.descriptor and following > reached:
            wide = entry.size >= _FAR or header >= _FAR
            reached += min(following - reached, _DESCRIPTOR64 if wide else _DESCRIPTOR)
        before = entry.name
    return offsets, dead + end.offset - reached


class _LocalHeaders:
    """Reads local headers in the order of the file, several at once where they lie close."""

    def __init__(self, data: ByteRange, end: int) -> None:
        self.data = data
        self.end = end
        self.window = b""
        self.start = 0

    def payload(self, entry: Entry, following: int) -> int:
        """Where the content begins: behind an extra field that need not be the directory's."""
        header, name = entry.header, entry.raw_name
        length = _LOCAL.size + len(name)
        at = header - self.start
        if at + length > len(self.window):
            self._read(entry, length, following)
            at = 0
        signature, stated, extra = _LOCAL.unpack_from(self.window, at)
        found = self.window[at + _LOCAL.size : at + length]
        if signature != b"PK\x03\x04" or stated != len(name) or found != name:
            raise CorruptFile(
                f"there is no record {entry.name!r} at offset {header:,}, "
                "where the zip directory puts it",
                file=self.data.source.name,
            )
        payload = header + length + int(extra)
        if payload + entry.packed > self.end:
            raise self._outside(entry)
        return payload

    def _read(self, entry: Entry, length: int, following: int) -> None:
        if entry.header + length > self.end:
            raise self._outside(entry)
        reach = _WINDOW if following - entry.header < _CLOSE else length
        self.window = self.data.read(entry.header, min(reach, self.end - entry.header))
        self.start = entry.header

    def _outside(self, entry: Entry) -> CorruptFile:
        return CorruptFile(
            f"record {entry.name!r} of {entry.packed:,} bytes at offset {entry.header:,} reaches "
            f"beyond the zip directory at {self.end:,}",
            file=self.data.source.name,
        )


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
