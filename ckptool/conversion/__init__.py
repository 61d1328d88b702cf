"""`convert`: steps in one pass, from a format that is read to one that is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ckptool.conversion.fit import Like as Like
from ckptool.conversion.layout import (
    Destination as Destination,
    opened_for as opened_for,
    with_configs as with_configs,
)
from ckptool.conversion.steps import converted as converted, steps_of as steps_of
from ckptool.formats import Source
from ckptool.renamed import renamed_arguments
from ckptool.transforms import Step
from ckptool.transforms.step import opened_by
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
"""Arguments of before, each with the step in its place."""


@renamed_arguments(
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
    """Write `source` to `target` in another format or after some steps; copy all other bytes.

    Safetensors and its shards hold one flat state dict: what else there is, is left out and named,
    and wrapper prefixes go unless a `Strip` or `Fit` says differently.

    Args:
        source: A path (a file, an index of shards or their folder, or that of a recipe's files), or
            an open checkpoint; or the paths of several files that hold parts of one state dict, or
            `KEY=PATH` each.
        target: The file to write, or a folder for `model.safetensors` in it, or for the files of a
            recipe. A name without a known extension is a folder if `source` is a folder or a set of
            files, or with `max_shard_size` or `files_from`.
        *steps: The changes, in order: `ckptool.Strip()`, `ckptool.Cast("bfloat16")`, ...
        format: `torch-zip`, `torch-legacy`, `safetensors`, ...; default: by the extension.
        max_shard_size: Split into files of at most this size: `"5GB"`, or bytes.
        files_from: A folder whose configuration and tokenizer files are copied beside the weights.
            The copy of `config.json` follows `Cast` and `Reshape`.
            None: the folder of `source`, if `target` is a folder; files that exist in `target`
            are kept without `overwrite`.
        strict: Refuse to leave anything out.
        overwrite: Replace an existing target.
        in_place: Allow `target` to be the source, which is edited if its format allows it.
        dry_run: Plan only.
        verify: Read the result back and compare it. None: only if tensors are computed.
        progress: Called with the bytes done and the bytes in all.

    Raises:
        UnreadableFile: the source cannot be read.
        UsageError: an argument has a wrong value, or arguments exclude each other.
        AmbiguousName: there are several state dicts, and no `Take` chooses one.
        MatchError: a state dict does not fit the model of `Fit`.
        NameCollision: two tensors would get the same key.
        NotRepresentable: the format cannot hold a tensor (with `strict`: anything), or a cast it.
        WriteError: nothing was written.
    """
    goal = Destination(
        target,
        source,
        steps,
        format=format,
        files_from=files_from,
        sharded=max_shard_size is not None,
    )
    every = with_configs(steps, goal.folders)
    salvage = any(isinstance(one, Step) and one.opens_damaged for one in steps)
    with opened_for(source, every, salvage=salvage) as checkpoint, ExitStack() as stack:
        is_same = in_place and goal.is_source(checkpoint)
        name = checkpoint.format if is_same else goal.format_for(checkpoint)
        made = converted(checkpoint, every, name)
        for opened in opened_by(every, checkpoint, made):
            stack.callback(opened.close)
        return save(
            goal.as_file(made),
            checkpoint.path if is_same else goal.path,
            apart=goal.apart,
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
