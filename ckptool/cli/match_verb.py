"""`ckptool match`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from ckptool.cli.console import Screen, print_document, print_lines, set_exit_code
from ckptool.cli.like import Allowing, allowance_options, resolve_reference
from ckptool.cli.options import PATH, Brief, file_argument, flag, screen_options, verb
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.formats.identify import find_unused_path
from ckptool.loading.plan import describe_like, plan_load
from ckptool.loading.source import StateDict, open_state_dict
from ckptool.matching import Allowance, Judgement, MatchReport
from ckptool.matching.align import is_average_counter
from ckptool.matching.layouts import TransposeRules
from ckptool.remedies import Remedy
from ckptool.render.match import advice_lines, match_lines, note_lines
from ckptool.render.text import to_option_words, to_options_text
from ckptool.transforms import Rule
from ckptool.words import as_argument
from ckptool.writing.target import make_default_target


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
    problem="the checkpoint does not fit",
    cls=_Match,
)
@file_argument
@click.option(
    "--like",
    type=PATH,
    metavar="REFERENCE",
    required=True,
    help="Compare with this checkpoint, or with the model that MODULE:FACTORY in your code builds.",
)
@click.option("--key", metavar="NAME", help="Take this state dict of FILE, if it has several.")
@click.option(
    "--like-key", metavar="NAME", help="Use this state dict of REFERENCE, if it has several."
)
@rename_options("a key of FILE before matching")
@allowance_options()
@flag("--no-fold", "Show a row for each tensor, without folding layers.")
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
    """Check whether a checkpoint fits a model, and what to rename.

    These match without a rule: wrapper prefixes such as "module.", one common prefix, and keys that
    torch itself renamed. Other renames are only proposed; apply them with --rename. If REFERENCE is
    a file, only its header is read, without torch. MODULE:FACTORY is imported from the current
    folder and called without arguments, on the meta device if possible. Load the result with
    ckptool.load_into, or save it with the model's keys with ckptool convert --like.
    """
    reference = resolve_reference(like)
    model_target = describe_like(reference, key=like_key)
    with open_state_dict(file, key=key, wanted=model_target.slots) as state:
        is_file = reference is like  # the path itself, not a model that was built
        plan = plan_load(
            state,
            model_target,
            rename=rules,
            transpose_rules=TransposeRules.parse(transpose, no_transpose),
            by_type=is_file,  # judge casts without torch
        )
        applied_rules = tuple(_find_applied_rules(rules, state))
        is_module = state.section.kind == "module"
    report = plan.report
    globs = {name.removeprefix("allow_"): arguments for name, arguments in allowed.items()}
    judgement = Allowance(min_coverage=min_coverage, **globs).judge(report)
    set_exit_code(0 if judgement.accepted else 1)
    if screen.as_json:
        print_document({**report.to_dict(), **_to_document(judgement)})
        return
    look = screen.look
    lines = match_lines(report, look, fold=not no_fold, judgement=judgement, options=True)
    if screen.fmt:  # keep them out of the table
        screen.say(note_lines(report, look, judgement=judgement, options=True))
        print_lines(lines)
        return
    print_lines(lines)
    command = ""
    can_write_rules = all(rule.regex for rule in rules)  # a table of keys has no REGEX=>REPL
    if can_write_rules and _can_convert(report):
        command = _make_convert_command(
            file,
            {
                "like": like,
                "key": key,
                "like_key": like_key,
                "rename": applied_rules,
                **{
                    f"allow_{name}": globs[name] for name in ("missing", "unexpected", "mismatched")
                },
                "min_coverage": min_coverage,
                "transpose": transpose,
                "no_transpose": no_transpose,
                "model_only": is_module,
            },
        )
    print_lines(advice_lines(judgement, look, command=command))


def _make_convert_command(file: str, arguments: Mapping[str, Any]) -> str:
    """Return the `convert` command that writes the file with the model's keys.

    `arguments` are its options by the names of the library; those that are None are left out.
    """
    target = find_unused_path(make_default_target(file, "fitted"))
    given = Remedy(tuple((name, value) for name, value in arguments.items() if value is not None))
    words = ["ckptool", "convert", as_argument(file), as_argument(target)]
    return shlex.join([*words, *to_option_words(given)])


def _find_applied_rules(rules: Iterable[Rule], state: StateDict) -> Iterator[str]:
    """Yield the rules that match at least one key of the file."""
    keys = list(state.slots)
    for rule in rules:
        renamed = [rule.apply(key) for key in keys]
        if any(new is not None for new in renamed):
            yield rule.text
            keys = [key if new is None else new for key, new in zip(keys, renamed, strict=True)]


def _to_document(judgement: Judgement) -> dict[str, Any]:
    """Return the part of the JSON document about the judgement."""
    remedy = judgement.remedy
    return {
        "accepted": judgement.accepted,
        "problems": [
            {"kind": problem.kind, "text": problem.text, "remedy": to_options_text(problem.remedy)}
            for problem in judgement.problems
        ],
        "remedy": {"text": to_options_text(remedy), "options": to_option_words(remedy)}
        if remedy
        else None,
    }


def _can_convert(report: MatchReport) -> bool:
    """Return True if the keys differ from the model's and `convert` can rename them."""
    kept_names = (name for name, _ in report.kept)
    # A file without the counter of an AveragedModel has none after `convert` either.
    if report.missing_keys or report.mismatched or any(map(is_average_counter, kept_names)):
        return False
    return any(old != new for renaming in report.renamed for old, new in renaming.names)
