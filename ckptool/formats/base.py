"""What every format offers (recognise, read, some plan a file), and what a check finds wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ckptool.checkpoint import Checkpoint
from ckptool.files import ByteRange, FileSource
from ckptool.files.opening import open_source
from ckptool.limits import Limits

if TYPE_CHECKING:
    from ckptool.files.atomic import Output
    from ckptool.files.editing import Patch

__all__ = [
    "OPAQUE_CONSTANTS",
    "Archive",
    "Checksum",
    "EditPlan",
    "EditableFormat",
    "Findings",
    "Format",
    "Probe",
    "Problem",
    "Record",
    "WritableFormat",
    "WritePlan",
]

_Answer = TypeVar("_Answer")

OPAQUE_CONSTANTS = "used by its code, and not stored in the file (mkldnn constants)"
"""What a note says of the constants that `torch.jit.optimize_for_inference` leaves behind."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `kind` is a word for programs, `place` the record, tensor or shard (empty: the file as a
    whole), `text` a clause for people without a full stop, `hint` the step that helps.
    """

    kind: str
    place: str
    text: str
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `ckptool.verify/1` has it."""
        return {"kind": self.kind, "place": self.place, "text": self.text, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class Checksum:
    """Bytes, and the CRC-32 that the file states of them."""

    place: str
    data: ByteRange
    crc32: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at the structure of a file gave, and what remains to be computed."""

    problems: tuple[Problem, ...] = ()
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


class Archive(NamedTuple):
    """Records by name: those of a zip, or the files of an unzipped one."""

    path: str
    folder: str
    """The name before the first `/` that all records share (`archive`), empty for a folder."""
    records: Mapping[str, Record]
    """In the order of the directory."""
    sources: tuple[FileSource, ...]
    size: int
    dead_bytes: int = 0
    notes: tuple[str, ...] = ()


class Probe:
    """A file or folder that is being recognised; what is asked twice is read once."""

    def __init__(
        self, path: str | os.PathLike[str], limits: Limits, source: FileSource | None = None
    ) -> None:
        """Look at `path`, and open it if it is a file that is not open yet (`source`).

        Raises:
            FileMissing: there is no such file or folder.
            FileDenied: the system refuses it.
            FileBusy: another process is editing it.
            CorruptFile: the journal of an edit lies beside it that cannot be settled.
        """
        self.path = os.fsdecode(path)
        self.limits = limits
        self.is_folder = os.path.isdir(self.path)
        self.source = source or (None if self.is_folder else open_source(self.path))
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
        return frozenset(os.listdir(self.path)) if self.is_folder else frozenset()

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


class WritePlan(NamedTuple):
    """A file that is not written yet: its exact size, what it leaves out, and how to write it."""

    format: str
    size: int
    write: Callable[[Output], None]
    left_out: tuple[str, ...] = ()
    """What the format cannot hold and this file will not have, a sentence each."""
    notes: tuple[str, ...] = ()
    tensors: int = 0
    blockers: tuple[str, ...] = ()
    """Classes in it that keep `torch.load(weights_only=True)` from taking it."""


class EditPlan(NamedTuple):
    """A change of the source file itself, in which the tensors stay where they are."""

    patch: Patch
    size: int
    """Bytes of the file afterwards."""
    notes: tuple[str, ...] = ()
    tensors: int = 0
    blockers: tuple[str, ...] = ()


class Format(Protocol):
    """One way of laying a checkpoint out in a file or folder."""

    name: str

    def recognise(self, probe: Probe) -> bool:
        """Whether the content is of this format; looks at as little as will tell."""
        ...

    def read(self, probe: Probe) -> Checkpoint:
        """The checkpoint, over the header alone.

        Raises:
            CorruptFile: it breaks a rule of the format.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        ...


@runtime_checkable
class WritableFormat(Format, Protocol):
    """A format that can be written too."""

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """What writing `checkpoint` would give; nothing is written yet.

        Raises:
            NotRepresentable: the format cannot hold a tensor that must be carried.
        """
        ...


@runtime_checkable
class EditableFormat(WritableFormat, Protocol):
    """A format whose files can be changed where they lie."""

    def plan_edit(self, checkpoint: Checkpoint) -> EditPlan | None:
        """What would make the file that `checkpoint` came from hold it; nothing is written yet.

        None where that takes a new file.

        Raises:
            NotRepresentable: the format cannot hold a tensor that must be carried.
        """
        ...
