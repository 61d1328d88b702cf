"""`ckptool show`."""

from __future__ import annotations

import click

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, screen_options, verb
from ckptool.formats import open_checkpoint
from ckptool.inspection.show import HEAD, show
from ckptool.render.show import shown_lines

__all__ = ["command"]


@verb(
    "show",
    "ckptool show model.pth epoch",
    "ckptool show model.pth state_dict/module.fc.bias",
    "ckptool show model.pth module.fc.bias --count 20",
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
def command(file: str, name: str, count: int, screen: Screen) -> None:
    """Show one value, one object or the head of one tensor.

    NAME is a name that ckptool list prints, or the end of one after a /, if only one name ends so.
    Minimum, maximum and mean are those of all finite elements of the tensor.
    """
    with open_checkpoint(file) as checkpoint, screen.progress() as progress:
        shown = show(checkpoint, name, count=count, progress=progress)
    screen.print(shown, shown_lines(shown, screen.look))
