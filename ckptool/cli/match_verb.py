"""`ckptool match`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import click

from ckptool.cli.console import Screen, print_document, print_lines, set_exit_code
from ckptool.cli.like import Allowing, allowance_options, referred
from ckptool.cli.options import PATH, Brief, file_argument, flag, screen_options, verb
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.formats.identify import unused
from ckptool.loading.plan import planned, target_like
from ckptool.loading.source import StateDict, stated
from ckptool.matching import Allowance, Judgement, MatchReport
from ckptool.matching.align import is_average_counter
from ckptool.matching.layouts import TransposeRules
from ckptool.remedies import Remedy
from ckptool.render.match import advice_lines, match_lines, note_lines
from ckptool.render.text import as_options, option_words
from ckptool.transforms import Rule
from ckptool.words import as_argument
from ckptool.writing.target import default_target


class _Match(Allowing, RulesInOrder, Brief):
    most_used = frozenset(
        {
            "like", "key", "like_key", "rename", "prefix", "allow_missing", "allow_unexpected",
            "min_coverage", "as_json",
        }
    )  # fmt: skip


@verb(
    "match",
    "ckptool match model.pth --like reference.pth",
    "ckptool match model.pth --like mypackage.models:build",
    "ckptool match model.pth --like reference.pth --allow-missing 'head.*' --min-coverage 0.9",
    r"ckptool match model.pth --like reference.pth --rename '^backbone\.=>encoder.'",
    finding="it does not fit",
    cls=_Match,
)
@file_argument
@click.option(
    "--like",
    type=PATH,
    metavar="REFERENCE",
    required=True,
    help="A checkpoint of the model, or MODULE:FACTORY, your code that builds it.",
)
@click.option("--key", metavar="NAME", help="The state dict of FILE, if there are several.")
@click.option(
    "--like-key", metavar="NAME", help="The state dict of REFERENCE, if there are several."
)
@rename_options("a name of FILE, first,")
@allowance_options()
@flag("--no-fold", "Show a row for each tensor; do not fold layers.")
@screen_options(fmt=True)
def command(
    file: str,
    like: str,
    key: str | None,
    like_key: str | None,
    rules: list[Rule],
    transpose: tuple[str, ...],
    no_transpose: tuple[str, ...],
    min_coverage: float | None,
    no_fold: bool,
    screen: Screen,
    **allowed: Any,
) -> None:
    """Check whether a checkpoint fits a model, and with which renames.

    Wrapper prefixes such as "module.", one common prefix, and names that torch itself has changed
    match without a rule. Any other rename is only proposed: apply it with --rename. Of a REFERENCE
    that is a file only the header is read, without torch. MODULE:FACTORY is imported from the
    current folder and called without arguments, on the meta device if possible.
    ckptool.load_into loads what matches; ckptool convert --like writes it under the model's names.
    """
    named = referred(like)
    wanted = target_like(named, key=like_key)
    with stated(file, key=key, wanted=wanted.slots) as state:
        by_type = named is like  # of a file the header is all that is asked
        plan = planned(
            state,
            wanted,
            rename=rules,
            choices=TransposeRules.of(transpose, no_transpose),
            by_type=by_type,
        )
        applied = tuple(_applied(rules, state))
        is_module = state.section.kind == "module"
    report = plan.report
    globs = {name.removeprefix("allow_"): given for name, given in allowed.items()}
    judgement = Allowance(min_coverage=min_coverage, **globs).judged(report)
    set_exit_code(0 if judgement.accepted else 1)
    if screen.as_json:
        print_document({**report.to_dict(), **_document(judgement)})
        return
    look = screen.look
    lines = match_lines(report, look, fold=not no_fold, judgement=judgement, options=True)
    if screen.fmt:  # a program reads stdout
        screen.say(note_lines(report, look, judgement=judgement, options=True))
        print_lines(lines)
        return
    print_lines(lines)
    given: dict[str, Any] = {
        "like": like,
        "key": key,
        "like_key": like_key,
        "rename": applied,
        **{f"allow_{name}": globs[name] for name in ("missing", "unexpected", "mismatched")},
        "min_coverage": min_coverage,
        "transpose": transpose,
        "no_transpose": no_transpose,
        "model_only": is_module,
    }
    command = ""
    if all(rule.regex for rule in rules) and _is_for_convert(report):
        target = unused(default_target(file, "fitted"))
        options = Remedy(tuple((name, one) for name, one in given.items() if one is not None))
        words = ["ckptool", "convert", as_argument(file), as_argument(target)]
        command = shlex.join([*words, *option_words(options)])
    print_lines(advice_lines(judgement, look, command=command))


def _applied(rules: Iterable[Rule], state: StateDict) -> Iterator[str]:
    """Yield the regexes that some name of the file matches."""
    names = list(state.slots)
    for rule in rules:
        news = [rule.apply(name) for name in names]
        if any(new is not None for new in news):
            yield rule.text
            names = [name if new is None else new for name, new in zip(names, news, strict=True)]


def _document(judgement: Judgement) -> dict[str, Any]:
    remedy = judgement.remedy
    return {
        "accepted": judgement.accepted,
        "problems": [
            {"kind": one.kind, "text": one.text, "remedy": as_options(one.remedy)}
            for one in judgement.problems
        ],
        "remedy": {"text": as_options(remedy), "options": option_words(remedy)} if remedy else None,
    }


def _is_for_convert(report: MatchReport) -> bool:
    """Return whether the names differ from the model's, and `convert` can change them."""
    kept = (name for name, _ in report.kept)
    if report.missing_keys or report.mismatched or any(map(is_average_counter, kept)):
        return False
    return any(own != new for renaming in report.renamed for own, new in renaming.names)
