"""`ckptool FILE`, without a verb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.cli.console import Screen
from ckptool.cli.options import file_argument, screen_options, verb
from ckptool.diagnosis.contents import detect_devices
from ckptool.diagnosis.diagnose import Diagnosis
from ckptool.diagnosis.info import Info, summarize_and_diagnose
from ckptool.formats import open_checkpoint
from ckptool.render.info import overview_lines
from ckptool.render.verdicts import verdict_text


@dataclass(frozen=True, slots=True)
class _Overview:
    """The document of `ckptool info`, with the verdict of `ckptool doctor --quick`."""

    info: Info
    diagnosis: Diagnosis

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.info/1` with three more keys."""
        return {
            **self.info.to_dict(),
            "ok": self.diagnosis.ok,
            "verdict": verdict_text(self.diagnosis),
            "command": self.diagnosis.first_command,
        }


@verb("info", "ckptool model.pth")  # "info", so that hints show a verb that exists
@file_argument
@screen_options(fmt=True)
def command(file: str, screen: Screen) -> None:
    """Summarize a checkpoint, with the verdict of doctor --quick and its first command.

    ckptool info and ckptool doctor show more.
    """
    with open_checkpoint(file) as checkpoint:
        summary, diagnosis = summarize_and_diagnose(checkpoint, detect_devices())
    lines = overview_lines(summary, diagnosis, screen.look)
    screen.print(_Overview(summary, diagnosis), lines)
