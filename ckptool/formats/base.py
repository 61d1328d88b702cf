"""What every format offers (recognize, read, some plan a file), and what a check finds wrong."""

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

_Answer = TypeVar("_Answer")

A_FOLDER = quote("folder")
OPAQUE_CONSTANTS = "its code uses it, and the file does not contain it (mkldnn constants)"
"""What a note says of the constants that `torch.jit.optimize_for_inference` leaves behind."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Bytes, and the CRC-32 that the file states of them."""

    place: str
    data: ByteRange
    crc32: int
    castagnoli: bool = False
    """Whether it is a CRC-32C: of another polynomial."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at the structure of a file gave, and what remains to be computed."""

    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    records: int = 0
    """Records of an archive."""

    def __add__(self, other: Findings) -> Findings:
        """Both together."""
        return Findings(
            self.problems + other.problems,
            self.notes + other.notes,
            self.checksums + other.checksums,
            self.records + other.records,
        )


class Record(NamedTuple):
    """One named run of bytes of an archive; a deflated one reads as what it inflates to."""

    name: str
    """Without the archive's folder: `data/0`."""
    data: ByteRange
    crc32: int | None = None
    """As the directory states it; None where there is none or it is 0 for a non-empty record."""
    header_offset: int = 0
    compressed: bool = False


@dataclass(frozen=True)
class Archive:
    """Records by name: those of a zip, or the files of an unzipped one."""

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
    """Whether it is to be salvaged: records may be missing."""

    @cached_property
    def _folded(self) -> Mapping[str, Record]:
        return {name.lower(): record for name, record in self.records.items()}

    def find(self, name: str) -> Record | None:
        """Return a record by name; as torch does it, without regard to ASCII case."""
        return self.records.get(name) or self._folded.get(name.lower())


Salvages = Callable[[ByteRange, Limits, tuple[Source, ...]], Archive]


def pickled(found: Unpickled) -> dict[str, Any]:
    """Return the details of a file that its pickle gives."""
    return {
        name: getattr(found, name) for name in ("protocol", "globals", "opcodes", "tidy", "framed")
    }


def of_files(files: Sequence[Checkpoint], made: Checkpoint, **told: Any) -> Checkpoint:
    """Return the checkpoint `made` of several files, with the details of the first and totals.

    `told` are details that are otherwise.
    """
    every = [one.details for one in files]
    sums = {
        key: sum(getattr(one, key) for one in every)
        for key in ("size", "storage_bytes", "dead_bytes")
    }
    names = {
        key: tuple(dict.fromkeys(name for one in every for name in getattr(one, key)))
        for key in ("globals", "opcodes")
    }
    sources = tuple(source for one in files for source in one.sources)
    return replace(
        made,
        details=replace(every[0] if every else Details(), **{**sums, **names, **told}),
        sources=sources,
    )


def check_limit(what: str, count: int, unit: str, most: int) -> None:
    """Raise LimitExceeded if a file asks for more than `most`: "the zip states" 9 "records"."""
    if count > most:
        raise LimitExceeded(f"{what} {count:,} {unit}, more than the limit of {most:,}")


@contextmanager
def naming(
    file: str | None, subject: str = "", *, hint: str | None = None, rules_of: str = ""
) -> Iterator[None]:
    """Name file and subject in the errors of a block; give a hint to those without one.

    With `rules_of` an error of Python becomes CorruptFile: content of a form that this writer does
    not give it.
    """
    try:
        yield
    except CheckpointError as error:
        if subject:
            error.message = f"{subject}: {error.message}"
        error.file = error.file or file
        own = None if error.hint == error.usual_hint else error.remedy or error.hint
        error.advise(own or hint)
        raise
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        if not rules_of:
            raise
        what = (
            f"{subject} does not follow the format of {rules_of}: {type(error).__name__}, {error}"
        )
        raise CorruptFile(what.lstrip(), file=file, hint=hint) from error


@contextmanager
def needing(package: str, what: str, file: str) -> Iterator[None]:
    """Name the package that an import in a block needs, and what of the file it is for."""
    try:
        yield
    except ImportError as error:
        what, hint = f"{what}, and {package} is not installed", f"pip install {package}"
        raise UnsupportedFormat(what, file=file, hint=hint) from error


class Probe:
    """A file or folder that is being recognized; what is asked twice is read once."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        limits: Limits,
        source: Source | None = None,
        *,
        salvages: Salvages | None = None,
    ) -> None:
        """Look at `path`, and open it if it is a file that is not open yet (`source`).

        With `salvages`, which reads what is whole of a zip, storages that are damaged or cut off
        have no bytes, and are no errors.

        Of a path that ends in a pattern (`run/model_world_size_4_rank_*.pt`) it is the folder, in
        which nothing but the names that match is seen; of a prefix of TensorFlow's its index.

        Raises:
            FileMissing: there is no such file or folder, or no name that matches.
            FileDenied: the system refuses it.
            FileBusy: another process is editing it.
            CorruptFile: the journal of an edit lies beside it that cannot be carried out.
        """
        self.limits, self.salvages = limits, salvages
        self.place = place_of(path)
        self.path = self.place.spelled(os.fsdecode(path))
        self._pattern = "*"
        folder, name = os.path.split(self.path)
        self.is_folder = self.place.is_folder(self.path)
        is_there = self.is_folder or self.place.exists(self.path)
        if "*" in name and not is_there and self.place.is_folder(folder or "."):
            self.path, self._pattern, self.is_folder = folder or ".", name, True
        index = f"{self.path}.index"  # of TensorFlow's, whose users name no file
        if not (is_there or self.is_folder) and self.place.is_file(index):
            self.path = index
        self.source = source or (None if self.is_folder else self.place.open(self.path))
        if self._pattern != "*" and not self.entries:
            raise FileMissing(f"has no file {self._pattern}", file=self.path)
        self._answers: dict[Callable[[Probe], Any], Any] = {}
        self._closing = ExitStack()
        if self.source is not None:
            self.on_close(self.source.close)

    @cached_property
    def head(self) -> bytes:
        """The first 512 bytes, fewer in a shorter file, none of a folder."""
        return b"" if self.source is None else self.source.read(0, min(512, self.source.size))

    @cached_property
    def entries(self) -> frozenset[str]:
        """The names in a folder; empty for a file."""
        names = self.place.names(self.path) if self.is_folder else frozenset()
        return names if self._pattern == "*" else frozenset(matching(names, self._pattern))

    def opened(self) -> Source:
        """Return the file.

        Raises:
            UnreadableFile: it is a folder.
        """
        return self.source or self.place.open(self.path)

    def ask(self, make: Callable[[Probe], _Answer]) -> _Answer:
        """Return what `make` finds out about the file; asked again, the same without a new look."""
        if make not in self._answers:
            self._answers[make] = make(self)
        answer: _Answer = self._answers[make]
        return answer

    def on_close(self, close: Callable[[], None]) -> None:
        """Have `close` called when the probe is closed."""
        self._closing.callback(close)

    def close(self) -> None:
        """Close what was opened here."""
        self._closing.close()


class Member(NamedTuple):
    """A file of torch.save's that stands in a new file, and what it holds."""

    offset: int
    length: int
    holds: Checkpoint


class NewFile(NamedTuple):
    """A file that is not written yet."""

    size: int
    write: Callable[[FileOutput], None]
    """Writes exactly `size` bytes."""
    holds: Checkpoint | None = None
    """The checkpoint to compare it with when it is read back; None for an index."""
    path: str = ""
    """Its place in a set of files; empty for a single file, whose place the user names."""
    members: Sequence[Member] = ()
    """What to compare it with, where it is made of files of torch.save's."""
    shared: Shared | None = None
    """What of it lies at the same place in a block as in the file that it is copied from."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """A write that has not begun: new files, or a patch of the source file, or nothing to do."""

    format: str
    files: tuple[NewFile, ...] = ()
    """In the order in which they are written. The last one names the others: it makes the set."""
    patch: Patch | None = None
    kept: int = 0
    """Bytes of the source, where it is patched or stays as it is."""
    tensors: int = 0
    """Names of tensors, tied ones each."""
    left_out: tuple[str, ...] = ()
    """What the source has and the result has not, a phrase each."""
    notes: tuple[str, ...] = ()
    """Other sentences that the user should read."""
    blockers: tuple[str, ...] = ()
    """Classes that keep `torch.load(weights_only=True)` from taking it."""

    @property
    def size(self) -> int:
        """Bytes of the result, of all files together."""
        end = self.patch.offset + len(self.patch.data) if self.patch else 0
        return max(self.kept, end) + sum(file.size for file in self.files)

    @property
    def written(self) -> int:
        """Bytes that will go to the disk."""
        return len(self.patch.data) if self.patch else sum(file.size for file in self.files)

    @property
    def index(self) -> str:
        """The path of the file that names the others; empty where one file is all."""
        return self.files[-1].path if self.files else ""


class Refusal(NamedTuple):
    """Why `torch.load`, called as it is by default, does not take the files of a format."""

    kind: str
    """Doctor's word for it."""
    what: str
    """What the file is, beginning with "it is"."""
    quote: Quote | None
    """The error of torch; None where it depends on the files."""
    reader: str = ""
    """The library that reads the file as it is, where another one wrote it."""
    instead: str = ""
    """What opens the file instead, as a clause."""


def of_many_files(what: str, reader: str = "") -> Refusal:
    """Return the refusal of a folder that several processes wrote."""
    return Refusal("distributed", what, A_FOLDER, reader)


class Format:
    """One way of laying a checkpoint out in a file or folder, and all that is known about it.

    The base itself stands for a tree in memory, which lies in no file.
    """

    name: str = MEMORY
    flat = False
    """Whether the root is one flat state dict."""
    tensors_only = False
    """Whether it has tensors and texts alone: no objects, storages, ties or wrappers."""
    by_torch = False
    """Whether `torch.save` writes it."""
    legacy = False
    """Whether the storages are in the pickle stream, as torch before 1.6 wrote them."""
    inline = False
    """Whether the numbers lie in the pickle itself."""
    is_program = False
    """Whether it is a program with its weights, whose tensors are those of a module."""
    can_salvage = False
    """Whether a file that is cut short or damaged opens without the bytes that it lacks."""
    hands_on_crc = False
    """Whether the file states a CRC-32 of each storage, so that one which is known travels on."""
    resumes = True
    """Whether a training that saved it resumes from one file of `torch.save`."""
    header_key = ""
    """The text that other libraries look for in its header."""
    remark = ""
    """What there is to know about a file in whose way nothing is."""
    index_name = ""
    """The file that names the others, of a format that is a folder of files."""
    shard_ending = ""
    """The ending of its shards, where the user gives none; empty if it has no shards."""
    layout = ""
    """Whose order of axes the tensors have, and whose names, where these are not torch's."""
    refusal: Refusal | None = None
    unsafe_loader = "torch.load(FILE, weights_only=False)"
    """The call that makes the objects in a file, and runs what the file says."""

    @property
    def keeps_order(self) -> bool:
        """Whether the keys come in the order in which they were saved: pickles alone keep it."""
        return self.inline or (self.by_torch and not self.shard_ending)

    def layout_notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Say whose layout the kernels have, if it is not torch's."""
        if not self.layout or all(len(one.shape) < 2 for one in find_tensors(checkpoint.root)):
            return ()
        return (
            f"kernels have the layout of {self.layout}: Dense [in, out], convolutions "
            f"[height, width, in, out]; load_into and convert --like convert a {self.layout} "
            "file to torch's layout",
        )

    def refuse_unusable(self, checkpoint: Checkpoint) -> None:
        """Refuse to write a tree of this format that no other file can stand for.

        Raises:
            NotRepresentable: nothing would load the result.
        """

    def recognize(self, probe: Probe) -> bool:
        """Return whether the content is of this format; looks at as little as will tell."""
        return False

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint, over the header alone.

        Raises:
            FileMissing: a file of the set is missing.
            CorruptFile: the file breaks a rule of the format, or the files contradict each other.
            UnsupportedFormat: it is of a kind that is not read, or a package is not installed.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        raise NotImplementedError

    def findings(self, probe: Probe) -> Findings:
        """Return what `verify` can say of a folder of this format, whether or not it can be read.

        Checksums are named here, and computed by who asks.
        """
        return Findings()


class WritableFormat(Format):
    """A format that can be written too."""

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """Return what writing `checkpoint` would give; nothing is written yet.

        Raises:
            NotRepresentable: the format cannot hold a tensor that must be carried.
        """
        raise NotImplementedError


class EditableFormat(WritableFormat):
    """A format whose files can be changed where they lie."""

    def plan_edit(self, checkpoint: Checkpoint) -> WritePlan | None:
        """Return the plan of an edit that makes the file of `checkpoint` hold it.

        None where that takes a new file.

        Raises:
            NotRepresentable: the format cannot hold a tensor that must be carried.
        """
        raise NotImplementedError


class FolderFormat(EditableFormat):
    """A format of several files in a folder; the paths of its plans are names in there."""

    def plan(self, checkpoint: Checkpoint, most: int | None = None) -> WritePlan:
        """Return what writing `checkpoint` into files of at most `most` bytes each would give.

        A single item that is larger has a file of its own.

        Raises:
            NotRepresentable: the format cannot hold a tensor that must be carried.
        """
        raise NotImplementedError
