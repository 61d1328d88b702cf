"""Find the intact records of a damaged zip: those with the right length and CRC-32."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress

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
    the beginning of the file.

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
        if record.crc32 in (None, crc)  # torch can be set to write none
    }
    for entry in entries:
        name = entry.name.rpartition("/")[2]
        if name in _NEEDED_RECORDS and name not in records:
            raise CorruptFile(f"record {name!r} is damaged")
    return Archive(data.source.name, folder, records, sources, data.length, is_partial=True)


def _select_last_copy(data: ByteRange) -> ByteRange:
    """Return the last copy of a restarted download, if it is complete; else all bytes."""
    first = data.read(0, min(data.length, LOCAL.size + 64))
    start = find_last_copy(data.source, first)
    with suppress(CorruptFile, UnsupportedFormat):
        copy = data.slice(start, data.length - start)
        if start and is_second_copy(data, start) and find_end(copy) is not None:
            return copy
    return data


def _list_entries(data: ByteRange, limits: Limits) -> list[ZipEntry]:
    """Return the entries of the directory, or of consecutive records if it cannot be read."""
    try:
        end = find_end(data)
        if end is not None:
            entries = read_directory(data, end, limits)
            check_names(entries, exact=False)
            return entries
    except (CorruptFile, UnsupportedFormat):  # the directory is damaged
        pass
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
        signature, _, flags, method, _, _, crc, packed, size, length, extra = LOCAL.unpack(head)
        payload = position + LOCAL.size + length + extra
        if signature != ZIP_MAGIC or payload > data.length:
            return
        name = data.read(position + LOCAL.size, length)
        stop = payload + packed
        if flags & DESCRIPTOR_FLAG:
            descriptor = _find_descriptor(data, payload, stored=method == STORED)
            if descriptor is None:
                return
            crc, packed, size, stop = descriptor
        if stop > data.length:
            return
        text = name.decode("utf-8", "backslashreplace")
        yield ZipEntry(
            text, name, method, crc, packed, size, position, bool(flags & DESCRIPTOR_FLAG)
        )
        position = stop


def _find_descriptor(
    data: ByteRange, payload: int, *, stored: bool
) -> tuple[int, int, int, int] | None:
    """Return CRC-32, packed size, size and end from the data descriptor of a record.

    It is the first one with a size that equals its distance from the start of the payload. None if
    the file has none. `stored` is True for a record that is not compressed.
    """
    position = payload
    while position < data.length:
        # Blocks overlap by the length of a descriptor, which may begin at the end of one.
        block = data.read(position, min(BLOCK + 24, data.length - position))
        at = block.find(_DESCRIPTOR_SIGNATURE)
        while at >= 0:
            for layout in (_SIZES_STRUCT, _SIZES64_STRUCT):
                stop = at + len(_DESCRIPTOR_SIGNATURE) + layout.size
                if stop > len(block):
                    continue
                crc, packed, size = layout.unpack_from(block, at + len(_DESCRIPTOR_SIGNATURE))
                if packed == position + at - payload and (size == packed or not stored):
                    return crc, packed, size, position + stop
            at = block.find(_DESCRIPTOR_SIGNATURE, at + 1)
        position += BLOCK
    return None
