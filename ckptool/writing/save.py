"""Write a checkpoint: plan, check, write, and return a receipt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Change, Checkpoint, gather_alone
from ckptool.core.placeholders import find_placeholders, refuse_placeholders
from ckptool.core.quantization_config import quantization_config
from ckptool.core.sections import describe_sections
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, UsageError, without_query
from ckptool.files import Source
from ckptool.files.computed import ComputedSource
from ckptool.files.place import is_address, place_of
from ckptool.files.source import Progress, count_far_bytes
from ckptool.formats import load_format, load_writable_format, shard_format_of
from ckptool.formats.base import EditableFormat, FolderFormat, NewFile, WritePlan
from ckptool.remedies import Remedy
from ckptool.symbolic.encoder import find_blockers
from ckptool.transforms import extract_state_dict
from ckptool.words import counted, listed
from ckptool.writing.divided import WriterGroup, finish_divided, write_divided
from ckptool.writing.job import Job, execute
from ckptool.writing.sharding import parse_size, plan_shards
from ckptool.writing.target import (
    check_address,
    check_still_source,
    check_target,
    choose_file,
    choose_format,
    describe_surprises,
    is_a_source,
)


@dataclass(frozen=True, slots=True, repr=False)
class Receipt(Result):
    """The result of a write."""

    path: str
    """The file; the index of shards; or the folder of a recipe's files."""
    format: str
    """The name of the format, as in `Checkpoint.format`."""
    size: int
    """The size in bytes, of all files together."""
    tensors: int
    """The number of tensor keys, including tied ones."""
    source: str = ""
    """The source file, or the first of several."""
    changes: tuple[Change, ...] = ()
    """The changes to the content, without those for left-out parts."""
    outcomes: tuple[Change, ...] = ()
    """Facts known after the computation: how many values overflowed, lost precision, ..."""
    left_out: tuple[str, ...] = ()
    """The parts of the source that are not in the file, as phrases."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    blockers: tuple[str, ...] = ()
    """Classes in the file that `torch.load(weights_only=True)` rejects."""
    written: int = 0
    """Bytes written to disk; less than `size` after an in-place edit."""
    files: tuple[tuple[str, int], ...] = ()
    """Each file with its size, if there are several: the shards, then their index."""
    verified: bool = False
    """True if the file was read back and compared."""
    dry_run: bool = False
    """True if nothing was written."""

    @property
    def edited(self) -> bool:
        """True if the file was edited in place."""
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
            "changes": _to_documents(self.changes),
            "outcomes": _to_documents(self.outcomes),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "weights_only_blockers": list(self.blockers),
        }


def _to_documents(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Return changes for a JSON document."""
    return [{"kind": change.kind, "text": change.text, "count": change.count} for change in changes]


LEFT_OUT = "left-out"
"""The kind of changes for parts that a transform left out."""


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
    divide_files: Callable[[Checkpoint], Mapping[str, Checkpoint]] | None = None,
    progress: Progress | None = None,
    group: WriterGroup | None = None,
    options: str = "",
) -> Receipt:
    """Write `checkpoint` to `path`, completely or not at all.

    `overwrite`, `in_place`, `rewrite`, `strict`, `dry_run`, `max_shard_size`, `verify`, `progress`
    and the errors are the same as for `Checkpoint.save`. Creates missing folders. Replaces the
    target of a link and keeps the link. See `choose_format` for the default of `format`.
    `files_from` is the folder with configuration, tokenizer and processor files to copy next to the
    weights. With `to_folder` the target is a folder, and `files_from` defaults to that of the
    source. `divide_files` returns the content of each file by name, in the folder of `path`. With a
    `group`, several processes write together and make the same call; `options`, as text of any
    kind, identify an interrupted write that continues.
    """
    check_address(path, in_place=in_place, verify=verify)
    is_remote = is_address(path)
    if divide_files is None:
        path = _choose_file(checkpoint, path, format, files_from, to_folder=to_folder)
    replaces_source = in_place and _is_source_path(path, checkpoint.sources)
    if replaces_source:
        check_still_source(path, checkpoint.sources)
    check_target(checkpoint, path, overwrite=overwrite, in_place=in_place)
    format_name = choose_format(checkpoint, path, format, sharded=max_shard_size is not None)
    load_format(checkpoint.format).refuse_unusable(checkpoint)
    if load_format(format_name).flat and divide_files is None:
        checkpoint = _take_state_dict(checkpoint)
        refuse_placeholders(checkpoint)
    else:
        checkpoint = checkpoint.with_late_values()
    if divide_files is not None:
        plan = _plan_separate_files(checkpoint, path, format_name, divide_files(checkpoint))
    else:
        if load_format(format_name).index_name and checkpoint.root is not checkpoint.original:
            rewrite = False  # an in-place edit of such a folder can only rewrite its index
        plan = _plan(
            checkpoint,
            path,
            format_name,
            max_shard_size,
            is_new_file=not replaces_source or rewrite or max_shard_size is not None,
            indexed=bool(format and shard_format_of(format)),
        )
    if verify is None:
        verify = _has_computed_tensors(checkpoint) and not is_remote
    job = Job(checkpoint, os.fspath(path), overwrite, replaces_source, verify, progress)
    if to_folder or files_from is not None:
        plan, warnings = _add_companions(plan, job, files_from, to_folder=to_folder)
        checkpoint = checkpoint.with_root(checkpoint.root, *warnings)
        job = replace(job, checkpoint=checkpoint)
    is_divided = plan.index and divide_files is None and not (dry_run or is_remote)
    # An earlier run of this write may only lack some renames.
    if group and is_divided and group.run_on_first(lambda: finish_divided(plan, job, options)):
        return _make_receipt(plan, job, group, dry_run=False)
    for file in plan.files if plan.index else ():
        check_target(checkpoint, file.path, overwrite=overwrite, in_place=in_place)
    refuse_empty(checkpoint, plan)
    notes = [*plan.notes, *describe_surprises(checkpoint, path, format, format_name)]
    notes += _describe_source(job, dry_run=dry_run)
    if (to_folder or plan.index) and divide_files is None and not is_remote:
        notes += _find_other_models(path, plan)
    if dry_run and (plan.index or os.path.isdir(checkpoint.path)):
        notes.append(_describe_space(plan, path))
    plan = replace(plan, notes=tuple(notes))
    _refuse_left_out(checkpoint, plan, strict=strict)
    if in_place and not overwrite and is_a_source(path, checkpoint.sources):
        _refuse_loss(checkpoint, plan)
    if not dry_run:
        if group is None:
            _execute_by_folder(plan, job)
        elif is_divided and len(plan.files) > 2:  # an index and several shards
            write_divided(plan, job, group, options)
        else:
            group.collect(0)  # every process has checked the target before the first one writes
            group.run_on_first(lambda: _execute_by_folder(plan, job))
    receipt = _make_receipt(plan, job, group, dry_run=dry_run)
    return receipt if divide_files is None else replace(receipt, path=os.path.dirname(path))


def _choose_file(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None,
    files_from: str | os.PathLike[str] | None,
    *,
    to_folder: bool,
) -> str | os.PathLike[str]:
    """Return the file to write: in a target folder, a file; for the source's folder, its index.

    A given format that is a folder also gets its index. Any other path is returned unchanged.
    """
    is_folder_format = bool(load_format(format or "").index_name)
    if to_folder or is_folder_format:
        return choose_file(checkpoint, path, format, to_folder=to_folder, files_from=files_from)
    index = choose_file(checkpoint, path, checkpoint.format, to_folder=False)
    return index if _is_source_path(index, checkpoint.sources) else path


def _plan(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    *,
    is_new_file: bool,
    indexed: bool,
) -> WritePlan:
    """Plan an edit of the source if possible, unless `is_new_file`; else a new file, or shards."""
    plan = None if is_new_file else _plan_in_place(checkpoint, path, format)
    if plan is not None:
        return plan
    if shard_format_of(format):
        plan = _plan_sharded(checkpoint, path, format, max_shard_size, indexed=indexed)
    elif isinstance(writer := load_writable_format(format), FolderFormat):
        if is_a_source(path, checkpoint.sources):
            raise NotRepresentable(
                "a folder cannot be written over itself; --in-place can only change its index",
                file=checkpoint.path,
                hint="write to another folder with -o",
            )
        plan = _with_full_paths(writer.plan(checkpoint, _parse_limit(max_shard_size)), path)
    else:
        plan = writer.plan(checkpoint)
    return replace(plan, left_out=(*_list_left_out(checkpoint, format), *plan.left_out))


def _plan_separate_files(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    content_by_name: Mapping[str, Checkpoint],
) -> WritePlan:
    """Return one plan for several files in the folder of `path`, each with its own content.

    A loss, note or blocker of several files is stated once.
    """
    folder, writer = os.path.dirname(path), load_writable_format(format)
    plans = [writer.plan(content) for content in content_by_name.values()]
    return WritePlan(
        format,
        tuple(  # each plan has one file
            plan.files[0]._replace(path=os.path.join(folder, name))
            for name, plan in zip(content_by_name, plans, strict=True)
        ),
        tensors=sum(plan.tensors for plan in plans),
        left_out=(
            *_list_left_out(checkpoint, format),
            *dict.fromkeys(text for plan in plans for text in plan.left_out),
        ),
        notes=tuple(dict.fromkeys(text for plan in plans for text in plan.notes)),
        blockers=tuple(dict.fromkeys(name for plan in plans for name in plan.blockers)),
    )


def _execute_by_folder(plan: WritePlan, job: Job) -> None:
    """Execute a plan; the files of each folder are written together or not at all."""
    files_by_folder: dict[str, list[NewFile]] = {}
    for file in plan.files:
        files_by_folder.setdefault(os.path.dirname(file.path), []).append(file)
    # A plan without files (an in-place edit, an unchanged file) is executed once.
    for files in files_by_folder.values() or ((),):
        execute(replace(plan, files=tuple(files)), job)


def _add_companions(
    plan: WritePlan, job: Job, files_from: str | os.PathLike[str] | None, *, to_folder: bool
) -> tuple[WritePlan, Sequence[Change]]:
    """Return the plan with configuration and tokenizer files next to the weights, and warnings.

    They are copied from `files_from`, else from the folder of the source. The plan is unchanged if
    the folder of the source has none, or is the target itself.

    Raises:
        UsageError: if the target is one file.
    """
    from ckptool.writing.companions import find_companion_folder, with_companions

    if not to_folder:
        raise UsageError(
            "files_from needs a folder as the target, which is one file",
            hint="write to a folder: ckptool convert SOURCE FOLDER/",
        )
    is_default = files_from is None
    folder = find_companion_folder(job.checkpoint) if files_from is None else files_from
    target = os.path.dirname(job.path)
    if folder is None or (is_default and os.path.realpath(folder) == os.path.realpath(target)):
        return plan, ()
    keeps_existing = is_default and not job.overwrite
    return with_companions(plan, job.path, folder, job.checkpoint, keeps_existing=keeps_existing)


def _describe_space(plan: WritePlan, path: str | os.PathLike[str]) -> str:
    """Return the bytes to write and the free space, as text."""
    files = counted(len(plan.files), "file")
    if is_address(path):
        return f"{files} of {plan.written:,} bytes"
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    return f"{files} of {plan.written:,} bytes; the disk has {free:,} bytes free"


def _describe_source(job: Job, *, dry_run: bool) -> Iterator[str]:
    """Yield notes on the source: its placeholders, its layout, and where it was read."""
    checkpoint = job.checkpoint
    change_kinds = {change.kind for change in checkpoint.changes}
    if placeholders := find_placeholders(checkpoint):
        yield f"{placeholders.text}; {placeholders.hint}"
    if "fit" not in change_kinds:  # fitted to a model, it no longer has the layout of the source
        yield from load_format(checkpoint.format).describe_layout(checkpoint)
    if job.in_place and "dequantize" in change_kinds:
        stated_in = quantization_config(checkpoint).where
        if stated_in.endswith(".json"):  # elsewhere it is in the file, and was removed
            yield f"{stated_in} next to the file still states the quantization"
    if any(source.is_far for source in checkpoint.sources):
        yield from _describe_remote(checkpoint, dry_run=dry_run)


def _describe_remote(checkpoint: Checkpoint, *, dry_run: bool) -> Iterator[str]:
    """Yield notes on a remote source: its commit, and the bytes to download."""
    if revision := place_of(checkpoint.path).pin_revision(checkpoint.path):
        yield f"read at revision {revision}"
    if dry_run:
        storages = (tensor.storage for _, tensor in checkpoint.tensors())
        remote_bytes = count_far_bytes(
            storage.data for storage in storages if storage is not None and storage.data is not None
        )
        yield f"would fetch {remote_bytes:,} bytes of tensor data"


def _plan_in_place(
    checkpoint: Checkpoint, path: str | os.PathLike[str], format: str
) -> WritePlan | None:
    """Return the in-place edit of the source, or None if a new file is needed.

    An unchanged checkpoint needs no edit: the plan keeps the file. Only some formats can be edited,
    and only at the path that was read. A file with hard links is written again, because the journal
    of an edit is next to one name.
    """
    is_unchanged = checkpoint.root is checkpoint.original and format == checkpoint.format
    if is_unchanged:
        tensors, blockers = sum(1 for _ in checkpoint.tensors()), find_blockers(checkpoint.root)
        return WritePlan(format, kept=checkpoint.details.size, tensors=tensors, blockers=blockers)
    source_format = load_format(format) if format == checkpoint.format else None
    if not isinstance(source_format, EditableFormat) or not is_a_source(path, checkpoint.sources):
        return None
    if os.stat(path).st_nlink > 1:
        return None
    plan = source_format.plan_edit(checkpoint)
    if plan and isinstance(source_format, FolderFormat):  # it has planned names in the folder
        plan = _with_full_paths(plan, path)
    return plan and replace(plan, left_out=tuple(_list_transform_losses(checkpoint)))


def _with_full_paths(plan: WritePlan, path: str | os.PathLike[str]) -> WritePlan:
    """Return the plan of a folder with full paths of its files; `path` is the index."""
    folder = os.path.dirname(path)
    files = (file._replace(path=os.path.join(folder, file.path)) for file in plan.files)
    return replace(plan, files=tuple(files))


def _parse_limit(size: int | str | None) -> int | None:
    """Return the limit of a shard in bytes; None for the default."""
    return parse_size(size) if isinstance(size, str) else size


def _plan_sharded(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    max_shard_size: int | str | None,
    *,
    indexed: bool,
) -> WritePlan:
    """Plan shards and an index or, if not `indexed`, one file if everything fits.

    Over its own source, without a size, the division into files stays the same. Old shards that are
    not in the new index stay, with a note.
    """
    limit = _parse_limit(max_shard_size)
    same_files = limit is None and is_a_source(path, checkpoint.sources)
    plan = plan_shards(
        checkpoint,
        path,
        format=format,
        max_shard_size=limit,
        indexed=indexed,
        same_files=same_files,
    )
    if not plan.index:
        return plan
    from ckptool.formats.sharded import read_shard_names  # most writes have no index

    new_names = {os.path.basename(file.path) for file in plan.files}
    unlisted = [name for name in read_shard_names(plan.index) if name not in new_names]
    note = f"kept shards that the new index does not list: {listed(unlisted)}"
    return replace(plan, notes=(*plan.notes, note)) if unlisted else plan


def _find_other_models(path: str | os.PathLike[str], plan: WritePlan) -> Iterator[str]:
    """Yield a note on other weights in the target's folder that a library may read instead."""
    from ckptool.formats.model_folder import identify_library  # most writes are of one file

    folder, written_name = os.path.split(plan.index or os.path.realpath(path))
    library = identify_library(written_name)
    if library is not None and os.path.isdir(folder):
        written = {written_name, *(os.path.basename(file.path) for file in plan.files)}
        weights = {name for name in os.listdir(folder) if identify_library(name) == library}
        if others := weights - written:
            yield f"kept {listed(sorted(others))} in the folder: {library} may read that instead"


def _make_receipt(
    plan: WritePlan, job: Job, group: WriterGroup | None, *, dry_run: bool
) -> Receipt:
    """Return the receipt of a write, with the facts that are only known after it."""
    reports = () if dry_run else job.checkpoint.reports
    # A plan without an index is one file, which one process writes.
    gather = group.collect if group is not None and plan.index else gather_alone
    return Receipt(
        path=plan.index or job.path,
        format=plan.format,
        size=plan.size,
        tensors=plan.tensors,
        source=without_query(job.checkpoint.path),
        changes=(
            *_format_changes(job.checkpoint, plan),
            *(change for change in job.checkpoint.changes if change.kind != LEFT_OUT),
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


def _format_changes(checkpoint: Checkpoint, plan: WritePlan) -> Iterator[Change]:
    """Yield the change of the format, or of the pickle protocol, which is always written as 2."""
    protocol = checkpoint.details.protocol
    if plan.format != checkpoint.format and not checkpoint.in_memory:
        yield Change("format", f"converted {checkpoint.format} to {plan.format}")
    elif plan.written and protocol not in (None, 2):
        yield Change("format", f"changed pickle protocol {protocol} to 2")


def _has_computed_tensors(checkpoint: Checkpoint) -> bool:
    """Return True if the bytes of any tensor must be computed."""
    return any(
        tensor.storage is not None
        and tensor.storage.data is not None
        and isinstance(tensor.storage.data.source, ComputedSource)
        for _, tensor in checkpoint.tensors()
    )


def _take_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its one state dict as root; unchanged if it has none.

    Then the format raises its own error.

    Raises:
        AmbiguousName: if there are several.
    """
    try:
        return extract_state_dict(checkpoint)
    except AmbiguousName:
        raise
    except NotFound:
        return checkpoint


def refuse_empty(checkpoint: Checkpoint, plan: WritePlan) -> None:
    """Refuse a result without needed entries, or without any tensors, unless the source is empty.

    Needed entries may be missing if the user asked to leave them out (`wanted`).
    The root of a format that is not flat may be a value without tensors. A checkpoint in memory may
    be empty, as for `torch.save`.

    Raises:
        NotRepresentable: the message lists the missing entries, or the content of the source.
    """
    needed = [change.text for change in checkpoint.changes if change.needed and not change.wanted]
    if needed:
        raise NotRepresentable(
            "a state dict cannot contain data that only the class itself can save: "
            f"{listed(needed)}",
            file=checkpoint.path or None,
            hint="save its state_dict() where the class is importable, or add --drop-objects "
            "to leave it out",
        )
    if plan.tensors or checkpoint.in_memory:
        return
    is_empty = isinstance(checkpoint.root, (dict, list, tuple)) and not checkpoint.root
    if is_empty or load_format(plan.format).flat:
        original = replace(checkpoint, root=checkpoint.original)
        content = [*describe_sections(original), *plan.left_out]
        if not content:  # the copy of an empty file is complete
            return
        raise NotRepresentable(
            f"the result would have no tensors; the file has {listed(content)}",
            file=checkpoint.path or None,
        )


def _refuse_left_out(checkpoint: Checkpoint, plan: WritePlan, *, strict: bool) -> None:
    """With `strict`, refuse to leave out parts that the user did not ask to leave out.

    Raises:
        NotRepresentable: the message lists them.
    """
    requested = {change.text for change in checkpoint.changes if change.wanted}
    lost = [text for text in plan.left_out if text not in requested]
    if strict and lost:
        raise NotRepresentable(
            f"{plan.format} cannot store everything; left out would be: {'; '.join(lost)}",
            file=checkpoint.path,
            hint="remove --strict to leave them out",
        )


def _refuse_loss(checkpoint: Checkpoint, plan: WritePlan) -> None:
    """Refuse an in-place change that loses data or changes the format: there is no other copy.

    Raises:
        NotRepresentable: if it does; `overwrite` accepts it.
    """
    lost = "; ".join(plan.left_out)
    if plan.format != checkpoint.format:
        lost = f"it would become a {plan.format}" + (f", without {lost}" if lost else "")
    if lost:
        raise NotRepresentable(
            f"an in-place edit of the {checkpoint.format} file would lose data: {lost}",
            file=checkpoint.path,
            # "write another file; or --overwrite does it anyway"
            hint=Remedy((("overwrite", True),), " does it anyway", "write another file; or "),
        )


def _is_source_path(path: str | os.PathLike[str], sources: Sequence[Source]) -> bool:
    """Return True if the target is a source, or has the path of one that no longer exists."""
    names = {os.path.realpath(source.name) for source in sources}
    return is_a_source(path, sources) or os.path.realpath(path) in names


def _list_left_out(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    """Yield the parts left out by the reader, the transforms, and the `target` format.

    A format without a place for the entries of a header (`__metadata__` of safetensors) drops them.
    """
    yield from checkpoint.details.left_behind
    yield from checkpoint.details.unreferenced
    yield from _list_transform_losses(checkpoint)
    # Every safetensors file states format: pt, which is no content.
    entries = [key for key in checkpoint.details.header if key != "format"]
    if entries and target != checkpoint.format and not load_format(target).header_key:
        yield f"header entries: {listed(entries)}"


def _list_transform_losses(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the parts left out by the transforms."""
    return (change.text for change in checkpoint.changes if change.kind == LEFT_OUT)
