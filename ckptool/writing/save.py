"""`save`: plan, refuse what must be refused, write, tell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable
from ckptool.files import FileSource
from ckptool.files.computed import ComputedSource
from ckptool.files.output import Progress
from ckptool.formats import writer
from ckptool.paths import listed
from ckptool.transforms import single_state_dict
from ckptool.writing.plans import Job, NewFile, Plan
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
    verify: bool | None = None,
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
        verify: Read the result back and compare every tensor before it takes its name. None: where
            tensors are computed (`cast`, `average`).
        progress: Told bytes done and bytes in all.

    Raises:
        NotRepresentable: the format cannot hold a tensor (or, `strict`, anything else).
        TargetExists: the target is there, or is the source.
        NoSpace: the disk cannot hold it.
        WriteDenied: the system does not let us write there.
        TruncatedFile: the source became shorter meanwhile.
        UnreadableFile: the source was written to meanwhile.
        WriteError: verification found a difference; or, in place, another file has taken the
            place of the source meanwhile.
    """
    check_target(checkpoint, path, overwrite=overwrite, in_place=in_place)
    name = target_format(checkpoint, path, format)
    if name == "safetensors":
        checkpoint = _only_state_dict(checkpoint)
    plan = NewFile(writer(name).plan(checkpoint), tuple(_left_behind(checkpoint, name)))
    _refuse_left_out(checkpoint, plan, strict=strict)
    if in_place and not overwrite and is_a_source(path, checkpoint.sources):
        _refuse_loss(checkpoint, plan)
    job = Job(
        checkpoint,
        os.fspath(path),
        overwrite,
        in_place and _names_a_source(path, checkpoint.sources),
        _computes(checkpoint) if verify is None else verify,
        progress,
    )
    if not dry_run:
        plan.carry_out(job)
    return _receipt(plan, job, dry_run=dry_run)


def _receipt(plan: Plan, job: Job, *, dry_run: bool) -> Receipt:
    reports = () if dry_run else job.checkpoint.reports
    return Receipt(
        path=job.path,
        format=plan.format,
        size=plan.size,
        tensors=plan.tensors,
        left_out=plan.left_out,
        notes=plan.notes,
        blockers=plan.blockers,
        dry_run=dry_run,
        written=plan.written,
        files=plan.files,
        verified=job.verify and not dry_run,
        outcomes=tuple(change for report in reports for change in report()),
    )


def _computes(checkpoint: Checkpoint) -> bool:
    """Whether a tensor's bytes are in no file."""
    return any(
        tensor.storage is not None
        and tensor.storage.data is not None
        and isinstance(tensor.storage.data.source, ComputedSource)
        for _, tensor in checkpoint.tensors()
    )


def _only_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """The one state dict alone; where there is none, the format itself says what is wrong."""
    try:
        return single_state_dict(checkpoint)
    except AmbiguousName:
        raise
    except NotFound:
        return checkpoint


def _refuse_left_out(checkpoint: Checkpoint, plan: Plan, *, strict: bool) -> None:
    if strict and plan.left_out:
        raise NotRepresentable(
            f"{plan.format} cannot hold all of it; this would be left out: "
            f"{'; '.join(plan.left_out)}",
            file=checkpoint.path,
            hint="write it without --strict to leave that out",
        )


def _refuse_loss(checkpoint: Checkpoint, plan: Plan) -> None:
    """In place there is no other copy: nothing may go without being asked for."""
    lost = "; ".join(plan.left_out)
    if plan.format != checkpoint.format:
        lost = f"it would become a {plan.format}" + (f", without {lost}" if lost else "")
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


def _left_behind(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    """What the reader and the transforms did not take along, and what only one format has."""
    yield from checkpoint.details.left_behind
    for change in checkpoint.changes:
        if change.kind == LEFT_OUT:
            yield change.text
    entries = [key for key in checkpoint.details.header if key != "format"]
    if entries and target != checkpoint.format:
        yield f"entries of the header: {listed(entries)}"
