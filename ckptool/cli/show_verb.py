"""`ckptool show`."""

from __future__ import annotations

import click

from ckptool.cli.console import Progress, print_result, stdout_look
from ckptool.cli.options import file_argument, fmt_option, json_option, quiet_option, verb
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
@fmt_option
@json_option
@quiet_option
def command(file: str, name: str, count: int, fmt: str | None, as_json: bool, quiet: bool) -> None:
    """Show one value, one object or the head of one tensor.

    NAME is a name that ckptool list prints, or the end of one after a /, if only one name ends so.
    Minimum, maximum and mean are those of all finite elements of the tensor.
    """
    with open_checkpoint(file) as checkpoint, Progress(quiet=quiet) as progress:
        shown = show(checkpoint, name, count=count, progress=progress)
    print_result(shown, shown_lines(shown, stdout_look(fmt)), as_json=as_json)
