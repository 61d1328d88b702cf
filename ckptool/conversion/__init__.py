"""`convert`: steps in one pass, from any readable format to any writable one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ckptool.conversion.fit import Like as Like
from ckptool.conversion.layout import (
    Destination as Destination,
    open_for_steps as open_for_steps,
    with_configs as with_configs,
)
from ckptool.conversion.steps import apply_steps as apply_steps, make_steps as make_steps
from ckptool.formats import Source
from ckptool.renamed import refuse_renamed_arguments
from ckptool.transforms import Step
from ckptool.transforms.step import list_opened_sources
from ckptool.writing import Receipt, save

_NOW_STEPS = {
    "allow_mismatched": "Fit", "allow_missing": "Fit", "allow_overflow": "Cast",
    "allow_unexpected": "Fit", "cast": "Cast", "cast_optimizer": "Cast", "compact": "Compact",
    "dequantize": "Cast", "device_map": "Remap", "drop_objects": "Plain", "exclude": "Take",
    "flatten": "Flatten", "fuse": "Reshape", "include": "Take", "interpolate_pos": "Reshape",
    "keep": "Cast", "key": "Take", "like": "Fit", "like_key": "Fit", "master": "Masters",
    "min_coverage": "Fit", "model_only": "Take", "nest": "Nest", "no_transpose": "Fit",
    "plain": "Plain", "raw": "Cast", "rename": "Rename", "resize": "Reshape", "salvage": "Salvage",
    "split": "Reshape", "ties": "Untie", "to": "Remap", "transpose": "Fit",
    "visible_devices": "Remap", "wrappers": "Strip",
}  # fmt: skip
"""Removed arguments, each with the step that replaces it."""


@refuse_renamed_arguments(
    **{old: f"give it the step ckptool.{step}(...)" for old, step in _NOW_STEPS.items()}
)
def convert(
    source: Source | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *steps: Step,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    files_from: str | os.PathLike[str] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    in_place: bool = False,
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Receipt:
    """Convert `source` to another format, apply steps, and write the result to `target`.

    Safetensors files and shards contain one flat state dict. Everything else is left out, listed in
    the receipt, and wrapper prefixes are removed unless a `Strip` or `Fit` decides.

    Args:
        source: The path of a file, of an index of shards, or of a folder (of shards or of a
            recipe's files); an open checkpoint; or several paths, or texts `KEY=PATH`, of files
            that contain parts of one state dict.
        target: The file to write, or a folder for `model.safetensors` or the files of a recipe. A
            name without a known extension is a folder if `source` is a folder or several files, or
            with `max_shard_size` or `files_from`.
        *steps: The changes, in order: `ckptool.Strip()`, `ckptool.Cast("bfloat16")`, ...
        format: `torch-zip`, `torch-legacy`, `safetensors`, ... Default: by the extension.
        max_shard_size: Split into files of at most this size: `"5GB"`, or a number of bytes.
        files_from: A folder with configuration and tokenizer files to copy next to the weights. The
            copy of `config.json` reflects `Cast` and `Reshape`. None: the folder of `source`, if
            `target` is a folder; existing files in `target` are then kept unless `overwrite`.
        strict: Raise an error rather than leave anything out.
        overwrite: Replace an existing target.
        in_place: Allow `target` to be the source, and edit it if its format allows that.
        dry_run: Return the receipt without writing anything.
        verify: Read the result back and compare it. None: only if tensors are computed.
        progress: Called with the bytes done so far and the total bytes.

    Raises:
        UnreadableFile: if the source cannot be read.
        UsageError: if an argument has a wrong value, or arguments exclude each other.
        AmbiguousName: if there are several state dicts, and no `Take` chooses one.
        MatchError: if a state dict does not fit the model of `Fit`.
        NameCollision: if two tensors would get the same key.
        NotRepresentable: if the format or a cast cannot store a tensor (`strict`: anything).
        WriteError: if the target cannot be written; nothing has changed.
    """
    goal = Destination(
        target,
        source,
        steps,
        format=format,
        files_from=files_from,
        sharded=max_shard_size is not None,
    )
    all_steps = with_configs(steps, goal.folders)
    salvage = any(isinstance(step, Step) and step.opens_damaged for step in steps)
    with open_for_steps(source, all_steps, salvage=salvage) as checkpoint, ExitStack() as stack:
        is_same = in_place and goal.is_source(checkpoint)
        name = checkpoint.format if is_same else goal.format_for(checkpoint)
        result = apply_steps(checkpoint, all_steps, name)
        for opened in list_opened_sources(all_steps, checkpoint, result):
            stack.callback(opened.close)
        return save(
            goal.unwrap_only_file(result),
            checkpoint.path if is_same else goal.path,
            divide_files=goal.divide_files,
            format=name,
            max_shard_size=max_shard_size,
            files_from=None if is_same else goal.companions,
            to_folder=goal.is_folder and not is_same,
            overwrite=overwrite,
            in_place=in_place,
            strict=strict,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
        )
