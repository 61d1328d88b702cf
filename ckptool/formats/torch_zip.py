"""The zip that torch.save writes since 1.6: read, written, and edited in place."""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.checkpoint import TORCH_REFUSES, Checkpoint, Details
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, FileMissing, NotRepresentable
from ckptool.files import ByteRange, Source
from ckptool.files.place import place_of
from ckptool.files.strided import swapped
from ckptool.formats.archive import (
    End,
    Entry,
    find_end,
    open_archive,
    payload_offsets,
    raw_entries,
    read_directory,
    read_text,
    record_of,
    zip_archive,
)
from ckptool.formats.base import Archive, EditableFormat, NewFile, Plan, Probe, Record
from ckptool.formats.legacy_stream import NestedStreams
from ckptool.formats.zip_writer import (
    NewRecord,
    Place,
    end_records,
    literal,
    plan_sharing_zip,
    plan_zip,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import Opaque, Storage, StorageRef
from ckptool.symbolic import Unpickled, unpickle
from ckptool.symbolic.rebuild import StoragePid, is_storage_pid, parse_storage_pid
from ckptool.words import are, few

if TYPE_CHECKING:
    from ckptool.files.atomic import Output

__all__ = [
    "COMPUTING",
    "PICKLE",
    "TORCH_ZIP",
    "Contents",
    "Laid",
    "Storages",
    "TorchZip",
    "alignment_of",
    "computed_offsets",
    "contents_of",
    "is_known_version",
    "read_contents",
    "records_are",
    "stored_in",
]

ALIGNMENT = 64


def _payload(index: int, storage: Storage, dtype: str, file: str) -> NewRecord:
    """Return the record `data/INDEX` in little-endian bytes; `dtype` tells what is reversed."""
    data = storage.data
    if data is None:
        raise NotRepresentable(
            f"storage {storage.key!r} is on the {storage.device} device and has no bytes to write",
            file=file,
        )
    swap = BY_NAME[dtype].swap_size if storage.byteorder == "big" else 1
    is_copied = swap == 1 and storage.crc32 is not None and not storage.compressed

    def write(output: Output) -> int:
        if swap > 1:
            return output.stream(swapped(data.blocks(), swap))
        if is_copied:
            output.copy(data)
            return storage.crc32 or 0
        return output.copy_checked(data)

    return NewRecord(f"data/{index}", storage.nbytes, write, data if is_copied else None)


PICKLE = "data.pkl"
_PAYLOADS = ("data/", "tensors/")
_FACTS = ("version", "byteorder", ".format_version", ".storage_alignment")
_OURS = frozenset({PICKLE, *_FACTS, ".data/serialization_id", ".data/version"})
SHORT = 64
"""Bytes that a record of a fact may have."""
COMPUTING = (".format_version", ".storage_alignment")
"""The records that let torch compute where storages are, instead of looking it up."""


_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9_.-]{1,255}")


_STALE = ".data/serialization_id"
"""A hash over all records, of which torch makes nothing but a line in a log."""
_POINTER = 1 << 16
"""A key beyond it is no count but an address: torch before 1.9 used those."""


class Storages:
    """The storages of an archive, made as a pickle names them; each key gives one object."""

    def __init__(
        self, archive: Archive, byteorder: str, folders: tuple[str, ...] = _PAYLOADS
    ) -> None:
        """Look keys up in `archive`, below the first of `folders` that has them."""
        self.archive = archive
        self.folders = folders
        self.byteorder = byteorder
        self.by_key: dict[str, Storage] = {}
        self.used: set[str] = set()
        """Names of the records that a storage stands for."""
        self._folded: dict[str, Record] | None = None

    def load(self, pid: Any) -> Any:
        """Return what a persistent id stands for.

        Raises:
            CorruptFile: the pid is malformed, its record is missing or of another length, or an
                earlier pid of that key says something else.
        """
        if not is_storage_pid(pid):
            return Opaque(None, (pid,), maker="persid")
        parsed = parse_storage_pid(pid, self.archive.path)
        if parsed.view is not None:
            raise CorruptFile(
                f"storage {parsed.key!r} is said to be seen through a view, which zips do not have",
                file=self.archive.path,
            )
        storage = self.by_key.get(parsed.key)
        if storage is None:
            storage = self.by_key[parsed.key] = self._find(parsed)
        elif storage.nbytes != parsed.nbytes or storage.device != parsed.device:
            raise CorruptFile(
                f"storage {parsed.key!r} has {storage.nbytes:,} bytes on {storage.device} at its "
                f"first mention and {parsed.nbytes:,} on {parsed.device} at another",
                file=self.archive.path,
            )
        return StorageRef(storage, parsed.dtype, parsed.untyped)

    def find(self, name: str) -> Record | None:
        """Return a record by name; as torch does it, without regard to ASCII case."""
        record = self.archive.records.get(name)
        if record is None:
            if self._folded is None:
                self._folded = {key.lower(): value for key, value in self.archive.records.items()}
            record = self._folded.get(name.lower())
        return record

    def _find(self, pid: StoragePid) -> Storage:
        found = (self.find(f"{folder}{pid.key}") for folder in self.folders)
        record = next((one for one in found if one is not None), None)
        if record is not None:
            self.used.add(record.name)
            return Storage(
                pid.key, record.data, pid.nbytes, pid.device, self.byteorder, record.crc32
            )
        if pid.device == "meta" or self.archive.is_partial:
            return Storage(pid.key, None, pid.nbytes, pid.device)
        raise CorruptFile(
            f"storage {pid.key!r} is missing: the pickle names it and there is no record "
            f"'{self.folders[0]}{pid.key}'",
            file=self.archive.path,
        )


class Contents(NamedTuple):
    """An archive's pickle as a tree, with what else its records say."""

    unpickled: Unpickled
    storages: Storages
    facts: dict[str, str]
    """The text of `version`, `byteorder`, ... where there is such a record."""


def read_contents(archive: Archive, limits: Limits) -> Contents:
    """Read `data.pkl` and the records that state a fact.

    Raises:
        CorruptFile: there is no `data.pkl`, the pickle is damaged, or a storage lies.
        LimitExceeded: the pickle asks for more than `limits`.
    """
    storages = Storages(archive, "little")
    facts = {
        name: read_text(record, SHORT).strip()
        for name in _FACTS
        if (record := storages.find(name)) is not None
    }
    storages.byteorder = facts.get("byteorder", "little")
    if storages.byteorder not in ("little", "big"):
        raise CorruptFile(
            f"its byte order is {storages.byteorder!r}, neither 'little' nor 'big'",
            file=archive.path,
        )
    record = storages.find(PICKLE)
    if record is None:
        raise CorruptFile("the archive has no record 'data.pkl'", file=archive.path)
    unpickled = unpickle(
        record.data,
        persistent_load=storages.load,
        nested=NestedStreams(archive.path, limits, record.data.length).load,
        limits=limits,
    )
    return Contents(unpickled, storages, facts)


def stored_in(path: str, limits: Limits) -> Any:
    """Return what torch.save wrote into one of thousands of files: each read opens it.

    Raises:
        FileMissing: there is no such file.
        CorruptFile: it is damaged.
        LimitExceeded: it asks for more than `limits`.
    """
    place = place_of(path)
    try:
        size = place.size(path)
    except OSError as error:
        raise FileMissing("is missing: copy it too", file=path) from error
    archive = zip_archive(ByteRange(place.member(path, size), 0, size), limits)
    return read_contents(archive, limits).unpickled.root


def contents_of(probe: Probe) -> Contents:
    """Return the contents of the torch zip that a probe looks at.

    Raises:
        CorruptFile: the archive or its pickle is damaged, or a storage lies about its length.
        LimitExceeded: it asks for more than `probe.limits`.
    """
    archive = probe.ask(open_archive)
    if archive is None:
        raise CorruptFile("this is no zip", file=probe.path)
    return read_contents(archive, probe.limits)


class TorchZip(EditableFormat):
    """The format `torch-zip`."""

    name = "torch-zip"
    by_torch = True
    can_salvage = True
    hands_on_crc = True
    remark = (
        "torch.load is its loader; torch.jit.load says: PytorchStreamReader failed locating file "
        "constants.pkl: file not found"
    )

    def recognise(self, probe: Probe) -> bool:
        """Return whether there is a `data.pkl`, and no `constants.pkl` as TorchScript has."""
        archive = probe.ask(open_archive)
        if archive is None:
            return False
        storages = Storages(archive, "little")
        return storages.find(PICKLE) is not None and storages.find("constants.pkl") is None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint, over the zip directory and the pickle.

        Raises:
            CorruptFile: the archive or its pickle is damaged, or a storage lies about its length.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        contents = probe.ask(contents_of)
        archive = contents.storages.archive
        return Checkpoint(
            contents.unpickled.root,
            self.name,
            probe.path,
            _details(archive, contents, is_zip=not probe.is_folder),
            sources=archive.sources,
        )

    def plan(self, checkpoint: Checkpoint) -> Plan:
        """Torch's layout but for `.data/serialization_id`, a hash for its own logging.

        Raises:
            NotRepresentable: a storage on the meta device, or an object that cannot be pickled.
        """
        from ckptool.symbolic.encoder import encode  # a list needs none of it

        encoded = encode(checkpoint.root)
        records = [
            literal("data.pkl", encoded.data),
            literal(".format_version", b"1"),
            literal(".storage_alignment", str(ALIGNMENT).encode()),
            literal("byteorder", b"little"),
        ]
        for index, storage in enumerate(encoded.storages):
            records.append(_payload(index, storage, encoded.dtypes[index], checkpoint.path))
        records.append(literal("version", b"3\n"))
        folder = checkpoint.details.folder
        new = folder and plan_sharing_zip(folder, records, "data/0", ALIGNMENT)
        new = new or plan_zip("archive", records, ALIGNMENT)
        return Plan(
            self.name,
            (NewFile(new.size, new.write, checkpoint, shared=new.shared),),
            tensors=sum(1 for _ in checkpoint.tensors()),
            blockers=encoded.blockers,
        )

    def plan_edit(self, checkpoint: Checkpoint) -> Plan | None:
        """Return what to append to the file for it to hold `checkpoint`; None: it cannot be done.

        It can where the file is a plain zip that torch takes, and every storage is a record of it,
        whole, under the key that it had. Only the directory and records that state a fact are read.

        Raises:
            NotRepresentable: an object that cannot be pickled.
        """
        # Imported here: a list needs none of it.
        from ckptool.files.editing import Patch
        from ckptool.symbolic.encoder import encode

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
        return Plan(
            self.name,
            patch=patch,
            kept=patch.offset,
            tensors=sum(1 for _ in checkpoint.tensors()),
            blockers=encoded.blockers,
        )


TORCH_ZIP = TorchZip()


def _details(archive: Archive, contents: Contents, *, is_zip: bool) -> Details:
    unpickled, used = contents.unpickled, contents.storages.used
    payloads = [record for name, record in archive.records.items() if name.startswith(_PAYLOADS)]
    unused = [record for record in payloads if record.name not in used]
    unused_bytes = sum(record.data.length for record in unused)
    return Details(
        size=archive.size,
        writer=_writer(archive, contents),
        folder=archive.folder if is_zip and _PLAIN_FOLDER.fullmatch(archive.folder) else "",
        byteorder=contents.storages.byteorder,
        protocol=unpickled.protocol,
        globals=unpickled.globals,
        opcodes=unpickled.opcodes,
        tidy=unpickled.tidy,
        framed=unpickled.framed,
        storage_bytes=sum(record.data.length for record in payloads),
        dead_bytes=archive.dead_bytes + unused_bytes,
        notes=(*archive.notes, *_notes(archive, contents, is_zip=is_zip)),
        left_behind=tuple(_left_behind(archive)),
        unreferenced=(f"{records_are([one.name for one in unused])} not referred to by the pickle",)
        if unused
        else (),
    )


def _notes(archive: Archive, contents: Contents, *, is_zip: bool) -> Iterator[str]:
    records = archive.records
    if is_zip and not archive.folder:
        yield f"{TORCH_REFUSES} its records do not stand in a folder"
    version = contents.facts.get("version")
    if is_zip and version is None and contents.storages.find(".data/version") is None:
        yield f"{TORCH_REFUSES} it has no record 'version'"
    elif version is not None and not is_known_version(version):
        yield f"{TORCH_REFUSES} its version is {version!r}, not between 1 and 10"
    if any(name.startswith("tensors/") for name in contents.storages.used):
        yield f"{TORCH_REFUSES} its tensors lie in 'tensors/', as torch 1.4 wrote them"
    compressed = [name for name, record in records.items() if record.compressed]
    if compressed:
        yield (
            f"{records_are(compressed)} compressed, which torch.load(mmap=True) reads as garbage; "
            "a rewrite stores them plainly"
        )


def _left_behind(archive: Archive) -> Iterator[str]:
    names = archive.records
    extra = [n for n in names if n.lower() not in _OURS and not n.startswith(_PAYLOADS)]
    if extra:
        yield f"{records_are(extra)} not part of a checkpoint"


def is_known_version(text: str) -> bool:
    """Return whether torch takes a file of that version (caffe2/serialize/versions.h)."""
    return text.isdecimal() and 1 <= int(text) <= 10


def records_are(names: list[str]) -> str:
    """Return the subject of a sentence: the first records, with the verb."""
    return f"record{'s' if len(names) > 1 else ''} {few(names, 3)} {are(len(names))}"


def _writer(archive: Archive, contents: Contents) -> str:
    """Return which torch lays a file out like this."""
    facts, keys = contents.facts, contents.storages.by_key
    if facts.get("version") == "1":
        return "torch 1.4"
    if facts.get("version") == "2":
        return "torch 1.5"
    if ".format_version" in facts:
        return "torch 2.7 or newer"
    if "byteorder" in facts:
        return "torch 2.1 to 2.6"
    if not keys:
        return "torch 1.6 to 2.0"
    if all(key.isdecimal() and int(key) >= _POINTER for key in keys):
        return "torch 1.6 to 1.8"
    return "torch 1.9 to 2.0" if archive.folder in ("archive", "") else "torch 1.13 or 2.0"


# edited in place


class Laid(NamedTuple):
    """A storage's record as it lies in the file."""

    name: bytes
    """With the folder."""
    size: int
    header: int
    payload: int
    """Offset of its first byte."""


def alignment_of(stated: str | None) -> int | None:
    """Return what `.storage_alignment` says, None where torch can make nothing of it."""
    text = str(ALIGNMENT) if stated is None else stated
    return int(text) if text.isdecimal() and int(text) > 0 else None


def computed_offsets(used: Iterable[Laid], alignment: int) -> Iterator[int | None]:
    """Return the payload offsets that torch computes, in order of first use in the pickle.

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


def _open_directory(source: Source) -> _Directory | None:
    """Return the directory of a torch zip that may have changed since it was opened."""
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
        """Return the entry of a record, named without the folder."""
        return self.by_name.get(f"{self.folder}/{name}".lower())

    def fact(self, name: str) -> str | None:
        """Return the text of a record that states a fact, if there is one."""
        entry = self.find(name)
        if entry is None:
            return None
        offsets, _ = payload_offsets(self.data, [entry], self.end)
        data = record_of(self.data, entry, offsets[entry.header], name, DEFAULT_LIMITS).data
        return data.read(0, min(data.length, SHORT)).decode("latin-1").strip()

    def is_torchs(self) -> bool:
        """Return whether all is in one folder with a UTF-8 name, and the version is known."""
        top = self.find(PICKLE)
        return (
            top is not None
            and top.name.encode() == top.raw_name
            and all(entry.name.startswith(f"{self.folder}/") for entry in self.entries)
            and is_known_version(self.fact("version") or "")
            and self.find(".data/version") is None  # torch would take that one, if it knows it
        )

    def records_of(self, storages: Sequence[Storage]) -> list[tuple[Entry, ByteRange]] | None:
        """Return the record that each storage is, whole and alone, with its bytes; else None."""
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
        """Return whether torch's own sums lead to these records, in their order of first use."""
        alignment = alignment_of(self.fact(".storage_alignment"))
        if alignment is None:
            return False
        laid = [Laid(entry.raw_name, entry.size, entry.header, data.offset) for entry, data in used]
        return list(computed_offsets(laid, alignment)) == [one.payload for one in laid]

    def edited(self, pickle: bytes, dropped: Container[str]) -> bytes:
        """Return what goes behind the end: the record of the new pickle, the directory, its end.

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
