"""Find the intact records of a damaged zip: those with the right length and CRC-32."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange, Source
from ckptool.files.checksums import compute_crc32s
from ckptool.files.source import BLOCK
from ckptool.formats.archive import (
    DESCRIPTOR_FLAG,
    LOCAL,
    STORED,
    LocalHeaders,
    ZipEntry,
    check_names,
    choose_folder,
    find_end,
    is_second_copy,
    make_record,
    read_directory,
)
from ckptool.formats.base import Archive, Record, check_limit
from ckptool.formats.registry import ZIP_MAGIC
from ckptool.formats.transfers import find_last_copy, text_transfer_error
from ckptool.limits import Limits

_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_SIZES_STRUCT, _SIZES64_STRUCT = struct.Struct("<3I"), struct.Struct("<I2Q")
_NEEDED_RECORDS = ("data.pkl", "byteorder")
"""Records that are needed to read the others."""


def read_intact_records(data: ByteRange, limits: Limits, sources: tuple[Source, ...]) -> Archive:
    """Return the intact records of a zip; all of its bytes are read.

    They come from its directory, or, if that is missing or damaged, from the consecutive records at
    the beginning of the file. An intact record has the CRC-32 that the zip states, if any.

    Raises:
        CorruptFile: the pickle or the byte order is not among them.
        LimitExceeded: it has more records, or more inflation, than `limits` allows.
    """
    if fault := text_transfer_error(data.source):
        raise fault
    data = _select_last_copy(data)
    entries = _list_entries(data, limits)
    folder = choose_folder(entries)
    headers, candidates = LocalHeaders(data, data.length), list[Record]()
    for entry in sorted(entries, key=lambda entry: entry.header):
        inner = entry.name.removeprefix(f"{folder}/") if folder else entry.name
        try:
            offset = headers.find_payload(entry, data.length)
            candidates.append(make_record(data, entry, offset, inner, limits))
        except LimitExceeded:
            raise
        except CheckpointError:  # a damaged header: the record is lost
            continue
    actual_crcs = compute_crc32s([record.data for record in candidates])
    records = {
        record.name: record
        for record, crc in zip(candidates, actual_crcs, strict=True)
        if record.crc32 in (None, crc)  # torch can be set to write no CRC-32
    }
    for entry in entries:
        name = entry.name.rpartition("/")[2]
        if name in _NEEDED_RECORDS and name not in records:
            raise CorruptFile(f"record {name!r} is damaged")
    return Archive(data.source.name, folder, records, sources, data.length, is_partial=True)


def _select_last_copy(data: ByteRange) -> ByteRange:
    """Return the last copy of a restarted download, if it is complete; else all bytes."""
    first_header = data.read(0, min(data.length, LOCAL.size + 64))  # with its name
    start = find_last_copy(data.source, first_header)
    with suppress(CorruptFile, UnsupportedFormat):
        copy = data.slice(start, data.length - start)
        if start and is_second_copy(data, start) and find_end(copy) is not None:
            return copy
    return data


def _list_entries(data: ByteRange, limits: Limits) -> list[ZipEntry]:
    """Return the entries of the directory, or of consecutive records if it cannot be read.

    Two names that differ only in case are an error, as in torch.
    """
    try:
        end = find_end(data)
        if end is not None:  # else the end of the file is lost
            entries = read_directory(data, end, limits)
            check_names(entries, exact=False)
            return entries
    except (CorruptFile, UnsupportedFormat):
        pass  # the directory is damaged; equal names of records are refused below
    entries = []
    for entry in _scan_local_headers(data):
        entries.append(entry)
        check_limit("the zip has", len(entries), "records", limits.max_records)
    check_names(entries, exact=False)
    return entries


def _scan_local_headers(data: ByteRange) -> Iterator[ZipEntry]:
    """Yield an entry for each local header from the start of the file, while they are consecutive.

    A header may have zeros for checksum and sizes; then they are in the descriptor after the bytes.
    """
    position = 0
    while position + LOCAL.size <= data.length:
        head = data.read(position, LOCAL.size)
        (
            signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length
        ) = LOCAL.unpack(head)  # fmt: skip
        payload = position + LOCAL.size + name_length + extra_length
        if signature != ZIP_MAGIC or payload > data.length:
            return
        raw_name = data.read(position + LOCAL.size, name_length)
        end = payload + packed
        has_descriptor = bool(flags & DESCRIPTOR_FLAG)
        if has_descriptor:
            descriptor = _find_descriptor(data, payload, stored=method == STORED)
            if descriptor is None:
                return
            crc, packed, size, end = descriptor
        if end > data.length:
            return
        name = raw_name.decode("utf-8", "backslashreplace")
        yield ZipEntry(name, raw_name, method, crc, packed, size, position, has_descriptor)
        position = end


class _Descriptor(NamedTuple):
    """The data descriptor after the payload of a record."""

    crc32: int
    packed: int
    size: int
    end: int
    """Its offset, and that of the next record."""


def _find_descriptor(data: ByteRange, payload: int, *, stored: bool) -> _Descriptor | None:
    """Return the data descriptor of the record with its payload at offset `payload`.

    It is the first one with a size that equals its distance from the start of the payload. None if
    the file has none. `stored` is True for a record that is not compressed.
    """
    position = payload
    while position < data.length:
        # Blocks overlap by the length of a descriptor, which may begin at the end of one.
        block = data.read(position, min(BLOCK + 24, data.length - position))
        at = block.find(_DESCRIPTOR_SIGNATURE)
        while at >= 0:
            for layout in (_SIZES_STRUCT, _SIZES64_STRUCT):  # plain, or zip64
                start = at + len(_DESCRIPTOR_SIGNATURE)
                end = start + layout.size
                if end > len(block):
                    continue
                crc, packed, size = layout.unpack_from(block, start)
                if packed == position + at - payload and (size == packed or not stored):
                    return _Descriptor(crc, packed, size, position + end)
            at = block.find(_DESCRIPTOR_SIGNATURE, at + 1)
        position += BLOCK
    return None
