"""`ckptool info`."""

from __future__ import annotations

from ckptool.cli.console import print_document, print_lines, stdout_look
from ckptool.cli.options import file_argument, fmt_option, json_option, quiet_option, verb
from ckptool.formats import open_checkpoint
from ckptool.inspection.summary import info

__all__ = ["command"]


@verb(
    "info",
    "ckptool info model.pth",
)
@file_argument
@fmt_option
@json_option
@quiet_option
def command(file: str, fmt: str | None, as_json: bool, quiet: bool) -> None:
    """Say on one screen what a checkpoint is and what makes it load.

    Format and writer, sections, wrapper names, devices, what keeps weights_only=True from loading
    it, bytes on disk and bytes that the tensors reach, and the commands that make it load on a
    machine with one GPU or none. With --fmt the table of sections alone.
    """
    with open_checkpoint(file) as checkpoint:
        summary = info(checkpoint)
    if as_json:
        print_document(summary.to_dict())
    else:
        from ckptool.render.info import info_lines

        print_lines(info_lines(summary, stdout_look(fmt)))
