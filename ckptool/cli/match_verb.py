"""`ckptool match`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import click

from ckptool.cli.allowing import Allowing, allowance_options
from ckptool.cli.console import print_document, print_lines, say, settle, stdout_look
from ckptool.cli.options import file_argument, fmt_option, json_option, quiet_option, verb
from ckptool.formats import open_checkpoint
from ckptool.formats.identify_kinds import as_argument, unused
from ckptool.loading.fitting.factory import referred
from ckptool.loading.fitting.references import reference
from ckptool.matching import Allowance, MatchReport, Problem
from ckptool.matching.fitting import compared, match_of
from ckptool.remedies import Remedy
from ckptool.render.remedies import as_options, option_words
from ckptool.render.terminal import Look
from ckptool.render.text import clean, runnable, wrapped
from ckptool.statedict import Section, model_state_dict, wrapped_names
from ckptool.transforms import prefix_rule, regex_rule
from ckptool.writing.naming import default_target

__all__ = ["command"]


@verb(
    "match",
    "ckptool match model.pth --like reference.pth",
    "ckptool match model.pth --like mypackage.models:build",
    "ckptool match model.pth --like reference.pth --allow-missing 'head.*' --min-coverage 0.9",
    r"ckptool match model.pth --like reference.pth --map '^backbone\.=>encoder.'",
    finding="it does not fit",
    cls=Allowing,
)
@file_argument
@click.option(
    "--like",
    metavar="REFERENCE",
    required=True,
    help="A checkpoint of the model, or MODULE:FACTORY: code of yours that builds it.",
)
@click.option("--key", metavar="NAME", help="The state dict of FILE, where there are several.")
@click.option(
    "--like-key", metavar="NAME", help="The state dict of REFERENCE, where there are several."
)
@click.option(
    "--map",
    "regexes",
    multiple=True,
    metavar="REGEX=>REPL",
    help="A rule for the names of FILE, before all others; repeatable.",
)
@click.option(
    "--prefix",
    "prefixes",
    multiple=True,
    metavar="OLD=NEW",
    help="The same for whole components at the front, after --map; model.= takes them off.",
)
@allowance_options()
@click.option("--no-fold", is_flag=True, help="A row for each tensor, not one for repeated layers.")
@fmt_option
@json_option
@quiet_option
def command(
    file: str,
    like: str,
    key: str | None,
    like_key: str | None,
    regexes: tuple[str, ...],
    prefixes: tuple[str, ...],
    allowance: Allowance,
    no_fold: bool,
    fmt: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say whether a checkpoint fits a model, and under which names.

    Wrappers such as module. are no difference, nor are prefixes, the renames of torch's own
    history, and a rule that the two sets of names leave no doubt about. Of a file REFERENCE the
    header is read, without torch; MODULE:FACTORY is imported from here on and called without
    arguments, on the meta device if that works. What fits, ckptool.load_into loads, and
    convert --like writes under the model's names.
    """
    rules = [*map(regex_rule, regexes), *map(prefix_rule, prefixes)]
    with open_checkpoint(file) as checkpoint:
        section = model_state_dict(checkpoint, key)
        wanted = reference(referred(like), key=like_key)
        found = match_of(section, wanted.slots, file=file, model=wanted.label, rules=rules)
        report = compared(section, found)
    judgement = allowance.judged(report, found.again)
    problems = judgement.problems
    settle(1 if problems else 0)
    if as_json:
        document = {"accepted": not problems, "problems": [_document(one) for one in problems]}
        helps = _helping(judgement.remedy) if judgement.remedy else None
        print_document({**report.to_dict(), **document, "remedy": helps})
        return
    unseen = [problem.text for problem in problems if problem.kind == "coverage"]
    report = report.with_changes(notes=(*report.notes, *unseen))
    from ckptool.render.match import match_lines, note_lines

    look, accepted = stdout_look(fmt), not problems
    if fmt:  # for a program to read: what is for people goes elsewhere
        say(note_lines(report, look, options=True), quiet=quiet)
    lines = match_lines(report, look, fold=not no_fold, accepted=accepted, options=True)
    print_lines(lines)
    if judgement.remedy and not fmt:
        hint = f"hint: {clean(as_options(judgement.remedy))}"
        print_lines(["", *wrapped(hint, look.width)])
    if accepted and not fmt and not prefixes:
        chosen = {"--key": key, "--like-key": like_key}
        options = [word for name, value in chosen.items() if value for word in (name, value)]
        options += [word for regex in _used(regexes, section) for word in ("--rename", regex)]
        options += ["--model-only"] if section.kind == "module" else []
        print_lines(_writing(report, file, like, [*options, *_allowing(allowance)], look))


def _used(regexes: Iterable[str], section: Section) -> Iterator[str]:
    """The rules that some name matches."""
    names = wrapped_names(section.node)
    for regex in regexes:
        rule = regex_rule(regex)
        news = [rule.apply(name) for name in names]
        if any(new is not None for new in news):
            yield regex
            names = [name if new is None else new for name, new in zip(names, news, strict=True)]


def _document(problem: Problem) -> dict[str, str]:
    return {"kind": problem.kind, "text": problem.text, "remedy": as_options(problem.remedy)}


def _helping(remedy: Remedy) -> dict[str, Any]:
    return {"text": as_options(remedy), "options": option_words(remedy)}


def _writing(
    report: MatchReport, file: str, like: str, options: list[str], look: Look
) -> Iterator[str]:
    """The command that writes the file under the model's names, where they are others."""
    if not any(own != new for renaming in report.renamed for own, new in renaming.names):
        return
    target = unused(default_target(file, "fitted"))
    words = ["ckptool", "convert", as_argument(file), as_argument(target), "--like", like]
    yield ""
    yield look.bold("to write it under these names")
    yield f"  {runnable(shlex.join([*words, *options]))}"


def _allowing(allowance: Allowance) -> Iterator[str]:
    """The options of `convert` that allow the same."""
    for name in ("missing", "unexpected", "mismatched"):
        given = getattr(allowance, name)
        option = f"--allow-{name}"
        if given is True:
            yield option
        elif given:
            yield from (f"{option}={glob}" for glob in given)
    if allowance.min_coverage is not None:
        yield f"--min-coverage={allowance.min_coverage:g}"
