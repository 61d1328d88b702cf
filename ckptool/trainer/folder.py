"""The folder of a run: whether it can be written, and what an earlier run has left in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ckptool
from ckptool.errors import CheckpointError, TargetExists, TrainingError
from ckptool.files.atomic import atomic_output
from ckptool.files.journal import occupied
from ckptool.files.system import worded
from ckptool.trainer import part_folders
from ckptool.trainer.metrics import Metrics

__all__ = [
    "Kept",
    "kept",
    "one_run_in",
    "refuse_earlier",
    "remove",
    "remove_checkpoint",
    "remove_numbered",
    "require_writable",
]

_NAME = re.compile(r"(last|best|step-(\d{8,}))(\.pth)?")


@dataclass(frozen=True)
class Kept:
    """A checkpoint in the folder of a run.

    Attributes:
        path: The file, or the folder that it is.
        name: `last`, `best` or `step-00000012`.
        step: After which step it was written; None: neither its name nor its content says so.
        written: When, in nanoseconds of the system's clock.
    """

    path: str
    name: str
    step: int | None
    written: int


def kept(folder: str) -> list[Kept]:
    """The checkpoints that are there, the newest first: by step, or by time where one has none.

    Of one step `last` is before the numbered one, and that before `best`. A header is read where
    the name does not tell the step.
    """
    found = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        name = _NAME.fullmatch(entry.name)
        if name is not None:
            step = int(name[2]) if name[2] else _step_in(entry.path)
            found.append(Kept(entry.path, name[1], step, entry.stat().st_mtime_ns))
    order = ("best", "step", "last")
    are_told = all(one.step is not None for one in found)
    return sorted(
        found,
        key=lambda one: (
            one.step if are_told and one.step is not None else one.written,
            order.index(one.name[:4]),
        ),
        reverse=True,
    )


def _step_in(path: str) -> int | None:
    values = os.path.join(path, part_folders.VALUES) if os.path.isdir(path) else path
    try:
        with ckptool.open(values) as held:
            step = held.root.get("step") if isinstance(held.root, dict) else None
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


@contextmanager
def one_run_in(folder: str) -> Iterator[None]:
    """Make the folder, and let no other run begin in it meanwhile; left empty, it goes again.

    What a kill has left half done in it is finished, or removed.

    Raises:
        TargetExists: a file is in its place.
        FileBusy: a run is under way there; its process is named.
        WriteError: the system refuses.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise TargetExists(
            "is a file, and a run wants a folder", file=folder, hint="--out names a folder"
        )
    with occupied(folder):
        part_folders.settle(folder)
        yield


class _Rehearsed(Exception):
    pass


def require_writable(folder: str, name: str = "last.pth", size: int = 1) -> None:
    """Write a file of `size` bytes in the folder, all but its name.

    Raises:
        TargetExists: a folder is where the file is to be.
        NoSpace: the disk cannot hold as much.
        WriteDenied: the system does not let us write there.
        FileBusy: another process is changing the file.
        WriteError: another refusal of the system.
    """
    target = os.path.join(folder, name)
    with suppress(_Rehearsed), atomic_output(target, max(size, 1), overwrite=True):
        raise _Rehearsed


def refuse_earlier(folder: str, *, origin: str | None, step: int) -> None:
    """Refuse to mix runs: what is in the folder must lead to where this one begins.

    A run that begins anew, or goes on from a checkpoint elsewhere, wants a folder without
    checkpoints and figures; one that goes on from a checkpoint of the folder, none of later steps.

    Args:
        folder: That of the run.
        origin: The checkpoint that it goes on from; None: it begins anew.
        step: The step after which it begins.

    Raises:
        TrainingError: there are others, which are named.
    """
    others = [os.path.basename(one.path) for one in _others(folder, origin, step)]
    is_within = origin is not None and _is_in(origin, folder)
    if not others and not is_within and Metrics(folder).has_lines:
        others = ["metrics.jsonl"]
    if not others:
        return
    names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    what = f"checkpoints of later steps than {step}" if is_within else "an earlier run"
    raise TrainingError(
        f"{folder} holds {what}: {names}",
        hint="--resume auto goes on from the newest, --overwrite removes them, another --out keeps "
        "them",
    )


def remove(folder: str, *, origin: str | None, step: int) -> None:
    """Remove what `refuse_earlier` names; figures are cut back by those who write them."""
    for one in _others(folder, origin, step):
        remove_checkpoint(one.path)


def remove_numbered(folder: str, keep: int) -> None:
    """Remove the checkpoints of steps but the last `keep`."""
    found = [one for one in map(_NAME.fullmatch, os.listdir(folder)) if one is not None and one[2]]
    for one in sorted(found, key=lambda name: int(name[2]))[:-keep]:
        remove_checkpoint(os.path.join(folder, one[0]))


def remove_checkpoint(path: str) -> None:
    """Remove a file, or the folder that it is; nothing where there is none."""
    with worded(path), suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            part_folders.remove(path)
        else:
            os.unlink(path)


def _others(folder: str, origin: str | None, step: int) -> Iterable[Kept]:
    is_within = origin is not None and _is_in(origin, folder)
    for one in kept(folder):
        if origin is not None and os.path.exists(origin) and os.path.samefile(one.path, origin):
            continue
        if not is_within or one.step is None or one.step > step:
            yield one


def _is_in(path: str, folder: str) -> bool:
    return os.path.realpath(os.path.dirname(path) or ".") == os.path.realpath(folder)
