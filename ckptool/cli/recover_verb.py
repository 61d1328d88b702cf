"""`ckptool recover`."""

from __future__ import annotations

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, flag, screen_options, verb
from ckptool.files.recovery import recover
from ckptool.render.receipt import recovery_lines

__all__ = ["command"]


@verb(
    "recover",
    "ckptool recover model.pth",
    "ckptool recover --discard model.pth",
)
@file_argument
@flag("--discard", "Only remove the journal; leave FILE as it is now.")
@flag("--force", "Roll back a file that was copied or moved together with its journal.")
@screen_options()
def command(file: str, discard: bool, force: bool, screen: Screen) -> None:
    """Roll back an edit in place that was killed.

    An edit in place first saves the old bytes in a journal next to the file,
    .FILE.ckptool-journal. If the edit was cut short, recover writes them back; if it was complete,
    the file stays. Every ckptool command that opens the file does the same first. If FILE is not
    the file that the journal belongs to, recover stops with an error and changes nothing;
    --discard then removes the journal.
    """
    done = recover(file, discard=discard, force=force)
    screen.tell(done, recovery_lines(done))
