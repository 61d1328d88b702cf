"""`ckptool diff`."""

from __future__ import annotations

import math
import os
from typing import Any

import click

from ckptool.checkpoint import Checkpoint
from ckptool.cli.console import Progress, print_document, print_lines, say, settle, stdout_look
from ckptool.cli.options import PATH, fmt_option, json_option, quiet_option, verb
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.inspection.diff import diff
from ckptool.transforms import regex_rule

__all__ = ["command"]

_NOTHING = ("/dev/null", os.devnull)
"""What git hands to a difftool for a file that is new or gone."""


def _tolerance(_: click.Context, option: click.Parameter, given: float | None) -> float | None:
    if given is not None and (math.isnan(given) or given < 0):
        raise UsageError(f"--{option.name} must be a number of 0 or more, not {given}")
    return given


@verb(
    "diff",
    "ckptool diff epoch1.pth epoch2.pth",
    "ckptool diff model.pth model.safetensors --quick",
    "ckptool diff a.pth b.pth --key state_dict --atol 1e-6",
    r"ckptool diff a.pth b.pth --map '^encoder\.=>backbone.' --stat",
    finding="they differ",
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--strict-names", is_flag=True, help="Compare names as they are, wrappers and all.")
@click.option(
    "--map",
    "regexes",
    multiple=True,
    metavar="REGEX=>REPL",
    help="Make names of A, wrappers off, into those of B; repeatable.",
)
@click.option("--key", metavar="NAME", help="Compare only what stands at this address.")
@click.option("--structure", is_flag=True, help="Names, types and shapes alone; no values.")
@click.option(
    "--quick", is_flag=True, help="Trust the CRC-32 where both files state one; no figures."
)
@click.option("--strict", is_flag=True, help="Device tags and requires_grad count as differences.")
@click.option(
    "--atol",
    type=float,
    callback=_tolerance,
    help="Absolute tolerance, as in torch.allclose (1e-8 where only --rtol is given).",
)
@click.option(
    "--rtol",
    type=float,
    callback=_tolerance,
    help="Relative tolerance, as in torch.allclose (1e-5 where only --atol is given).",
)
@click.option("--equal-nan", is_flag=True, help="NaN is equal to NaN where values are compared.")
@click.option("--stat", is_flag=True, help="How much differs in each module.")
@click.option("--name-status", is_flag=True, help="A line an entry: A, D, M, R or T and its name.")
@click.option(
    "--max-diffs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the N tensors that changed most.",
)
@click.option("--no-fold", is_flag=True, help="A row for each tensor, not one for repeated layers.")
@fmt_option
@json_option
@quiet_option
def command(
    a: str,
    b: str,
    regexes: tuple[str, ...],
    stat: bool,
    name_status: bool,
    no_fold: bool,
    fmt: str | None,
    as_json: bool,
    quiet: bool,
    **how: Any,
) -> None:
    """Say what differs between two checkpoints, of any formats.

    Names are compared with wrappers such as module. off. Equal bytes are found without torch;
    where they differ there are figures, relative ones to B, the largest change first. Repeated
    layers are one row, with the worst of each figure; --fmt folds nothing.
    """
    shown = {"--stat": stat, "--name-status": name_status, "--json": as_json}
    given = [name for name, wanted in shown.items() if wanted]
    if name_status and fmt:
        given.append("--fmt")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined")
    rules = [regex_rule(text) for text in regexes]
    with _opened(a) as one, _opened(b) as other, Progress(quiet=quiet) as progress:
        found = diff(one, other, rules=rules, progress=progress, **how)
    settle(0 if found.identical else 1)
    if as_json:
        print_document(found.to_dict())
        return
    from ckptool.render.diff import diff_lines, note_lines, stat_lines, status_lines

    look = stdout_look(fmt)
    if name_status or fmt:  # for a program to read: what is for people goes elsewhere
        say(note_lines(found, look), quiet=quiet)
    if name_status:
        print_lines(status_lines(found))
    else:
        print_lines((stat_lines if stat else diff_lines)(found, look, fold=not no_fold))


def _opened(path: str) -> Checkpoint:
    """Return the checkpoint of a file; an empty one if one side of a diff has no file."""
    return Checkpoint({}, "nothing", path) if path in _NOTHING else open_checkpoint(path)
