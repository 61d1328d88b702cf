"""`ckptool report`."""

from __future__ import annotations

from contextlib import ExitStack

import click

from ckptool.cli.console import Progress, print_document, say
from ckptool.cli.options import PATH, file_argument, json_option, quiet_option, verb
from ckptool.formats import open_checkpoint
from ckptool.inspection.reporting import report
from ckptool.render.page import check_page_target, page_lines, write_page

__all__ = ["command"]


@verb(
    "report",
    "ckptool report model.pth -o model.html",
    "ckptool report epoch1.pth epoch2.pth -o epochs.html",
    "ckptool report run.pth --key state_dict --no-values -o run.html",
)
@file_argument
@click.argument("other", metavar="[FILE2]", type=PATH, required=False)
@click.option("-o", "--output", type=PATH, required=True, help="Page to write.")
@click.option("--key", metavar="NAME", help="Only the tensors below this address.")
@click.option("--no-values", is_flag=True, help="Read the header alone: no histograms, no figures.")
@click.option("--force", is_flag=True, help="Overwrite an existing page.")
@json_option
@quiet_option
def command(
    file: str,
    other: str | None,
    output: str,
    key: str | None,
    no_values: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a page about a checkpoint, or about two compared.

    It is one HTML file that needs no network: summary, a map of the bytes by module, every
    tensor with search and sort, histograms of the values; of two files also what differs, layer by
    layer. Any browser opens it.
    """
    with ExitStack() as stack:
        files = [file] if other is None else [file, other]
        opened = [stack.enter_context(open_checkpoint(one)) for one in files]
        check_page_target(opened, output, overwrite=force)
        with Progress(quiet=quiet) as progress:
            found = report(*opened, key=key, values=not no_values, progress=progress)
        receipt = write_page(found, output, opened, overwrite=force)
    say(page_lines(receipt), quiet=quiet)
    if as_json:
        print_document(receipt.to_dict())
