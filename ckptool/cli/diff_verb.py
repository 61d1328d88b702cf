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
"""The paths that git gives to a difftool in place of a file that is new or deleted."""


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
    finding="they differ",
    cls=_Diff,
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@flag("--strict-names", "Compare names with their wrapper prefixes.")
@rename_options("a name of A, without wrapper prefixes,")
@click.option("--key", metavar="NAME", help="Compare only what is below this path.")
@flag("--model-only", "Compare only the weights: the state dict of the model in each file.")
@flag("--structure", "Compare names, types and shapes, but no values.")
@flag("--quick", "Compare CRC-32 sums if both files have them; no figures.")
@flag("--strict", "Compare device tags and requires_grad, too.")
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    help="Absolute tolerance, as in torch.allclose (1e-8 if only --rtol is given).",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Relative tolerance, as in torch.allclose (1e-5 if only --atol is given).",
)
@flag("--equal-nan", "Treat NaN as equal to NaN.")
@flag("--ignore-dtype", "Compare a wider type rounded to the narrower one: is a half copy exact?")
@flag("--stat", "Show how much differs in each module.")
@flag("--name-status", "Print one line per entry: A, D, M, R or T, and its name.")
@click.option(
    "--sort",
    type=click.Choice(SORTABLE),
    metavar="FIGURE",
    default="rel_norm",
    help=f"Sort tensors by {listed(SORTABLE)}, the largest change first [default: rel_norm].",
)
@click.option(
    "--max-diffs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show only the first N tensors that changed.",
)
@flag("--no-fold", "Show a row for each entry; do not fold layers or containers.")
@screen_options(fmt=True)
def command(
    a: str,
    b: str,
    rules: list[Rule],
    stat: bool,
    name_status: bool,
    no_fold: bool,
    screen: Screen,
    **how: Any,
) -> None:
    """Show what differs between two checkpoints of any formats.

    Wrapper prefixes such as "module." are ignored. The weights come first, sorted by rel norm, the
    Frobenius norm of the difference divided by that of A. NaN is first, integers are last. The
    figure max rel is relative to the elements of B. Repeated layers are folded into one
    row, which has the largest of each figure. A section or another container that only one file
    has is one line; --fmt and --no-fold list its entries. Figures need torch, the rest does not.
    """
    shown = {"--stat": stat, "--name-status": name_status, "--json": screen.as_json}
    shown["--fmt"] = name_status and bool(screen.fmt)  # of --stat it is a table
    given = [name for name, wanted in shown.items() if wanted]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined")
    with _opened(a) as one, _opened(b) as other, screen.progress() as progress:
        found = diff(one, other, rename=rules, progress=progress, **how)
    set_exit_code(0 if found.identical else 1)
    look = screen.look
    if (name_status or screen.fmt) and not screen.as_json:
        screen.say(note_lines(found, look))  # a program reads stdout
    drawn = (stat_lines if stat else diff_lines)(found, look, fold=not no_fold)
    screen.print(found, status_lines(found) if name_status else drawn)


def _opened(path: str) -> Checkpoint:
    """Return the checkpoint of a file; an empty one if one side of a diff has no file."""
    return Checkpoint({}, "nothing", path) if path in _NOTHING else open_checkpoint(path)
