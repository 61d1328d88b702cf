"""Decide which differences are accepted, and find arguments that help with the others.

This is the policy of `load_into`, `match` and `convert --like`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from glob import escape as escaped_glob
from typing import Any, NamedTuple

from ckptool.core.finding import Finding
from ckptool.core.names import group_families
from ckptool.errors import MatchError, UsageError
from ckptool.matching.align import find_common_module
from ckptool.matching.known_renames import MERGE, has_adapter
from ckptool.matching.report import (
    Ambiguity,
    DtypeChange,
    MatchReport,
    Mismatch,
    Renaming,
    max_allowed_keys,
)
from ckptool.remedies import Remedy, merge_remedies
from ckptool.words import are, counted, listed, printable, shell

Allowed = bool | str | Sequence[str] | None
"""True or False for all keys, or globs of allowed keys; None follows `strict`."""
_MAX_FOLDED_KEYS = 2000
"""The number of keys folded for a message, which shows only a few."""
_MAX_LISTED_KEYS = 4
"""The number of keys that a hint lists one by one."""
_MAX_GLOBS = 8
"""The largest number of globs in a hint."""
_MAX_GLOB_LENGTH = 160
"""The most characters of a key or glob in a hint."""
_SMALLEST_SHOWN_SHARE = 0.001
_NO_REMEDY = Remedy()
_HINT_RENAME = Remedy((("rename", ("REGEX=>REPL",)),), to_fill_in=True)
_HINT_OTHER_MODEL = Remedy(
    lead="the file may be for another model; use ",
    instead=(
        Remedy((("key", "NAME"),), " for another state dict in the file", to_fill_in=True),
        _HINT_RENAME._replace(note=" to rename keys"),
    ),
)
_TOO_MANY_GLOBS = Remedy(note="too many differences for a few globs; the report lists them")
_HINT_RENAME_AMBIGUOUS = Remedy(
    instead=(
        _HINT_RENAME._replace(
            note=" if these are the same tensors; otherwise the architectures differ"
        ),
    )
)
_HINT_UNTIE = Remedy(
    note="untie them in the model, or keep only one of them in the file; the model "
    "then uses it for all of these keys"
)


@dataclass(frozen=True, slots=True)
class MatchFinding(Finding):
    """A reason to refuse a match, on one line with the keys folded.

    Its kind is `missing`, `unexpected`, `mismatched`, `untied`, `ambiguous`, `layout`,
    `lossy-cast`, `coverage` or `optimizer`.
    """

    remedy: Remedy = field(default=_NO_REMEDY, kw_only=True)
    """The `load_into` arguments that help."""


class _Refused(NamedTuple):
    """The differences of a report that are not allowed."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[Mismatch]
    lossy_casts: list[DtypeChange]
    is_empty: bool
    """True if nothing would be loaded."""
    is_too_little: bool
    """True if something would be loaded, but less than `min_coverage`."""


class Judgement(NamedTuple):
    """The problems of a report, the most important first; without problems, it is accepted."""

    problems: tuple[MatchFinding, ...]
    remedy: Remedy
    """The arguments that help with all problems."""

    @property
    def accepted(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    @property
    def is_of_the_optimizer(self) -> bool:
        """True if only the state of the optimizer is not accepted."""
        return {problem.kind for problem in self.problems} == {"optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The allowed differences between a state dict and a model.

    `strict=False` allows missing and unexpected keys, as in torch. If nothing fits, the match is
    always refused, unless `min_coverage` is 0.
    """

    strict: bool = True
    missing: Allowed = None
    unexpected: Allowed = None
    mismatched: Allowed = False
    lossy_cast: Allowed = False
    min_coverage: float | None = None

    def __post_init__(self) -> None:
        """Check the types of the arguments."""
        if not isinstance(self.strict, bool):
            raise UsageError(f"strict={self.strict!r} is not True or False")
        for name in ("missing", "unexpected", "mismatched", "lossy_cast"):
            value = getattr(self, name)
            are_globs = isinstance(value, Collection) and not isinstance(value, (bytes, Mapping))
            if not (
                value is None
                or isinstance(value, bool)
                or (are_globs and all(isinstance(glob, str) for glob in value))
            ):
                raise UsageError(
                    f"allow_{name}={value!r} is not True, False or a list of globs",
                    hint=f"use allow_{name}=['head.*'], for example",
                )
        min_coverage = self.min_coverage
        if min_coverage is not None and (
            isinstance(min_coverage, bool)
            or not isinstance(min_coverage, (int, float))
            or not 0 <= min_coverage <= 1
        ):
            raise UsageError(f"min_coverage={min_coverage!r} is not a number from 0 to 1")

    def allows_cast(self, *keys: str) -> bool:
        """Return True if a lossy cast is allowed for one of these keys."""
        is_allowed = _make_key_test(self.lossy_cast or False)
        return any(map(is_allowed, keys))

    def judge(self, report: MatchReport) -> Judgement:
        """Return all problems, the most important first, and the arguments that help.

        The remedy is one that solves every problem: a note if the file is for another model, else
        the proposed rules (alternatives if they answer a question) with the allowances needed
        after them. A problem has a remedy of its own where allowing it is enough.
        """
        refused = self._find_refused(report)
        unmatched = {*refused.missing, *refused.unexpected}
        ambiguities = [
            row
            for row in report.ambiguous
            if refused.is_empty or unmatched & {*row.names, *row.candidates}
        ]
        rule_groups: list[Sequence[Renaming]] = [()]
        if unmatched or refused.is_empty:
            rule_groups = _group_proposed_rules(report, ambiguities)
        remedies = [_find_remedy(report, rules, refused, ambiguities) for rules in rule_groups]
        usable = [remedy for remedy in remedies if remedy.arguments]
        has_rules = _has_rules(usable)
        loads_too_little = refused.is_empty or refused.is_too_little
        can_allow = bool(usable) and not has_rules and not loads_too_little
        # The proposed rules are alternatives: each answers which of the ambiguous keys match.
        rules_remedy = usable[0]._replace(instead=tuple(usable[1:])) if has_rules else _NO_REMEDY
        problems = (
            *(_find_no_match(report) if refused.is_empty and not refused.mismatched else ()),
            *_find_ambiguity(ambiguities, rules_remedy),
            *_find_unknown_layout(report),
            *_find_unmatched(
                "mismatched",
                [
                    (row.name, f" (file {list(row.shape)}, model {list(row.wanted)})")
                    for row in refused.mismatched
                ],
                "of another shape",
                is_allowed=can_allow,
            ),
            *_find_unmatched(
                "missing",
                [(key, "") for key in refused.missing],
                "missing from the file",
                is_allowed=can_allow,
                max_keys=4,
            ),
            *_find_unmatched(
                "unexpected",
                [(key, "") for key in refused.unexpected],
                "not in the model",
                is_allowed=can_allow,
                max_keys=4,
            ),
            *_find_untied(report),
            *_find_unmatched(
                "lossy-cast",
                [
                    (
                        row.name,
                        f" {row.before} -> {row.after}{f' ({row.loss})' if row.loss else ''}",
                    )
                    for row in refused.lossy_casts
                ],
                "changed by a cast",
            ),
            *(self._find_low_coverage(report) if refused.is_too_little else ()),
            *_find_optimizer_problems(report),
        )
        remedy = _choose_remedy(report, problems, remedies, loads_too_little=loads_too_little)
        return Judgement(problems, remedy)

    def _find_refused(self, report: MatchReport) -> _Refused:
        """Return the differences of a report that this does not allow.

        Allowed keys may be those of the model (`row.name`) or of the file (`row.own`).
        """
        is_mismatch_allowed = _make_key_test(self.mismatched or False)
        loads_nothing, min_coverage = _is_nothing_loaded(report), self.min_coverage
        is_below_minimum = min_coverage is not None and report.coverage < min_coverage
        return _Refused(
            _list_refused(report.missing_keys, self.missing, otherwise=not self.strict),
            _list_refused(report.unexpected_keys, self.unexpected, otherwise=not self.strict),
            [
                row
                for row in report.mismatched
                if not (is_mismatch_allowed(row.name) or is_mismatch_allowed(row.own))
            ],
            [row for row in report.cast if row.lossy and not self.allows_cast(row.name, row.own)],
            is_empty=loads_nothing and min_coverage != 0,
            is_too_little=is_below_minimum and not loads_nothing,
        )

    def _find_low_coverage(self, report: MatchReport) -> Iterator[MatchFinding]:
        """Yield the problem of a report that loads less than `min_coverage`."""
        text = (
            f"{_format_percent(report.coverage)} of the model's parameters would be loaded, "
            f"expected at least {100 * (self.min_coverage or 0):.6g}%"
        )
        yield MatchFinding("coverage", text)

    def refusal_error(self, report: MatchReport) -> MatchError | None:
        """Return the error to raise, or None if the report is accepted.

        Its text has the three most useful lines, its remedy the arguments that help most.
        """
        judgement = self.judge(report)
        if judgement.accepted:
            return None
        texts = [problem.text for problem in judgement.problems]
        # If all keys match, the share says nothing: the first problem follows instead.
        is_complete = bool(report.names) and report.fitting == report.names
        file = report.file if report.file.isprintable() else printable(report.file)
        verdict = (
            f"{file or 'the state dict'} does not fit {printable(report.model) or 'the model'}"
        )
        if judgement.is_of_the_optimizer:
            verdict = f"{f'{file}: ' if file else ''}the optimizer state cannot be loaded"
        lines = [
            f"{verdict}: {texts.pop(0) if is_complete else _describe_share(report)}",
            *texts[:2],
        ]
        if report.proposed and judgement.remedy.arguments:
            lines[-1] += "; the rules in the hint match more, but were not applied"
        return MatchError(
            "\n".join(lines),
            file=report.file or None,
            hint=judgement.remedy or None,
            report=report,
        )


def _choose_remedy(
    report: MatchReport,
    problems: Iterable[MatchFinding],
    remedies: Sequence[Remedy],
    *,
    loads_too_little: bool,
) -> Remedy:
    """Return one remedy that solves all problems, or a note if no argument does.

    `remedies` are the alternatives for unmatched keys, from `_find_remedy`; each is combined with
    the remedies of the other problems. If too little is loaded, only rules help, not allowances.
    """
    usable = [remedy for remedy in remedies if remedy.arguments]
    # Reversed, because the first problem of a kind has the remedy.
    remedy_by_kind = {problem.kind: problem.remedy for problem in reversed([*problems])}
    if "untied" in remedy_by_kind:  # no argument allows it
        return _HINT_UNTIE
    if loads_too_little and not _has_rules(usable):
        # Not while rules are proposed: to accept a low coverage, or to look for another model.
        remedy = _NO_REMEDY if report.proposed else remedy_by_kind.get("coverage", _NO_REMEDY)
        return remedy or (_NO_REMEDY if usable else remedies[0])  # a note without arguments
    if not usable and remedies[0]:  # a note without arguments
        return remedies[0]
    # Each alternative must also solve the other problems.
    other_remedies = [
        remedy_by_kind.get(kind, _NO_REMEDY) for kind in ("layout", "lossy-cast", "optimizer")
    ]
    first, *others = [
        _combine_remedies([remedy, *other_remedies]) for remedy in usable or [_NO_REMEDY]
    ]
    return first._replace(instead=(*first.instead, *others))


def _has_rules(remedies: Iterable[Remedy]) -> bool:
    """Return True if a remedy has a rename rule."""
    return any(argument == "rename" for remedy in remedies for argument, _ in remedy.arguments)


def _list_refused(keys: Iterable[str], allowed: Allowed, *, otherwise: bool) -> list[str]:
    """Return the keys that are not allowed; `otherwise` decides if `allowed` is None."""
    is_allowed = _make_key_test(otherwise if allowed is None else allowed)
    return [key for key in keys if not is_allowed(key)]


def _make_key_test(allowed: bool | str | Sequence[str]) -> Callable[[str], Any]:
    """Return a function that is true for allowed keys: those that match a glob."""
    if isinstance(allowed, bool):
        return lambda key: allowed
    return _compile_globs((allowed,) if isinstance(allowed, str) else tuple(allowed))


@lru_cache(maxsize=16)
def _compile_globs(globs: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the `match` method of a regular expression for all globs."""
    return re.compile("|".join(map(translate, globs)) or "(?!)").match


def _is_nothing_loaded(report: MatchReport) -> bool:
    """Return True if nothing matches, or no parameter."""
    if report.undecided:
        return False
    if report.names and not report.fitting:
        return True
    return report.parameters > 0 and not report.loaded


def _group_proposed_rules(
    report: MatchReport, ambiguities: Sequence[Ambiguity]
) -> list[Sequence[Renaming]]:
    """Return the proposed rules to apply together, one group for each possible answer.

    Rules that are alternatives, each an answer to an ambiguity, are groups of one rule. Otherwise
    all proposed rules are one group.
    """
    if not any(ambiguity.rules for ambiguity in report.ambiguous):
        return [report.proposed]
    answers = {rule for ambiguity in ambiguities for rule in ambiguity.rules}
    groups: list[Sequence[Renaming]] = [
        [renaming] for renaming in report.proposed if renaming.rule in answers
    ]
    no_rules = ()
    return groups or [no_rules]


def _find_remedy(
    report: MatchReport,
    proposed: Sequence[Renaming],
    refused: _Refused,
    ambiguities: Sequence[Ambiguity],
) -> Remedy:
    """Return the proposed rules, and the allowances for refused keys that they do not match.

    If rules and allowances cannot help, the remedy is a note: the keys are ambiguous, or the file
    is for another model.
    """
    resolved = {key for renaming in proposed for pair in renaming.names for key in pair}
    missing = [key for key in refused.missing if key not in resolved]
    unexpected = [key for key in refused.unexpected if key not in resolved]
    mismatched = [row.name for row in refused.mismatched]
    remaining = {*missing, *unexpected}
    # An ambiguity without rules that resolve it: the user must write one.
    if any(not row.rules and remaining & {*row.names, *row.candidates} for row in ambiguities):
        return _HINT_RENAME_AMBIGUOUS
    n_lost = len(missing) + len(mismatched)
    if text := explain_misfit(report, n_lost, unexpected, is_renamed=bool(proposed)):
        # An advice (to merge adapters, to use a recipe) does not depend on the rules.
        is_advice = text == MERGE or bool(report.recipe)
        after = ", even after the proposed rules" if proposed and not is_advice else ""
        return Remedy(note=f"{text}{after}")
    remedies = []
    if proposed:
        remedies.append(Remedy((("rename", tuple(renaming.rule for renaming in proposed)),)))
    notes = []
    for argument, keys, text in (
        ("allow_mismatched", mismatched, "the model keeps its own"),
        ("allow_missing", missing, "the model keeps its own"),
        ("allow_unexpected", unexpected, "left out:"),
    ):
        if keys:
            remedies.append(_make_allowance(argument, keys))
            notes.append(f"{text} {_fold_keys(keys, max_keys=3)}")
    remedy = _combine_remedies(remedies)
    needs_note = proposed and notes and remedy.arguments
    return remedy._replace(note=f" ({'; '.join(notes)})") if needs_note else remedy


def explain_misfit(
    report: MatchReport, n_lost: int, unexpected: Sequence[str], *, is_renamed: bool = False
) -> str:
    """Return the reason why a file cannot be for the model, or "" if it may be.

    Args:
        report: The result of the match.
        n_lost: The number of model tensors that are not in the file, or have another shape.
        unexpected: The file keys that the model does not have.
        is_renamed: True if these are counted after the proposed rules.
    """
    max_keys = max_allowed_keys(report.names)  # `names` is the number of model keys
    # File keys that match in the spelling of torch or PEFT. PEFT puts `.base_layer.` in the keys of
    # the weights that an adapter changes, so with it the unexpected keys are an adapter.
    known = (key for rule in report.renamed if rule.kind == "known" for key, _ in rule.names)
    if has_adapter(unexpected, known):
        return MERGE
    if report.recipe:
        text = "this looks like the same model in another layout"
        file = shell(report.file) if report.file else "FILE"
        return f"{text}: ckptool convert {file} OUT --recipe {report.recipe}"
    # Integers in place of fractions are useless without their scales.
    if unexpected and any("float" in cast.after and "int" in cast.before for cast in report.cast):
        return "the file has quantized weights: integers, with scales under other keys"
    if n_lost > max_keys:
        text = f"{n_lost:,} of the model's {counted(report.names, 'tensor')} are not in the file"
        return f"the architectures differ: {text}"
    # A proposed rule that gives the model every tensor may leave many keys of the file unused.
    if len(unexpected) > max_keys and (n_lost or not is_renamed):
        text = f"the file has {counted(len(unexpected), 'tensor')} that the model does not have"
        return f"the architectures differ: {text}"
    return ""


def _find_no_match(report: MatchReport) -> Iterator[MatchFinding]:
    """Yield the problem of a report in which nothing is loaded."""
    if report.mismatched:
        text = "nothing is left to load: the common keys have other shapes"
        note = " to leave the model unchanged"  # follows the argument in the hint
        yield MatchFinding("coverage", text, remedy=Remedy((("min_coverage", 0),), note))
    elif report.fitting:
        text = (
            f"the file has none of the model's parameters; only {report.fitting:,} other "
            "tensors match"
        )
        yield MatchFinding("coverage", text, remedy=_HINT_OTHER_MODEL)
    else:
        model_keys, file_keys = _fold_keys(report.missing_keys, max_keys=2), "no tensors"
        if report.unexpected_keys:
            file_keys = _fold_keys(report.unexpected_keys, max_keys=2)
        text = f"no key matches: the file has {file_keys}; the model has {model_keys}"
        yield MatchFinding("coverage", text, remedy=_HINT_OTHER_MODEL)


def _find_ambiguity(ambiguities: Sequence[Ambiguity], remedy: Remedy) -> Iterator[MatchFinding]:
    """Yield one problem for all ambiguous keys, if there are any."""
    if ambiguities:
        first, others = ambiguities[0], len(ambiguities) - 1
        more = f", and {counted(others, 'more such key')}" if others else ""
        text = f"ambiguous: {_fold_keys(first.names)} could be {_fold_keys(first.candidates)}{more}"
        yield MatchFinding("ambiguous", text, remedy=remedy)


def _find_unknown_layout(report: MatchReport) -> Iterator[MatchFinding]:
    """Yield one problem for all tensors with an unknown order of axes."""
    if report.undecided:
        reasons: dict[str, list[str]] = {}
        for row in report.undecided:
            reasons.setdefault(row.reason, []).append(row.name)
        texts = [f"{_fold_keys(keys, max_keys=3)} ({reason})" for reason, keys in reasons.items()]
        globs = _find_globs([row.name for row in report.undecided]) or ("*",)
        remedy = Remedy(
            (("transpose", globs),),
            " if the axes are [..., in, out]",
            instead=(Remedy((("no_transpose", globs),), " if the axes are in torch's order"),),
        )
        count = counted(len(report.undecided), "tensor")
        text = f"the order of the axes is unknown for {count}: {listed(texts, most=3)}"
        yield MatchFinding("layout", text, remedy=remedy)


def _find_unmatched(
    kind: str,
    rows: Sequence[tuple[str, str]],
    fact: str,
    *,
    is_allowed: bool = True,
    max_keys: int = 3,
) -> Iterator[MatchFinding]:
    """Yield one problem for tensors of a kind, given as keys with a detail each."""
    if rows:
        count = f"{counted(len(rows), 'tensor')} {are(len(rows))}"
        argument = f"allow_{kind.replace('-', '_')}"
        remedy = _make_allowance(argument, [name for name, _ in rows]) if is_allowed else _NO_REMEDY
        yield MatchFinding(kind, f"{count} {fact}: {_list_rows(rows, max_keys)}", remedy=remedy)


def _find_optimizer_problems(report: MatchReport) -> Iterator[MatchFinding]:
    """Yield the problems of the optimizer state; only the first has the remedy."""
    optimizer = report.optimizer
    if optimizer is None:
        return
    remedy = optimizer.remedy
    if isinstance(remedy, str):
        remedy = Remedy(note=remedy)
    for text in optimizer.problems:
        yield MatchFinding("optimizer", text, remedy=remedy)
        remedy = _NO_REMEDY


def _find_untied(report: MatchReport) -> Iterator[MatchFinding]:
    """Yield a problem for each group of keys that is tied only in the model."""
    for keys in report.untied:
        text = f"{_fold_keys(keys)} are tied in the model, but differ in the file"
        yield MatchFinding("untied", text, remedy=_HINT_UNTIE)


def _describe_share(report: MatchReport) -> str:
    """Return a phrase for the matching share: `2 of 8 tensors match (25% of the parameters)`."""
    if not report.names:
        return "the model has no tensors"
    part = f"{report.fitting:,} of {counted(report.names, 'tensor')}"
    verb = "matches" if report.fitting == 1 else "match"
    return f"{part} {verb} ({_format_percent(report.coverage)} of the parameters)"


def _format_percent(share: float) -> str:
    """Return the share with one digit; 0% and 100% only for exactly 0 and 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < _SMALLEST_SHOWN_SHARE:
        return "<0.1%"
    return f"{share:.1%}" if share <= 1 - _SMALLEST_SHOWN_SHARE else ">99.9%"


def _combine_remedies(remedies: Sequence[Remedy]) -> Remedy:
    """Return all remedies in one; only the note `_TOO_MANY_GLOBS` if one of them is that note."""
    useful = [remedy for remedy in remedies if remedy]
    if any(remedy is _TOO_MANY_GLOBS for remedy in useful):
        return _TOO_MANY_GLOBS
    return merge_remedies(useful)


def _make_allowance(argument: str, keys: Sequence[str]) -> Remedy:
    """Return the argument that allows these keys, or `_TOO_MANY_GLOBS` for too many globs."""
    globs = _find_globs(keys)
    if not globs:
        return _TOO_MANY_GLOBS
    is_one_glob_of_many = len(globs) == 1 < len(keys)  # a single key stays a list
    value = globs[0] if is_one_glob_of_many else globs
    return Remedy(((argument, value),))


def _find_globs(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys if they are few, otherwise globs of their modules, or () if too many.

    Keys are grouped by the component after their common module; all numbers are one group. Too many
    groups become one glob of the common module.
    """
    if len(keys) <= _MAX_LISTED_KEYS and all(len(key) <= _MAX_GLOB_LENGTH for key in keys):
        return tuple(map(escaped_glob, dict.fromkeys(keys)))
    common = find_common_module(keys)
    groups: dict[str, list[str]] = {}
    for key in keys:
        component = key[len(common) :].partition(".")[0]
        groups.setdefault("0" if component.isdigit() else component, []).append(key)
    globs = []
    for group in groups.values():
        module = find_common_module(group)
        is_single = len(group) == 1 and len(group[0]) <= _MAX_GLOB_LENGTH
        if not is_single and not module:
            return ()
        globs.append(escaped_glob(group[0]) if is_single else f"{escaped_glob(module)}*")
    if len(globs) > _MAX_GLOBS and common:
        globs = [f"{escaped_glob(common)}*"]
    is_readable = len(globs) <= _MAX_GLOBS and all(len(glob) <= _MAX_GLOB_LENGTH for glob in globs)
    return tuple(dict.fromkeys(globs)) if is_readable else ()


def _fold_keys(keys: Sequence[str], max_keys: int = 4) -> str:
    """Return `layers.{0..31}.weight, head.bias, and 4 more`."""
    return _list_rows([(key, "") for key in keys], max_keys)


def _list_rows(rows: Sequence[tuple[str, str]], max_rows: int) -> str:
    """List keys with their details; fold repeated layers with the same detail."""
    folded_rows, other_rows = rows[:_MAX_FOLDED_KEYS], rows[_MAX_FOLDED_KEYS:]
    details = [detail for _, detail in folded_rows]
    shown = [  # `layers.{0..31}.weight`, with the detail of the first
        f"{family.label}{details[family.numbers[0]]}" for family in group_families(folded_rows)
    ]
    shown += [key + detail for key, detail in other_rows]
    return listed(shown, max_rows)
