"""The verbs that read the elements of tensors: `show` and `stats`."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, filter_options, flag, screen_options, verb
from ckptool.formats import open_checkpoint
from ckptool.inspection.show import HEAD, show
from ckptool.inspection.stats import BINS, SORTABLE, stats
from ckptool.render.figures import ramp_for, shown_lines, stats_lines


@verb(
    "show",
    "ckptool show model.pth epoch",
    "ckptool show model.pth state_dict/module.fc.bias",
    "ckptool show model.pth fc.bias --count 20",
)
@file_argument
@click.argument("name")
@click.option(
    "--count",
    type=click.IntRange(min=0),
    default=HEAD,
    show_default=True,
    help="How many elements of a tensor to show.",
)
@screen_options(fmt=True)
def show_command(file: str, name: str, count: int, screen: Screen) -> None:
    """Show one value, one object or the head of one tensor.

    NAME is a path that ckptool list prints, a key, or the end of a path after a . or /, if only
    one path ends so; wrapper prefixes are ignored.
    Minimum, maximum and mean are those of all finite elements of the tensor.
    """
    with open_checkpoint(file) as checkpoint, screen.progress() as progress:
        shown = show(checkpoint, name, count=count, progress=progress)
    screen.print(shown, shown_lines(shown, screen.look))


@verb(
    "stats",
    "ckptool stats model.pth",
    "ckptool stats model.pth --key state_dict --include '*.weight' --sort norm",
    "ckptool stats model.safetensors --fold",
    "ckptool stats model.pth --fmt csv",
    finding="a NAME that matches no key",
)
@file_argument
@filter_options
@click.option("--key", metavar="NAME", help="Show only the tensors below this path.")
@click.option(
    "--bins",
    type=click.IntRange(1, 1000),
    default=BINS,
    show_default=True,
    help="Bins of a histogram, from the smallest to the largest element.",
)
@click.option(
    "--sort",
    type=click.Choice(tuple(SORTABLE)),
    help="Sort by this, the largest first, names from A to Z [default: the order of the file].",
)
@flag("--fold", "Show repeated layers in one row.")
@screen_options(fmt=True)
def stats_command(
    file: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: str | None,
    fold: bool,
    screen: Screen,
    **how: Any,
) -> None:
    """Show the range, mean, zeros and NaN of each tensor.

    std is the standard deviation of the population (divided by n); norm is Euclidean. NaN and
    infinite elements are counted, and left out of all other figures; of complex numbers the
    magnitude is measured. A tensor is flagged if it is constant or zero, if it has NaN or Inf, or
    if it differs from the same tensor of the other layers (layers.{0..31}.mlp.weight) in type,
    shape or device, or by a factor of 10 in norm or std.
    """
    with open_checkpoint(file) as checkpoint, screen.progress() as progress:
        found = stats(checkpoint, include=include, exclude=exclude, progress=progress, **how)
    screen.report_unmatched(found.unmatched)
    if not (found.tensors or found.unmatched):
        screen.note_none("no tensor", include, exclude)
    found = found.folded() if fold else found
    found = found.sorted_by(sort) if sort else found
    ramp = ramp_for(getattr(sys.stdout, "encoding", None))
    screen.print(found, stats_lines(found, screen.look, ramp))
