"""What `torch.save` writes since 1.6, and since 1.4 when asked: a zip of a pickle and storages.

Records in one folder: `data.pkl`, whose persistent ids name storages; `data/KEY` (`tensors/KEY` in
1.4) with the bytes of each; `version`; since 2.1 `byteorder`; since 2.7 `.format_version` and
`.storage_alignment`. After torch/serialization.py (`_save`, `_load`) and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckptool.checkpoint import TORCH_REFUSES, Checkpoint, Details
from ckptool.errors import CorruptFile
from ckptool.formats.archive import read_text
from ckptool.formats.base import Archive, EditPlan, Probe, Record, WritePlan
from ckptool.formats.legacy_stream import NestedStreams
from ckptool.limits import Limits
from ckptool.model import Opaque, Storage, StorageRef
from ckptool.symbolic import Unpickled, unpickle
from ckptool.symbolic.persistent import StoragePid, is_storage_pid, parse_storage_pid

__all__ = [
    "PICKLE",
    "TORCH_ZIP",
    "Contents",
    "Storages",
    "TorchZip",
    "few",
    "is_known_version",
    "read_contents",
]

PICKLE = "data.pkl"
_PAYLOADS = ("data/", "tensors/")
_FACTS = ("version", "byteorder", ".format_version", ".storage_alignment")
_OURS = frozenset({PICKLE, *_FACTS, ".data/serialization_id", ".data/version"})
SHORT = 64
"""Bytes that a record of a fact may have."""
_POINTER = 1 << 16
"""A key beyond it is no count but an address: torch before 1.9 used those."""
ALIGNMENT = 64


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
        """What a persistent id stands for.

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
        """A record by name; as torch does it, without regard to ASCII case."""
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
        if pid.device == "meta":
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


class TorchZip:
    """The format `torch-zip`."""

    name = "torch-zip"

    def recognise(self, probe: Probe) -> bool:
        """Whether there is a `data.pkl`, and no `constants.pkl` as TorchScript has."""
        archive = probe.archive
        if archive is None:
            return False
        storages = Storages(archive, "little")
        return storages.find(PICKLE) is not None and storages.find("constants.pkl") is None

    def read(self, probe: Probe) -> Checkpoint:
        """The checkpoint, over the zip directory and the pickle.

        Raises:
            CorruptFile: the archive or its pickle is damaged, or a storage lies about its length.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        archive = probe.archive
        if archive is None:
            raise CorruptFile("this is no zip", file=probe.path)
        contents = probe.contents = read_contents(archive, probe.limits)
        return Checkpoint(
            contents.unpickled.root,
            self.name,
            probe.path,
            _details(archive, contents, is_zip=not probe.is_folder),
            sources=archive.sources,
        )

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """The zip that torch 2.13 would write (`torch_zip_writer.plan`).

        Raises:
            NotRepresentable: a storage on the meta device, or an object that cannot be pickled.
        """
        from ckptool.formats.torch_zip_writer import plan

        return plan(checkpoint)

    def plan_edit(self, checkpoint: Checkpoint) -> EditPlan | None:
        """What to append to the file itself (`torch_zip_edit.plan_edit`).

        Raises:
            NotRepresentable: an object that cannot be pickled.
        """
        from ckptool.formats.torch_zip_edit import plan_edit

        return plan_edit(checkpoint)


TORCH_ZIP = TorchZip()


def _details(archive: Archive, contents: Contents, *, is_zip: bool) -> Details:
    unpickled, used = contents.unpickled, contents.storages.used
    payloads = [record for name, record in archive.records.items() if name.startswith(_PAYLOADS)]
    unused = [record for record in payloads if record.name not in used]
    unused_bytes = sum(record.data.length for record in unused)
    return Details(
        size=archive.size,
        writer=_writer(archive, contents),
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
        unreferenced=tuple(_unreferenced(unused)),
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
            f"{few(compressed)} compressed, which torch.load(mmap=True) reads as garbage; "
            "a rewrite stores them plainly"
        )


def _unreferenced(unused: list[Record]) -> Iterator[str]:
    if unused:
        yield f"{few([record.name for record in unused])} not referred to by the pickle"


def _left_behind(archive: Archive) -> Iterator[str]:
    names = archive.records
    extra = [n for n in names if n.lower() not in _OURS and not n.startswith(_PAYLOADS)]
    if extra:
        yield f"{few(extra)} not part of a checkpoint"


def is_known_version(text: str) -> bool:
    """Whether torch takes a file of that version (caffe2/serialize/versions.h)."""
    return text.isdecimal() and 1 <= int(text) <= 10


def few(names: list[str]) -> str:
    """The subject of a sentence: the names, or the first of them, with the verb."""
    if len(names) == 1:
        return f"record {names[0]!r} is"
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"records {shown}{more} are"


def _writer(archive: Archive, contents: Contents) -> str:
    """Which torch lays a file out like this."""
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
