"""The verbs that read tensor values: `show` and `stats`."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, filter_options, flag, screen_options, verb
from ckptool.formats import open_checkpoint
from ckptool.inspection.show import HEAD, show
from ckptool.inspection.stats import BINS, SORTABLE, stats
from ckptool.render.figures import choose_ramp, shown_lines, stats_lines


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
    help="Show this many elements of a tensor.",
)
@screen_options(fmt=True)
def show_command(file: str, name: str, count: int, screen: Screen) -> None:
    """Show one value, one object, or the start of a tensor.

    NAME is a path as printed by ckptool list, a key, or the end of a path after a . or / if only
    one path matches. Wrapper prefixes are ignored. Minimum, maximum and mean cover all finite
    elements of the tensor.
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
    problem="a NAME matches nothing",
)
@file_argument
@filter_options
@click.option("--key", metavar="NAME", help="Show only the tensors below this path.")
@click.option(
    "--bins",
    type=click.IntRange(1, 1000),
    default=BINS,
    show_default=True,
    help="Draw histograms with this many bins.",
)
@click.option(
    "--sort",
    type=click.Choice(tuple(SORTABLE)),
    help="Sort by this column, largest first (names from A to Z). [default: file order]",
)
@flag("--fold", "Fold repeated layers into one row.")
@screen_options(fmt=True)
def stats_command(
    file: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: str | None,
    fold: bool,
    screen: Screen,
    **options: Any,
) -> None:
    """Show the range, mean, zeros and NaN of each tensor.

    std is the population standard deviation (divided by n); norm is Euclidean. NaN and infinite
    elements are counted, and excluded from the other columns. Complex numbers are measured by
    magnitude. A tensor is flagged if it is constant or zero, has NaN or Inf, or differs from the
    same tensor of the other layers (layers.{0..31}.mlp.weight) in dtype, shape or device, or by a
    factor of 10 in norm or std.
    """
    with open_checkpoint(file) as checkpoint, screen.progress() as progress:
        result = stats(checkpoint, include=include, exclude=exclude, progress=progress, **options)
    screen.report_unmatched(result.unmatched)
    if not (result.tensors or result.unmatched):
        screen.note_if_filtered("no tensor", include, exclude)
    result = result.folded() if fold else result
    result = result.sorted_by(sort) if sort else result
    ramp = choose_ramp(getattr(sys.stdout, "encoding", None))
    screen.print(result, stats_lines(result, screen.look, ramp))
