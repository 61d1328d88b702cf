"""`ckptool report`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.api import report
from ckptool.cli.console import Screen
from ckptool.cli.options import PATH, file_argument, flag, screen_options, verb
from ckptool.render.page import page_lines


@verb(
    "report",
    "ckptool report model.pth -o model.html",
    "ckptool report epoch1.pth epoch2.pth -o epochs.html",
    "ckptool report run.pth --key state_dict --no-values -o run.html",
)
@file_argument
@click.argument("other", metavar="[FILE2]", type=PATH, required=False)
@click.option("-o", "--output", type=PATH, required=True, help="Write the page to this file.")
@click.option("--key", metavar="NAME", help="Show only the tensors below this path.")
@flag("--no-values", "Read only the header; compute no statistics or histograms.")
@flag("--force", "Replace an existing page.")
@screen_options()
def command(
    file: str, output: str, no_values: bool, force: bool, screen: Screen, **options: Any
) -> None:
    """Write an HTML page that describes one checkpoint or compares two.

    The page is one file and works offline. It has a summary with the verdict of doctor, the values,
    a map of the bytes by module, all tensors with search and sort, and histograms. With FILE2, it
    also shows the differences layer by layer.
    """
    with screen.progress() as progress:
        receipt = report(
            file, output, values=not no_values, overwrite=force, progress=progress, **options
        )
    screen.print_receipt(receipt, page_lines(receipt))
