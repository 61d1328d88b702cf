"""Public functions that combine several packages. The others are in the packages themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from ckptool import transforms
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import Source, open_or_reuse
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.transforms import Rename, Rule, Strip, Wrap, make_remap
from ckptool.transforms.step import open_and_change
from ckptool.writing import Receipt, save

if TYPE_CHECKING:
    from ckptool.render.page import PageReceipt

Words: TypeAlias = "str | Sequence[str] | None"
Rules: TypeAlias = "Iterable[str | Rule]"


def open(
    path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS, master: bool = False
) -> Checkpoint:
    """Open the checkpoint in a file or folder. Reads only the header and runs no code of the file.

    Close the checkpoint, or use it as a context manager.

    Args:
        path: A file, an index of shards, or a folder with a model in several files.
        limits: Limits for the sizes and counts in a header.
        master: Use the fp32 master weights in the optimizer state of DeepSpeed.

    Raises:
        FileMissing: if the file does not exist.
        NotACheckpoint: if the file is something else; the message describes it.
        UnsupportedFormat: if ckptool cannot read this kind of checkpoint.
        CorruptFile: if the file violates its format (`TruncatedFile`: if it ends too early).
        LimitExceeded: if the file needs more than `limits` allows.
        NotFound: if `master` is True and the file has no master weights.
    """
    return open_and_change(
        path,
        lambda checkpoint: transforms.Masters()(checkpoint) if master else checkpoint,
        limits=limits,
    )


def report(
    source: Source,
    target: str | os.PathLike[str],
    *,
    other: Source | None = None,
    key: str | None = None,
    values: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PageReceipt:
    """Write a page about a checkpoint: a single, self-contained HTML file.

    Args:
        source: A path, or an open checkpoint.
        target: The HTML file to write.
        other: A checkpoint to compare `source` with.
        key: The path of the section to show. Default: the whole checkpoint.
        values: Read the tensors for statistics and histograms.
        overwrite: Replace an existing page.
        progress: Called with the bytes done so far and the total bytes.

    Raises:
        UnreadableFile: if a source cannot be read.
        NotFound: if there is no entry at `key`.
        TargetExists, WriteError: if the target exists, is a source, or cannot be written.
    """
    from ckptool.comparison import report as reports
    from ckptool.render.page import write_page  # Here: other functions need no page.
    from ckptool.writing.target import check_target

    with ExitStack() as stack:
        sources = [source] if other is None else [source, other]
        files = [stack.enter_context(open_or_reuse(checkpoint)) for checkpoint in sources]
        for file in files:  # checked before anything is read
            check_target(file, target, overwrite=overwrite, in_place=False)
        data = reports.report(*files, key=key, values=values, progress=progress)
        return write_page(data, target, files, overwrite=overwrite)


def average(
    sources: Iterable[Source],
    target: str | os.PathLike[str],
    *,
    mode: str = "mean",
    weights: Sequence[float] = (),
    t: float | None = None,
    ints: str = "same",
    key: str | None = None,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    in_place: bool = False,
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Receipt:
    """Write the average of several checkpoints. Everything but the weights is from the first.

    Args:
        sources: Two or more paths or open checkpoints.
        target: The file to write.
        mode: `"mean"`; `"slerp"` of two files; `"task"`: first + `t` * (second - third).
        weights: The weight of each source in the mean. They are divided by their sum.
        t: With `"slerp"`, the position between the first (0) and the second (1), default 0.5. With
            `"task"`, the factor of the difference, default 1.
        ints: `"same"` requires equal integer tensors in all sources; `"first"` takes the first.
        key: The path of one state dict to average. Default: all of them.
        format: The format to write (`torch-zip`, `safetensors`, ...). Default: by the extension.
        max_shard_size: Split the result into files of at most this size: `"5GB"`, or bytes.
        strict: Raise an error rather than leave anything out.
        overwrite: Replace an existing target.
        in_place: Allow the target to be one of the sources.
        dry_run: Return the receipt without writing anything.
        verify: Read the result back and compare it. Default: True, because tensors are computed.
        progress: Called with the bytes done so far and the total bytes.

    Raises:
        UnreadableFile: if a source cannot be read.
        NotFound, UsageError: if keys, shapes or integers differ, or there are too few sources.
        WriteError: if the target cannot be written; nothing has changed.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise UsageError(
            "average needs a list of files, not a single file",
            file=sources,
            hint='ckptool.average(["a.pth", "b.pth"], "mean.pth")',
        )
    with ExitStack() as stack:
        files = [stack.enter_context(open_or_reuse(source)) for source in sources]
        return save(
            transforms.average(files, mode=mode, weights=weights, t=t, ints=ints, key=key),
            target,
            format=format,
            max_shard_size=max_shard_size,
            strict=strict,
            overwrite=overwrite,
            in_place=in_place,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
        )


def merge_lora(
    base: Source,
    adapters: Iterable[Source],
    target: str | os.PathLike[str],
    *,
    scale: Sequence[float] = (),
    alpha: float | None = None,
    key: str | None = None,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Receipt:
    """Write a model with LoRA adapters merged into its weights, like `merge_and_unload` of PEFT.

    Sums are computed in float32 (float64 if a tensor is float64) and rounded once to the dtype of
    the base.

    Args:
        base: A path or an open checkpoint.
        adapters: Adapters in the layout of PEFT, kohya or diffusers. Leave them out if `base` is
            the state dict of a PeftModel, which contains its own.
        target: The file to write.
        scale: One factor per adapter, or one for all.
        alpha: PEFT's `lora_alpha`, if there is no `adapter_config.json` next to the adapter.
        key: The path of the state dict to change.
        format: The format to write (`torch-zip`, `safetensors`, ...). Default: by the extension.
        max_shard_size: Split a larger result into shards with an index.
        overwrite: Replace an existing target.
        dry_run: Return the receipt without writing anything.
        verify: Read the result back and compare it. Default: True, because tensors are computed.
        progress: Called with the bytes done so far and the total bytes.

    Raises:
        UnreadableFile: if a source cannot be read.
        NotFound: if a tensor of an adapter has no counterpart in the base.
        UsageError: if the scale is unknown, or shapes do not match.
        NotRepresentable: if an adapter is of another kind (LoHa, ...) or the base is quantized.
        WriteError: if the target cannot be written; nothing has changed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_or_reuse(source)) for source in (base, *adapters)]
        return save(
            transforms.merge_lora(files[0], files[1:], scale=scale, alpha=alpha, key=key),
            target,
            format=format,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
        )


@overload
def strip_module(
    state: Source, *, only: Words = ..., levels: int | None = ..., at: str | None = ...
) -> Checkpoint: ...
@overload
def strip_module(
    state: Mapping[Any, Any], *, only: Words = ..., levels: int | None = ..., at: str | None = ...
) -> dict[Any, Any]: ...
def strip_module(
    state: Source | Mapping[Any, Any],
    *,
    only: Words = None,
    levels: int | None = None,
    at: str | None = None,
) -> Checkpoint | dict[Any, Any]:
    """Return a checkpoint or a new dict without wrapper prefixes: `module.`, `_orig_mod.`, ...

    Changes every state dict in `state`, with its `_metadata` and the parameter names in optimizers.
    The result has the same tensors. The argument is not modified.

    Args:
        state: A path, an open checkpoint, a state dict, or a dict that contains state dicts.
        only: Remove only this wrapper, or these, for example `_orig_mod`.
        levels: Remove at most this many nested wrappers.
        at: Remove only the wrapper of the submodule at this path.

    Raises:
        NameCollision: if two keys would become the same.
        NotFound: if no key starts with the path `at`.
        UsageError: if `only` is not a known wrapper, or `levels` is less than 1.
    """
    return Strip(only, levels, at)(state)


@overload
def add_module(
    state: Source, *, wrapper: str = ..., at: str | None = ..., key: Any = ...
) -> Checkpoint: ...
@overload
def add_module(
    state: Mapping[Any, Any], *, wrapper: str = ..., at: str | None = ..., key: Any = ...
) -> dict[Any, Any]: ...
def add_module(
    state: Source | Mapping[Any, Any],
    *,
    wrapper: str = "module",
    at: str | None = None,
    key: Any = None,
) -> Checkpoint | dict[Any, Any]:
    """Return a checkpoint or a new dict whose keys start with `module.`, for a DataParallel model.

    Args:
        state: As for `strip_module`.
        wrapper: The wrapper name to add.
        at: Wrap only the submodule at this path.
        key: The path of one state dict to change. Default: all of them.

    Raises:
        NameCollision: if two keys would become the same.
        NotFound: if there is no entry at `key`, or no key starts with the path `at`.
        UsageError: if `wrapper` is not a known wrapper.
    """
    return Wrap(wrapper, at, key)(state)


@overload
def remap(state: Source, rules: str | Mapping[str, str]) -> Checkpoint: ...
@overload
def remap(state: Mapping[Any, Any], rules: str | Mapping[str, str]) -> dict[Any, Any]: ...
def remap(
    state: Source | Mapping[Any, Any], rules: str | Mapping[str, str]
) -> Checkpoint | dict[Any, Any]:
    """Return a checkpoint or a new dict with its tensors on other devices.

    Rules are for example `"cpu"`, `{"cuda:1": "cuda:0"}` or `{"cuda:*": "cpu"}`, applied
    simultaneously. A checkpoint gets new device tags; the tensors of a dict in memory are moved.

    Args:
        state: As for `strip_module`.
        rules: One device for all tensors, or a mapping of devices or patterns to new devices.

    Raises:
        DeviceError: if a rule has an invalid device, or a tensor cannot be moved.
    """
    return make_remap(rules)(state)


@overload
def rename(
    state: Source, rules: Rules = ..., *, prefixes: Iterable[str] = ..., key: Any = ...
) -> Checkpoint: ...
@overload
def rename(
    state: Mapping[Any, Any], rules: Rules = ..., *, prefixes: Iterable[str] = ..., key: Any = ...
) -> dict[Any, Any]: ...
def rename(
    state: Source | Mapping[Any, Any],
    rules: Rules = (),
    *,
    prefixes: Iterable[str] = (),
    key: Any = None,
) -> Checkpoint | dict[Any, Any]:
    r"""Return a checkpoint or a new dict with keys renamed by rules, `^backbone\.=>encoder.` ...

    Rules apply in order. A rule that matches no key is listed in `changes`; for a dict it causes a
    `CheckpointWarning`.

    Args:
        state: As for `strip_module`.
        rules: Texts `REGEX=>REPL`, or rules from `transforms.table_rule` and similar functions.
        prefixes: Texts `OLD=NEW`, applied after `rules` to whole components at the start of a key.
        key: The path of one state dict to change. Default: all of them.

    Raises:
        NameCollision: if two keys would become the same.
        NotFound: if there is no entry at `key`.
        UsageError: if a text is not a rule, or a rule makes a key empty.
    """
    return Rename(rules, prefixes, key)(state)
