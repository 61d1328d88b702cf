"""`save`: plan, refuse what must be refused, write beside the target, rename."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, WriteError
from ckptool.files import FileSource
from ckptool.files.atomic import atomic_output
from ckptool.files.output import Progress
from ckptool.files.system import announce_read
from ckptool.formats import writer
from ckptool.paths import listed
from ckptool.transforms import single_state_dict
from ckptool.writing.receipt import Receipt
from ckptool.writing.target import check_target, is_a_source, target_format

__all__ = ["LEFT_OUT", "save"]

LEFT_OUT = "left-out"
"""The kind of the changes that name what a transform did not carry over."""


def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    overwrite: bool = False,
    in_place: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Receipt:
    """Write `checkpoint` to `path`, whole or not at all.

    Args:
        checkpoint: Open; its tensors are copied from the files that it was read from.
        path: Missing folders are made; a link's target is replaced and the link stays.
        format: `torch-zip`, `torch-legacy`, `safetensors`; see `target_format` for the default.
        overwrite: Replace another file that is there.
        in_place: Allow the target to be the source: a new file takes its place.
        strict: Refuse to leave anything out.
        dry_run: Plan only; refusals that do not depend on the disk are raised all the same.
        progress: Told bytes done and bytes in all.

    Raises:
        NotRepresentable: the format cannot hold a tensor (or, `strict`, anything else).
        TargetExists: the target is there, or is the source.
        NoSpace: the disk cannot hold it.
        WriteDenied: the system does not let us write there.
        TruncatedFile: the source became shorter meanwhile.
        UnreadableFile: the source was written to meanwhile.
        WriteError: in place, and another file has taken the place of the source meanwhile.
    """
    check_target(checkpoint, path, overwrite=overwrite, in_place=in_place)
    name = target_format(checkpoint, path, format)
    if name == "safetensors":
        checkpoint = _only_state_dict(checkpoint)
    plan = writer(name).plan(checkpoint)
    left_out = (*_left_behind(checkpoint, plan.format), *plan.left_out)
    if strict and left_out:
        raise NotRepresentable(
            f"{plan.format} cannot hold all of it; this would be left out: {'; '.join(left_out)}",
            file=checkpoint.path,
            hint="write it without --strict to leave that out",
        )
    if in_place and not overwrite and is_a_source(path, checkpoint.sources):
        _refuse_loss(checkpoint, plan.format, left_out)
    if not dry_run:
        for source in checkpoint.sources:
            announce_read(source.fileno())
        own = in_place and _names_a_source(path, checkpoint.sources)
        with atomic_output(
            path,
            plan.size,
            overwrite=overwrite or own,
            mode=_permissions(checkpoint),
            check=lambda: _check_sources(checkpoint.sources, path if own else None),
            progress=progress,
        ) as output:
            plan.write(output)
    return Receipt(
        path=os.fspath(path),
        format=plan.format,
        size=plan.size,
        tensors=plan.tensors,
        left_out=left_out,
        notes=plan.notes,
        blockers=plan.blockers,
        dry_run=dry_run,
    )


def _only_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """The one state dict alone; where there is none, the format itself says what is wrong."""
    try:
        return single_state_dict(checkpoint)
    except AmbiguousName:
        raise
    except NotFound:
        return checkpoint


def _refuse_loss(checkpoint: Checkpoint, target: str, left_out: tuple[str, ...]) -> None:
    """In place there is no other copy: nothing may go without being asked for."""
    lost = "; ".join(left_out)
    if target != checkpoint.format:
        lost = f"it would become a {target}" + (f", without {lost}" if lost else "")
    if lost:
        raise NotRepresentable(
            f"the {checkpoint.format} file would lose something in place: {lost}",
            file=checkpoint.path,
            hint="-o writes another file; --force does it all the same",
        )


def _names_a_source(path: str | os.PathLike[str], sources: Sequence[FileSource]) -> bool:
    """Whether the target is a source, or has the name of one that is no longer there."""
    names = {os.path.realpath(source.path) for source in sources}
    return is_a_source(path, sources) or os.path.realpath(path) in names


def _check_sources(sources: Sequence[FileSource], own: str | os.PathLike[str] | None) -> None:
    """Refuse to keep what was read of a file that changed; `own` must still be one that was read.

    Raises:
        UnreadableFile: a source has been written to.
        WriteError: another file is at `own`, or none.
    """
    for source in sources:
        source.check_unchanged()
    if own is not None and not is_a_source(own, sources):
        there = os.path.lexists(own)
        what = "another file has taken its place" if there else "it has been removed"
        raise WriteError(
            f"{what} meanwhile; nothing was written",
            file=own,
            hint="-o writes the result to another file",
        )


def _left_behind(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    """What the reader and the transforms did not take along, and what only one format has."""
    yield from checkpoint.details.left_behind
    for change in checkpoint.changes:
        if change.kind == LEFT_OUT:
            yield change.text
    entries = [key for key in checkpoint.details.header if key != "format"]
    if entries and target != checkpoint.format:
        yield f"entries of the header: {listed(entries)}"


def _permissions(checkpoint: Checkpoint) -> int | None:
    """The permission bits of the source, which a new file takes over."""
    if not checkpoint.sources:
        return None
    return stat.S_IMODE(os.fstat(checkpoint.sources[0].fileno()).st_mode) & 0o777
