"""A zip's directory, by the rules that torch's reader keeps (miniz) and stricter ones.

Whatever one reader could take for something else than another does is an error: a directory that
lies about its size, records that overlap, two records of one name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from ckptool.errors import CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange
from ckptool.limits import Limits

__all__ = [
    "DEFLATED",
    "REFUSED",
    "STORED",
    "End",
    "Entry",
    "find_end",
    "raw_entries",
    "read_directory",
]

STORED, DEFLATED = 0, 8
_METHODS = {
    1: "shrunk", 6: "imploded", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz",
}  # fmt: skip

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4x2H4x3I4H6xI")
"""Of a directory entry, what counts: no versions, times and attributes."""
_LENGTHS = struct.Struct("<28x3H")
"""Of a directory entry, the lengths of what follows it: name, extra field, comment."""
_ENTRY_SIGNATURE = b"PK\x01\x02"
_LOCAL_SIGNATURE = b"PK\x03\x04"
_FAR, _MANY = 0xFFFFFFFF, 0xFFFF

_ENCRYPTED, _DESCRIPTOR, _PATCH, _STRONG, _MASKED = 1 << 0, 1 << 3, 1 << 5, 1 << 6, 1 << 13
REFUSED = _ENCRYPTED | _PATCH | _STRONG | _MASKED
"""Flags of records that nobody reads without more."""
_LONGEST_ENTRY = _ENTRY.size + 3 * 0xFFFF


class End(NamedTuple):
    """What the end records state: `entries` of the directory in `length` bytes at `offset`."""

    entries: int
    offset: int
    length: int
    start: int
    """Offset of the first end record: the directory ends there."""
    size: int
    """Bytes of the end records, the comment and what follows."""


class Entry(NamedTuple):
    """One entry of the directory, sizes in bytes."""

    name: str
    raw_name: bytes
    method: int
    crc32: int
    packed: int
    size: int
    header: int
    """Offset of the local header."""
    descriptor: bool
    """Whether a data descriptor follows the payload."""


def find_end(data: ByteRange) -> End | None:
    """The end records of a zip, None where there are none in the last 64 KiB.

    Raises:
        CorruptFile: they contradict each other, or the archive spans several disks.
        UnsupportedFormat: several archives stand one behind another.
    """
    reach = min(data.length, _END.size + 0xFFFF)
    tail = data.read(data.length - reach, reach)
    found = tail.rfind(b"PK\x05\x06", 0, max(len(tail) - _END.size + 4, 0))
    if found < 0:
        return None
    position = data.length - reach + found
    _, disk, first_disk, on_disk, entries, length, offset, _ = _END.unpack_from(tail, found)
    end = End(entries, offset, length, position, data.length - position)
    wide = _find_end64(data, end)
    if (disk, first_disk) not in ((0, 0), (1, 1)) and wide is None:
        raise _corrupt(data, "the zip is one of several disks")
    if on_disk != entries:
        raise _corrupt(data, f"the zip states {entries:,} records, and {on_disk:,} on its disk")
    end = wide or end
    shift = end.start - end.offset - end.length
    if shift:
        if shift > 0 and data.read(end.offset + shift, 4) in (_ENTRY_SIGNATURE, b"PK\x05\x06"):
            _refuse_shifted(data, shift)
        raise _corrupt(
            data,
            f"the zip directory of {end.length:,} bytes at offset {end.offset:,} should end at "
            f"its end record, which stands at {end.start:,}",
        )
    return end


def _find_end64(data: ByteRange, end: End) -> End | None:
    """The 64-bit end record that a locator before the plain one points to."""
    position = end.start - _LOCATOR.size
    if position < 0:
        return None
    signature, _, offset, disks = _LOCATOR.unpack(data.read(position, _LOCATOR.size))
    if signature != b"PK\x06\x07":
        return None
    if offset + _END64.size > position or disks > 1:
        raise _corrupt(data, f"the zip64 end record cannot lie at offset {offset:,}")
    fields = _END64.unpack(data.read(offset, _END64.size))
    signature, own_size, _, _, disk, first_disk, on_disk, entries, length, start = fields
    if signature != b"PK\x06\x06" or offset + own_size + 12 != position:
        before = position - _END64.size
        if before > offset and data.read(before, 4) == b"PK\x06\x06":
            _refuse_shifted(data, before - offset)
        raise _corrupt(data, f"there is no zip64 end record at offset {offset:,}")
    if (disk, first_disk) not in ((0, 0), (1, 1)) or on_disk != entries:
        raise _corrupt(data, "the zip is one of several disks")
    for short, wide, unknown in (
        (end.entries, entries, _MANY),
        (end.length, length, _FAR),
        (end.offset, start, _FAR),
    ):
        if short not in (wide, unknown):
            raise _corrupt(data, f"the two end records of the zip differ: {short:,} and {wide:,}")
    return End(entries, start, length, offset, data.length - offset)


def read_directory(data: ByteRange, end: End, limits: Limits) -> list[Entry]:
    """The entries in the order of the directory, each within the file.

    Raises:
        CorruptFile: an entry breaks a rule (formats of zip: APPNOTE 4.3.12; miniz.c
            `mz_zip_reader_read_central_dir`).
        UnsupportedFormat: an encrypted record, a compression other than deflate, or several
            archives one behind another.
        LimitExceeded: more records than `limits` allows.
    """
    if end.entries > limits.max_records:
        raise LimitExceeded(
            f"the zip states {end.entries:,} records; {limits.max_records:,} are allowed",
            file=data.source.name,
        )
    if not end.entries * _ENTRY.size <= end.length <= end.entries * _LONGEST_ENTRY:
        raise _corrupt(
            data, f"a zip directory of {end.entries:,} records cannot take {end.length:,} bytes"
        )
    directory = data.read(end.offset, end.length)
    try:
        return list(_entries(data, directory, end))
    except struct.error as error:
        raise _corrupt(data, "the zip directory ends within a record's entry") from error


def _entries(data: ByteRange, directory: bytes, end: End) -> Iterator[Entry]:
    position = 0
    unpack, width = _ENTRY.unpack_from, _ENTRY.size
    for index in range(end.entries):
        (
            signature, flags, method, crc, packed, size,
            name_length, extra_length, comment_length, disk, header,
        ) = unpack(directory, position)  # fmt: skip
        if signature != _ENTRY_SIGNATURE:
            raise _corrupt(data, f"the zip directory is damaged at its entry {index:,}")
        start = position + width
        raw_name = directory[start : start + name_length]
        extra_start = start + name_length
        position = extra_start + extra_length + comment_length
        if position > end.length:
            raise _corrupt(data, f"the zip directory ends within its entry {index:,}")
        name = raw_name.decode("utf-8", "backslashreplace")
        if _FAR in (packed, size, header):
            extra = directory[extra_start : extra_start + extra_length]
            size, packed, header = _widen(data, name, extra, size, packed, header)
        descriptor = bool(flags & _DESCRIPTOR)
        entry = Entry(name, raw_name, method, crc, packed, size, header, descriptor)
        odd_method = method not in (STORED, DEFLATED) or (method == STORED and packed != size)
        if odd_method or flags & REFUSED or disk > 1:
            _refuse_record(data, entry, flags)
        yield entry
    if directory[position : position + 4] == _ENTRY_SIGNATURE:
        raise _corrupt(data, f"the zip directory holds more than the {end.entries:,} it states")


def raw_entries(data: ByteRange, end: End) -> list[bytes]:
    """The entries of a directory that `read_directory` has read, byte for byte."""
    directory = data.read(end.offset, end.length)
    entries = []
    position = 0
    for _ in range(end.entries):
        lengths = _LENGTHS.unpack_from(directory, position)
        stop = position + _ENTRY.size + sum(lengths)
        entries.append(directory[position:stop])
        position = stop
    return entries


def _widen(
    data: ByteRange, name: str, extra: bytes, size: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Size, packed size and header offset, those that are 2**32 - 1 taken from the zip64 field."""
    values = [size, packed, header]
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1:
            wide = extra[position : position + length]
            for index, value in enumerate(values):
                if value == _FAR:
                    if len(wide) < 8:
                        raise _corrupt(data, f"the zip64 field of record {name!r} is too short")
                    values[index] = int.from_bytes(wide[:8], "little")
                    wide = wide[8:]
            break
        position += length
    return values[0], values[1], values[2]


def _refuse_record(data: ByteRange, entry: Entry, flags: int) -> NoReturn:
    method = entry.method
    if flags & (_ENCRYPTED | _STRONG | _MASKED):
        what = "encrypted"
    elif flags & _PATCH:
        what = "a patch"
    elif method not in (STORED, DEFLATED):
        what = f"compressed by a method that torch cannot read ({_METHODS.get(method, method)})"
    elif entry.packed != entry.size and method == STORED:
        raise _corrupt(
            data,
            f"record {entry.name!r} is stored in {entry.packed:,} bytes "
            f"but should have {entry.size:,}",
        )
    else:
        raise _corrupt(data, f"record {entry.name!r} lies on another disk of the zip")
    raise UnsupportedFormat(
        f"record {entry.name!r} is {what}",
        file=data.source.name,
        hint="unzip it with the tool that made it and give the folder",
    )


def _refuse_shifted(data: ByteRange, shift: int) -> NoReturn:
    """Offsets that are all `shift` too small: archives one behind another, or something before."""
    if data.read(shift, 4) == data.read(0, 4) == _LOCAL_SIGNATURE:
        raise UnsupportedFormat(
            "this is a run of zip archives one behind another, as a shard (`.distcp`) of a "
            "distributed checkpoint is",
            file=data.source.name,
            hint="give the folder that holds `.metadata`, not one of its shards",
        )
    raise _corrupt(data, f"{shift:,} foreign bytes stand before the zip")


def _corrupt(data: ByteRange, fact: str) -> CorruptFile:
    return CorruptFile(fact, file=data.source.name)
