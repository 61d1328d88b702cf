"""`ckptool info`."""

from __future__ import annotations

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, screen_options, verb
from ckptool.diagnosis.info import info
from ckptool.formats import open_checkpoint
from ckptool.render.info import info_lines


@verb(
    "info",
    "ckptool info model.pth",
)
@file_argument
@screen_options(fmt=True)
def command(file: str, screen: Screen) -> None:
    """Summarize a checkpoint and show how to load it.

    The page shows the format and its writer, the sections, wrapper prefixes and devices, why
    weights_only=True refuses the file, bytes on disk and bytes that tensors use, and the commands
    that make it load on a machine with one GPU or none. --fmt prints only the table of sections.
    ckptool FILE, without a command, prints the same with the verdict of doctor --quick.
    """
    with open_checkpoint(file) as checkpoint:
        summary = info(checkpoint)
    screen.print(summary, info_lines(summary, screen.look))
