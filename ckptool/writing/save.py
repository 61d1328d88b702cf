"""Write a checkpoint: plan, refuse, write, and say what was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Change, Checkpoint, alone
from ckptool.core.placeholders import placeholders_of, refuse_placeholders
from ckptool.core.sections import what_there_is
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, UsageError, without_query
from ckptool.files import Source
from ckptool.files.computed import ComputedSource
from ckptool.files.place import is_address, place_of
from ckptool.files.source import Progress, far_bytes
from ckptool.formats import format_of, shard_of, writer
from ckptool.formats.base import EditableFormat, FolderFormat, NewFile, WritePlan
from ckptool.remedies import Remedy
from ckptool.symbolic.encoder import blockers
from ckptool.transforms import single_state_dict
from ckptool.words import counted, listed
from ckptool.writing.divided import WriterGroup, finish_divided, write_divided
from ckptool.writing.job import Job, carry_out
from ckptool.writing.sharding import parse_size, plan_shards
from ckptool.writing.target import (
    check_address,
    check_still_there,
    check_target,
    is_a_source,
    remarks,
    target_file,
    target_format,
)


@dataclass(frozen=True, slots=True, repr=False)
class Receipt(Result):
    """What one write did."""

    path: str
    """The file; of a checkpoint in shards, the index; of the files of a recipe, their folder."""
    format: str
    """As `Checkpoint.format`."""
    size: int
    """Bytes of the file, of all files together where there are several."""
    tensors: int
    """Names of tensors in it, tied ones each."""
    source: str = ""
    """The file that it was made from, the first where there are several."""
    changes: tuple[Change, ...] = ()
    """What was done to the content, but for what was left out."""
    outcomes: tuple[Change, ...] = ()
    """What only the computation told: how many elements overflowed, lost precision, ..."""
    left_out: tuple[str, ...] = ()
    """What the source has and the file has not, a phrase each."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user."""
    blockers: tuple[str, ...] = ()
    """Classes in it that keep `torch.load(weights_only=True)` from taking it."""
    written: int = 0
    """Bytes that went to the disk; less than `size` where the file was edited in place."""
    files: tuple[tuple[str, int], ...] = ()
    """Every file with its bytes, where there are several: the shards, then their index."""
    verified: bool = False
    """Read back and compared."""
    dry_run: bool = False
    """Planned only: nothing was written."""

    @property
    def edited(self) -> bool:
        """Whether the file was changed where it lies, not written anew."""
        return 0 < self.written < self.size

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.receipt/1`."""
        return {
            "schema": "ckptool.receipt/1",
            "source": self.source,
            "file": self.path,
            "format": self.format,
            "size": self.size,
            "tensors": self.tensors,
            "written": self.written,
            "files": [{"file": path, "size": length} for path, length in self.files],
            "verified": self.verified,
            "dry_run": self.dry_run,
            "changes": _documents(self.changes),
            "outcomes": _documents(self.outcomes),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "weights_only_blockers": list(self.blockers),
        }


def _documents(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [{"kind": change.kind, "text": change.text, "count": change.count} for change in changes]


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
    files_from: str | os.PathLike[str] | None = None,
    to_folder: bool = False,
    apart: Callable[[Checkpoint], Mapping[str, Checkpoint]] | None = None,
    progress: Progress | None = None,
    group: WriterGroup | None = None,
    options: str = "",
) -> Receipt:
    """Write `checkpoint` to `path`, whole or not at all.

    `overwrite`, `in_place`, `rewrite`, `strict`, `dry_run`, `max_shard_size`, `verify`, `progress`
    and the errors are those of `Checkpoint.save`. Missing folders are made; a link's target is
    replaced and the link stays. See `target_format` for the default of `format`. `files_from` is
    the folder whose configuration, tokenizer and processor files are copied beside the weights.
    With `to_folder` the target is a folder, and without `files_from` that of the source has them.
    `apart` divides the checkpoint into several files by their names, which go into the folder of
    `path`. A `group` of processes writes together: each calls this in the same way, and `options`,
    what was asked for in words of any kind, are what such a write is known by again.
    """
    check_address(path, in_place=in_place, verify=verify)
    is_far = is_address(path)
    if apart is None:
        path = _file_of(checkpoint, path, format, files_from, to_folder=to_folder)
    own = in_place and _names_a_source(path, checkpoint.sources)
    if own:
        check_still_there(path, checkpoint.sources)
    check_target(checkpoint, path, overwrite=overwrite, in_place=in_place)
    name = target_format(checkpoint, path, format, sharded=max_shard_size is not None)
    format_of(checkpoint.format).refuse_unusable(checkpoint)
    if format_of(name).flat and apart is None:
        checkpoint = _only_state_dict(checkpoint)
        refuse_placeholders(checkpoint)
    else:
        checkpoint = checkpoint.with_late_values()
    if format_of(name).index_name and checkpoint.root is not checkpoint.original:
        rewrite = False  # such a folder is not written over itself, only its index
    anew = not own or rewrite or max_shard_size is not None
    if apart is not None:
        plan = _apart(checkpoint, os.path.dirname(path), name, apart(checkpoint))
    else:
        indexed = bool(format and shard_of(format))
        plan = _planned(checkpoint, path, name, max_shard_size, anew=anew, indexed=indexed)
    job = Job(
        checkpoint,
        os.fspath(path),
        overwrite,
        own,
        _computes(checkpoint) and not is_far if verify is None else verify,
        progress,
    )
    if to_folder or files_from is not None:
        plan, more = _accompanied(plan, job, files_from, to_folder=to_folder)
        checkpoint = checkpoint.with_root(checkpoint.root, *more)
        job = replace(job, checkpoint=checkpoint)
    is_divided = plan.index and apart is None and not (dry_run or is_far)
    if group and is_divided and group.first(lambda: finish_divided(plan, job, options)):
        return _receipt(plan, job, group, dry_run=False)
    for file in plan.files if plan.index else ():
        check_target(checkpoint, file.path, overwrite=overwrite, in_place=in_place)
    refuse_empty(checkpoint, plan)
    notes = [*plan.notes, *remarks(checkpoint, path, format, name)]
    if found := placeholders_of(checkpoint):
        notes.append(f"{found.text}; {found.hint}")
    if all(change.kind != "fit" for change in checkpoint.changes):
        notes += format_of(checkpoint.format).layout_notes(checkpoint)
    if any(source.is_far for source in checkpoint.sources):
        notes += _from_afar(checkpoint, dry_run=dry_run)
    if dry_run and (plan.index or os.path.isdir(checkpoint.path)):
        notes.append(_room(plan, path))
    plan = replace(plan, notes=tuple(notes))
    _refuse_left_out(checkpoint, plan, strict=strict)
    if in_place and not overwrite and is_a_source(path, checkpoint.sources):
        _refuse_loss(checkpoint, plan)
    if not dry_run:
        if group is None:
            _carry_out_by_folder(plan, job)
        elif is_divided and len(plan.files) > 2:
            write_divided(plan, job, group, options)
        else:
            group.all(0)  # that each has seen what is there before the first writes
            group.first(lambda: _carry_out_by_folder(plan, job))
    receipt = _receipt(plan, job, group, dry_run=dry_run)
    return receipt if apart is None else replace(receipt, path=os.path.dirname(path))


def _file_of(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None,
    files_from: str | os.PathLike[str] | None,
    *,
    to_folder: bool,
) -> str | os.PathLike[str]:
    """Return the file to write: of a folder that one in it, of the source's own the index."""
    if to_folder or format_of(format or "").index_name:
        return target_file(checkpoint, path, format, to_folder=to_folder, files_from=files_from)
    index = target_file(checkpoint, path, checkpoint.format, to_folder=False)
    return index if _names_a_source(index, checkpoint.sources) else path


def _planned(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    *,
    anew: bool,
    indexed: bool,
) -> WritePlan:
    """Plan an edit of the source if that will do, unless `anew`; else a new file, or shards."""
    plan = None if anew else _in_place(checkpoint, path, format)
    if plan is not None:
        return plan
    if shard_of(format):
        plan = _sharded(checkpoint, path, format, max_shard_size, indexed=indexed)
    elif isinstance(known := writer(format), FolderFormat):
        if is_a_source(path, checkpoint.sources):
            raise NotRepresentable(
                "a folder cannot be written over itself; --in-place can only change its index",
                file=checkpoint.path,
                hint="write to another folder with -o",
            )
        plan = _placed(known.plan(checkpoint, _most(max_shard_size)), path)
    else:
        plan = known.plan(checkpoint)
    return replace(plan, left_out=(*_left_behind(checkpoint, format), *plan.left_out))


def _apart(
    checkpoint: Checkpoint, folder: str, format: str, parts: Mapping[str, Checkpoint]
) -> WritePlan:
    """Return the plan of one file for each part, by its name in the folder."""
    plans = {os.path.join(folder, name): writer(format).plan(one) for name, one in parts.items()}
    every = plans.values()
    return WritePlan(
        format,
        tuple(plan.files[0]._replace(path=path) for path, plan in plans.items()),
        tensors=sum(plan.tensors for plan in every),
        left_out=(
            *_left_behind(checkpoint, format),
            *dict.fromkeys(text for plan in every for text in plan.left_out),
        ),
        notes=tuple(dict.fromkeys(text for plan in every for text in plan.notes)),
        blockers=tuple(dict.fromkeys(name for plan in every for name in plan.blockers)),
    )


def _carry_out_by_folder(plan: WritePlan, job: Job) -> None:
    """Execute a plan; the files of each folder are written as a set, whole or not at all."""
    folders: dict[str, list[NewFile]] = {}
    for file in plan.files:
        folders.setdefault(os.path.dirname(file.path), []).append(file)
    for files in folders.values() or ((),):
        carry_out(replace(plan, files=tuple(files)), job)


def _accompanied(
    plan: WritePlan, job: Job, files_from: str | os.PathLike[str] | None, *, to_folder: bool
) -> tuple[WritePlan, Sequence[Change]]:
    """Return the plan with the files that belong next to the weights in a folder, and warnings."""
    from ckptool.writing.companions import folder_of_companions, with_companions

    if not to_folder:
        raise UsageError(
            "files_from needs a folder as the target, which is one file",
            hint="write to a folder: ckptool convert SOURCE FOLDER/",
        )
    found = files_from is None
    folder = folder_of_companions(job.checkpoint) if files_from is None else files_from
    target = os.path.dirname(job.path)
    if folder is None or (found and os.path.realpath(folder) == os.path.realpath(target)):
        return plan, ()
    keeps = found and not job.overwrite
    return with_companions(plan, job.path, folder, job.checkpoint, keeps=keeps)


def _room(plan: WritePlan, path: str | os.PathLike[str]) -> str:
    """Return how much is to be written, and how much the disk holds."""
    files = counted(len(plan.files), "file")
    if is_address(path):
        return f"{files} of {plan.written:,} bytes"
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    return f"{files} of {plan.written:,} bytes; the disk has {free:,} bytes free"


def _from_afar(checkpoint: Checkpoint, *, dry_run: bool) -> Iterator[str]:
    """Yield what is read of another machine: at which commit, and how much is to come."""
    if pinned := place_of(checkpoint.path).pinned(checkpoint.path):
        yield f"read at revision {pinned}"
    if dry_run:
        storages = (tensor.storage for _, tensor in checkpoint.tensors())
        data = far_bytes(one.data for one in storages if one is not None and one.data is not None)
        yield f"would fetch {data:,} bytes of tensor data"


def _in_place(
    checkpoint: Checkpoint, path: str | os.PathLike[str], format: str
) -> WritePlan | None:
    """Return the edit that makes the source hold the checkpoint; None where that takes a new file.

    A file with several names gets a new one: the journal of an edit lies beside one name only.
    """
    if checkpoint.root is checkpoint.original and format == checkpoint.format:
        tensors, refused = sum(1 for _ in checkpoint.tensors()), blockers(checkpoint.root)
        return WritePlan(format, kept=checkpoint.details.size, tensors=tensors, blockers=refused)
    known = format_of(format) if format == checkpoint.format else None
    if not isinstance(known, EditableFormat) or not is_a_source(path, checkpoint.sources):
        return None
    if os.stat(path).st_nlink > 1:
        return None
    plan = known.plan_edit(checkpoint)
    if plan and isinstance(known, FolderFormat):
        plan = _placed(plan, path)
    return plan and replace(plan, left_out=tuple(_not_carried(checkpoint)))


def _placed(plan: WritePlan, path: str | os.PathLike[str]) -> WritePlan:
    """Return the plan of a folder with the paths of its files, of which `path` is the index."""
    folder = os.path.dirname(path)
    files = (file._replace(path=os.path.join(folder, file.path)) for file in plan.files)
    return replace(plan, files=tuple(files))


def _most(size: int | str | None) -> int | None:
    return parse_size(size) if isinstance(size, str) else size


def _sharded(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    *,
    indexed: bool,
) -> WritePlan:
    """Shards and an index, or, if not `indexed`, the one file that all of it fits in.

    Shards that the new index names no more stay, and are named.
    """
    most = _most(max_shard_size)
    same_files = most is None and is_a_source(path, checkpoint.sources)
    plan = plan_shards(
        checkpoint,
        path,
        format=format,
        max_shard_size=most,
        indexed=indexed,
        same_files=same_files,
    )
    if not plan.index:
        return plan
    new = {os.path.basename(file.path) for file in plan.files}
    from ckptool.formats.sharded import shards_named_by  # most writes have no index

    gone = [name for name in shards_named_by(plan.index) if name not in new]
    stays = f"kept shards that the new index does not list: {listed(gone)}"
    return replace(plan, notes=(*plan.notes, stays)) if gone else plan


def _receipt(plan: WritePlan, job: Job, group: WriterGroup | None, *, dry_run: bool) -> Receipt:
    reports = () if dry_run else job.checkpoint.reports
    gather = group.all if group is not None and plan.index else alone
    return Receipt(
        path=plan.index or job.path,
        format=plan.format,
        size=plan.size,
        tensors=plan.tensors,
        source=without_query(job.checkpoint.path),
        changes=(
            *_reformatted(job.checkpoint, plan),
            *(one for one in job.checkpoint.changes if one.kind != LEFT_OUT),
        ),
        left_out=plan.left_out,
        notes=plan.notes,
        blockers=plan.blockers,
        dry_run=dry_run,
        written=plan.written,
        files=tuple((file.path, file.size) for file in plan.files if plan.index),
        verified=job.verify and not dry_run,
        outcomes=tuple(change for report in reports for change in report(gather)),
    )


def _reformatted(checkpoint: Checkpoint, plan: WritePlan) -> Iterator[Change]:
    """Yield the change of format, or within one format of the pickle protocol."""
    protocol = checkpoint.details.protocol
    if plan.format != checkpoint.format and not checkpoint.in_memory:
        yield Change("format", f"converted {checkpoint.format} to {plan.format}")
    elif plan.written and protocol not in (None, 2):
        yield Change("format", f"changed pickle protocol {protocol} to 2")


def _computes(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor's bytes are in no file."""
    return any(
        tensor.storage is not None
        and tensor.storage.data is not None
        and isinstance(tensor.storage.data.source, ComputedSource)
        for _, tensor in checkpoint.tensors()
    )


def _only_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """Return the one state dict; if there is none, the format itself says what is wrong."""
    try:
        return single_state_dict(checkpoint)
    except AmbiguousName:
        raise
    except NotFound:
        return checkpoint


def refuse_empty(checkpoint: Checkpoint, plan: WritePlan) -> None:
    """Refuse a result without what was asked for: its numbers, or anything at all.

    Raises:
        NotRepresentable: naming what would be missing.
    """
    needed = [one.text for one in checkpoint.changes if one.needed and not one.wanted]
    if needed:
        raise NotRepresentable(
            f"a state dict cannot contain what only the class saves: {listed(needed)}",
            file=checkpoint.path or None,
            hint="save its state_dict() where the class is importable, or add --drop-objects "
            "to leave it out",
        )
    empty = isinstance(checkpoint.root, (dict, list, tuple)) and not checkpoint.root
    if not plan.tensors and (empty or format_of(plan.format).flat) and not checkpoint.in_memory:
        was = replace(checkpoint, root=checkpoint.original)
        there = [*what_there_is(was), *plan.left_out]
        if not there:  # an empty file: its copy lacks nothing
            return
        raise NotRepresentable(
            f"the result would have no tensors; the file has {listed(there)}",
            file=checkpoint.path or None,
        )


def _refuse_left_out(checkpoint: Checkpoint, plan: WritePlan, *, strict: bool) -> None:
    wanted = {change.text for change in checkpoint.changes if change.wanted}
    lost = [text for text in plan.left_out if text not in wanted]
    if strict and lost:
        raise NotRepresentable(
            f"{plan.format} cannot store everything; left out would be: {'; '.join(lost)}",
            file=checkpoint.path,
            hint="remove --strict to leave them out",
        )


def _refuse_loss(checkpoint: Checkpoint, plan: WritePlan) -> None:
    """Refuse a change in place that loses something unasked: there is no other copy."""
    lost = "; ".join(plan.left_out)
    if plan.format != checkpoint.format:
        lost = f"it would become a {plan.format}" + (f", without {lost}" if lost else "")
    if lost:
        raise NotRepresentable(
            f"an in-place edit of the {checkpoint.format} file would lose data: {lost}",
            file=checkpoint.path,
            hint=Remedy((("overwrite", True),), " does it anyway", "write another file; or "),
        )


def _names_a_source(path: str | os.PathLike[str], sources: Sequence[Source]) -> bool:
    """Return whether the target is a source, or has the name of one that is no longer there."""
    names = {os.path.realpath(source.name) for source in sources}
    return is_a_source(path, sources) or os.path.realpath(path) in names


def _left_behind(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    """Yield what the reader and the transforms did not take along, and what only one format has."""
    yield from checkpoint.details.left_behind
    yield from checkpoint.details.unreferenced
    yield from _not_carried(checkpoint)
    entries = [key for key in checkpoint.details.header if key != "format"]
    if entries and target != checkpoint.format and not format_of(target).header_key:
        yield f"header entries: {listed(entries)}"


def _not_carried(checkpoint: Checkpoint) -> Iterator[str]:
    """Return what the transforms did not take along."""
    return (change.text for change in checkpoint.changes if change.kind == LEFT_OUT)
