"""The files and folders of this machine, asked by few questions."""

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
    from ckptool.files.recovery import open_recovered

    return open_recovered(path)


class Place:
    """The file system of this machine; what lies elsewhere answers the same questions."""

    def spelled(self, path: str) -> str:
        """Return the path in the form that others are made of by joining."""
        return path

    def pinned(self, path: str) -> str:
        """Return what a path that means another thing from time to time has been taken for."""
        return ""

    def exists(self, path: str) -> bool:
        """Return whether something is there, be it a link that leads nowhere."""
        return os.path.lexists(path)

    def is_folder(self, path: str) -> bool:
        """Return whether a folder is there."""
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        """Return whether a file is there; links are followed."""
        return os.path.isfile(path)

    def names(self, folder: str) -> frozenset[str]:
        """Return what is in a folder (empty: the one we are in).

        Raises:
            OSError: it is none, or may not be listed.
        """
        return frozenset(os.listdir(folder or "."))

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            OSError: there is none.
        """
        return os.path.getsize(path)

    def open(self, path: str) -> Source:
        """Open a file for reading, after what a killed edit left of it has been set right.

        Raises:
            UnreadableFile: as `open_source`.
        """
        return open_source(path)

    def expect(self, paths: Sequence[str]) -> None:
        """Make ready for files that are about to be opened one after the other."""

    def member(self, path: str, size: int) -> Source:
        """Return a file of a folder, which is opened when it is read and has `size` bytes then."""
        return FolderFile(path, size)

    def refuse_target(self, path: str, *, overwrite: bool) -> None:
        """Refuse a target that is not to be replaced; as `files.atomic.refuse_target`."""
        from ckptool.files.atomic import refuse_target  # most only read

        refuse_target(path, overwrite=overwrite)

    def new_files(
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
        """Give outputs for files that appear together; as `files.atomic.atomic_set`."""
        from ckptool.files.atomic import atomic_set

        return atomic_set(
            index,
            sizes,
            overwrite=overwrite,
            mode=mode,
            check=check,
            progress=progress,
            shared=shared,
        )
