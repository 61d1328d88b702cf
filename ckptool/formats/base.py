"""The interface of all formats (recognize, read, plan a file), and the findings of checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckptool.core.checkpoint import MEMORY, Checkpoint, Details
from ckptool.core.finding import Finding
from ckptool.core.model import find_tensors
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    LimitExceeded,
    UnsupportedFormat,
)
from ckptool.files import ByteRange, Source
from ckptool.files.place import place_of
from ckptool.limits import Limits
from ckptool.quotes import Quote, quote

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput
    from ckptool.files.editing import Patch
    from ckptool.files.source import Shared
    from ckptool.symbolic import Unpickled

_Result = TypeVar("_Result")

FOLDER_QUOTE = quote("folder")
OPAQUE_CONSTANTS = "its code uses it, and the file does not contain it (mkldnn constants)"
"""The note on constants that `torch.jit.optimize_for_inference` does not store."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Bytes, and the CRC-32 that their file states."""

    place: str
    data: ByteRange
    crc32: int
    castagnoli: bool = False
    """True if it is a CRC-32C, with another polynomial."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings about the structure of a file, and the checksums to compute."""

    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    records: int = 0
    """The number of records of an archive."""

    def __add__(self, other: Findings) -> Findings:
        """Return the findings of both together."""
        return Findings(
            self.problems + other.problems,
            self.notes + other.notes,
            self.checksums + other.checksums,
            self.records + other.records,
        )


class Record(NamedTuple):
    """One named range of bytes in an archive; a deflated one reads as its inflated content."""

    name: str
    """Without the archive's folder: `data/0`."""
    data: ByteRange
    crc32: int | None = None
    """From the directory; None if it is missing, or 0 for a record that is not empty."""
    header_offset: int = 0
    compressed: bool = False


@dataclass(frozen=True)
class Archive:
    """Records by name: those of a zip, or the files of an unzipped zip."""

    path: str
    folder: str
    """The name before the first `/` that all records share (`archive`), empty for a folder."""
    records: Mapping[str, Record]
    """In the order of the directory."""
    sources: tuple[Source, ...]
    size: int
    dead_bytes: int = 0
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    """True if it is being salvaged, so that records may be missing."""

    @cached_property
    def _by_lower_name(self) -> Mapping[str, Record]:
        """The records by lower-case name."""
        return {name.lower(): record for name, record in self.records.items()}

    def find(self, name: str) -> Record | None:
        """Return a record by name, ignoring ASCII case as torch does."""
        return self.records.get(name) or self._by_lower_name.get(name.lower())


Salvages = Callable[[ByteRange, Limits, tuple[Source, ...]], Archive]


def details_from_pickle(unpickled: Unpickled) -> dict[str, Any]:
    """Return the details of a file that come from its pickle."""
    return {
        name: getattr(unpickled, name)
        for name in ("protocol", "globals", "opcodes", "tidy", "framed")
    }


def combine_details(files: Sequence[Checkpoint], joined: Checkpoint, **stated: Any) -> Checkpoint:
    """Return `joined` with the details of the first of its files and the totals of all.

    Sizes are added up, `globals` and `opcodes` are united. `stated` replaces details by name.
    """
    parts = [file.details for file in files]
    sums = {
        key: sum(getattr(part, key) for part in parts)
        for key in ("size", "storage_bytes", "dead_bytes")
    }
    unions = {
        key: tuple(dict.fromkeys(name for part in parts for name in getattr(part, key)))
        for key in ("globals", "opcodes")
    }
    sources = tuple(source for file in files for source in file.sources)
    return replace(
        joined,
        details=replace(parts[0] if parts else Details(), **{**sums, **unions, **stated}),
        sources=sources,
    )


def check_limit(subject: str, count: int, unit: str, maximum: int) -> None:
    """Refuse a `count` of more than `maximum`: "the zip has" 9 "records".

    Raises:
        LimitExceeded: it is more.
    """
    if count > maximum:
        raise LimitExceeded(f"{subject} {count:,} {unit}, more than the limit of {maximum:,}")


@contextmanager
def add_error_context(
    file: str | None, subject: str = "", *, hint: str | None = None, rules_of: str = ""
) -> Iterator[None]:
    """Add file and subject to the errors of a block, and a hint to those without one.

    With `rules_of`, Python errors about unexpected content become CorruptFile.
    """
    try:
        yield
    except CheckpointError as error:
        if subject:
            error.message = f"{subject}: {error.message}"
        error.file = error.file or file
        # The usual hint of the error's class is the same for all files: `hint` knows more.
        own_hint = None if error.hint == error.usual_hint else error.remedy or error.hint
        error.advise(own_hint or hint)
        raise
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        if not rules_of:
            raise
        message = (
            f"{subject} does not follow the format of {rules_of}: {type(error).__name__}, {error}"
        )
        raise CorruptFile(message.lstrip(), file=file, hint=hint) from error


@contextmanager
def require_package(package: str, purpose: str, file: str) -> Iterator[None]:
    """Turn an ImportError in the block into UnsupportedFormat, with the package to install."""
    try:
        yield
    except ImportError as error:
        message, hint = f"{purpose}, and {package} is not installed", f"pip install {package}"
        raise UnsupportedFormat(message, file=file, hint=hint) from error


class Probe:
    """A file or folder that is being recognized; it is read only once for all formats."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        limits: Limits,
        source: Source | None = None,
        *,
        salvages: Salvages | None = None,
    ) -> None:
        """Open `path`, unless it is a folder or already open (`source`).

        `salvages` is a function that reads the intact records of a damaged zip. If it is given,
        damaged or truncated storages have no bytes instead of raising errors.

        A path that ends in a pattern (`run/model_world_size_4_rank_*.pt`) is its folder with only
        the matching names; the prefix of a TensorFlow checkpoint is its index.

        Raises:
            FileMissing: the file or folder does not exist, or no name matches.
            FileDenied: no permission to read it.
            FileBusy: another process is editing it.
            CorruptFile: it has the journal of an edit that cannot be recovered.
        """
        self.limits, self.salvages = limits, salvages
        self.place = place_of(path)
        self.path = self.place.normalize_path(os.fsdecode(path))
        self._pattern = "*"
        """The pattern that names in the folder must match to be in `entries`."""
        folder, name = os.path.split(self.path)
        self.is_folder = self.place.is_folder(self.path)
        exists = self.is_folder or self.place.exists(self.path)
        if "*" in name and not exists and self.place.is_folder(folder or "."):
            self.path, self._pattern, self.is_folder = folder or ".", name, True
        tensorflow_index = f"{self.path}.index"
        if not (exists or self.is_folder) and self.place.is_file(tensorflow_index):
            self.path = tensorflow_index
        self.source = source or (None if self.is_folder else self.place.open(self.path))
        if self._pattern != "*" and not self.entries:
            raise FileMissing(f"has no file {self._pattern}", file=self.path)
        self._results: dict[Callable[[Probe], Any], Any] = {}
        """The results of `compute_once`, by function."""
        self._closing = ExitStack()
        """The calls that `close` makes."""
        if self.source is not None:
            self.on_close(self.source.close)

    @cached_property
    def head(self) -> bytes:
        """The first 512 bytes, fewer of a shorter file, none of a folder."""
        return b"" if self.source is None else self.source.read(0, min(512, self.source.size))

    @cached_property
    def entries(self) -> frozenset[str]:
        """The names in a folder; empty for a file."""
        names = self.place.list_names(self.path) if self.is_folder else frozenset()
        return names if self._pattern == "*" else frozenset(matching(names, self._pattern))

    def require_source(self) -> Source:
        """Return the file.

        Raises:
            UnreadableFile: it is a folder.
        """
        return self.source or self.place.open(self.path)

    def compute_once(self, compute: Callable[[Probe], _Result]) -> _Result:
        """Return `compute(probe)`, computed once per probe."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        result: _Result = self._results[compute]
        return result

    def on_close(self, close: Callable[[], None]) -> None:
        """Call `close` when the probe is closed."""
        self._closing.callback(close)

    def close(self) -> None:
        """Close the files that this probe opened."""
        self._closing.close()


class Member(NamedTuple):
    """A torch.save file inside a new file, and the checkpoint in it."""

    offset: int
    length: int
    checkpoint: Checkpoint


class NewFile(NamedTuple):
    """A planned file."""

    size: int
    write: Callable[[FileOutput], None]
    """Writes exactly `size` bytes."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to compare it with after writing; None for an index."""
    path: str = ""
    """Its path in a set of files; empty for a single file, with a path given by the user."""
    members: Sequence[Member] = ()
    """The torch.save files inside it, to compare them after writing."""
    shared: Shared | None = None
    """The bytes that can share blocks with the file that they are copied from."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """A planned write: new files, or a patch of the source file, or nothing."""

    format: str
    files: tuple[NewFile, ...] = ()
    """In the order of writing. The last one is the index, which completes the set."""
    patch: Patch | None = None
    kept: int = 0
    """Bytes of the source, if it is patched or unchanged."""
    tensors: int = 0
    """The number of tensor keys, including tied ones."""
    left_out: tuple[str, ...] = ()
    """The properties of the source that are not in the result, one phrase each."""
    notes: tuple[str, ...] = ()
    """Other sentences for the user."""
    blockers: tuple[str, ...] = ()
    """Classes that keep `torch.load(weights_only=True)` from loading it."""

    @property
    def size(self) -> int:
        """The size of the result in bytes, of all files together."""
        patch_end = self.patch.offset + len(self.patch.data) if self.patch else 0
        # The patch begins inside the kept bytes, and may make the source longer.
        source_size = max(self.kept, patch_end)
        return source_size + sum(file.size for file in self.files)

    @property
    def written(self) -> int:
        """Bytes that will be written to the disk."""
        return len(self.patch.data) if self.patch else sum(file.size for file in self.files)

    @property
    def index(self) -> str:
        """The path of the index; empty for a single file."""
        return self.files[-1].path if self.files else ""


class Refusal(NamedTuple):
    """The reason why `torch.load` with default arguments rejects the files of a format."""

    kind: str
    """The kind of doctor's complaint."""
    what: str
    """What the file is, beginning with "it is"."""
    quote: Quote | None
    """The error of torch; None where it depends on the files."""
    reader: str = ""
    """The library that wrote the file and reads it as is."""
    instead: str = ""
    """What opens the file instead, as a clause."""


def distributed_refusal(description: str, reader: str = "") -> Refusal:
    """Return the refusal of a folder that several processes wrote."""
    return Refusal("distributed", description, FOLDER_QUOTE, reader)


class Format:
    """A format of checkpoints in a file or folder, and its properties.

    The base class represents a tree in memory.
    """

    name: str = MEMORY
    flat = False
    """True if the root is one flat state dict."""
    tensors_only = False
    """True if it has only tensors and texts: no objects, storages, ties or wrappers."""
    by_torch = False
    """True if `torch.save` writes it."""
    legacy = False
    """True if the storages are in the pickle stream, as in torch before 1.6."""
    inline = False
    """True if the tensor data is in the pickle itself."""
    is_program = False
    """True if it is a program with its weights, and the tensors are those of a module."""
    can_salvage = False
    """True if a truncated or damaged file can be opened without the lost bytes."""
    hands_on_crc = False
    """True if the file has a CRC-32 of each storage, so that a known one is passed on."""
    resumes = True
    """True if the training that saved it can resume from one `torch.save` file."""
    header_key = ""
    """The text that other libraries look for in its header."""
    remark = ""
    """A remark about files without problems."""
    index_name = ""
    """The name of the index, for a format that is a folder of files."""
    shard_ending = ""
    """The default extension of its shards; empty if it has no shards."""
    layout = ""
    """The framework of its axis order and keys, if that is not torch."""
    refusal: Refusal | None = None
    unsafe_loader = "torch.load(FILE, weights_only=False)"
    """The call that creates the objects in a file, and runs its code."""

    @property
    def keeps_order(self) -> bool:
        """True if the keys are in the order in which they were saved.

        One pickle keeps it, with the data (`inline`) or without. Shards and other formats do not.
        """
        return self.inline or (self.by_torch and not self.shard_ending)

    def describe_layout(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return a note on the layout of the kernels, if it is not torch's."""
        if not self.layout:
            return ()
        if all(len(tensor.shape) < 2 for tensor in find_tensors(checkpoint.root)):
            return ()  # no kernels: a bias is the same in every layout
        return (
            f"kernels have the layout of {self.layout}: Dense [in, out], convolutions "
            f"[height, width, in, out]; load_into and convert --like convert a {self.layout} "
            "file to torch's layout",
        )

    def refuse_unusable(self, checkpoint: Checkpoint) -> None:
        """Refuse to write a tree of this format that no other file can represent; by default none.

        Raises:
            NotRepresentable: nothing would load the result.
        """

    def recognize(self, probe: Probe) -> bool:
        """Return whether the content has this format; read as little as needed."""
        return False

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint; read only the header.

        Raises:
            FileMissing: a file of the set is missing.
            CorruptFile: the file breaks a rule of the format, or the files contradict each other.
            UnsupportedFormat: it is not supported, or a package is not installed.
            LimitExceeded: it needs more than `probe.limits` allows.
        """
        raise NotImplementedError

    def collect_findings(self, probe: Probe) -> Findings:
        """Return the findings of `verify` about a folder of this format, readable or not.

        Checksums are listed here, and computed by the caller.
        """
        return Findings()


class WritableFormat(Format):
    """A format that can be written."""

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """Return the plan to write `checkpoint`; nothing is written yet.

        Raises:
            NotRepresentable: the format cannot store one of the tensors.
        """
        raise NotImplementedError


class EditableFormat(WritableFormat):
    """A format with files that can be edited in place."""

    def plan_edit(self, checkpoint: Checkpoint) -> WritePlan | None:
        """Return the plan of an edit of the source file that makes it equal to `checkpoint`.

        None if that needs a new file.

        Raises:
            NotRepresentable: the format cannot store one of the tensors.
        """
        raise NotImplementedError


class FolderFormat(EditableFormat):
    """A format of several files in a folder; the paths of its plans are names in this folder."""

    def plan(self, checkpoint: Checkpoint, max_bytes: int | None = None) -> WritePlan:
        """Return the plan to write `checkpoint` into files of at most `max_bytes` bytes each.

        A single larger item has a file of its own.

        Raises:
            NotRepresentable: the format cannot store one of the tensors.
        """
        raise NotImplementedError
