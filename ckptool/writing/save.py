"""`save`: plan, refuse what must be refused, write, tell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable
from ckptool.files import FileSource
from ckptool.files.computed import ComputedSource
from ckptool.files.output import Progress
from ckptool.formats import SHARD_FORMATS, WRITABLE, writer
from ckptool.formats.base import EditableFormat
from ckptool.formats.shard_index import shards_named_by
from ckptool.statedict import what_there_is
from ckptool.transforms import single_state_dict
from ckptool.words import listed
from ckptool.writing.plans import Edited, Job, NewFile, NewSet, Plan, Untouched
from ckptool.writing.receipt import Receipt
from ckptool.writing.sharding import parse_size, plan_shards
from ckptool.writing.target import (
    FLAT,
    check_still_there,
    check_target,
    is_a_source,
    target_format,
)

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
    rewrite: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    max_shard_size: int | str | None = None,
    verify: bool | None = None,
    progress: Progress | None = None,
) -> Receipt:
    """Write `checkpoint` to `path`, whole or not at all.

    Args:
        checkpoint: Open; its tensors are copied from the files that it was read from.
        path: Missing folders are made; a link's target is replaced and the link stays.
        format: `torch-zip`, `torch-legacy`, `safetensors`, `safetensors-sharded`,
            `torch-sharded` (an index, even of one shard); see `target_format` for the default.
        overwrite: Replace another file that is there.
        in_place: Allow the target to be the source. It is edited where it lies, if its format and
            the changes allow it; else a new file takes its place.
        rewrite: In place, a new file even where an edit would do: dead bytes go.
        strict: Refuse to leave anything out that the user did not ask to leave out.
        dry_run: Plan only; refusals that do not depend on the disk are raised all the same.
        max_shard_size: Bytes of tensors in one file, or words such as `5GB`; more go into shards.
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
    own = in_place and _names_a_source(path, checkpoint.sources)
    if own:
        check_still_there(path, checkpoint.sources)
    check_target(checkpoint, path, overwrite=overwrite, in_place=in_place)
    name = target_format(checkpoint, path, format, sharded=max_shard_size is not None)
    if name in FLAT:
        checkpoint = _only_state_dict(checkpoint)
    anew = not own or rewrite or max_shard_size is not None
    plan = _planned(
        checkpoint, path, name, max_shard_size, anew=anew, indexed=format in SHARD_FORMATS
    )
    _check_files(checkpoint, plan, overwrite=overwrite, in_place=in_place)
    _refuse_hollow(checkpoint, plan)
    _refuse_left_out(checkpoint, plan, strict=strict)
    if in_place and not overwrite and is_a_source(path, checkpoint.sources):
        _refuse_loss(checkpoint, plan)
    job = Job(
        checkpoint,
        os.fspath(path),
        overwrite,
        own,
        _computes(checkpoint) if verify is None else verify,
        progress,
    )
    if not dry_run:
        plan.carry_out(job)
    return _receipt(plan, job, dry_run=dry_run)


def _planned(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    *,
    anew: bool,
    indexed: bool,
) -> Plan:
    """An edit of the source where that will do, unless `anew`; else a new file, or shards."""
    plan = None if anew else _in_place(checkpoint, path, format)
    if plan is not None:
        return plan
    left_behind = tuple(_left_behind(checkpoint, format))
    if format in SHARD_FORMATS:
        return _sharded(checkpoint, path, format, max_shard_size, left_behind, indexed=indexed)
    return NewFile(writer(format).plan(checkpoint), left_behind)


def _in_place(checkpoint: Checkpoint, path: str | os.PathLike[str], format: str) -> Plan | None:
    """The edit that makes the source hold the checkpoint; None where that takes a new file.

    A file with several names gets a new one: the journal of an edit lies beside one name only.
    """
    if checkpoint.root is checkpoint.original and format == checkpoint.format:
        return Untouched(checkpoint)
    known = writer(format) if format == checkpoint.format and format in WRITABLE else None
    if not isinstance(known, EditableFormat) or not is_a_source(path, checkpoint.sources):
        return None
    if os.stat(path).st_nlink > 1:
        return None
    plan = known.plan_edit(checkpoint)
    return None if plan is None else Edited(plan, format, tuple(_not_carried(checkpoint)))


def _sharded(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    left_behind: tuple[str, ...],
    *,
    indexed: bool,
) -> Plan:
    """Shards and an index, or, if not `indexed`, the one file that all of it fits in.

    Shards that the new index names no more stay, and are named.
    """
    most = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    same_files = most is None and is_a_source(path, checkpoint.sources)
    plan = plan_shards(
        checkpoint,
        path,
        format=format,
        max_shard_size=most,
        indexed=indexed,
        same_files=same_files,
    )
    if plan.index_path is None:
        return NewFile(plan.shards[0].plan, left_behind)
    new = {os.path.basename(shard.path) for shard in plan.shards}
    gone = tuple(name for name in shards_named_by(plan.index_path) if name not in new)
    return NewSet(plan, plan.index_path, left_behind, gone)


def _check_files(checkpoint: Checkpoint, plan: Plan, *, overwrite: bool, in_place: bool) -> None:
    """Refuse a set of which a file is in the way; those of the source itself are not in place."""
    for file, _ in plan.files:
        check_target(checkpoint, file, overwrite=overwrite, in_place=in_place)


def _receipt(plan: Plan, job: Job, *, dry_run: bool) -> Receipt:
    reports = () if dry_run else job.checkpoint.reports
    return Receipt(
        path=plan.files[-1][0] if plan.files else job.path,
        format=plan.format,
        size=plan.size,
        tensors=plan.tensors,
        source=job.checkpoint.path,
        changes=tuple(one for one in job.checkpoint.changes if one.kind != LEFT_OUT),
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


def _refuse_hollow(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse a result without what was asked for: its numbers, or anything at all."""
    needed = [one.text for one in checkpoint.changes if one.needed and not one.wanted]
    if needed:
        raise NotRepresentable(
            f"a state dict would lack what only its class saves: {listed(needed)}",
            file=checkpoint.path or None,
            hint="load it where that class is and save its state_dict(); or --drop-objects leaves "
            "it out",
        )
    empty = isinstance(checkpoint.root, (dict, list, tuple)) and not checkpoint.root
    hollow = not plan.tensors and (empty or plan.format in FLAT)
    if hollow and checkpoint.format != "memory":
        was = replace(checkpoint, root=checkpoint.original)
        there = [*what_there_is(was), *plan.left_out]
        if not there:  # an empty file: its copy lacks nothing
            return
        raise NotRepresentable(
            f"no tensor would be in the result; there is {listed(there)}",
            file=checkpoint.path or None,
        )


def _refuse_left_out(checkpoint: Checkpoint, plan: Plan, *, strict: bool) -> None:
    wanted = {change.text for change in checkpoint.changes if change.wanted}
    lost = [text for text in plan.left_out if text not in wanted]
    if strict and lost:
        raise NotRepresentable(
            f"{plan.format} cannot hold all of it; this would be left out: {'; '.join(lost)}",
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
            hint="write another file; or --force does it all the same",
        )


def _names_a_source(path: str | os.PathLike[str], sources: Sequence[FileSource]) -> bool:
    """Whether the target is a source, or has the name of one that is no longer there."""
    names = {os.path.realpath(source.path) for source in sources}
    return is_a_source(path, sources) or os.path.realpath(path) in names


def _left_behind(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    """What the reader and the transforms did not take along, and what only one format has."""
    yield from checkpoint.details.left_behind
    yield from checkpoint.details.unreferenced
    yield from _not_carried(checkpoint)
    entries = [key for key in checkpoint.details.header if key != "format"]
    if entries and target != checkpoint.format:
        yield f"entries of the header: {listed(entries)}"


def _not_carried(checkpoint: Checkpoint) -> Iterator[str]:
    """What the transforms did not take along."""
    return (change.text for change in checkpoint.changes if change.kind == LEFT_OUT)
