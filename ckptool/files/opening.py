"""Files opened for reading, after a killed edit of them has been finished or rolled back."""

from __future__ import annotations

import os

from ckptool.errors import FileMissing
from ckptool.files.beside import has_journal
from ckptool.files.source import FileSource

__all__ = ["open_source"]


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
