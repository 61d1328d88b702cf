"""The errors that ckptool raises about a file or a request, and its one warning.

    CheckpointError
    ├── UnreadableFile          the file cannot be opened as a checkpoint
    │   ├── FileMissing         (FileNotFoundError)  no such file
    │   ├── FileDenied          (PermissionError)  no permission to read it
    │   ├── NotACheckpoint      (ValueError)  it is something else; the message says what
    │   ├── UnsupportedFormat   (ValueError)  a checkpoint that ckptool cannot read
    │   ├── CorruptFile         (ValueError)  it breaks a rule of its own format
    │   │   └── TruncatedFile   (EOFError)  it ends before its content does
    │   └── LimitExceeded       (ValueError)  it needs more than limits.py allows
    ├── NotFound                (KeyError)  no tensor, section or key has this name
    │   └── AmbiguousName       several match
    ├── NameCollision           (ValueError)  two tensors would get the same key
    ├── DeviceError             (ValueError)  not a device, or one that cannot be moved
    ├── UsageError              (ValueError)  options that cannot be combined
    │   └── OutOfRange          (IndexError)  an index that a tensor does not have
    ├── WriteError              nothing was written; an old file is unchanged
    │   ├── TargetExists        (FileExistsError)
    │   ├── NoSpace             (OSError)
    │   ├── WriteDenied         (PermissionError)
    │   └── NotRepresentable    (ValueError)  the target format cannot store it
    ├── MatchError              (RuntimeError)  a state dict does not fit a model
    ├── TrainingError           (RuntimeError)  a training run cannot begin or continue
    │   ├── PeerLost            another process of the run has gone
    │   └── WorkerFailed        a launched process has failed or died
    ├── FileBusy                (BlockingIOError)  another process is changing the file
    └── TorchMissing            (ImportError)  torch is needed and not installed

    CheckpointWarning           (UserWarning)  a part of the file is not in the result, or
                                               an interrupted edit was recovered

A message is one sentence with the file, the place in it and the problem. The hint, if any, is the
command or the step that helps.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ckptool.remedies import Remedy

__all__ = [
    "AmbiguousName",
    "CheckpointError",
    "CheckpointWarning",
    "CorruptFile",
    "DeviceError",
    "FileBusy",
    "FileDenied",
    "FileMissing",
    "LimitExceeded",
    "MatchError",
    "NameCollision",
    "NoSpace",
    "NotACheckpoint",
    "NotFound",
    "NotRepresentable",
    "OutOfRange",
    "PeerLost",
    "TargetExists",
    "TorchMissing",
    "TrainingError",
    "TruncatedFile",
    "UnreadableFile",
    "UnsupportedFormat",
    "UsageError",
    "WorkerFailed",
    "WriteDenied",
    "WriteError",
    "warn",
]

_HINT = "hint: "


class CheckpointError(Exception):
    """The base class: one sentence, and a hint if something helps."""

    message: str
    """The sentence."""
    file: str | None
    """The file, as it was given."""
    remedy: Remedy | None
    """The remedy, as arguments of the library."""
    hint: str | None
    """The hint in words; None if no remedy is known."""
    usual_hint: ClassVar[str | None] = None
    """The default hint of the class."""

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        hint: str | Remedy | None = None,
    ) -> None:
        """Store the parts; `file` is shown before the message."""
        super().__init__(message)
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.advise(hint)

    def advise(self, hint: str | Remedy | None) -> None:
        """Set the hint: a text, or a `remedy`, which `hint` shows as text."""
        hint = self.usual_hint if hint is None else hint
        self.remedy = None if isinstance(hint, str) else hint
        self.hint = None if hint is None else str(hint)
        other_notes = [
            note for note in getattr(self, "__notes__", ()) if not note.startswith(_HINT)
        ]
        self.__notes__ = other_notes if self.hint is None else [*other_notes, f"{_HINT}{self.hint}"]

    @property
    def sentence(self) -> str:
        """The message, after the file if that is known and not in the message."""
        if self.file is None or _mentions_file(self.message, self.file):
            return self.message
        return f"{without_query(self.file)}: {self.message}"

    def __str__(self) -> str:
        """Return the sentence; the hint is a note, which a traceback shows below it."""
        return self.sentence


def without_query(file: str) -> str:
    """Return a path; remove user, password and query from an address, which may be secrets."""
    if "://" not in file:
        return file
    return re.sub(r"(?<=://)[^/@]*@", "", file).partition("?")[0]


def _mentions_file(message: str, file: str) -> bool:
    """Return True if the message contains the file, not only as a part of a word."""
    return re.search(rf"(?<![\w./-]){re.escape(file)}(?![\w/-])", message) is not None


class UnreadableFile(CheckpointError):
    """The file cannot be opened as a checkpoint."""


class FileMissing(UnreadableFile, FileNotFoundError):
    """The file does not exist."""


class FileDenied(UnreadableFile, PermissionError):
    """No permission to read the file."""


class NotACheckpoint(UnreadableFile, ValueError):
    """It is something else; the message says what."""


class UnsupportedFormat(UnreadableFile, ValueError):
    """A checkpoint that ckptool cannot read; the message has its kind and a tool that can."""


class CorruptFile(UnreadableFile, ValueError):
    """It breaks a rule of its own format."""


class TruncatedFile(CorruptFile, EOFError):
    """It ends before its content does."""

    usual_hint = "save, copy or download the file again"


class LimitExceeded(UnreadableFile, ValueError):
    """It needs more than `limits.Limits` allows."""

    usual_hint = (
        "no trainer writes such a file; if you trust it, raise the limits with "
        "ckptool.open(file, limits=ckptool.Limits(...))"
    )


class NotFound(CheckpointError, KeyError):
    """No tensor, value, section or key has this name."""


class AmbiguousName(NotFound):
    """Several match this name; the message lists them."""


class NameCollision(CheckpointError, ValueError):
    """Two tensors would get the same key."""


class DeviceError(CheckpointError, ValueError):
    """It is not a device, or one that cannot be moved."""


class UsageError(CheckpointError, ValueError):
    """Options that cannot be combined."""


class OutOfRange(UsageError, IndexError):
    """An index that a tensor does not have, which ends a loop over it."""


class WriteError(CheckpointError):
    """Nothing was written; an old file at the target is unchanged."""


class TargetExists(WriteError, FileExistsError):
    """The target exists, or is the source itself."""


class NoSpace(WriteError, OSError):
    """The disk cannot hold the result."""


class WriteDenied(WriteError, PermissionError):
    """No permission to write there."""


class NotRepresentable(WriteError, ValueError):
    """The target format cannot store it."""


class MatchError(CheckpointError, RuntimeError):
    """A state dict does not fit a model, which was not changed; `report` has the details.

    A `RuntimeError` like the one from `Module.load_state_dict`. If arguments help, `remedy` has
    them as data: `load_into(model, path, **dict(error.remedy.arguments))`.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        hint: str | Remedy | None = None,
        report: Any = None,
    ) -> None:
        """Store the `matching.MatchReport` as well."""
        super().__init__(message, file=file, hint=hint)
        self.report = report


class FileBusy(CheckpointError, BlockingIOError):
    """Another process is changing the file; the message has its number."""


class TrainingError(CheckpointError, RuntimeError):
    """A training run cannot begin or continue; its saved checkpoints are unchanged."""


class PeerLost(TrainingError):
    """Another process of the run has ended; it or its launcher reports why."""


class WorkerFailed(TrainingError):
    """A launched process has failed or died; the others were stopped.

    `traceback` is the text of an unexpected error's traceback; otherwise it is empty.
    """

    def __init__(self, message: str, traceback: str = "", *, hint: str | None = None) -> None:
        """Store its last message, or the known facts of its end."""
        super().__init__(message, hint=hint)
        self.traceback = traceback


class TorchMissing(CheckpointError, ImportError):
    """This needs torch, which is not installed."""


class CheckpointWarning(UserWarning):
    """A part of the file is not in the result, or was repaired; the message says what."""


def warn(message: str) -> None:
    """Issue a `CheckpointWarning` at the line that called the package.

    From Python 3.12, `warnings.warn` can do this (`skip_file_prefixes`).
    """
    inside = (__name__.partition(".")[0], "contextlib")  # contextlib is between our functions
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CheckpointWarning, stacklevel=level)
