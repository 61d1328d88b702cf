"""`ckptool recover`."""

from __future__ import annotations

import click

from ckptool.cli.console import print_document, say
from ckptool.cli.options import file_argument, json_option, quiet_option, verb
from ckptool.files.recovery import recover
from ckptool.render.receipt import recovery_lines

__all__ = ["command"]


@verb(
    "recover",
    "ckptool recover model.pth",
    "ckptool recover --discard model.pth",
)
@file_argument
@click.option(
    "--discard", is_flag=True, help="Only remove the journal; leave the file as it is now."
)
@click.option(
    "--force",
    is_flag=True,
    help="Roll back a file that was copied or moved since, journal and all.",
)
@json_option
@quiet_option
def command(file: str, discard: bool, force: bool, as_json: bool, quiet: bool) -> None:
    """Undo what a killed edit in place left of a file.

    An edit in place first notes in a journal beside the file, .FILE.ckptool-journal, what was
    there. Where it was cut short, the file is rolled back to that; where all of the edit is there,
    the file stays. Any ckptool command that opens the file does the same first. A file other than
    the one that the journal tells of is never touched: that is an error, and --discard removes the
    journal alone.
    """
    done = recover(file, discard=discard, force=force)
    say(recovery_lines(done), quiet=quiet)
    if as_json:
        print_document(done.to_dict())
