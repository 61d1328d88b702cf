"""Archives: the records of a zip, or the files of an unzipped one, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.checkpoint import TORCH_REFUSES
from ckptool.errors import CorruptFile, FileDenied, FileMissing, LimitExceeded, TruncatedFile
from ckptool.files import ByteRange, FileSource
from ckptool.files.inflated import refuse_bomb
from ckptool.formats.base import Archive, Probe, Record
from ckptool.formats.zip_directory import Entry, find_end, read_directory
from ckptool.formats.zip_records import payload_offsets, record_of
from ckptool.limits import Limits

__all__ = ["ARRAY", "FolderFile", "open_archive", "read_json", "read_text", "zip_archive"]

ARRAY = ".npy"
"""How the records of numpy's archives end, which all of them do."""

_SIGNATURE = b"PK\x03\x04"
_MARKS = ("data.pkl", "model.json", "archive_format", "serialized_state_dict.pt")
"""Records that only an archive of torch's has at its top."""


def open_archive(probe: Probe) -> Archive | None:
    """The zip's records, or those of an unzipped checkpoint; None for anything else.

    A zip is what begins as one: torch looks at the first four bytes alone.

    Raises:
        CorruptFile: it begins as a zip and is damaged.
        UnsupportedFormat: an encrypted zip, an odd compression, several zips in a row.
        LimitExceeded: it holds more records than `probe.limits` allows.
    """
    if probe.is_folder:
        return _open_folder(probe)
    if probe.source is None or not probe.head.startswith(_SIGNATURE):
        return None
    whole = ByteRange(probe.source, 0, probe.source.size)
    archive = zip_archive(whole, probe.limits, (probe.source,))
    probe.source.stated = [
        (one.name, one.data, one.crc32) for one in archive.records.values() if one.crc32 is not None
    ]
    return archive


def zip_archive(data: ByteRange, limits: Limits, sources: tuple[FileSource, ...] = ()) -> Archive:
    """The records of a zip that fills `data`, a file or a record of another archive.

    The archive's folder is the one that holds `data.pkl`, where one alone does; else, as torch
    has it, that of the first entry. Entries outside it are named in a note. An archive of numpy's
    has none: a slash belongs to the name of an array.

    Raises:
        CorruptFile: it breaks a rule of the format.
        UnsupportedFormat: an encrypted record or one of an odd compression.
        LimitExceeded: more records, or more inflation, than `limits` allows.
    """
    end = find_end(data)
    if end is None:
        from ckptool.formats.zip_truncated import truncated

        raise truncated(data, limits)
    entries = read_directory(data, end, limits)
    arrays = all(entry.name.endswith(ARRAY) for entry in entries)
    _check_names(data, entries, exact=arrays)
    offsets, dead = payload_offsets(data, entries, end)
    folder = "" if arrays else _folder_of(entries)
    cut = len(folder) + 1 if folder else 0
    prefix = f"{folder}/" if folder else ""
    records: dict[str, Record] = {}
    foreign = []
    for entry in entries:
        name = entry.name
        if not name.startswith(prefix):
            foreign.append(name)
        elif not name.endswith("/"):
            name = name[cut:]
            records[name] = record_of(data, entry, offsets[entry.header], name, limits)
    notes = _foreign_note(folder, foreign)
    return Archive(data.source.name, folder, records, sources, data.length, dead, notes)


def _check_names(data: ByteRange, entries: list[Entry], *, exact: bool) -> None:
    """Refuse two records of one name; torch looks names up without regard to ASCII case."""
    spelled = str if exact else str.lower
    if len({spelled(entry.name) for entry in entries}) == len(entries):
        return
    seen: dict[str, Entry] = {}
    for entry in entries:
        other = seen.setdefault(spelled(entry.name), entry)
        if other is not entry:
            raise CorruptFile(
                f"the zip has two records of one name, {other.name!r} at offset "
                f"{other.header:,} and {entry.name!r} at {entry.header:,}",
                file=data.source.name,
            )


def _folder_of(entries: list[Entry]) -> str:
    holders = {
        entry.name.split("/", 1)[0]
        for entry in entries
        if entry.name.endswith("/data.pkl") and entry.name.count("/") == 1
    }
    if len(holders) == 1:
        return holders.pop()
    first = entries[0].name if entries else ""
    return first.split("/", 1)[0] if "/" in first else ""


def _foreign_note(folder: str, foreign: list[str]) -> tuple[str, ...]:
    if not foreign:
        return ()
    shown = ", ".join(repr(name) for name in foreign[:3])
    more = f" and {len(foreign) - 3:,} more" if len(foreign) > 3 else ""
    return (
        f"{TORCH_REFUSES} {shown}{more} "
        f"{'stand' if len(foreign) > 1 else 'stands'} outside the folder {folder!r}",
    )


class FolderFile:
    """A file of an unzipped checkpoint, opened anew for each read: there may be many thousands."""

    def __init__(self, path: str, size: int) -> None:
        """Stand for the `size` bytes of `path`."""
        self._path = path
        self._size = size

    @property
    def name(self) -> str:
        """The path."""
        return self._path

    @property
    def size(self) -> int:
        """Bytes in the file when the folder was listed."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        source = self._open()
        try:
            return source.read(offset, length)
        finally:
            source.close()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`."""
        source = self._open()
        try:
            source.read_into(offset, buffer)
        finally:
            source.close()

    def _open(self) -> FileSource:
        source = FileSource(self._path)
        if source.size != self._size:
            source.close()
            raise TruncatedFile(
                f"the file had {self._size:,} bytes when the folder was listed "
                f"and has {source.size:,} now",
                file=self._path,
            )
        return source


def _open_folder(probe: Probe) -> Archive | None:
    """The files of an unzipped archive: its marks stand in the folder, or in its only folder."""
    if not probe.entries.isdisjoint(_MARKS):
        return _folder_archive(probe.path, probe.limits)
    names = [name for name in probe.entries if not name.startswith((".", "__"))]
    folders = [path for name in names if os.path.isdir(path := os.path.join(probe.path, name))]
    if len(folders) == 1 and any(os.path.isfile(os.path.join(folders[0], m)) for m in _MARKS):
        return _folder_archive(folders[0], probe.limits)
    return None


def _folder_archive(path: str, limits: Limits) -> Archive:
    records: dict[str, Record] = {}
    for name, entry in _files_below(path, ""):
        if len(records) >= limits.max_records:
            raise LimitExceeded(
                f"the folder holds more than {limits.max_records:,} files", file=path
            )
        size = entry.stat().st_size
        records[name] = Record(name, ByteRange(FolderFile(entry.path, size), 0, size))
    total = sum(record.data.length for record in records.values())
    return Archive(path, "", records, (), total)


def _files_below(path: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Regular files by name, in sorted order; links are not followed: they lead anywhere."""
    try:
        with os.scandir(path) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except FileNotFoundError as error:
        raise FileMissing("there is no such folder", file=path) from error
    except PermissionError as error:
        raise FileDenied("the system does not let us read it", file=path) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield f"{prefix}{entry.name}", entry


def read_text(record: Record, most: int) -> str:
    """The text of a record, at most `most` bytes of it in all.

    Raises:
        LimitExceeded: it is longer.
        CorruptFile: it is not UTF-8.
    """
    name, data = record.name, record.data
    if data.length > most:
        raise LimitExceeded(
            f"record {name!r} has {data.length:,} bytes; {most:,} are allowed",
            file=data.source.name,
        )
    try:
        return data.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(
            f"record {name!r} is not text ({error})", file=data.source.name
        ) from error


def read_json(record: Record, limits: Limits) -> Mapping[str, Any]:
    """The JSON object in a record.

    Raises:
        LimitExceeded: it is longer than `limits.max_json_bytes`.
        CorruptFile: it is not JSON, or not an object.
    """
    refuse_bomb(record.data, limits.max_header_inflation)
    text = read_text(record, limits.max_json_bytes)
    file = record.data.source.name
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"record {record.name!r} is not JSON ({error})", file=file) from error
    if not isinstance(document, dict):
        raise CorruptFile(f"record {record.name!r} is not a JSON object", file=file)
    return document
