"""Compare the local headers of a zip with its directory, which zip readers do not do."""

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
    DESCRIPTOR_FLAG,
    END,
    END_SIGNATURE,
    FIELD,
    LOCAL,
    LOCATOR,
    SEE_ZIP64,
    STORED,
    UNSUPPORTED_FLAGS,
    ZIP64,
    End,
    find_end,
    read_raw_entries,
    split_extra_fields,
)
from ckptool.formats.registry import ZIP_MAGIC
from ckptool.words import counted

_LIKELY_EXTRA_BYTES = 256
"""Bytes read at once of a local header: more is rarely there."""


_Fields = list[tuple[int, bytes]]
"""Extra fields: number and content."""


class _Shared(NamedTuple):
    """The facts that both headers of a record state."""

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


def _parse_entries(data: ByteRange, end: End) -> Iterator[_Central]:
    """Yield the entries of a directory, except those with a zip64 field that is too short.

    The reader of the archive refuses those, so they need no comparison.

    Raises:
        CheckpointError: the directory is outside the file.
        struct.error: it ends within an entry.
    """
    for name, raw in read_raw_entries(data, end):
        fixed = CENTRAL.unpack_from(raw)
        _signature, made_by, *shared, crc, packed, size = fixed[:10]
        name_length, extra_length, _comment_length, disk, internal, external, header = fixed[10:]
        tail = raw[CENTRAL.size + name_length :]
        extra, comment = tail[:extra_length], tail[extra_length:]
        values = [size, packed, header]  # in the order of the zip64 field
        fields = _parse_extra_fields(extra)
        wide_values = iter(_parse_zip64_values(fields))  # only of the values that need it
        for index, value in enumerate(values):
            if value == SEE_ZIP64:
                values[index] = next(wide_values, -1)
        if -1 not in values:  # the zip64 field has enough numbers
            size, packed, header = values
            yield _Central(
                _Shared(*shared), made_by, crc, packed, size, header, disk, internal, external,
                name, fields, comment,
            )  # fmt: skip


def _read_local_header(data: ByteRange, offset: int, name_length: int) -> _Local | None:
    """Return the local header at `offset`; None if there is none inside the file."""
    try:
        raw = data.read(
            offset, min(LOCAL.size + name_length + _LIKELY_EXTRA_BYTES, data.length - offset)
        )
        signature, *shared, crc, packed, size, length, extra_length = LOCAL.unpack_from(raw)
        header_size = LOCAL.size + length + extra_length
        if header_size > len(raw):
            raw = data.read(offset, header_size)
    except (CheckpointError, struct.error):
        return None
    if signature != ZIP_MAGIC:
        return None
    name, extra = raw[LOCAL.size : LOCAL.size + length], raw[LOCAL.size + length : header_size]
    fields = _parse_extra_fields(extra)
    return _Local(_Shared(*shared), crc, packed, size, name, fields, offset + header_size)


def _parse_extra_fields(extra: bytes) -> _Fields | None:
    """Return number and content of the fields of an extra area; None if they do not fill it.

    Up to three zero bytes may be left over, as some tools pad. Four would be a field.
    """
    fields = list(split_extra_fields(extra))
    packed = b"".join(FIELD.pack(number, len(content)) + content for number, content in fields)
    is_filled = extra.startswith(packed) and not extra[len(packed) :].strip(b"\0")
    return fields if is_filled else None


def _parse_zip64_values(fields: _Fields | None) -> list[int]:
    """Return the numbers of the zip64 field; empty if there is no such field."""
    content = next((content for number, content in fields or () if number == ZIP64), b"")
    length = len(content) // 8 * 8
    return [value for (value,) in struct.iter_unpack("<Q", content[:length])]


_END64_VERSIONS = struct.Struct("<12x2H")
_SHORT_DESCRIPTOR, _ZIP64_DESCRIPTOR = struct.Struct("<3I"), struct.Struct("<I2Q")
_DESCRIPTORS = tuple(
    (form, signature)
    for signature in (b"PK\x07\x08", b"")
    for form in (_SHORT_DESCRIPTOR, _ZIP64_DESCRIPTOR)
)
"""CRC-32 and two sizes; the signature before them is optional (APPNOTE 4.3.9)."""
_FOLDER_ATTRIBUTE = 0x10
"""MS-DOS's mark of a folder among the external attributes."""
_ZIP64_VERSION = 45
_VERSIONS = {10, 20, _ZIP64_VERSION}
"""Versions needed that one header may have where the other has another: some tools count anew."""

_MAX_UNSUPPORTED_CHECKED = 100
_PADDING_FIELD = int.from_bytes(b"FB", "little")
"""The extra field that torch pads with, to align what follows."""
_TORCH_END_VERSION = 0x031E
"""The version that torch's writer states in the 64-bit end record."""


def find_header_problems(data: ByteRange, *, only_unsupported: bool = False) -> tuple[Finding, ...]:
    """Return a finding for each contradiction between the headers of a zip; none if it has no end.

    Errors of the reader are reported when the file is opened. With `only_unsupported`, only the
    first records with an unsupported method or flag are checked: damage may have changed these.
    """
    try:
        end = find_end(data)
        if end is None:
            return ()
        entries = list(_parse_entries(data, end))
    except (CheckpointError, struct.error):
        return ()
    if only_unsupported:
        entries = [
            entry
            for entry in entries
            if entry.shared.method not in (STORED, DEFLATED)
            or entry.shared.flags & UNSUPPORTED_FLAGS
        ][:_MAX_UNSUPPORTED_CHECKED]
    headers = [_read_local_header(data, entry.header, len(entry.name)) for entry in entries]
    is_torch = _is_by_torch(entries, headers)
    problems = [
        Finding("header", text, (entry.name.decode("utf-8", "backslashreplace"),))
        for entry, local in zip(entries, headers, strict=True)
        for text in _find_entry_problems(data, entry, local, is_torch)
    ]
    return (*problems, *_find_end_problems(data, end, is_torch))


def _is_by_torch(entries: Sequence[_Central], headers: Sequence[_Local | None]) -> bool:
    """Return whether most records have version 0 and padding, as all have from torch's writer."""
    count = sum(
        entry.made_by == 0 and local is not None and _has_torch_padding(local)
        for entry, local in zip(entries, headers, strict=True)
    )
    return count > len(entries) / 2


def _has_torch_padding(local: _Local) -> bool:
    return any(number == _PADDING_FIELD for number, _ in local.fields or ())


def _find_entry_problems(
    data: ByteRange, entry: _Central, local: _Local | None, by_torch: bool
) -> Iterator[str]:
    """Yield a clause for each problem in the directory entry and local header of one record.

    With `by_torch`, also for fields that torch never writes in this way.
    """
    if entry.external & _FOLDER_ATTRIBUTE and not entry.name.endswith(b"/"):
        yield (
            "the directory marks it as a folder, so torch.load does not read its bytes and "
            "returns uninitialized memory"
        )
    if entry.disk:
        yield f"the directory puts it on disk {entry.disk:,} of an archive with one disk"
    if entry.fields is None:
        yield "the extra field of its directory entry is damaged"
    if local is None or local.name != entry.name:
        return  # the reader reports it
    needed_versions = {local.shared.needed, entry.shared.needed}
    is_version_plausible = len(needed_versions) == 1 or needed_versions < _VERSIONS
    has_same_facts = local.shared == entry.shared._replace(needed=local.shared.needed)
    if not is_version_plausible or not has_same_facts or not _has_same_sizes(entry, local):
        yield "its own header contradicts the directory"
    if local.fields is None:
        yield "the extra field of its own header is damaged"
    # Torch pads with Z, other tools with zeros.
    elif any(
        number == _PADDING_FIELD and content.strip(b"Z") and content.strip(b"\0")
        for number, content in local.fields
    ):
        yield "the padding before its bytes is damaged"
    if local.shared.flags & DESCRIPTOR_FLAG and not _has_descriptor(data, entry, local):
        yield "the data descriptor after its bytes is missing or contradicts the directory"
    if by_torch and (entry.made_by == 0 or _has_torch_padding(local)):  # not added by another tool
        yield from _find_odd_fields(entry, local)


def _has_same_sizes(entry: _Central, local: _Local) -> bool:
    """Return True if the local header has the checksum and sizes of the directory.

    They may be 0 if a data descriptor has them, and 2**32 - 1 if the zip64 field has them.
    """
    zip64_values = _parse_zip64_values(local.fields)
    has_descriptor = bool(local.shared.flags & DESCRIPTOR_FLAG)
    # The zip64 field repeats values of the directory, or 0 for sizes in the data descriptor.
    known_values = {entry.packed, entry.size, entry.header, *([0] if has_descriptor else [])}
    if not known_values.issuperset(zip64_values):
        return False
    placeholders = {0, SEE_ZIP64} if zip64_values else {0}
    if has_descriptor and local.crc32 == 0 and {local.packed, local.size} <= placeholders:
        return True
    pairs = ((local.crc32, entry.crc32), (local.packed, entry.packed), (local.size, entry.size))
    return all(
        own == stated or (zip64_values and (own == SEE_ZIP64 or (has_descriptor and own == 0)))
        for own, stated in pairs
    )


def _has_descriptor(data: ByteRange, entry: _Central, local: _Local) -> bool:
    """Return whether a data descriptor follows the bytes and agrees with the directory."""
    start = local.payload + entry.packed
    longest = max(len(signature) + form.size for form, signature in _DESCRIPTORS)
    try:
        raw = data.read(start, max(min(longest, data.length - start), 0))
    except CheckpointError:
        return False
    facts = (entry.crc32, entry.packed, entry.size)
    return any(
        raw.startswith(signature + form.pack(*facts))
        for form, signature in _DESCRIPTORS
        # Sizes of 4 bytes cannot state large numbers.
        if form is not _SHORT_DESCRIPTOR or max(facts) <= SEE_ZIP64
    )


def _find_odd_fields(entry: _Central, local: _Local) -> Iterator[str]:
    """Yield a clause for each difference from the headers of torch's writer (miniz 3.0.2)."""
    torch_version = {STORED: 0, DEFLATED: 20}.get(entry.shared.method)
    # Torch writes 0 for the numbers compared below. The folder attribute, and versions that differ,
    # have findings of their own.
    has_torch_version = torch_version == entry.shared.needed or (
        entry.shared.needed != local.shared.needed
    )
    external = entry.external & ~_FOLDER_ATTRIBUTE
    if entry.made_by or entry.internal or external or entry.comment or not has_torch_version:
        yield "its directory entry has numbers that torch does not write"
    for fields, usual in ((entry.fields, (ZIP64,)), (local.fields, (ZIP64, _PADDING_FIELD))):
        if any(number not in usual for number, _ in fields or ()):
            yield "it has an extra field that torch does not write"
    is_readable = local.fields is not None  # else the whole extra area is damaged
    if not _has_torch_padding(local) and is_readable:
        yield "the padding before its bytes is damaged"


def _find_end_problems(data: ByteRange, end: End, by_torch: bool) -> Iterator[Finding]:
    """Yield the findings on the end records, which begin at `end.start`, and the bytes after them.

    Without a zip64 record, the plain end record is the first, and has no versions to check.
    """
    tail = data.read(end.start)
    plain_at = tail.rfind(END_SIGNATURE, 0, len(tail) - END.size + len(END_SIGNATURE))
    _, disk, first_disk, _, _, _, _, comment_length = END.unpack_from(tail, plain_at)
    trailing = len(tail) - plain_at - END.size - comment_length
    if trailing > 0:
        yield Finding("trailing", f"{counted(trailing, 'byte')} after the end of the zip")
    elif trailing < 0:
        text = f"the comment of {comment_length:,} bytes is {-trailing:,} bytes too short"
        yield Finding("end", text)
    if plain_at == 0:
        return
    _, end64_disk, _, disk_count = LOCATOR.unpack_from(tail, plain_at - LOCATOR.size)
    if (disk, first_disk, end64_disk, disk_count) != (0, 0, 0, 1):
        yield Finding("end", "the end records give several disks")
    made_by, needed = _END64_VERSIONS.unpack_from(tail)
    if needed != _ZIP64_VERSION or (by_torch and made_by != _TORCH_END_VERSION):
        text = f"the 64-bit end record has the versions {made_by:,} and {needed:,}"
        yield Finding("end", text)
