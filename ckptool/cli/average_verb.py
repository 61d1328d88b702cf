"""`ckptool average`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.checkpoint import Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import PATH, Listed, Target, output_option, target_options, verb
from ckptool.errors import UsageError
from ckptool.transforms import average

__all__ = ["command"]


@verb(
    "average",
    "ckptool average epoch_18.pth epoch_19.pth epoch_20.pth -o mean.pth",
    "ckptool average a.pth b.safetensors -o mean.safetensors --ints first",
    "ckptool average a.pth b.pth -o mixed.pth --weights 0.7,0.3",
    "ckptool average a.pth b.pth -o mixed.pth --mode slerp --t 0.3",
    "ckptool average model.pth tuned.pth base.pth -o added.pth --mode task",
)
@click.argument("files", type=PATH, nargs=-1, required=True)
@output_option
@click.option(
    "--mode",
    type=click.Choice(["mean", "slerp", "task"]),
    default="mean",
    show_default=True,
    help="slerp: along the arc between two files. task: A + t (B - C), of three files.",
)
@click.option(
    "--weights",
    type=Listed(float),
    default=(),
    help="A weight for each file, as 0.7,0.3; the sum is divided by theirs. Only with mode mean.",
)
@click.option(
    "--t",
    type=float,
    help="slerp: from 0, the first file, to 1, the second [default: 0.5]. task: how much of the "
    "difference is added [default: 1].",
)
@click.option(
    "--ints",
    type=click.Choice(["same", "first"]),
    default="same",
    show_default=True,
    help="Integer tensors must be the same in all files, or are taken from the first.",
)
@click.option("--key", metavar="NAME", help="Average only this state dict.")
@target_options(place=False)
def command(files: tuple[str, ...], target: Target, **how: Any) -> None:
    """Average the weights of several checkpoints.

    Tensors of the same name, without wrapper prefixes, are summed in float64 and rounded to their
    type in the first file. Names, ties, _metadata and other values come from the first file;
    optimizer and scheduler state is left out.
    """
    if len(files) < 2:
        raise UsageError("average needs two or more files", hint="ckptool average A B -o mean.pth")

    def change(*checkpoints: Checkpoint) -> Checkpoint:
        return average(checkpoints, **how)

    write_changed(files[0], change, target, word="average", others=files[1:])
