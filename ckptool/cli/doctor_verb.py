"""`ckptool doctor`."""

from __future__ import annotations

import click

from ckptool.cli.console import Progress, print_document, print_lines, settle, stdout_look
from ckptool.cli.factory import referred
from ckptool.cli.options import PATH, file_argument, json_option, quiet_option, verb
from ckptool.diagnosis import doctor

__all__ = ["command"]


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
    help="A checkpoint of the model that it is to load into, or MODULE:FACTORY (ckptool match).",
)
@click.option(
    "--key", metavar="NAME", help="The state dict that is meant, where there are several."
)
@click.option("--quick", is_flag=True, help="Only the header: neither checksums nor NaN.")
@click.option(
    "--devices",
    metavar="LIST",
    help="Devices of the machine that is meant: cpu, or cuda:0,cuda:1. Default: this one's.",
)
@click.option("--explain", is_flag=True, help="Where and why as well, and what else helps.")
@json_option
@quiet_option
def command(
    file: str,
    like: str | None,
    key: str | None,
    quick: bool,
    devices: str | None,
    explain: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say why a checkpoint does not load, and what mends it.

    Every reason why torch.load(FILE) and load_state_dict fail or mislead, and the command that
    mends it. The command makes a new file; FILE itself is never changed. Notes (what works, and is
    worth knowing) do not count for the exit code. The system says which GPUs there are: torch is
    not imported, except for MODULE:FACTORY.
    """
    reference = None if like is None else referred(like)
    with Progress(quiet=quiet) as progress:
        found = doctor(
            file,
            like=reference,
            named=like or "",
            key=key,
            quick=quick,
            devices=devices,
            progress=progress,
        )
    settle(0 if found.ok else 1)
    if as_json:
        print_document(found.to_dict())
    else:
        from ckptool.render.doctor import diagnosis_lines

        print_lines(diagnosis_lines(found, stdout_look(), explain=explain))
