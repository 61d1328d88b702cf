"""Write a zip with torch's layout: stored, aligned, with sizes known in advance.

After third_party/miniz-3.0.2/miniz.c (`mz_zip_writer_add_mem_ex_v2`) and
caffe2/serialize/inline_container.cc (`getPadding`). Records begin at multiples of the alignment; a
data descriptor after them has their sizes; the zip64 end record is always written.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptool.errors import WriteError
from ckptool.files.source import SHARED, WORTH_SHARING, ByteRange, Shared
from ckptool.formats.archive import (
    CENTRAL,
    DESCRIPTOR_FLAG,
    END,
    END64,
    LOCAL,
    LOCATOR,
    SEE_ZIP64,
    SEE_ZIP64_COUNT,
    ZIP64,
)

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput

_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_PADDING_HEADER = struct.Struct("<2sH")
_UTF8 = 1 << 11
_MADE_BY, _NEEDED_VERSION = 0x031E, 45


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A planned record: its name in the folder, its size, and the function that writes it."""

    name: str
    size: int
    write: Callable[[FileOutput], int]
    """Writes exactly `size` bytes and returns their CRC-32."""
    copied: ByteRange | None = None
    """The range that is copied unchanged; None if it is computed."""


def literal_record(name: str, data: bytes) -> NewRecord:
    """Return a record with the given bytes."""

    def write(output: FileOutput) -> int:
        """Write the bytes, and return their CRC-32."""
        output.write(data)
        return zlib.crc32(data)

    return NewRecord(name, len(data), write)


@dataclass(frozen=True, slots=True)
class ZipPlace:
    """The place of a record, which determines all fields of its headers but the CRC."""

    name: bytes
    """With the folder."""
    size: int
    header: int
    """Offset of the local header."""
    alignment: int
    congruent: int | None = None
    """An offset that its payload must be congruent to, modulo `SHARED`."""

    @property
    def wide(self) -> bool:
        """True if its headers need a zip64 field."""
        return self.size >= SEE_ZIP64 or self.header >= SEE_ZIP64

    @property
    def flags(self) -> int:
        """The flags of an entry: its name is UTF-8, and its sizes follow the payload, if any."""
        return _UTF8 | (DESCRIPTOR_FLAG if self.size else 0)

    @property
    def payload(self) -> int:
        """Offset of the first byte of content: the next multiple of the alignment.

        With `congruent`, it is the next offset that is congruent to it modulo `SHARED`, so that the
        file system can share blocks. The header always ends with a field for the padding.
        """
        zip64_field = self.pack_zip64_field(local=True)
        earliest = self.header + LOCAL.size + len(self.name) + len(zip64_field)
        earliest += _PADDING_HEADER.size
        if self.congruent is not None:
            return earliest + (self.congruent - earliest) % SHARED
        return -(-earliest // self.alignment) * self.alignment

    @property
    def descriptor_size(self) -> int:
        """Bytes of the data descriptor; 0 after an empty payload."""
        if not self.size:
            return 0
        return _DESCRIPTOR64.size if self.wide else _DESCRIPTOR.size

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.payload + self.size + self.descriptor_size

    def pack_zip64_field(self, *, local: bool) -> bytes:
        """Return the zip64 field with the sizes and the offset that do not fit, or nothing.

        The packed size is 0 in a local header, because the data descriptor has it.
        """
        values = []
        if self.size >= SEE_ZIP64:
            packed_size = 0 if local else self.size
            values += [self.size, packed_size]
        if self.header >= SEE_ZIP64:
            values.append(self.header)
        if not values:
            return b""
        return struct.pack(f"<2H{len(values)}Q", ZIP64, 8 * len(values), *values)

    def pack_local_header(self) -> bytes:
        """Return header, name and extra field, padded so that the payload is aligned.

        CRC-32 and sizes are 0: the data descriptor has them. `FB` is the padding field of torch.
        """
        zip64_field = self.pack_zip64_field(local=True)
        fixed_size = LOCAL.size + len(self.name) + len(zip64_field) + _PADDING_HEADER.size
        padding = self.payload - (self.header + fixed_size)
        extra = zip64_field + _PADDING_HEADER.pack(b"FB", padding) + b"Z" * padding
        return (
            LOCAL.pack(b"PK\x03\x04", 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
            + self.name
            + extra
        )

    def pack_descriptor(self, crc: int) -> bytes:
        """Return the data descriptor; empty after an empty payload."""
        if not self.size:  # its header has all fields already, which are 0
            return b""
        layout = _DESCRIPTOR64 if self.wide else _DESCRIPTOR
        return layout.pack(b"PK\x07\x08", crc, self.size, self.size)

    def pack_entry(self, crc: int) -> bytes:
        """Return the entry in the directory.

        A number that does not fit is all ones, and the zip64 field has it. The zeros are versions,
        method (stored), time, date, comment, disk and attributes.
        """
        zip64_field = self.pack_zip64_field(local=False)
        size, header = min(self.size, SEE_ZIP64), min(self.header, SEE_ZIP64)
        lengths = (len(self.name), len(zip64_field), 0)
        fixed = (b"PK\x01\x02", 0, 0, self.flags, 0, 0, 0, crc, size, size)
        return CENTRAL.pack(*fixed, *lengths, 0, 0, 0, header) + self.name + zip64_field


@dataclass(frozen=True, slots=True)
class NewZip:
    """A planned zip."""

    records: tuple[tuple[NewRecord, ZipPlace], ...]
    size: int
    """Size of the whole file in bytes."""
    shared: Shared | None = None
    """The bytes that can share blocks with the file that they are copied from."""

    def write(self, output: FileOutput) -> None:
        """Write the records, the directory and the end records.

        Raises:
            WriteError: a record is longer or shorter than planned.
        """
        start = output.tell()  # offsets in a zip count from its first byte
        entries = []
        for record, place in self.records:
            output.write(place.pack_local_header())
            crc = record.write(output)
            written_bytes = output.tell() - start - place.payload
            if written_bytes != place.size:
                raise WriteError(
                    f"record {record.name!r} has {written_bytes:,} bytes, expected {place.size:,}"
                )
            output.write(place.pack_descriptor(crc))
            entries.append(place.pack_entry(crc))
        offset = output.tell() - start
        directory = b"".join(entries)
        output.write(directory + pack_end_records(len(entries), offset, len(directory)))


def pack_end_records(entries: int, offset: int, length: int) -> bytes:
    """Return the three end records for a directory of `length` bytes at `offset`.

    The plain record refers to the zip64 record only for numbers that are too long for it.
    """
    end64_offset = offset + length
    short_entries = min(entries, SEE_ZIP64_COUNT)
    return (
        END64.pack(  # its size counts from after the size field
            b"PK\x06\x06", END64.size - 12, _MADE_BY, _NEEDED_VERSION, 0, 0, entries, entries,
            length, offset,
        )
        + LOCATOR.pack(b"PK\x06\x07", 0, end64_offset, 1)
        + END.pack(
            b"PK\x05\x06", 0, 0, short_entries, short_entries, min(length, SEE_ZIP64),
            min(offset, SEE_ZIP64), 0,
        )
    )  # fmt: skip


def plan_sharing_zip(
    folder: str, records: Sequence[NewRecord], first_name: str, alignment: int
) -> NewZip | None:
    """Lay out records so that most bytes can share blocks with the file they come from.

    The offset of the record `first_name` becomes congruent to its offset in its file, modulo
    `SHARED`; copied records after it follow automatically if they are in the order of the file.

    Returns:
        None if `first_name` is not copied from an aligned offset, or if the shared bytes are less
        than half of the file or less than `WORTH_SHARING`.
    """
    copied_data = next((record.copied for record in records if record.name == first_name), None)
    if copied_data is None or copied_data.offset % alignment:
        return None
    new = plan_zip(folder, records, alignment, (first_name, copied_data.offset))
    shared_bytes = sum(
        record.size
        for record, place in new.records
        if record.copied and (record.copied.offset - place.payload) % SHARED == 0
    )
    is_worthwhile = shared_bytes >= WORTH_SHARING and 2 * shared_bytes > new.size
    return replace(new, shared=Shared(shared_bytes, copied_data)) if is_worthwhile else None


def plan_zip(
    folder: str,
    records: Sequence[NewRecord],
    alignment: int,
    aligned: tuple[str, int] | None = None,
) -> NewZip:
    """Lay out `records` in `folder`, in their order, each payload at a multiple of `alignment`.

    `aligned` is a record's name and an offset that its payload is congruent to, modulo `SHARED`.
    """
    placed_records = []
    position = directory_size = 0
    for record in records:
        name = f"{folder}/{record.name}".encode()
        congruent = aligned[1] if aligned and aligned[0] == record.name else None
        place = ZipPlace(name, record.size, position, alignment, congruent)
        placed_records.append((record, place))
        position = place.end
        directory_size += len(place.pack_entry(crc=0))
    size = position + directory_size + END64.size + LOCATOR.size + END.size
    return NewZip(tuple(placed_records), size)
