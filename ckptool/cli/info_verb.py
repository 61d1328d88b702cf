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

    info shows the format and its writer, the sections, wrapper prefixes and devices, why
    weights_only=True rejects the file, the bytes on disk and the bytes used, and commands to load
    it on a machine with one GPU or none. --fmt prints only the table of sections. ckptool FILE,
    without a command, adds the verdict of doctor --quick.
    """
    with open_checkpoint(file) as checkpoint:
        summary = info(checkpoint)
    screen.print(summary, info_lines(summary, screen.look))
