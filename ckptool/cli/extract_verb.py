"""`ckptool extract`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.options import (
    OutputOptions,
    file_argument,
    flag,
    glob_options,
    master_option,
    plain_options,
    target_options,
    verb,
)
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.transforms import Masters, Plain, Take
from ckptool.transforms.extraction import count_kept


@verb(
    "extract",
    "ckptool extract run.pth --model-only -o weights.pth",
    "ckptool extract run.pth --ema -o averaged.pth",
    "ckptool extract weights.pth --include 'backbone.*' --exclude '*.num_batches_tracked'",
    "ckptool extract run.pth --key state_dict/fc.weight -o fc.pth",
    "ckptool extract run.pth --plain --drop-objects",
)
@file_argument
@click.option("--key", metavar="NAME", help="Take the section, container or tensor at this path.")
@glob_options
@flag("--ema", "Take the averaged (EMA) weights under the model's own keys.")
@master_option
@plain_options
@target_options()
def command(
    file: str,
    ema: bool,
    master: bool,
    plain: bool,
    drop_objects: bool,
    target: OutputOptions,
    **selection: Any,
) -> None:
    """Extract a section, some tensors, or only the weights.

    The receipt lists everything left out. Leaving out one optimizer tensor leaves out the whole
    optimizer. Values and objects are kept, except with --model-only. Writes model.extracted.pth.
    --in-place needs --force, because the rest is lost.
    """
    if selection["key"] is None and not (
        any(selection.values()) or ema or master or plain or drop_objects
    ):
        raise UsageError(
            "extract needs at least one of --key, --include, --exclude, --model-only, --ema, "
            "--master, --plain and --drop-objects",
            hint="ckptool extract FILE --model-only",
        )
    if ema and (master or selection["model_only"] or selection["key"] is not None):
        raise UsageError(
            "--ema cannot be combined with --key, --model-only or --master",
            hint="ckptool extract FILE --ema",
        )

    steps = [Masters()] if master else []
    take = Take(**selection, ema=ema)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Take the selected entries, and count them if any were left out."""
        source = checkpoint.then(*steps)
        extracted = source.then(take)
        own_changes = extracted.changes[len(source.changes) :]
        if any(step.kind != "warning" for step in own_changes):  # else the whole file was taken
            extracted = extracted.with_root(extracted.root, count_kept(source, extracted))
        return extracted.then(Plain(plain, drop_objects)) if plain or drop_objects else extracted

    write_changed(file, change, target, word="extracted", rewrite=True)
