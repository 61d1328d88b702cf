"""Read zip archives: their directory and records, and the pickle of a truncated archive."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter, index
from typing import Any, NamedTuple, NoReturn

from ckptool.core.checkpoint import TORCH_REFUSES
from ckptool.core.model import Opaque, Storage, StorageRef
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileDenied,
    FileMissing,
    LimitExceeded,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.files import ByteRange, FolderFile, InflatedSource, Source
from ckptool.files.inflated import refuse_bomb
from ckptool.files.tiled import make_late_range
from ckptool.formats.base import Archive, Probe, Record, add_error_context, check_limit
from ckptool.formats.registry import ZIP_MAGIC
from ckptool.formats.transfers import salvage_command
from ckptool.limits import Limits
from ckptool.symbolic import unpickle
from ckptool.symbolic.rebuild import is_storage_pid, parse_storage_pid
from ckptool.words import are, few

STORED, DEFLATED = 0, 8
_METHOD_NAMES = {
    1: "shrunk", 6: "imploded", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz",
}  # fmt: skip

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
FIELD = struct.Struct("<2H")
ZIP64 = 1
"""The extra field with sizes and offset as numbers of 64 bits."""
_ENTRY_SIGNATURE, END_SIGNATURE = b"PK\x01\x02", b"PK\x05\x06"
SEE_ZIP64, SEE_ZIP64_COUNT = 0xFFFFFFFF, 0xFFFF
"""The values of fields that are too short; the zip64 field or record has the true ones."""

DESCRIPTOR_FLAG, UNSUPPORTED_FLAGS = 1 << 3, 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
"""Flags of a record: a data descriptor follows it; it is encrypted (0, 6, 13) or a patch (5)."""
_MAX_ENTRY_BYTES = CENTRAL.size + 3 * 0xFFFF
"""The size of an entry with the longest name, extra area and comment."""
_SINGLE_DISK = ((0, 0), (1, 1))
"""The numbers of this disk and of the first: miniz, which torch uses, counts from 0 or 1."""


class ZipSeries(UnsupportedFormat):
    """The file is a series of zip archives, one after the other."""


class End(NamedTuple):
    """The content of the end records: `entries` of the directory in `length` bytes at `offset`."""

    entries: int
    offset: int
    length: int
    start: int
    """Offset of the first end record: the directory ends there."""


class ZipEntry(NamedTuple):
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
    """True if a data descriptor follows the payload."""


def find_end(data: ByteRange) -> End | None:
    """Return the end records of a zip; None if the last 64 KiB have none.

    A zip64 end record, if there is one, states numbers that do not fit the plain one. The directory
    must end where the first end record begins.

    Raises:
        CorruptFile: they contradict each other, or the archive spans several disks.
        UnsupportedFormat: it is a series of archives.
    """
    reach = min(data.length, END.size + 0xFFFF)
    tail = data.read(data.length - reach, reach)
    # At least END.size bytes begin with the 4 bytes of the signature.
    at = tail.rfind(END_SIGNATURE, 0, max(len(tail) - END.size + len(END_SIGNATURE), 0))
    if at < 0:
        return None
    position = data.length - reach + at
    _, disk, first_disk, on_disk, entries, length, offset, _ = END.unpack_from(tail, at)
    end = End(entries, offset, length, position)
    end64 = _find_end64(data, end)
    if (disk, first_disk) not in _SINGLE_DISK and end64 is None:
        raise CorruptFile("the zip is split over several disks")
    if on_disk != entries:
        raise CorruptFile(f"the zip has {entries:,} records in total but {on_disk:,} on this disk")
    end = end64 or end
    shift = end.start - (end.offset + end.length)
    if shift:
        # An empty directory consists of the end record only.
        if shift > 0 and data.read(end.offset + shift, 4) in (_ENTRY_SIGNATURE, END_SIGNATURE):
            _refuse_shifted(data, shift)
        raise CorruptFile(
            f"the zip directory ({end.length:,} bytes at offset {end.offset:,}) does not end "
            f"at its end record at {end.start:,}"
        )
    return end


def _find_end64(data: ByteRange, end: End) -> End | None:
    """Return the zip64 end record before `end`, checked against it; None if there is none.

    Its locator precedes `end`, and states its offset.
    """
    locator_offset = end.start - LOCATOR.size
    if locator_offset < 0:
        return None
    signature, _, offset, disks = LOCATOR.unpack(data.read(locator_offset, LOCATOR.size))
    if signature != b"PK\x06\x07":
        return None
    if offset + END64.size > locator_offset or disks > 1:
        raise CorruptFile(f"the zip64 end record cannot be at offset {offset:,}")
    fields = END64.unpack(data.read(offset, END64.size))
    signature, own_size, _, _, disk, first_disk, on_disk, entries, length, directory = fields
    # The size in the record is that of the bytes after its first 12.
    if signature != b"PK\x06\x06" or offset + 12 + own_size != locator_offset:
        usual_offset = locator_offset - END64.size
        if usual_offset > offset and data.read(usual_offset, 4) == b"PK\x06\x06":
            _refuse_shifted(data, usual_offset - offset)
        raise CorruptFile(f"no zip64 end record at offset {offset:,}")
    if (disk, first_disk) not in _SINGLE_DISK or on_disk != entries:
        raise CorruptFile("the zip is split over several disks")
    for short, wide, unknown in (
        (end.entries, entries, SEE_ZIP64_COUNT),
        (end.length, length, SEE_ZIP64),
        (end.offset, directory, SEE_ZIP64),
    ):
        if short not in (wide, unknown):
            raise CorruptFile(f"the two end records of the zip disagree: {short:,} and {wide:,}")
    return End(entries, directory, length, start=offset)


def read_directory(data: ByteRange, end: End, limits: Limits) -> list[ZipEntry]:
    """Return the entries in the order of the directory, each within the file.

    Raises:
        CorruptFile: an entry breaks a rule (formats of zip: APPNOTE 4.3.12; miniz.c
            `mz_zip_reader_read_central_dir`).
        UnsupportedFormat: a record is encrypted or compressed other than by deflate, or it is a
            series of archives.
        LimitExceeded: it has more records than `limits` allows.
    """
    check_limit("the zip has", end.entries, "records", limits.max_records)
    if not end.entries * CENTRAL.size <= end.length <= end.entries * _MAX_ENTRY_BYTES:
        raise CorruptFile(
            f"a zip directory of {end.length:,} bytes cannot have {end.entries:,} records"
        )
    directory = data.read(end.offset, end.length)
    try:
        return list(_parse_directory(directory, end))
    except struct.error as error:
        raise CorruptFile("the zip directory ends within the entry of a record") from error


def _parse_directory(directory: bytes, end: End) -> Iterator[ZipEntry]:
    """Yield the checked entries of a directory, in its order.

    Each has fixed fields, then its name, extra fields and a comment.
    """
    position = 0
    unpack, width = CENTRAL.unpack_from, CENTRAL.size
    for number in range(end.entries):
        (
            signature, _, _, flags, method, _, _, crc, packed, size,
            name_length, extra_length, comment_length, disk, _, _, header,
        ) = unpack(directory, position)  # fmt: skip
        if signature != _ENTRY_SIGNATURE:
            raise CorruptFile(f"the zip directory is damaged at entry {number:,}")
        start = position + width
        raw_name = directory[start : start + name_length]
        extra_start = start + name_length
        position = extra_start + extra_length + comment_length
        if position > end.length:
            raise CorruptFile(f"the zip directory ends within entry {number:,}")
        name = raw_name.decode("utf-8", "backslashreplace")
        if SEE_ZIP64 in (packed, size, header):
            extra = directory[extra_start : extra_start + extra_length]
            size, packed, header = _widen_sizes(name, extra, size, packed, header)
        descriptor = bool(flags & DESCRIPTOR_FLAG)
        entry = ZipEntry(name, raw_name, method, crc, packed, size, header, descriptor)
        odd_method = method not in (STORED, DEFLATED) or (method == STORED and packed != size)
        if odd_method or flags & UNSUPPORTED_FLAGS or disk > 1:  # miniz may count from 1
            _refuse_record(entry, flags)
        yield entry
    if directory[position : position + 4] == _ENTRY_SIGNATURE:
        raise CorruptFile(f"the zip directory has more than the stated {end.entries:,} entries")


def read_raw_entries(data: ByteRange, end: End) -> list[tuple[bytes, bytes]]:
    """Return the name and the bytes of each entry of a directory that `read_directory` has read."""
    directory = data.read(end.offset, end.length)
    entries = []
    start = 0
    for _ in range(end.entries):
        fields = CENTRAL.unpack_from(directory, start)
        *_, name_length, extra_length, comment_length, _, _, _, _ = fields
        name_start = start + CENTRAL.size
        name_stop = name_start + name_length
        stop = name_stop + extra_length + comment_length
        entries.append((directory[name_start:name_stop], directory[start:stop]))
        start = stop
    return entries


def _widen_sizes(
    name: str, extra: bytes, size: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Return size, packed size and header offset; too long ones come from the zip64 field.

    It has only the values that are 2**32 - 1 in the entry, in this order, with 8 bytes each.
    """
    values = [size, packed, header]
    wide = next((content for kind, content in split_extra_fields(extra) if kind == ZIP64), None)
    for number, value in enumerate(values):
        if value == SEE_ZIP64 and wide is not None:
            if len(wide) < 8:
                raise CorruptFile(f"the zip64 field of record {name!r} is too short")
            values[number], wide = int.from_bytes(wide[:8], "little"), wide[8:]
    return values[0], values[1], values[2]


def split_extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each field of an extra area; the last may be truncated."""
    position = 0
    while position + FIELD.size <= len(extra):
        number, length = FIELD.unpack_from(extra, position)
        position += FIELD.size
        yield number, extra[position : position + length]
        position += length


def _refuse_record(entry: ZipEntry, flags: int) -> NoReturn:
    """Refuse a record that is encrypted, compressed in an unknown way, or on another disk."""
    method = entry.method
    if flags & UNSUPPORTED_FLAGS:
        is_patch = flags & UNSUPPORTED_FLAGS == 1 << 5  # the other flags mean encryption
        message = "a patch" if is_patch else "encrypted"
    elif method not in (STORED, DEFLATED):
        message = (
            f"compressed with a method that torch cannot read ({_METHOD_NAMES.get(method, method)})"
        )
    elif entry.packed != entry.size and method == STORED:
        raise CorruptFile(
            f"record {entry.name!r} is stored in {entry.packed:,} bytes, expected {entry.size:,}"
        )
    else:
        raise CorruptFile(f"record {entry.name!r} is on another disk of the zip")
    raise UnsupportedFormat(
        f"record {entry.name!r} is {message}",
        hint="unzip it with the program that made it, and give the folder",
    )


def _refuse_shifted(data: ByteRange, shift: int) -> NoReturn:
    """Refuse a zip with offsets that are all `shift` too small: other bytes precede the archive.

    They are a first copy of the file, the earlier archives of a series, or foreign.
    """
    if data.read(shift, 4) == data.read(0, 4) == ZIP_MAGIC:
        if is_second_copy(data, shift):
            raise CorruptFile(
                f"the download restarted: a second copy of the file begins at offset {shift:,}",
                hint=f"download it again, or run {salvage_command(data.source.name)}",
            )
        raise ZipSeries(
            "the file is a series of zip archives, for example a shard (`.distcp`) of a "
            "distributed checkpoint",
            hint="give the folder that contains `.metadata`, not one of its shards",
        )
    raise CorruptFile(f"{shift:,} foreign bytes precede the zip")


def is_second_copy(data: ByteRange, shift: int) -> bool:
    """Return True if the zip at `shift` is a second copy of the one at 0: a restarted download.

    A truncated first copy only has to begin like the second. A complete one, as in the series of a
    DCP shard, must also have the same directory, and so the same checksums.
    """
    length = min(shift, data.length - shift, LOCAL.size + 64)
    if data.read(0, length) != data.read(shift, length):
        return False
    is_first_complete = data.read(max(0, shift - END.size), 4) == END_SIGNATURE
    if not is_first_complete:
        return True
    length = min(shift, _WINDOW)
    first_tail, second_tail = (data.read(stop - length, length) for stop in (shift, data.length))
    return data.length == 2 * shift and first_tail == second_tail


_WINDOW = 64 << 10
"""Bytes read at once if small records are close together."""
_WINDOW_DISTANCE = 4 << 10
"""The distance of two local headers up to which one longer read is cheaper than two calls."""
_DESCRIPTOR_BYTES, _DESCRIPTOR64 = 16, 24


def _find_payloads(
    data: ByteRange, entries: list[ZipEntry], end: End
) -> tuple[dict[int, int], int]:
    """Return the payload offset by header offset, and the number of unused bytes.

    Each local header is read: its name must match the directory, and its record must end before the
    next one begins. For a file on another machine this happens when a record is read, so no offsets
    are returned.

    Raises:
        CorruptFile: a record is outside the file, two overlap, or a header is missing.
    """
    if data.source.is_far:  # each header would be a request
        return {}, 0
    headers = LocalHeaders(data, end.offset)
    ordered = sorted(entries, key=attrgetter("header"))
    starts = [*(entry.header for entry in ordered), end.offset]
    offsets: dict[int, int] = {}
    unused = previous_end = 0
    previous_name = ""
    for entry, following in zip(ordered, starts[1:], strict=True):
        header = entry.header
        if header < previous_end:
            raise CorruptFile(
                f"records {previous_name!r} and {entry.name!r} overlap at offset {header:,}"
            )
        unused += header - previous_end
        offsets[header] = payload = headers.find_payload(entry, following)
        previous_end = payload + entry.packed
        if entry.descriptor and following > previous_end:
            # APPNOTE 4.3.9: the sizes in a data descriptor have 4 bytes each, in a zip64 record 8;
            # the signature before them is optional, but common writers have it.
            is_zip64 = entry.size >= SEE_ZIP64 or header >= SEE_ZIP64
            previous_end += min(
                following - previous_end, _DESCRIPTOR64 if is_zip64 else _DESCRIPTOR_BYTES
            )
        previous_name = entry.name
    return offsets, unused + end.offset - previous_end


class LocalHeaders:
    """Reads local headers in the order of the file, several at once if they are close."""

    def __init__(self, data: ByteRange, end: int) -> None:
        """Read the headers of `data`, where the records end at `end`."""
        self.data = data
        self.end = end
        self.window = b""
        """The bytes that were read last: one header or several."""
        self.window_start = 0

    def find_payload(self, entry: ZipEntry, following: int) -> int:
        """Return the offset of an entry's content, from the length of its local extra field.

        `following` is the offset of the next local header.

        Raises:
            CorruptFile: the header is missing, or the content overlaps the directory.
        """
        header, name = entry.header, entry.raw_name
        length = LOCAL.size + len(name)
        start = header - self.window_start
        if start + length > len(self.window):
            self._read_window(entry, length, following)  # from the header
            start = 0
        signature, *_, name_length, extra_length = LOCAL.unpack_from(self.window, start)
        written_name = self.window[start + LOCAL.size : start + length]
        if signature != ZIP_MAGIC or name_length != len(name) or written_name != name:
            raise CorruptFile(
                f"record {entry.name!r} is not at offset {header:,}, where the zip directory "
                "places it"
            )
        payload = header + length + int(extra_length)
        if payload + entry.packed > self.end:
            raise self._overlap_error(entry)
        return payload

    def _read_window(self, entry: ZipEntry, length: int, following: int) -> None:
        """Read the local header of an entry, and the bytes after it if the next header is close."""
        if entry.header + length > self.end:
            raise self._overlap_error(entry)
        is_next_close = following - entry.header < _WINDOW_DISTANCE
        window_length = min(_WINDOW if is_next_close else length, self.end - entry.header)
        self.window = self.data.read(entry.header, window_length)
        self.window_start = entry.header

    def _overlap_error(self, entry: ZipEntry) -> CorruptFile:
        """Return the error for a record that reaches into the directory."""
        return CorruptFile(
            f"record {entry.name!r} ({entry.packed:,} bytes at offset {entry.header:,}) "
            f"overlaps the zip directory at {self.end:,}"
        )


def make_record(
    data: ByteRange, entry: ZipEntry, payload: int | None, name: str, limits: Limits
) -> Record:
    """Return the record of an entry, with its bytes at `payload`.

    None, for a file on another machine, means that its local header is read with the record.

    Raises:
        LimitExceeded: it would inflate to more than `limits` allows.
    """
    crc = entry.crc32 if entry.crc32 or not entry.size else None  # torch can be set to write 0
    if payload is None:
        # The CRC-32 is that of the inflated content.
        stated_crc = crc if entry.method == STORED else None
        packed = make_late_range(
            data.source.name, entry.packed, partial(_locate_content, data, entry, stated_crc)
        )
    else:
        packed = ByteRange(data.source, data.offset + payload, entry.packed)
    if entry.method != DEFLATED:
        return Record(name, packed, crc, entry.header)
    if entry.size > entry.packed * limits.max_inflation:
        raise LimitExceeded(
            f"record {entry.name!r} of {entry.packed:,} bytes inflates to {entry.size:,}, "
            f"more than {limits.max_inflation:,} times its size"
        )
    inflated = ByteRange(InflatedSource(packed, entry.size), 0, entry.size)
    return Record(name, inflated, crc, entry.header, compressed=True)


def _locate_content(
    data: ByteRange, entry: ZipEntry, crc: int | None
) -> tuple[ByteRange, int | None]:
    """Read the local header of an entry, and return the content after it and its CRC-32."""
    with add_error_context(data.source.name):
        headers = LocalHeaders(data, end=data.length)
        payload = headers.find_payload(entry, following=data.length)  # as if it were the last
    return data.slice(payload, entry.packed), crc


def truncated_error(data: ByteRange, limits: Limits) -> TruncatedFile:
    """Return the error for a zip that ends before its directory.

    torch writes the pickle first, and the pickle has the length of every storage. If it is intact,
    the error states the least size of the file, and how to salvage tensors. A `.distcp` file is a
    series of archives, which cannot be salvaged.
    """
    missing = "the file is truncated: the zip directory at its end is missing"
    fact = f"{missing}; it has {data.length:,} bytes"
    expected, hint = 0, "download or copy it again"
    with suppress(CheckpointError, struct.error):
        pickle_end, sizes, root = _read_first_pickle(data, limits)
        expected = pickle_end + sum(sizes)
        is_torch = not data.source.name.endswith(".distcp")
        # Salvage makes sense if at least the first storage is intact.
        if is_torch and sizes and pickle_end + sizes[0] <= data.length:
            hint += f", or run {salvage_command(data.source.name, root)}"
    if expected > data.length:
        lost = expected - data.length
        fact += f", but its tensors need at least {expected:,}, so at least {lost:,} are missing"
    return TruncatedFile(fact, hint=hint)


def _read_first_pickle(data: ByteRange, limits: Limits) -> tuple[int, list[int], Any]:
    """Return the end of the pickle, the size of each of its storages, and its tree.

    Only if the first record is an uncompressed `data.pkl`; else 0, no sizes and None.
    """
    _, _, _, method, *_, name_length, extra_length = LOCAL.unpack(data.read(0, LOCAL.size))
    if method != STORED or not data.read(LOCAL.size, name_length).endswith(b"/data.pkl"):
        return 0, [], None
    sizes: dict[str, int] = {}

    def record_size(pid: Any) -> Any:
        """Note the size of the storage of a persistent id, and return a storage without data."""
        if not is_storage_pid(pid):
            return Opaque(None, (pid,), maker="persid")
        storage = parse_storage_pid(pid, data.source.name)
        sizes[storage.key] = storage.nbytes
        placeholder = Storage(storage.key, None, storage.nbytes, storage.device)
        return StorageRef(placeholder, storage.dtype, storage.untyped)

    start = LOCAL.size + name_length + extra_length
    pickle = unpickle(data, persistent_load=record_size, limits=limits, start=start)
    return pickle.end, [*sizes.values()], pickle.root


ARRAY_EXTENSION = ".npy"
"""The extension of all records in a numpy archive."""

_CHECKPOINT_RECORDS = ("data.pkl", "model.json", "archive_format", "serialized_state_dict.pt")
"""Records that only torch archives have at the top level."""


def open_archive(probe: Probe) -> Archive:
    """Return the records of a zip or of an unzipped checkpoint; other files have none.

    A file is a zip if it begins like one: torch checks only the first four bytes. The stated CRC-32
    of each record is remembered in `probe.source.stated`. A salvaging probe has its own function to
    read the intact records.

    Raises:
        CorruptFile: it begins like a zip and is damaged.
        UnsupportedFormat: it is encrypted, has an unsupported compression, or is a series of zips.
        LimitExceeded: it has more records than `probe.limits` allows.
    """
    if probe.is_folder:
        return _read_unzipped_folder(probe)
    if probe.source is None or not probe.head.startswith(ZIP_MAGIC):
        return Archive(probe.path, folder="", records={}, sources=(), size=0)
    data = ByteRange(probe.source, 0, probe.source.size)
    archive = (probe.salvages or read_zip)(data, probe.limits, (probe.source,))
    probe.source.stated = [
        (record.name, record.data, record.crc32)
        for record in archive.records.values()
        if record.crc32 is not None
    ]
    return archive


def read_zip(data: ByteRange, limits: Limits, sources: tuple[Source, ...] = ()) -> Archive:
    """Return the records of a zip that fills `data`, a file or a record of another archive.

    The archive's folder is the one with `data.pkl`, if there is only one; else, as in torch, that
    of the first entry. A note lists entries outside it. A numpy archive has no folder: a slash
    belongs to the name of an array.

    Raises:
        CorruptFile: it breaks a rule of the format.
        UnsupportedFormat: a record is encrypted or has an unsupported compression.
        LimitExceeded: it has more records, or more inflation, than `limits` allows.
    """
    end = find_end(data)
    if end is None:
        raise truncated_error(data, limits)
    entries = read_directory(data, end, limits)
    is_numpy = all(entry.name.endswith(ARRAY_EXTENSION) for entry in entries)
    check_names(entries, exact=is_numpy)
    offsets, unused_bytes = _find_payloads(data, entries, end)
    folder = "" if is_numpy else choose_folder(entries)
    prefix = f"{folder}/" if folder else ""
    records: dict[str, Record] = {}
    outside_names = []
    for entry in entries:
        name = entry.name
        if not name.startswith(prefix):
            outside_names.append(name)
        elif not name.endswith("/"):
            name = name.removeprefix(prefix)
            records[name] = make_record(data, entry, offsets.get(entry.header), name, limits)
    verb = are(len(outside_names))
    note = f"{TORCH_REFUSES} {few(outside_names, 3)} {verb} outside the folder {folder!r}"
    notes = (note,) if outside_names else ()
    return Archive(data.source.name, folder, records, sources, data.length, unused_bytes, notes)


def check_names(entries: list[ZipEntry], *, exact: bool) -> None:
    """Refuse two records with the same name; like torch, ignore ASCII case unless `exact`."""
    normalize = str if exact else str.lower
    if len({normalize(entry.name) for entry in entries}) == len(entries):
        return
    entry_by_name: dict[str, ZipEntry] = {}
    for entry in entries:
        other = entry_by_name.setdefault(normalize(entry.name), entry)
        if other is not entry:
            raise CorruptFile(
                f"the zip has two records with the same name, {other.name!r} at offset "
                f"{other.header:,} and {entry.name!r} at {entry.header:,}"
            )


def choose_folder(entries: list[ZipEntry]) -> str:
    """Return the folder with `data.pkl`, if only one has it; else that of the first entry."""
    folders = {
        entry.name.split("/", 1)[0]
        for entry in entries
        if entry.name.endswith("/data.pkl") and entry.name.count("/") == 1
    }
    if len(folders) == 1:
        return folders.pop()
    first = entries[0].name if entries else ""
    return first.split("/", 1)[0] if "/" in first else ""


def _read_unzipped_folder(probe: Probe) -> Archive:
    """Return the files of an unzipped archive, by path in the folder or in its only subfolder.

    A folder without the records of a checkpoint has no records.
    """
    path = probe.path
    if probe.entries.isdisjoint(_CHECKPOINT_RECORDS):
        # Without `.DS_Store`, `__MACOSX` and their like.
        visible_names = [name for name in probe.entries if not name.startswith((".", "__"))]
        visible_paths = (os.path.join(path, name) for name in visible_names)
        subfolders = list(filter(os.path.isdir, visible_paths))
        if len(subfolders) != 1 or not any(
            os.path.isfile(os.path.join(subfolders[0], name)) for name in _CHECKPOINT_RECORDS
        ):
            return Archive(path, folder="", records={}, sources=(), size=0)
        path = subfolders[0]
    records: dict[str, Record] = {}
    for name, entry in _walk_files(path, ""):
        check_limit("the folder has", len(records) + 1, "files", probe.limits.max_records)
        size = entry.stat().st_size
        records[name] = Record(name, ByteRange(FolderFile(entry.path, size), 0, size))
    total = sum(record.data.length for record in records.values())
    return Archive(path, folder="", records=records, sources=(), size=total)


def _walk_files(path: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield name and entry of each file in a folder and its subfolders, sorted by name.

    Names are relative to the first folder: `prefix` is the way to this one. For safety, links are
    left out.
    """
    try:
        with os.scandir(path) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except FileNotFoundError as error:
        raise FileMissing("no such folder", file=path) from error
    except PermissionError as error:
        raise FileDenied("permission denied", file=path) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk_files(entry.path, f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield f"{prefix}{entry.name}", entry


def read_text(record: Record, max_bytes: int) -> str:
    """Return the text of a record of at most `max_bytes` bytes.

    Raises:
        LimitExceeded: it is longer.
        CorruptFile: it is not UTF-8.
    """
    name, data = record.name, record.data
    check_limit(f"record {name!r} has", data.length, "bytes", max_bytes)
    try:
        return data.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"record {name!r} is not text ({error})") from error


def parse_counts(values: Any, limits: Limits) -> tuple[int, ...]:
    """Return a shape or strides from JSON; serializers also write text and `{"as_int": 3}`.

    Raises:
        TypeError, ValueError: it is not a list of counts, or has too many dimensions.
    """
    if not isinstance(values, list) or len(values) > limits.max_dimensions:
        raise ValueError("not a shape")
    return tuple(map(parse_count, values))


def parse_count(value: Any) -> int:
    """Return a count from JSON; serializers also write text and `{"as_int": 3}`.

    Raises:
        TypeError, ValueError: it is not a count.
    """
    value = value.get("as_int") if isinstance(value, dict) else value
    # A count of 64 bits has at most 19 digits; `index` refuses a longer text.
    number = int(value) if isinstance(value, str) and len(value) < 20 else index(value)
    if number < 0:
        raise ValueError(f"{number:,} is not a count")
    return number


def read_json(record: Record, limits: Limits) -> Mapping[str, Any]:
    """Return the JSON object in a record.

    Raises:
        LimitExceeded: it is longer than `limits.max_json_bytes`.
        CorruptFile: it is not JSON, or not an object.
    """
    from ckptool.formats.safetensors_header import parse_json  # most archives have no JSON

    refuse_bomb(record.data, limits.max_header_inflation)
    subject = f"record {record.name!r}"
    with add_error_context(record.data.source.name):
        document = parse_json(read_text(record, limits.max_json_bytes), subject)
        if not isinstance(document, dict):
            raise CorruptFile(f"{subject} is not a JSON object")
    return document
