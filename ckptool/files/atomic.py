"""A file that appears whole or not at all: written beside the target, synced, renamed over it."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from ckptool.errors import FileBusy, TargetExists, WriteDenied
from ckptool.files.locking import undisturbed
from ckptool.files.names import beside
from ckptool.files.output import FileOutput, Progress
from ckptool.files.recovery import settle
from ckptool.files.refusals import check_space, who, worded
from ckptool.files.system import (
    close_to_rename,
    holder_of,
    lock,
    remove_unlocked,
    reserve,
    sync_folder,
)
from ckptool.files.temporary import folder_of, found_beside, private, seal

__all__ = ["atomic_output", "refuse_target"]

_TEMPORARY = r"\.ckptool-[0-9a-f]{12}\.tmp"


@contextmanager
def atomic_output(
    path: str | os.PathLike[str],
    size: int,
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[FileOutput]:
    """An output for exactly `size` bytes that become the file at `path` when the block ends well.

    Whatever else happens, a kill included, an old file stays as it was. The temporary file is
    removed; after a kill, by the next run that writes to the same name: whoever writes holds a
    lock on the temporary file, so one that nobody holds is debris (systems without such locks
    keep it). Links are resolved: what a link leads to is replaced, the link stays. `mode` is
    the permission bits of a new file (None: what the umask leaves); a file that is replaced hands
    on its own, and its owner and group where the system lets us. `check` is called when all is on
    the disk, right before the rename; what it raises leaves the old file. What a killed edit
    of the target left is set right first, and nobody can edit it meanwhile: a journal is never
    beside another file than its own.

    Raises:
        FileBusy: another process, or thread, is editing or writing it; the message says who.
        CorruptFile: the journal of an edit of other content lies beside the target.
        TargetExists: the target is there and not to be overwritten, or is a folder.
        NoSpace: the disk cannot hold `size` bytes.
        WriteDenied: the system does not let us write there.
        WriteError: another refusal of the system, or more or fewer bytes than `size`.
    """
    target = os.path.realpath(path)
    with worded(os.fspath(path)):
        old = refuse_target(path, overwrite=overwrite)
        settle(target)
        with undisturbed(target), folder_of(target) as folder:
            _remove_debris(target)
            check_space(folder, size)
            with _temporary_file(target, mode if old is None else 0o600) as file:
                _refuse_other_writers(target, file.name)
                reserve(file.fileno(), size)
                output = FileOutput(file.fileno(), size, progress, file.name)
                yield output
                seal(file, output, old, mode)
                close_to_rename(file)
                refuse_target(path, overwrite=overwrite)
                if check is not None:
                    check()
                os.replace(file.name, target)
        sync_folder(folder)


def refuse_target(path: str | os.PathLike[str], *, overwrite: bool) -> os.stat_result | None:
    """What the system says of a file that may be replaced; None where there is none.

    Raises:
        TargetExists: it is there and not to be overwritten, or is a folder.
        WriteDenied: it is a device, a pipe or the like.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise TargetExists("is a folder", file=path, hint="give the name of a file to write")
    if not stat.S_ISREG(old.st_mode):
        raise WriteDenied("is not a regular file", file=path, hint="give the name of a file")
    if not overwrite:
        raise TargetExists(
            "exists already", file=path, hint="--force replaces it; or choose another name"
        )
    return old


def _remove_debris(target: str) -> None:
    """Remove the temporary files of killed runs that were to become `target`."""
    for found in found_beside(target, _TEMPORARY):
        remove_unlocked(found)


def _refuse_other_writers(target: str, own: str) -> None:
    """Refuse to write what another process is writing, once our own file shows that we do.

    Of two that begin at the same moment both may be refused, never none.
    """
    for found in found_beside(target, _TEMPORARY):
        if found != own and (holder := holder_of(found)) is not None:
            raise FileBusy(
                f"is being written by {who(holder)}",
                file=target,
                hint="try again when it has finished, or choose another name",
            )


@contextmanager
def _temporary_file(target: str, mode: int | None) -> Iterator[FileIO]:
    """A new file beside the target, open and locked; it is removed where the block fails."""
    while True:
        temporary = beside(target, f".ckptool-{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb", buffering=0, opener=private(mode)) as file:
                lock(file.fileno())
                if not os.path.lexists(temporary):  # taken for debris before it was locked
                    continue
                yield file
                return
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
