"""`ckptool doctor`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.console import Screen, set_exit_code
from ckptool.cli.like import referred
from ckptool.cli.options import PATH, file_argument, flag, screen_options, verb
from ckptool.diagnosis import doctor
from ckptool.render.verdicts import diagnosis_lines


@verb(
    "doctor",
    "ckptool doctor model.pth",
    "ckptool doctor model.pth --like reference.pth",
    "ckptool doctor model.pth --like mypackage.models:build",
    "ckptool doctor model.pth --quick --devices cpu,cuda:0",
    finding="something fails or misleads",
)
@file_argument
@click.option(
    "--like",
    metavar="REFERENCE",
    type=PATH,
    help="Check against the model: another checkpoint of it, or MODULE:FACTORY (ckptool match).",
)
@click.option("--key", metavar="NAME", help="The state dict to check, if there are several.")
@flag("--quick", "Read only the header: no checksums, no NaN.")
@click.option(
    "--devices",
    metavar="LIST",
    help="Devices of the machine that will load it: cpu, or cuda:0,cuda:1. Default: this one's.",
)
@flag("--explain", "Add where and why, and what else helps.")
@screen_options()
def command(file: str, like: str | None, explain: bool, screen: Screen, **how: Any) -> None:
    """Explain why a checkpoint does not load, and how to fix it.

    doctor lists every error of torch.load(FILE) and load_state_dict, every warning (it loads, but
    wrongly) and notes, and prints the command that writes a file without them. FILE itself is
    never changed. Notes do not change the exit code. torch is not imported, except for
    MODULE:FACTORY.
    """
    reference = None if like is None else referred(like)
    with screen.progress() as progress:
        found = doctor(file, like=reference, named=like or "", progress=progress, **how)
    set_exit_code(0 if found.ok else 1)
    screen.print(found, diagnosis_lines(found, screen.look, explain=explain))
