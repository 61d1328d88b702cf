"""Files opened for reading, and the names of what lies beside them."""

from __future__ import annotations

import hashlib
import os

from ckptool.errors import FileMissing
from ckptool.files.source import FileSource

__all__ = ["UNFINISHED", "beside", "has_journal", "journal_path", "journalled", "open_source"]

_NAME_BYTES = 255
_ENDING_BYTES = 40
_JOURNAL = ".ckptool-journal"
UNFINISHED = ".tmp"
"""Behind the name of a journal that is being written."""


def beside(target: str, ending: str) -> str:
    """`.NAME` and `ending` (up to 40 bytes) in the folder of `target`, whose links are resolved.

    A name that would become too long is cut and gets a mark of its own.
    """
    folder, name = os.path.split(target)
    raw = os.fsencode(name)
    room = _NAME_BYTES - 1 - _ENDING_BYTES
    if len(raw) > room:
        mark = "-" + hashlib.sha256(raw).hexdigest()[:12]
        name = raw[: room - len(mark)].decode("utf-8", "ignore") + mark
    return os.path.join(folder, f".{name}{ending}")


def journal_path(target: str) -> str:
    """Where the journal of `target` lies: `.NAME.ckptool-journal` beside it, links resolved."""
    return beside(os.path.realpath(target), _JOURNAL)


def journalled(name: str) -> str | None:
    """The file whose journal is called `name` (if that was not cut); None for any other name."""
    if not name.startswith(".") or not name.endswith(_JOURNAL):
        return None
    return name[1 : -len(_JOURNAL)]


def has_journal(target: str) -> bool:
    """Whether a journal lies beside `target`, or the beginning of one."""
    path = journal_path(target)
    return os.path.lexists(path) or os.path.lexists(path + UNFINISHED)


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Open a file for reading, after what a killed edit left of it has been set right.

    Where the system does not let us set it right, the file reads as it was before the edit. What
    was done is said in a `CheckpointWarning`.

    Raises:
        FileMissing: there is no such file.
        FileBusy: another process is editing it; the message names that one.
        CorruptFile: a journal lies beside it that is damaged, or about other content; nothing was
            touched.
        UnreadableFile: any other refusal.
    """
    path = os.fspath(path)
    try:
        source = FileSource(path)
    except FileMissing:
        if not has_journal(path):
            raise
    else:
        edited = has_journal(path)
        if not edited and source.changed() is None:
            return source  # of one state: no edit had begun when it was opened
        source.close()
        if not edited:
            return open_source(path)
    # Imported here: next to every file is as its last writer left it, and opens at once.
    from ckptool.files.recovery import open_settled

    return open_settled(path)
