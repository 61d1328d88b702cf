"""The zip of torch.save since 1.6: read, write, and edit in place."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Container, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.checkpoint import TORCH_REFUSES, Checkpoint, Details
from ckptool.core.model import Opaque, Storage, StorageRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, FileMissing, NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.place import place_of
from ckptool.files.strided import swap_blocks
from ckptool.formats.archive import find_end, open_archive, read_raw_entries, read_text, read_zip
from ckptool.formats.base import (
    Archive,
    EditableFormat,
    NewFile,
    Probe,
    Record,
    WritePlan,
    add_error_context,
    details_from_pickle,
)
from ckptool.formats.legacy_stream import unpickle_outer
from ckptool.formats.zip_writer import (
    NewRecord,
    ZipPlace,
    literal_record,
    pack_end_records,
    plan_sharing_zip,
    plan_zip,
)
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.symbolic import Unpickled
from ckptool.symbolic.rebuild import StoragePid, is_storage_pid, parse_storage_pid
from ckptool.words import are, few

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput

ALIGNMENT = 64


def _make_storage_record(index: int, storage: Storage, dtype: str, file: str) -> NewRecord:
    """Return the planned record `data/INDEX` of a storage, in little-endian order for its `dtype`.

    If the file states the CRC-32 of just these bytes, the kernel can copy them; else they are read
    to compute it.

    Raises:
        NotRepresentable: the storage has no data.
    """
    data = storage.data
    if data is None:
        raise NotRepresentable(
            f"storage {storage.key!r} is on the {storage.device} device and has no data to write",
            file=file,
        )
    swap = BY_NAME[dtype].swap_size if storage.byteorder == "big" else 1
    is_copied = swap == 1 and storage.crc32 is not None and not storage.compressed

    def write(output: FileOutput) -> int:
        """Write the bytes, swapped if necessary, and return their CRC-32."""
        if swap > 1:
            return output.write_blocks(swap_blocks(data.iterate_blocks(), swap))
        if is_copied:
            output.copy(data)  # checked against this CRC-32 by the caller
            return storage.crc32 or 0  # `is_copied` means that it is not None
        return output.copy_with_crc(data)

    return NewRecord(f"data/{index}", storage.nbytes, write, data if is_copied else None)


PICKLE = "data.pkl"
_STORAGE_FOLDERS = ("data/", "tensors/")
"""Where storages are: torch 1.4 used the second."""
_SMALL_RECORDS = ("version", "byteorder", ".format_version", ".storage_alignment")
_KNOWN_RECORDS = frozenset({PICKLE, *_SMALL_RECORDS, ".data/serialization_id", ".data/version"})
SHORT = 64
"""The longest record of a fact, in bytes."""
_OFFSET_RECORDS = (".format_version", ".storage_alignment")
"""The records that make torch compute the offsets of storages, instead of looking them up."""


_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9_.-]{1,255}")


_SERIALIZATION_ID = ".data/serialization_id"
"""A hash over all records, which torch only logs."""
_UNLIMITED = Limits(max_records=sys.maxsize, max_inflation=sys.maxsize)
_MIN_POINTER_KEY = 1 << 16
"""Larger keys are addresses, which torch used before 1.9."""


class Storages:
    """The storages of an archive, created when the pickle uses them; one object per key."""

    def __init__(
        self, archive: Archive, byteorder: str, folders: tuple[str, ...] = _STORAGE_FOLDERS
    ) -> None:
        """Look up keys in `archive`, in the first of `folders` that has them.

        `byteorder` is that of the bytes in all storages.
        """
        self.archive = archive
        self.folders = folders
        self.byteorder = byteorder
        self.by_key: dict[str, Storage] = {}
        """The storages that the pickle has used so far."""
        self.used: set[str] = set()
        """The names of the records whose storage the pickle uses."""

    def load(self, pid: Any) -> Any:
        """Return the storage of a persistent id, or an `Opaque` for any other id.

        Raises:
            CorruptFile: the pid is malformed, its record is missing or has another length, or it
                contradicts an earlier pid of the key.
        """
        if not is_storage_pid(pid):
            return Opaque(None, (pid,), maker="persid")
        parsed = parse_storage_pid(pid, self.archive.path)
        if parsed.view is not None:
            raise CorruptFile(f"storage {parsed.key!r} has a view, which zip files do not support")
        storage = self.by_key.get(parsed.key)
        if storage is None:
            storage = self.by_key[parsed.key] = self._find_storage(parsed)
        elif storage.nbytes != parsed.nbytes or storage.device != parsed.device:
            raise CorruptFile(
                f"storage {parsed.key!r} has {storage.nbytes:,} bytes on {storage.device} "
                f"when first used and {parsed.nbytes:,} on {parsed.device} later"
            )
        return StorageRef(storage, parsed.dtype, parsed.untyped)

    def _find_storage(self, pid: StoragePid) -> Storage:
        """Return the storage of a persistent id, with the bytes of its record.

        On the meta device, or when salvaging, a storage without a record has no bytes.
        """
        for folder in self.folders:
            record = self.archive.find(f"{folder}{pid.key}")
            if record is not None:
                self.used.add(record.name)
                return Storage(
                    pid.key, record.data, pid.nbytes, pid.device, self.byteorder, record.crc32
                )
        if pid.device == "meta" or self.archive.is_partial:
            return Storage(pid.key, None, pid.nbytes, pid.device)
        raise CorruptFile(
            f"storage {pid.key!r} is missing: the pickle uses it, but the zip has no record "
            f"'{self.folders[0]}{pid.key}'"
        )


class ZipContents(NamedTuple):
    """The pickle of an archive as a tree, and the text of small records."""

    unpickled: Unpickled
    storages: Storages
    small_records: dict[str, str]
    """The text of records such as `version` and `byteorder`."""


def read_contents(archive: Archive, limits: Limits) -> ZipContents:
    """Read `data.pkl` and small records such as `version`; the bytes of storages are not read.

    Raises:
        CorruptFile: `data.pkl` is missing or damaged, or a storage has a wrong length.
        LimitExceeded: the pickle needs more than `limits` allows.
    """
    small_records = _read_small_records(archive)
    storages = Storages(archive, check_byteorder(small_records.get("byteorder", "little")))
    record = archive.find(PICKLE)
    if record is None:
        raise CorruptFile("the archive has no record 'data.pkl'")
    unpickled = unpickle_outer(record.data, limits, persistent_load=storages.load)
    return ZipContents(unpickled, storages, small_records)


def _read_small_records(archive: Archive) -> dict[str, str]:
    """Return the text of each small record such as `version` that the archive has, by its name."""
    records = {name: archive.find(name) for name in _SMALL_RECORDS}
    return {name: read_text(record, SHORT).strip() for name, record in records.items() if record}


def check_byteorder(text: str) -> str:
    """Return the byte order of an archive from its record.

    Raises:
        CorruptFile: the byte order is unknown.
    """
    if text not in ("little", "big"):
        message = f"the byte order is {text!r}, expected 'little' or 'big'"
        raise CorruptFile(message)
    return text


def read_torch_file(path: str, limits: Limits) -> Any:
    """Return the tree of one of thousands of torch.save files, which is open only during a read.

    Raises:
        FileMissing: the file does not exist.
        CorruptFile: it is damaged.
        LimitExceeded: it needs more than `limits` allows.
    """
    with add_error_context(path):
        return read_contents(read_zip(open_member(path), limits), limits).unpickled.root


def open_member(path: str) -> ByteRange:
    """Return the bytes of one of thousands of files; it is open only during a read.

    Raises:
        FileMissing: the file does not exist.
    """
    place = place_of(path)
    try:
        size = place.size(path)
    except OSError as error:
        raise FileMissing("is missing", file=path, hint="copy it as well") from error
    return ByteRange(place.open_member(path, size), 0, size)


def read_zip_contents(probe: Probe) -> ZipContents:
    """Return the contents of the torch zip of a probe.

    Raises:
        CorruptFile: the archive or its pickle is damaged, or a storage has a wrong length.
        LimitExceeded: it needs more than `probe.limits` allows.
    """
    return read_contents(probe.compute_once(open_archive), probe.limits)


class TorchZip(EditableFormat):
    """The format `torch-zip`."""

    name = "torch-zip"
    by_torch = True
    can_salvage = True
    hands_on_crc = True
    remark = f"torch.load is its loader; {quote('no-constants')}"

    def recognize(self, probe: Probe) -> bool:
        """Return whether a zip has `data.pkl` and, unlike TorchScript, no `constants.pkl`."""
        archive = probe.compute_once(open_archive)
        return archive.find(PICKLE) is not None and archive.find("constants.pkl") is None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint; read only the zip directory and the pickle."""
        contents = probe.compute_once(read_zip_contents)
        archive = contents.storages.archive
        return Checkpoint(
            contents.unpickled.root,
            self.name,
            probe.path,
            _describe_file(archive, contents, is_zip=not probe.is_folder),
            sources=archive.sources,
        )

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """Plan torch's layout without `.data/serialization_id`, a hash for its logging.

        The folder in the archive is the old one, if that lets most bytes share blocks with the file
        that they come from; else it is `archive`.
        """
        from ckptool.symbolic.encoder import encode  # not needed to list tensors

        encoded = encode(checkpoint.root)
        records = [
            literal_record("data.pkl", encoded.data),
            literal_record(".format_version", b"1"),
            literal_record(".storage_alignment", str(ALIGNMENT).encode()),
            literal_record("byteorder", b"little"),
        ]
        for index, storage in enumerate(encoded.storages):
            records.append(
                _make_storage_record(index, storage, encoded.dtypes[index], checkpoint.path)
            )
        records.append(literal_record("version", b"3\n"))
        folder = checkpoint.details.folder
        first_storage = "data/0"
        sharing_zip = folder and plan_sharing_zip(folder, records, first_storage, ALIGNMENT)
        new = sharing_zip or plan_zip("archive", records, ALIGNMENT)
        return WritePlan(
            self.name,
            (NewFile(new.size, new.write, checkpoint, shared=new.shared),),
            tensors=sum(1 for _ in checkpoint.tensors()),
            blockers=encoded.blockers,
        )

    def plan_edit(self, checkpoint: Checkpoint) -> WritePlan | None:
        """Plan the bytes that, appended to the file, make it equal to `checkpoint`, or None.

        It is possible if the file is a plain zip that torch accepts, and every storage is one of
        its complete records, under its old key. The bytes are a new pickle and a new directory,
        without the old pickle and the records that would be wrong. No tensor data is read.
        """
        # Imported here: not needed to list tensors.
        from ckptool.files.editing import Patch
        from ckptool.symbolic.encoder import encode

        if checkpoint.format != "torch-zip" or len(checkpoint.sources) != 1:
            return None
        data = ByteRange(checkpoint.sources[0], 0, checkpoint.sources[0].size)
        archive = read_zip(data, _UNLIMITED)  # the limits were checked when the file was opened
        old = _find_editable_pickle(archive)
        if old is None:
            return None
        encoded = encode(checkpoint.root, key_of=attrgetter("key"))
        storage_records = _match_records(archive, encoded.storages)
        if storage_records is None:
            return None
        dropped = {_SERIALIZATION_ID}
        # With these records, torch computes the offsets of storages from their order in the pickle.
        alignment = parse_alignment(_read_small_records(archive).get(".storage_alignment"))
        if alignment is None or find_misplaced(archive, storage_records, alignment):
            dropped.update(_OFFSET_RECORDS)
        added = _encode_edit(data, f"{archive.folder}/", old, encoded.data, dropped)
        if added is None:
            return None
        patch = Patch(data.length, added)
        return WritePlan(
            self.name,
            patch=patch,
            kept=patch.offset,
            tensors=sum(1 for _ in checkpoint.tensors()),
            blockers=encoded.blockers,
        )


TORCH_ZIP = TorchZip()


def _describe_file(archive: Archive, contents: ZipContents, *, is_zip: bool) -> Details:
    """Return the details of a torch zip: sizes, writer, notes, unused and unknown records.

    The name of the folder is kept only if it is short and plain: it is used for a new file.
    `is_zip` is False for an unzipped archive.
    """
    storage_records, unknown_names = [], []
    for name, record in archive.records.items():
        if name.startswith(_STORAGE_FOLDERS):
            storage_records.append(record)
        elif name.lower() not in _KNOWN_RECORDS:
            unknown_names.append(name)
    used_names = contents.storages.used
    unused = [record for record in storage_records if record.name not in used_names]
    unused_phrase = f"{phrase_records([record.name for record in unused])} not used by the pickle"
    return Details(
        size=archive.size,
        writer=_identify_writer(archive, contents),
        folder=archive.folder if is_zip and _PLAIN_FOLDER.fullmatch(archive.folder) else "",
        byteorder=contents.storages.byteorder,
        **details_from_pickle(contents.unpickled),
        storage_bytes=sum(record.data.length for record in storage_records),
        dead_bytes=archive.dead_bytes + sum(record.data.length for record in unused),
        notes=(*archive.notes, *_describe_problems(archive, contents, is_zip=is_zip)),
        left_behind=(f"{phrase_records(unknown_names)} not part of a checkpoint",)
        if unknown_names
        else (),
        unreferenced=(unused_phrase,) if unused else (),
    )


def find_refusals(archive: Archive, contents: ZipContents) -> Iterator[tuple[str, str, str]]:
    """Yield the reasons why torch rejects a readable zip: kind of problem, record, clause."""
    if not archive.folder:
        yield "folder", "", "its records are not in a folder"
    version = contents.small_records.get("version")
    if version is None and archive.find(".data/version") is None:
        yield "version", "", "it has no record 'version'"
    elif version is not None and not _is_known_version(version):
        yield "version", "version", f"its version is {version!r}, expected 1 to 10"


def _describe_problems(archive: Archive, contents: ZipContents, *, is_zip: bool) -> Iterator[str]:
    """Yield a note for each reason why torch.load or its mmap cannot read the file."""
    records = archive.records
    for _, _, clause in find_refusals(archive, contents) if is_zip else ():
        yield f"{TORCH_REFUSES} {clause}"
    if any(name.startswith("tensors/") for name in contents.storages.used):
        yield f"{TORCH_REFUSES} its tensors are in 'tensors/', as in torch 1.4"
    compressed = [name for name, record in records.items() if record.compressed]
    if compressed:
        yield (
            f"{phrase_records(compressed)} compressed, which torch.load(mmap=True) reads as "
            "garbage; rewrite the file to store them uncompressed"
        )


def _is_known_version(text: str) -> bool:
    """Return whether torch accepts a file of that version (caffe2/serialize/versions.h)."""
    return text.isdecimal() and 1 <= int(text) <= 10


def phrase_records(names: list[str]) -> str:
    """Return the subject and verb of a sentence about records: `records 'a', 'b' are`."""
    return f"record{'s' if len(names) > 1 else ''} {few(names, 3)} {are(len(names))}"


def _identify_writer(archive: Archive, contents: ZipContents) -> str:
    """Return the torch versions that write this layout, judging by records, keys and folder.

    Up to torch 1.8 the keys of storages were their addresses in memory.
    """
    small_records, keys = contents.small_records, contents.storages.by_key
    if small_records.get("version") == "1":
        return "torch 1.4"
    if small_records.get("version") == "2":
        return "torch 1.5"
    if ".format_version" in small_records:
        return "torch 2.7 or newer"
    if "byteorder" in small_records:
        return "torch 2.1 to 2.6"
    if not keys:
        return "torch 1.6 to 2.0"
    if all(key.isdecimal() and int(key) >= _MIN_POINTER_KEY for key in keys):
        return "torch 1.6 to 1.8"
    # Only from 1.13 on, the folder can have the name of the file.
    return "torch 1.9 to 2.0" if archive.folder in ("archive", "") else "torch 1.13 or 2.0"


# edited in place


def parse_alignment(stated: str | None) -> int | None:
    """Return the number in `.storage_alignment`; None if torch cannot parse it.

    Without the record (`stated` is None), torch uses 64.
    """
    text = str(ALIGNMENT) if stated is None else stated
    return int(text) if text.isdecimal() and int(text) > 0 else None


def find_misplaced(archive: Archive, used: Sequence[Record], alignment: int) -> list[Record]:
    """Return the records that are not at the offsets that torch computes.

    `used` are the records in the order in which the pickle first uses them. torch looks up the
    first, which must have the key 0, and computes the others: each follows the one before it.
    """
    if used and used[0].name != "data/0":
        return list(used)  # torch would start from the wrong record
    misplaced_records, header_offset = [], 0
    for position, record in enumerate(used):
        name = f"{archive.folder}/{record.name}".encode("utf-8", "replace")
        if position == 0:
            header_offset = record.header_offset
        place = ZipPlace(name, record.data.length, header_offset, alignment)
        payload_offset = record.data.offset if position == 0 else place.payload
        if payload_offset != record.data.offset:
            misplaced_records.append(record)
        header_offset = payload_offset + place.size + place.descriptor_size
    return misplaced_records


def _find_editable_pickle(archive: Archive) -> Record | None:
    """Return the pickle of an archive that torch accepts; None for any other archive."""
    has_one_folder = bool(archive.folder) and not archive.notes  # a note is a flaw of the zip
    has_known_version = _is_known_version(_read_small_records(archive).get("version", ""))
    if not has_one_folder or not has_known_version:
        return None
    if archive.find(".data/version"):  # torch would use this version instead
        return None
    return archive.find(PICKLE)


def _match_records(archive: Archive, storages: Sequence[Storage]) -> list[Record] | None:
    """Return the record of each storage, with its key and exactly its bytes.

    None if a storage has no such record, or two storages have the same.
    """
    candidates = [archive.find(f"data/{storage.key}") for storage in storages]
    records = [
        record
        for record, storage in zip(candidates, storages, strict=True)
        if record is not None and record.data == storage.data
    ]
    distinct_offsets = {record.header_offset for record in records}
    return records if len(distinct_offsets) == len(storages) else None


def _encode_edit(
    data: ByteRange, prefix: str, old: Record, pickle: bytes, dropped: Container[str]
) -> bytes | None:
    """Return the bytes to append to a zip: a new pickle, the directory, the end records.

    Entries of other records are unchanged, but those in `dropped` (lower-case names in the folder
    `prefix`) are left out. The new pickle replaces the record `old`, under its name. None if that
    name is not UTF-8 in the file, so that its entry is not found.
    """
    end, crc = find_end(data), zlib.crc32(pickle)
    place = ZipPlace(f"{prefix}{old.name}".encode(), len(pickle), data.length, ALIGNMENT)
    entry_by_name = dict(read_raw_entries(data, end)) if end else {}
    if place.name not in entry_by_name:
        return None
    entry_by_name[place.name] = place.pack_entry(crc)
    prefix_length = len(prefix.encode())
    kept_entries = [
        entry
        for name, entry in entry_by_name.items()
        # Any bytes are latin-1; the names in `dropped` are ASCII.
        if name[prefix_length:].decode("latin-1").lower() not in dropped
    ]
    directory = b"".join(kept_entries)
    return b"".join((
        place.pack_local_header(), pickle, place.pack_descriptor(crc), directory,
        pack_end_records(len(kept_entries), place.end, len(directory)),
    ))  # fmt: skip
