"""A torch zip edited in place, and the storage offsets that torch computes."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.files import ByteRange, FileSource
from ckptool.files.editing import Patch
from ckptool.formats.archive import (
    End,
    Entry,
    find_end,
    payload_offsets,
    raw_entries,
    read_directory,
    record_of,
)
from ckptool.formats.base import EditPlan
from ckptool.formats.torch_zip import ALIGNMENT, PICKLE, SHORT, is_known_version
from ckptool.formats.zip_writer import Place, end_records
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import Storage
from ckptool.symbolic.encoder import encode

__all__ = ["COMPUTING", "Laid", "alignment_of", "computed_offsets", "plan_edit"]

COMPUTING = (".format_version", ".storage_alignment")
"""The records that let torch compute where storages are, instead of looking it up."""


class Laid(NamedTuple):
    """A storage's record as it lies in the file."""

    name: bytes
    """With the folder."""
    size: int
    header: int
    payload: int
    """Offset of its first byte."""


def alignment_of(stated: str | None) -> int | None:
    """What `.storage_alignment` says, None where torch can make nothing of it."""
    text = str(ALIGNMENT) if stated is None else stated
    return int(text) if text.isdecimal() and int(text) > 0 else None


def computed_offsets(used: Iterable[Laid], alignment: int) -> Iterator[int | None]:
    """Where torch takes each payload to begin, in the order in which the pickle first uses them.

    The first is looked up and must have the key 0: it is None where it has another, and nothing
    follows.
    """
    header = 0
    for position, laid in enumerate(used):
        if position == 0 and not laid.name.endswith(b"/data/0"):
            yield None
            return
        header = header if position else laid.header
        place = Place(laid.name, laid.size, header, alignment)
        computed = place.payload if position else laid.payload
        yield computed
        header = computed + laid.size + place.descriptor_size


_STALE = ".data/serialization_id"
"""A hash over all records, of which torch makes nothing but a line in a log."""


def plan_edit(checkpoint: Checkpoint) -> EditPlan | None:
    """What to append to the file for it to hold `checkpoint`; None if that cannot be done.

    It can where the file is a plain zip that torch takes, and every storage is a record of it,
    whole, under the key that it had. Only the directory and records that state a fact are read.

    Raises:
        NotRepresentable: an object that cannot be pickled.
    """
    if checkpoint.format != "torch-zip" or len(checkpoint.sources) != 1:
        return None
    directory = _open_directory(checkpoint.sources[0])
    if directory is None or not directory.is_torchs():
        return None
    encoded = encode(checkpoint.root, key_of=attrgetter("key"))
    used = directory.records_of(encoded.storages)
    if used is None:
        return None
    dropped = {_STALE, *(() if directory.torch_computes(used) else COMPUTING)}
    patch = Patch(directory.data.length, directory.edited(encoded.data, dropped))
    return EditPlan(
        patch,
        patch.offset + len(patch.data),
        tensors=sum(1 for _ in checkpoint.tensors()),
        blockers=encoded.blockers,
    )


def _open_directory(source: FileSource) -> _Directory | None:
    """The directory of a file that has been opened as a torch zip, and may have changed since."""
    data = ByteRange(source, 0, source.size)
    end = find_end(data)
    if end is None:
        return None
    # However many records it has: whoever opened the file has set a limit.
    return _Directory(data, end, read_directory(data, end, Limits(max_records=end.entries)))


class _Directory:
    """The directory of a file, looked into as torch does: without regard to ASCII case."""

    def __init__(self, data: ByteRange, end: End, entries: list[Entry]) -> None:
        self.data = data
        self.end = end
        self.entries = entries
        self.folder = entries[0].name.partition("/")[0] if entries else ""
        self.by_name = {entry.name.lower(): entry for entry in entries}

    def find(self, name: str) -> Entry | None:
        """The entry of a record, named without the folder."""
        return self.by_name.get(f"{self.folder}/{name}".lower())

    def fact(self, name: str) -> str | None:
        """The text of a record that states a fact, if there is one."""
        entry = self.find(name)
        if entry is None:
            return None
        offsets, _ = payload_offsets(self.data, [entry], self.end)
        data = record_of(self.data, entry, offsets[entry.header], name, DEFAULT_LIMITS).data
        return data.read(0, min(data.length, SHORT)).decode("latin-1").strip()

    def is_torchs(self) -> bool:
        """Whether all stands in one folder with a name in UTF-8, and the version is a known one."""
        top = self.find(PICKLE)
        return (
            top is not None
            and top.name.encode() == top.raw_name
            and all(entry.name.startswith(f"{self.folder}/") for entry in self.entries)
            and is_known_version(self.fact("version") or "")
            and self.find(".data/version") is None  # torch would take that one, if it knows it
        )

    def records_of(self, storages: Sequence[Storage]) -> list[tuple[Entry, ByteRange]] | None:
        """The record that each storage is, whole and alone, with its bytes; else None."""
        ordered = sorted(self.entries, key=attrgetter("header"))
        headers = [entry.header for entry in ordered]
        records = []
        for storage in storages:
            data = storage.data
            if data is None or data.source is not self.data.source:
                return None
            entry = ordered[bisect_left(headers, data.offset) - 1]
            name = f"{self.folder}/data/{storage.key}"
            if entry.size != data.length or entry.name.lower() != name.lower():
                return None
            records.append((entry, data))
        alone = len({entry.header for entry, _ in records}) == len(records)
        return records if alone else None

    def torch_computes(self, used: Sequence[tuple[Entry, ByteRange]]) -> bool:
        """Whether torch's own sums lead to these records, in their order of first use."""
        alignment = alignment_of(self.fact(".storage_alignment"))
        if alignment is None:
            return False
        laid = [Laid(entry.raw_name, entry.size, entry.header, data.offset) for entry, data in used]
        return list(computed_offsets(laid, alignment)) == [one.payload for one in laid]

    def edited(self, pickle: bytes, dropped: Container[str]) -> bytes:
        """What goes behind the end: the record of the new pickle, the directory, its end.

        Entries of other records stay as they are, in their order, but for those `dropped`.
        """
        old, crc = self.by_name[f"{self.folder}/{PICKLE}".lower()], zlib.crc32(pickle)
        place = Place(old.raw_name, len(pickle), self.data.length, ALIGNMENT)
        cut = len(self.folder) + 1
        entries = [
            place.entry(crc) if entry is old else raw
            for entry, raw in zip(self.entries, raw_entries(self.data, self.end), strict=True)
            if entry.name[cut:].lower() not in dropped
        ]
        directory = b"".join(entries)
        return b"".join((
            place.local_header(), pickle, place.descriptor(crc), directory,
            end_records(len(entries), place.end, len(directory)),
        ))  # fmt: skip
