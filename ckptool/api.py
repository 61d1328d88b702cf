"""Public functions that combine several rooms; the others are in the room that they belong to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from ckptool import transforms
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import Source, opened
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.transforms import Rename, Rule, Strip, Wrap, remapping
from ckptool.transforms.step import opened_and_changed
from ckptool.writing import Receipt, save

if TYPE_CHECKING:
    from ckptool.render.page import PageReceipt

Words: TypeAlias = "str | Sequence[str] | None"
Rules: TypeAlias = "Iterable[str | Rule]"


def open(
    path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS, master: bool = False
) -> Checkpoint:
    """Open the checkpoint in a file or folder. Read only its header, and run no code of it.

    Close the checkpoint, or use it as a context manager.

    Args:
        path: A file, an index of shards, or the folder of a model in several files.
        limits: Bounds for what a header may ask for.
        master: Take the fp32 masters that the optimizer of DeepSpeed keeps for the weights.

    Raises:
        FileMissing: the file does not exist.
        NotACheckpoint: the file is something else; the message says what.
        UnsupportedFormat: ckptool does not read this kind of checkpoint.
        CorruptFile: the file breaks a rule of its format (`TruncatedFile`: it ends too early).
        LimitExceeded: the file asks for more than `limits` allows.
        NotFound: with `master`: there are no masters.
    """
    return opened_and_changed(
        path, lambda one: transforms.Masters()(one) if master else one, limits=limits
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
    """Write a page about a checkpoint: a single HTML file that loads nothing else.

    Args:
        source: A path, or an open checkpoint.
        target: The page to write.
        other: A checkpoint to compare `source` with.
        key: The address of the part to show; default: the whole checkpoint.
        values: Read the tensors, for figures and histograms.
        overwrite: Replace an existing page.
        progress: Called with the bytes done and the bytes in all.

    Raises:
        UnreadableFile: a source cannot be read.
        NotFound: there is nothing at `key`.
        TargetExists, WriteError: nothing was written; the target exists, or is a source.
    """
    from ckptool.comparison import report as reports
    from ckptool.render.page import write_page  # a list needs no page
    from ckptool.writing.target import check_target

    with ExitStack() as stack:
        sources = [source] if other is None else [source, other]
        files = [stack.enter_context(opened(one)) for one in sources]
        for file in files:  # before anything is read
            check_target(file, target, overwrite=overwrite, in_place=False)
        found = reports.report(*files, key=key, values=values, progress=progress)
        return write_page(found, target, files, overwrite=overwrite)


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
    """Write the mean of the weights of several checkpoints; take the rest from the first.

    Args:
        sources: Two or more paths or open checkpoints.
        target: The file to write.
        mode: `"mean"`; `"slerp"`, of two files; `"task"`: the first + `t` (the second - the third).
        weights: One for each source of a mean; divided by their sum.
        t: How far slerp goes from the first (0) to the second (1), 0.5 if not given; or the factor
            of the task's difference, 1 if not given.
        ints: Integer tensors must be the `"same"` in all sources, or are those of the `"first"`.
        key: The address of the only state dict to average.
        format: The format to write (`torch-zip`, `safetensors`, ...); default: by the extension.
        max_shard_size: Split the result into files of at most this size: `"5GB"`, or bytes.
        strict: Refuse to leave anything out.
        overwrite: Replace an existing target.
        in_place: Allow the target to be one of the sources.
        dry_run: Plan only.
        verify: Read the result back and compare it; default: yes, as tensors are computed.
        progress: Called with the bytes done and the bytes in all.

    Raises:
        UnreadableFile: a source cannot be read.
        NotFound, UsageError: keys, shapes or integers differ, or there are too few sources.
        WriteError: nothing was written.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise UsageError(
            "average takes a list of files, and this is one",
            file=sources,
            hint='ckptool.average(["a.pth", "b.pth"], "mean.pth")',
        )
    with ExitStack() as stack:
        files = [stack.enter_context(opened(source)) for source in sources]
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
    """Write a model with LoRA adapters merged into its weights, as `merge_and_unload` of PEFT does.

    Sums are calculated in float32 (float64 where a tensor has that type) and rounded once to the
    type of the base.

    Args:
        base: A path or an open checkpoint.
        adapters: Those of PEFT, kohya or diffusers; none if `base` is the state dict of a
            PeftModel, which holds its own.
        target: The file to write.
        scale: A factor for each adapter, or one for all.
        alpha: PEFT's `lora_alpha`, where no `adapter_config.json` beside the adapter says it.
        key: The address of the state dict to change.
        format: The format to write (`torch-zip`, `safetensors`, ...); default: by the extension.
        max_shard_size: Split a larger result into shards and an index.
        overwrite: Replace an existing target.
        dry_run: Plan only.
        verify: Read the result back and compare it; default: yes, as tensors are computed.
        progress: Called with the bytes done and the bytes in all.

    Raises:
        UnreadableFile: a source cannot be read.
        NotFound: a tensor of an adapter has no counterpart in the base.
        UsageError: the scale is not known; shapes do not fit.
        NotRepresentable: an adapter of another kind (LoHa, LoKr, ...); a base that is quantized.
        WriteError: nothing was written.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(opened(source)) for source in (base, *adapters)]
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

    Every state dict inside is changed; `_metadata` and the names in optimizers follow. The tensors
    are the same objects. The argument does not change.

    Args:
        state: A path, an open checkpoint, a state dict, or a dict that contains some.
        only: Remove only wrappers of this kind, or of these kinds.
        levels: Remove at most this many levels.
        at: Remove the wrapper of the submodule with this path.

    Raises:
        NameCollision: two keys would become the same.
        NotFound: no key starts with the path `at`.
        UsageError: `only` is not a known wrapper, or `levels` is less than 1.
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
        state: As of `strip_module`.
        wrapper: The component to add.
        at: Wrap only the submodule with this path.
        key: The address of the only state dict to change.

    Raises:
        NameCollision: two keys would become the same.
        NotFound: there is nothing at `key`, or no key starts with the path `at`.
        UsageError: `wrapper` is not a known wrapper.
    """
    return Wrap(wrapper, at, key)(state)


@overload
def remap(state: Source, rules: str | Mapping[str, str]) -> Checkpoint: ...
@overload
def remap(state: Mapping[Any, Any], rules: str | Mapping[str, str]) -> dict[Any, Any]: ...
def remap(
    state: Source | Mapping[Any, Any], rules: str | Mapping[str, str]
) -> Checkpoint | dict[Any, Any]:
    """Return a checkpoint or a new dict on other devices: the rules apply all at once.

    Examples of rules: `"cpu"`, `{"cuda:1": "cuda:0"}`, `{"cuda:*": "cpu"}`. In a checkpoint the
    device tags are rewritten; the tensors of a dict in memory are moved.

    Args:
        state: As of `strip_module`.
        rules: The device of all tensors, or a mapping of a device or a pattern to the new device.

    Raises:
        DeviceError: a word is not a device, or a tensor cannot be moved.
    """
    return remapping(rules)(state)


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
    r"""Return a checkpoint or a new dict with keys renamed in order: `^backbone\.=>encoder.` ...

    A rule that matches nothing is told in `changes`; of a dict by a `CheckpointWarning`.

    Args:
        state: As of `strip_module`.
        rules: `REGEX=>REPL` each, or a rule made by `transforms.table_rule` and its siblings.
        prefixes: `OLD=NEW` each, applied after `rules` to whole components at the front of a key.
        key: The address of the only state dict to change.

    Raises:
        NameCollision: two keys would become the same.
        NotFound: there is nothing at `key`.
        UsageError: a text is not a rule, or a rule leaves nothing of a key.
    """
    return Rename(rules, prefixes, key)(state)
