"""`ckptool diff`."""

from __future__ import annotations

import os
from typing import Any

import click

from ckptool.cli.console import Screen, set_exit_code
from ckptool.cli.options import PATH, Brief, flag, screen_options, verb
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.comparison.diff import SORTABLE, diff
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.render.diff import diff_lines, note_lines, stat_lines, status_lines
from ckptool.transforms import Rule
from ckptool.words import listed

_NOTHING = ("/dev/null", os.devnull)
"""The paths that git passes to a difftool for a new or deleted file."""


class _Diff(RulesInOrder, Brief):
    most_used = frozenset(
        {
            "key", "model_only", "rename", "structure", "quick", "strict", "atol", "rtol",
            "ignore_dtype", "sort", "stat", "name_status", "as_json",
        }
    )  # fmt: skip


@verb(
    "diff",
    "ckptool diff epoch1.pth epoch2.pth",
    "ckptool diff model.pth model.safetensors --model-only --quick",
    "ckptool diff a.pth b.pth --key state_dict --atol 1e-6",
    "ckptool diff model.pth half.safetensors --ignore-dtype",
    r"ckptool diff a.pth b.pth --rename '^encoder\.=>backbone.' --stat",
    problem="the checkpoints differ",
    cls=_Diff,
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@flag("--strict-names", "Compare keys with their wrapper prefixes.")
@rename_options("a key of A, without wrapper prefixes")
@click.option("--key", metavar="NAME", help="Compare only entries below this path.")
@flag("--model-only", "Compare only the model's state dict in each file.")
@flag("--structure", "Compare keys, dtypes and shapes, but not values.")
@flag("--quick", "Compare CRC-32 checksums if both files have them; compute no statistics.")
@flag("--strict", "Also compare devices and requires_grad.")
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    help="Set the absolute tolerance, as in torch.allclose. [default with --rtol: 1e-8]",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Set the relative tolerance, as in torch.allclose. [default with --atol: 1e-5]",
)
@flag("--equal-nan", "Treat NaN as equal to NaN.")
@flag(
    "--ignore-dtype",
    "Round the wider dtype to the narrower one first, to check that a half-precision copy is "
    "exact.",
)
@flag("--stat", "Show how much differs in each module.")
@flag("--name-status", "Print one line per entry: A, D, M, R or T, and its path.")
@click.option(
    "--sort",
    type=click.Choice(SORTABLE),
    metavar="FIGURE",
    default="rel_norm",
    help=f"Sort tensors by {listed(SORTABLE)}, largest change first. [default: rel_norm]",
)
@click.option(
    "--max-diffs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show only the first N tensors that changed.",
)
@flag("--no-fold", "Show a row for each entry, without folding layers or containers.")
@screen_options(fmt=True)
def command(
    a: str,
    b: str,
    rules: list[Rule],
    stat: bool,
    name_status: bool,
    no_fold: bool,
    screen: Screen,
    **options: Any,
) -> None:
    """Compare two checkpoints, in any formats.

    Wrapper prefixes such as "module." are ignored. Weights come before other tensors, and
    floating-point weights before integers, sorted by rel norm (the Frobenius norm of the difference
    divided by that of A), NaN first. max rel is relative to the elements of B. Repeated layers are
    folded into one row with the maximum of each column. A container is one row if only one file has
    it; --fmt and --no-fold list its entries. Only the statistics need torch.
    """
    shown = {"--stat": stat, "--name-status": name_status, "--json": screen.as_json}
    shown["--fmt"] = name_status and bool(screen.fmt)  # with --stat, it is a table
    given_options = [option for option, is_given in shown.items() if is_given]
    if len(given_options) > 1:
        raise UsageError(f"{' and '.join(given_options)} cannot be combined")
    with _open_side(a) as old, _open_side(b) as new, screen.progress() as progress:
        result = diff(old, new, rename=rules, progress=progress, **options)
    set_exit_code(0 if result.identical else 1)
    look = screen.look
    if (name_status or screen.fmt) and not screen.as_json:
        screen.say(note_lines(result, look))  # keep them out of the table
    lines = (stat_lines if stat else diff_lines)(result, look, fold=not no_fold)
    screen.print(result, status_lines(result) if name_status else lines)


def _open_side(path: str) -> Checkpoint:
    """Open a checkpoint; return an empty one for the missing side of a git diff."""
    return Checkpoint({}, "nothing", path) if path in _NOTHING else open_checkpoint(path)
