"""What zip readers pass over: local headers against the directory."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptool.core.finding import Finding
from ckptool.errors import CheckpointError
from ckptool.files import ByteRange
from ckptool.formats.archive import (
    CENTRAL,
    DEFLATED,
    DESCRIPTOR,
    END,
    FAR,
    FIELD,
    LOCAL,
    LOCATOR,
    REFUSED,
    STORED,
    ZIP64,
    End,
    extra_fields,
    find_end,
    raw_entries,
)
from ckptool.formats.registry import ZIP_MAGIC
from ckptool.words import counted

_LIKELY = 256
"""Bytes read at once of a local header: more is rarely there."""


_Fields = list[tuple[int, bytes]]
"""Extra fields: number and content."""


class _Shared(NamedTuple):
    """What both headers of a record state."""

    needed: int
    """The version of the format that a reader must know."""
    flags: int
    method: int
    time: int
    date: int


class _Central(NamedTuple):
    """An entry of the directory, sizes and offset as wide as they are."""

    shared: _Shared
    made_by: int
    crc32: int
    packed: int
    size: int
    header: int
    disk: int
    internal: int
    external: int
    name: bytes
    fields: _Fields | None
    """Of the extra area; None where it is damaged."""
    comment: bytes


class _Local(NamedTuple):
    """The header before a record's bytes; sizes as written."""

    shared: _Shared
    crc32: int
    packed: int
    size: int
    name: bytes
    fields: _Fields | None
    """Of the extra area; None where it is damaged."""
    payload: int
    """Offset of the record's bytes."""


def _directory_entries(data: ByteRange, end: End) -> Iterator[_Central]:
    """Yield the entries of a directory, those left out whose 64-bit field is too short.

    Raises:
        CheckpointError: the directory lies outside the file.
        struct.error: it ends within an entry.
    """
    for name, raw in raw_entries(data, end):
        fixed = CENTRAL.unpack_from(raw)
        _, made_by, *shared, crc, packed, size = fixed[:10]
        name_length, extra_length, _, disk, internal, external, header = fixed[10:]
        rest = raw[CENTRAL.size + name_length :]
        extra, comment = rest[:extra_length], rest[extra_length:]
        values = [size, packed, header]
        fields = _extra_fields(extra)
        wide = iter(_wide_values(fields))
        for index, value in enumerate(values):
            if value == FAR:
                values[index] = next(wide, -1)
        if -1 not in values:
            size, packed, header = values
            yield _Central(
                _Shared(*shared), made_by, crc, packed, size, header, disk, internal, external,
                name, fields, comment,
            )  # fmt: skip


def _local_header(data: ByteRange, offset: int, name_length: int) -> _Local | None:
    """Return the local header at `offset`; None if there is none inside the file."""
    try:
        raw = data.read(offset, min(LOCAL.size + name_length + _LIKELY, data.length - offset))
        signature, *shared, crc, packed, size, length, extra_length = LOCAL.unpack_from(raw)
        whole = LOCAL.size + length + extra_length
        if whole > len(raw):
            raw = data.read(offset, whole)
    except (CheckpointError, struct.error):
        return None
    if signature != ZIP_MAGIC:
        return None
    name, extra = raw[LOCAL.size : LOCAL.size + length], raw[LOCAL.size + length : whole]
    fields = _extra_fields(extra)
    return _Local(_Shared(*shared), crc, packed, size, name, fields, offset + whole)


def _extra_fields(extra: bytes) -> _Fields | None:
    """Return the fields of an extra area by number; None where they do not fill it.

    Up to three zero bytes may be left over, as some tools pad.
    """
    fields = list(extra_fields(extra))
    whole = b"".join(FIELD.pack(number, len(content)) + content for number, content in fields)
    is_whole = extra.startswith(whole) and not extra[len(whole) :].strip(b"\0")
    return fields if is_whole else None


def _wide_values(fields: _Fields | None) -> list[int]:
    """Return the numbers of the zip64 field, empty where there is none."""
    content = next((content for number, content in fields or () if number == ZIP64), b"")
    whole = len(content) - len(content) % 8
    return [value for (value,) in struct.iter_unpack("<Q", content[:whole])]


_END64_VERSIONS = struct.Struct("<12x2H")
_DESCRIPTORS = tuple(
    (struct.Struct(f"<{form}"), signature)
    for signature in (b"PK\x07\x08", b"")
    for form in ("3I", "I2Q")
)
"""CRC-32 and two sizes; the signature before them is optional (APPNOTE 4.3.9)."""
_FOLDER = 0x10
"""MS-DOS's mark of a folder among the external attributes."""
_ZIP64_VERSION = 45
_VERSIONS = {10, 20, _ZIP64_VERSION}
"""Versions needed that one header may have where the other has another: some tools count anew."""

_MOST_REFUSED = 100
_PADDING = int.from_bytes(b"FB", "little")
"""The extra field that torch pads with, to align what follows."""
_TORCHS_END = 0x031E
"""The version that torch's writer states in the 64-bit end record."""


def header_problems(data: ByteRange, *, refused: bool = False) -> tuple[Finding, ...]:
    """Yield every contradiction between the headers of a zip; none if its end is not found.

    What the reader refuses is told by opening the file, and not looked for here. `refused`: only
    some records of a kind that is not read, which may be so by damage alone.
    """
    try:
        end = find_end(data)
        if end is None:
            return ()
        entries = list(_directory_entries(data, end))
    except (CheckpointError, struct.error):
        return ()
    if refused:
        entries = [
            entry
            for entry in entries
            if entry.shared.method not in (STORED, DEFLATED) or entry.shared.flags & REFUSED
        ][:_MOST_REFUSED]
    headers = [_local_header(data, entry.header, len(entry.name)) for entry in entries]
    by_torch = _is_torchs(entries, headers)
    problems = [
        Finding("header", text, (entry.name.decode("utf-8", "backslashreplace"),))
        for entry, local in zip(entries, headers, strict=True)
        for text in _entry_faults(data, entry, local, by_torch)
    ]
    return (*problems, *_end_problems(data, end, by_torch))


def _is_torchs(entries: Sequence[_Central], headers: Sequence[_Local | None]) -> bool:
    """Return whether most records are as torch's writer leaves them: then all should be."""
    plain = sum(
        entry.made_by == 0 and local is not None and _is_padded(local)
        for entry, local in zip(entries, headers, strict=True)
    )
    return plain * 2 > len(entries)


def _is_padded(local: _Local) -> bool:
    return any(number == _PADDING for number, _ in local.fields or ())


def _entry_faults(
    data: ByteRange, entry: _Central, local: _Local | None, by_torch: bool
) -> Iterator[str]:
    """Yield what is wrong with one record's headers, a clause each."""
    if entry.external & _FOLDER and not entry.name.endswith(b"/"):
        yield (
            "the directory marks it as a folder, so torch.load does not read its bytes and "
            "returns uninitialized memory"
        )
    if entry.disk:
        yield f"the directory puts it on disk {entry.disk:,} of an archive with one disk"
    if entry.fields is None:
        yield "the extra field of its directory entry is damaged"
    if local is None or local.name != entry.name:
        return  # told by the reader
    (needed, *stated), (known, *true) = local.shared, entry.shared
    is_known = needed == known or {needed, known} < _VERSIONS
    if not is_known or stated != true or not _is_sized(entry, local):
        yield "its own header contradicts the directory"
    if local.fields is None:
        yield "the extra field of its own header is damaged"
    # Torch pads with Z, other tools with zeros.
    elif any(
        number == _PADDING and content.strip(b"Z") and content.strip(b"\0")
        for number, content in local.fields
    ):
        yield "the padding before its bytes is damaged"
    if local.shared.flags & DESCRIPTOR and not _is_described(data, entry, local):
        yield "the data descriptor after its bytes is missing or contradicts the directory"
    if by_torch and (entry.made_by == 0 or _is_padded(local)):
        yield from _torchs_faults(entry, local)


def _is_sized(entry: _Central, local: _Local) -> bool:
    """Return whether the local header has the checksum and sizes of the directory.

    All are 0 where a data descriptor has them.
    """
    wide = _wide_values(local.fields)
    described = bool(local.shared.flags & DESCRIPTOR)
    known = {entry.packed, entry.size, entry.header, *([0] if described else [])}
    if described and local.crc32 == 0 and {local.packed, local.size} <= ({0, FAR} if wide else {0}):
        return known.issuperset(wide)
    sums = ((local.crc32, entry.crc32), (local.packed, entry.packed), (local.size, entry.size))
    return known.issuperset(wide) and all(
        ours == theirs or (wide and (ours == FAR or (described and not ours)))
        for ours, theirs in sums
    )


def _is_described(data: ByteRange, entry: _Central, local: _Local) -> bool:
    """Return whether a data descriptor follows the bytes and agrees with the directory."""
    start = local.payload + entry.packed
    longest = _DESCRIPTORS[1][0].size + 4
    try:
        found = data.read(start, max(min(longest, data.length - start), 0))
    except CheckpointError:
        return False
    facts = (entry.crc32, entry.packed, entry.size)
    return any(
        found.startswith(signature + form.pack(*facts))
        for form, signature in _DESCRIPTORS
        if form.size > 12 or max(facts) <= FAR
    )


def _torchs_faults(entry: _Central, local: _Local) -> Iterator[str]:
    """Return where a record is not as torch's writer leaves every one (formats of miniz 3.0.2)."""
    needed = {STORED: 0, DEFLATED: 20}.get(entry.shared.method)
    odd = entry.made_by, entry.internal, entry.external & ~_FOLDER, len(entry.comment)
    if any(odd) or needed != entry.shared.needed == local.shared.needed:
        yield "its directory entry has numbers that torch does not write"
    for fields, known in ((entry.fields, (ZIP64,)), (local.fields, (ZIP64, _PADDING))):
        if any(number not in known for number, _ in fields or ()):
            yield "it has an extra field that torch does not write"
    if not _is_padded(local) and local.fields is not None:
        yield "the padding before its bytes is damaged"


def _end_problems(data: ByteRange, end: End, by_torch: bool) -> Iterator[Finding]:
    """Yield what is wrong with the records behind the directory, and behind them."""
    tail = data.read(end.start)
    found = tail.rfind(b"PK\x05\x06", 0, len(tail) - END.size + 4)
    _, disk, first_disk, _, _, _, _, comment = END.unpack_from(tail, found)
    rest = len(tail) - found - END.size - comment
    if rest > 0:
        yield Finding("trailing", f"{counted(rest, 'byte')} after the end of the zip")
    elif rest < 0:
        yield Finding("end", f"the comment of {comment:,} bytes is {-rest:,} bytes too short")
    if found == 0:
        return
    locator = LOCATOR.unpack_from(tail, found - LOCATOR.size)
    if (disk, first_disk, locator[1], locator[3]) != (0, 0, 0, 1):
        yield Finding("end", "the end records give several disks")
    made_by, needed = _END64_VERSIONS.unpack_from(tail)
    if needed != _ZIP64_VERSION or (by_torch and made_by != _TORCHS_END):
        text = f"the 64-bit end record has the versions {made_by:,} and {needed:,}"
        yield Finding("end", text)
