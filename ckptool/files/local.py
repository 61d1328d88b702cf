"""The files and folders of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckptool.errors import FileMissing
from ckptool.files.source import FileSource, FolderFile, Progress, Shared, Source
from ckptool.files.temporary import has_journal

if TYPE_CHECKING:
    from ckptool.files.atomic import Outputs


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Open a file for reading; recover it first if an edit was interrupted.

    If the recovery fails, the file reads as it was before the edit. A `CheckpointWarning` reports
    the recovery.

    Raises:
        FileMissing: there is no such file.
        FileBusy: another process is editing it; the message has its number.
        CorruptFile: its journal is damaged or belongs to other content; nothing was changed.
        UnreadableFile: any other refusal.
    """
    path = os.fspath(path)
    try:
        source = FileSource(path)
    except FileMissing:
        if not has_journal(path):  # with one, it is an index that was not renamed yet
            raise
    else:
        is_edited = has_journal(path)
        if not is_edited and source.describe_change() is None:
            return source  # consistent: no edit had begun when it was opened
        source.close()
        if not is_edited:  # an edit has ended since: open the new content
            return open_source(path)
    # Imported here: almost no file needs a recovery.
    from ckptool.files.recovery import open_recovered

    return open_recovered(path)


class Place:
    """The file system of this machine; other places have the same methods."""

    def normalize_path(self, path: str) -> str:
        """Return the path in a form that can be joined with other names: here, the path itself."""
        return path

    def pin_revision(self, path: str) -> str:
        """Return the path with its revision if it can have one; empty here."""
        return ""

    def exists(self, path: str) -> bool:
        """Return True if the path exists, even as a broken link."""
        return os.path.lexists(path)

    def is_folder(self, path: str) -> bool:
        """Return True if the path is a folder."""
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        """Return True if the path is a file; links are followed."""
        return os.path.isfile(path)

    def list_names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder (empty: the current folder).

        Raises:
            OSError: it is not a folder, or cannot be listed.
        """
        return frozenset(os.listdir(folder or "."))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: it does not exist.
        """
        return os.path.getsize(path)

    def open(self, path: str) -> Source:
        """Open a file for reading; recover it first if an edit was interrupted.

        Raises:
            UnreadableFile: as `open_source`.
        """
        return open_source(path)

    def expect(self, paths: Sequence[str]) -> None:
        """Prepare for files that are about to be opened one after the other; not needed here."""

    def open_member(self, path: str, size: int) -> Source:
        """Return a file in a folder, which is opened when read and must then have `size` bytes."""
        return FolderFile(path, size)

    def refuse_target(self, path: str, *, overwrite: bool) -> None:
        """Refuse a target that must not be replaced; see `files.atomic.refuse_target`."""
        from ckptool.files.atomic import refuse_target  # most callers only read

        refuse_target(path, overwrite=overwrite)

    def open_outputs(
        self,
        index: str,
        sizes: Mapping[str, int],
        *,
        overwrite: bool,
        mode: int | None,
        check: Callable[[], None],
        progress: Progress | None,
        shared: Shared | None = None,
    ) -> AbstractContextManager[Outputs]:
        """Yield outputs for files that appear together; see `files.atomic.open_atomic_set`."""
        from ckptool.files.atomic import open_atomic_set

        return open_atomic_set(
            index,
            sizes,
            overwrite=overwrite,
            mode=mode,
            check=check,
            progress=progress,
            shared=shared,
        )
