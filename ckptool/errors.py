"""Every error that ckptool raises about a file or a request, one tree, and its one warning.

    CheckpointError
    ├── UnreadableFile          the file cannot be opened as a checkpoint
    │   ├── FileMissing         (FileNotFoundError)  no such file
    │   ├── FileDenied          (PermissionError)  the system refuses it
    │   ├── NotACheckpoint      (ValueError)  it is something else, named in the message
    │   ├── UnsupportedFormat   (ValueError)  a checkpoint of a kind that is not read yet
    │   ├── CorruptFile         (ValueError)  it breaks a rule of its own format
    │   │   └── TruncatedFile   (EOFError)  it ends before its content does
    │   └── LimitExceeded       (ValueError)  it asks for more than limits.py allows
    ├── NotFound                (KeyError)  no tensor, section or key of that name
    │   └── AmbiguousName       several answer to it
    ├── NameCollision           (ValueError)  two tensors would get one name
    ├── DeviceError             (ValueError)  a device word, or a tag that cannot be moved
    ├── UsageError              (ValueError)  options that do not fit together
    │   └── OutOfRange          (IndexError)  an index that a tensor does not have
    ├── WriteError              nothing was written, or the old file is still there
    │   ├── TargetExists        (FileExistsError)
    │   ├── NoSpace             (OSError)
    │   ├── WriteDenied         (PermissionError)
    │   └── NotRepresentable    (ValueError)  the target format cannot hold it
    ├── MatchError              (RuntimeError)  a state dict does not fit a model
    ├── TrainingError           (RuntimeError)  a training run cannot begin, or go on
    │   ├── PeerLost            another process of the run has gone
    │   └── WorkerFailed        one of the processes that were launched has failed, or died
    ├── FileBusy                (BlockingIOError)  another process is changing the file
    └── TorchMissing            (ImportError)  torch is needed and not installed

    CheckpointWarning           (UserWarning)  something of the file is not in what is returned, or
                                               a cut short edit of it was set right

A message is one sentence that names the file, the place in it and what is wrong. The hint, where
there is one, is the command or the step that helps.
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
    """The root: one sentence, and a hint where something helps."""

    message: str
    """The sentence."""
    file: str | None
    """The file that it is about, as it was given."""
    remedy: Remedy | None
    """What helps, as arguments of the library."""
    hint: str | None
    """What helps, in words; None where nothing is known."""
    usual_hint: ClassVar[str | None] = None
    """What helps where the one who raises knows nothing better."""

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        hint: str | Remedy | None = None,
    ) -> None:
        """Keep the parts; `file` is put before the message when it is shown."""
        super().__init__(message)
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.advise(hint)

    def advise(self, hint: str | Remedy | None) -> None:
        """Say what helps: a text, or arguments, which `remedy` keeps and `hint` has as a text."""
        hint = self.usual_hint if hint is None else hint
        self.remedy = None if isinstance(hint, str) else hint
        self.hint = None if hint is None else str(hint)
        others = [one for one in getattr(self, "__notes__", ()) if not one.startswith(_HINT)]
        self.__notes__ = others if self.hint is None else [*others, f"{_HINT}{self.hint}"]

    @property
    def sentence(self) -> str:
        """The message, with the file in front where it is known and not named already."""
        if self.file is None or _names(self.message, self.file):
            return self.message
        return f"{without_query(self.file)}: {self.message}"

    def __str__(self) -> str:
        """Return the sentence; the hint is a note, which a traceback shows below it."""
        return self.sentence


def without_query(file: str) -> str:
    """Return a path; of an address no user, password or query, which may hold a token."""
    if "://" not in file:
        return file
    return re.sub(r"(?<=://)[^/@]*@", "", file).partition("?")[0]


def _names(message: str, file: str) -> bool:
    """Return whether the file is named in the message, not only as a part of a word."""
    return re.search(rf"(?<![\w./-]){re.escape(file)}(?![\w/-])", message) is not None


class UnreadableFile(CheckpointError):
    """The file cannot be opened as a checkpoint."""


class FileMissing(UnreadableFile, FileNotFoundError):
    """There is no such file."""


class FileDenied(UnreadableFile, PermissionError):
    """The system does not let us read it."""


class NotACheckpoint(UnreadableFile, ValueError):
    """It is something else; the message says what."""


class UnsupportedFormat(UnreadableFile, ValueError):
    """A checkpoint of a kind that is not read; the message names it and the tool that reads it."""


class CorruptFile(UnreadableFile, ValueError):
    """It breaks a rule of its own format."""


class TruncatedFile(CorruptFile, EOFError):
    """It ends before its content does."""

    usual_hint = "save, copy or download the file again"


class LimitExceeded(UnreadableFile, ValueError):
    """It asks for more than `limits.Limits` allows."""

    usual_hint = (
        "no trainer writes such a file; if you trust it, raise the limits with "
        "ckptool.open(file, limits=ckptool.Limits(...))"
    )


class NotFound(CheckpointError, KeyError):
    """No tensor, value, section or key of that name."""


class AmbiguousName(NotFound):
    """Several answer to that name; the message lists them."""


class NameCollision(CheckpointError, ValueError):
    """Two tensors would get one name."""


class DeviceError(CheckpointError, ValueError):
    """A device word that is none, or a tag that cannot be moved."""


class UsageError(CheckpointError, ValueError):
    """Options that do not fit together."""


class OutOfRange(UsageError, IndexError):
    """An index that a tensor does not have, which ends a loop over it."""


class WriteError(CheckpointError):
    """Nothing was written; an old file at the target is untouched."""


class TargetExists(WriteError, FileExistsError):
    """The target is there already, or is the source itself."""


class NoSpace(WriteError, OSError):
    """The disk cannot hold the result."""


class WriteDenied(WriteError, PermissionError):
    """The system does not let us write there."""


class NotRepresentable(WriteError, ValueError):
    """The target format cannot hold it."""


class MatchError(CheckpointError, RuntimeError):
    """A state dict does not fit a model, which was not touched; `report` says all about it.

    A `RuntimeError` like the one that `Module.load_state_dict` raises. Where arguments help,
    `remedy` has them as data: `load_into(model, path, **dict(error.remedy.arguments))`.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        hint: str | Remedy | None = None,
        report: Any = None,
    ) -> None:
        """Keep the `matching.MatchReport` as well."""
        super().__init__(message, file=file, hint=hint)
        self.report = report


class FileBusy(CheckpointError, BlockingIOError):
    """Another process is changing the file at this moment; the message says which."""


class TrainingError(CheckpointError, RuntimeError):
    """A training run cannot begin, or cannot go on; what it had saved is still there."""


class PeerLost(TrainingError):
    """Another process of the run has gone: why, it says itself, or its launcher."""


class WorkerFailed(TrainingError):
    """One of the processes that were launched has failed, or died; the others have been ended.

    `traceback` is that of an error that nobody foresaw, as text; otherwise it is empty.
    """

    def __init__(self, message: str, traceback: str = "", *, hint: str | None = None) -> None:
        """Take what it said last, or what is known of its end."""
        super().__init__(message, hint=hint)
        self.traceback = traceback


class TorchMissing(CheckpointError, ImportError):
    """Torch is needed for this and is not installed."""


class CheckpointWarning(UserWarning):
    """Something of the file is not in what is returned, or was set right; the message names it."""


def warn(message: str) -> None:
    """Issue a `CheckpointWarning` at the line that called into the package, however deep this is.

    `warnings.warn` can do so by itself from Python 3.12 on (`skip_file_prefixes`).
    """
    inside = (__name__.partition(".")[0], "contextlib")  # which stands between functions of ours
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CheckpointWarning, stacklevel=level)
