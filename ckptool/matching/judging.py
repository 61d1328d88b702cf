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
from itertools import chain
from typing import Any, NamedTuple

from ckptool.core.finding import Finding
from ckptool.core.names import group_families
from ckptool.errors import MatchError, UsageError
from ckptool.matching.align import common_module
from ckptool.matching.known_renames import MERGE, has_adapter
from ckptool.matching.report import Ambiguity, MatchReport, Renaming, most_allowed
from ckptool.remedies import Remedy, merge_remedies
from ckptool.words import are, counted, listed, printable, shell

Allowed = bool | str | Sequence[str] | None
"""True or False for all keys, or globs of allowed keys; None follows `strict`."""
_MOST_FOLDED = 2000
"""The number of keys folded for a message, which shows only a few."""
_MOST_NAMED = 4
"""The number of keys that a hint lists one by one."""
_MOST_GLOBS = 8
"""The largest number of globs in a hint."""
_LONGEST = 160
"""The most characters of a key or glob in a hint."""
_SMALL = 0.001
_NONE = Remedy()
_ANY_RULE = Remedy((("rename", ("REGEX=>REPL",)),), to_fill_in=True)
_OTHER = Remedy(
    lead="the file may be for another model; use ",
    instead=(
        Remedy((("key", "NAME"),), " for another state dict in the file", to_fill_in=True),
        _ANY_RULE._replace(note=" to rename keys"),
    ),
)
_SCATTERED = Remedy(note="too many differences for a few globs; the report lists them")
_UNDECIDED = Remedy(
    instead=(
        _ANY_RULE._replace(
            note=" if these are the same tensors; otherwise the architectures differ"
        ),
    )
)
_UNTIED = Remedy(
    note="untie them in the model, or keep only one of them in the file; the model "
    "then uses it for all of these keys"
)


@dataclass(frozen=True, slots=True)
class MatchFinding(Finding):
    """A reason to refuse a match, on one line with the keys folded.

    Its kind is `missing`, `unexpected`, `mismatched`, `untied`, `ambiguous`, `layout`,
    `lossy-cast`, `coverage` or `optimizer`.
    """

    remedy: Remedy = field(default=_NONE, kw_only=True)
    """The `load_into` arguments that help."""


class Judgement(NamedTuple):
    """The problems of a report, the most important first; without problems, it is accepted."""

    problems: tuple[MatchFinding, ...]
    remedy: Remedy
    """The arguments that help with all problems."""

    @property
    def accepted(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def is_of_the_optimizer(self) -> bool:
        """Whether only the state of the optimizer is not accepted."""
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
        for what in ("missing", "unexpected", "mismatched", "lossy_cast"):
            value = getattr(self, what)
            are_globs = isinstance(value, Collection) and not isinstance(value, (bytes, Mapping))
            if not (
                value is None
                or isinstance(value, bool)
                or (are_globs and all(isinstance(glob, str) for glob in value))
            ):
                raise UsageError(
                    f"allow_{what}={value!r} is not True, False or a list of globs",
                    hint=f"use allow_{what}=['head.*'], for example",
                )
        least = self.min_coverage
        if least is not None and (
            isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least <= 1
        ):
            raise UsageError(f"min_coverage={least!r} is not a number from 0 to 1")

    def takes_cast(self, *names: str) -> bool:
        """Return True if a lossy cast is allowed for one of these keys."""
        takes = _taker(self.lossy_cast or False)
        return any(map(takes, names))

    def judged(self, report: MatchReport) -> Judgement:
        """Return all problems, the most important first, and the arguments that help."""
        missing = _refused(report.missing_keys, self.missing, otherwise=not self.strict)
        unexpected = _refused(report.unexpected_keys, self.unexpected, otherwise=not self.strict)
        takes = _taker(self.mismatched or False)
        shapes = [
            (one.name, f" (file {list(one.shape)}, model {list(one.wanted)})")
            for one in report.mismatched
            if not (takes(one.name) or takes(one.own))
        ]
        lossy = [
            (one.name, f" {one.before} -> {one.after}{f' ({one.loss})' if one.loss else ''}")
            for one in report.cast
            if one.lossy and not self.takes_cast(one.name, one.own)
        ]
        least, is_empty = self.min_coverage, _fits_nowhere(report)
        is_nothing = is_empty and least != 0
        is_short = least is not None and report.coverage < least and not is_empty
        refused = {*missing, *unexpected}
        unclear = [
            one for one in report.ambiguous if is_nothing or refused & {*one.names, *one.candidates}
        ]
        wrong = [name for name, _ in shapes]
        short = (
            f"{_percent(report.coverage)} of the model's parameters would be loaded, expected at "
            f"least {100 * (least or 0):.6g}%"
        )
        ways = [
            _way(report, proposed, (missing, unexpected, wrong), unclear)
            for proposed in (_chosen(report, unclear) if refused or is_nothing else [()])
        ]
        usable = [way for way in ways if way.arguments]
        has_rules = any(name == "rename" for way in usable for name, _ in way.arguments)
        is_allowed = bool(usable) and not (has_rules or is_nothing or is_short)
        question = usable[0]._replace(instead=tuple(usable[1:])) if has_rules else _NONE
        problems = tuple(
            chain(
                _nothing(report) if is_nothing and not shapes else (),
                _ambiguous(unclear, question),
                _layout(report),
                _left("mismatched", shapes, "of another shape", is_allowed=is_allowed),
                *(
                    _left(kind, [(name, "") for name in names], what, is_allowed=is_allowed, most=4)
                    for kind, names, what in (
                        ("missing", missing, "missing from the file"),
                        ("unexpected", unexpected, "not in the model"),
                    )
                ),
                _untied(report),
                _left("lossy-cast", lossy, "changed by a cast"),
                [MatchFinding("coverage", short)] if is_short else (),
                _optimizer(report),
            )
        )
        kinds = {problem.kind: problem.remedy for problem in reversed(problems)}
        if "untied" in kinds:
            return Judgement(problems, _UNTIED)
        if not has_rules and (is_nothing or is_short):  # no allowance helps
            share = _NONE if report.proposed else kinds.get("coverage", _NONE)
            return Judgement(problems, share or (_NONE if usable else ways[0]))
        if not usable and ways[0]:
            return Judgement(problems, ways[0])
        beside = [kinds.get(kind, _NONE) for kind in ("layout", "lossy-cast", "optimizer")]
        first, *others = [_all_of([way, *beside]) for way in usable or [_NONE]]
        return Judgement(problems, first._replace(instead=(*first.instead, *others)))

    def refusal(self, report: MatchReport) -> MatchError | None:
        """Return the error to raise, or None if the report is accepted.

        Its text has the three most useful lines, its remedy the arguments that help most.
        """
        judgement = self.judged(report)
        if judgement.accepted:
            return None
        texts = [problem.text for problem in judgement.problems]
        is_whole = bool(report.names) and report.fitting == report.names
        file = report.file if report.file.isprintable() else printable(report.file)
        verdict = (
            f"{file or 'the state dict'} does not fit {printable(report.model) or 'the model'}"
        )
        if judgement.is_of_the_optimizer:
            verdict = f"{f'{file}: ' if file else ''}the optimizer state cannot be loaded"
        lines = [f"{verdict}: {texts.pop(0) if is_whole else _share(report)}", *texts[:2]]
        if report.proposed and judgement.remedy.arguments:
            lines[-1] += "; the rules in the hint match more, but were not applied"
        return MatchError(
            "\n".join(lines),
            file=report.file or None,
            hint=judgement.remedy or None,
            report=report,
        )


def _refused(names: Iterable[str], allowed: Allowed, *, otherwise: bool) -> list[str]:
    takes = _taker(otherwise if allowed is None else allowed)
    return [name for name in names if not takes(name)]


def _taker(allowed: bool | str | Sequence[str]) -> Callable[[str], Any]:
    if isinstance(allowed, bool):
        return lambda name: allowed
    return _matching((allowed,) if isinstance(allowed, str) else tuple(allowed))


@lru_cache(maxsize=16)
def _matching(globs: tuple[str, ...]) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, globs)) or "(?!)").match


def _fits_nowhere(report: MatchReport) -> bool:
    """Return True if nothing matches, or no parameter."""
    if report.undecided:
        return False
    if report.names and not report.fitting:
        return True
    return report.parameters > 0 and not report.loaded


def _chosen(report: MatchReport, unclear: Sequence[Ambiguity]) -> list[Sequence[Renaming]]:
    """Return the proposed rules to apply together, one group for each possible answer."""
    asked = {rule for one in unclear for rule in one.rules}
    if any(one.rules for one in report.ambiguous):
        return [[one] for one in report.proposed if one.rule in asked] or [()]
    return [report.proposed]


def _way(
    report: MatchReport,
    proposed: Sequence[Renaming],
    left: tuple[Sequence[str], Sequence[str], Sequence[str]],
    unclear: Sequence[Ambiguity],
) -> Remedy:
    """Return the proposed rules and the allowances needed after them, or why they are too many.

    `left` are the missing, unexpected and mismatched keys.
    """
    done = {name for one in proposed for pair in one.names for name in pair}
    missing, unexpected = ([name for name in names if name not in done] for names in left[:2])
    rest = {*missing, *unexpected}
    if any(not one.rules and rest & {*one.names, *one.candidates} for one in unclear):
        return _UNDECIDED
    after = ", even after the proposed rules" if proposed and not report.recipe else ""
    lost = len(missing) + len(left[2])
    if text := difference(report, lost, unexpected, is_renamed=bool(proposed)):
        return Remedy(note=f"{text}{after if text != MERGE else ''}")
    remedies = [Remedy((("rename", tuple(one.rule for one in proposed)),))] if proposed else []
    notes = []
    for argument, names, text in (
        ("allow_mismatched", left[2], "the model keeps its own"),
        ("allow_missing", missing, "the model keeps its own"),
        ("allow_unexpected", unexpected, "left out:"),
    ):
        if names:
            remedies.append(_allowing(argument, names))
            notes.append(f"{text} {_folded(names, most=3)}")
    found = _all_of(remedies)
    is_told = proposed and notes and found.arguments
    return found._replace(note=f" ({'; '.join(notes)})") if is_told else found


def difference(
    report: MatchReport, lost: int, unexpected: Sequence[str], *, is_renamed: bool = False
) -> str:
    """Return why a file cannot be for the model, or "" if it may be.

    Args:
        report: The result of the match.
        lost: The number of model tensors that are not in the file, or have another shape.
        unexpected: The file keys that the model does not have.
        is_renamed: True if these are counted after proposed rules.
    """
    most = most_allowed(report.names)
    known = (own for one in report.renamed if one.kind == "known" for own, _ in one.names)
    if has_adapter(unexpected, known):
        return MERGE
    if report.recipe:
        text = "this looks like the same model in another layout"
        file = shell(report.file) if report.file else "FILE"
        return f"{text}: ckptool convert {file} OUT --recipe {report.recipe}"
    # Integers in place of fractions are useless without their scales.
    if unexpected and any("float" in one.after and "int" in one.before for one in report.cast):
        return "the file has quantized weights: integers, with scales under other keys"
    if lost > most:
        text = f"{lost:,} of the model's {counted(report.names, 'tensor')} are not in the file"
        return f"the architectures differ: {text}"
    if len(unexpected) > most and (lost or not is_renamed):
        text = f"the file has {counted(len(unexpected), 'tensor')} that the model does not have"
        return f"the architectures differ: {text}"
    return ""


def _nothing(report: MatchReport) -> Iterator[MatchFinding]:
    if report.mismatched:
        text = "nothing is left to load: the common keys have other shapes"
        note = " to leave the model unchanged"
        yield MatchFinding("coverage", text, remedy=Remedy((("min_coverage", 0),), note))
    elif report.fitting:
        text = (
            f"the file has none of the model's parameters; only {report.fitting:,} other "
            "tensors match"
        )
        yield MatchFinding("coverage", text, remedy=_OTHER)
    else:
        own, wanted = _folded(report.unexpected_keys, 2), _folded(report.missing_keys, 2)
        own = own if report.unexpected_keys else "no tensors"
        text = f"no key matches: the file has {own}; the model has {wanted}"
        yield MatchFinding("coverage", text, remedy=_OTHER)


def _ambiguous(unclear: Sequence[Ambiguity], remedy: Remedy) -> Iterator[MatchFinding]:
    if unclear:
        first, others = unclear[0], len(unclear) - 1
        more = f", and {counted(others, 'more such key')}" if others else ""
        text = f"ambiguous: {_folded(first.names)} could be {_folded(first.candidates)}{more}"
        yield MatchFinding("ambiguous", text, remedy=remedy)


def _layout(report: MatchReport) -> Iterator[MatchFinding]:
    if report.undecided:
        reasons: dict[str, list[str]] = {}
        for one in report.undecided:
            reasons.setdefault(one.reason, []).append(one.name)
        texts = [f"{_folded(names, most=3)} ({reason})" for reason, names in reasons.items()]
        globs = _globs_of([one.name for one in report.undecided]) or ("*",)
        remedy = Remedy(
            (("transpose", globs),),
            " if the axes are [..., in, out]",
            instead=(Remedy((("no_transpose", globs),), " if the axes are in torch's order"),),
        )
        many = counted(len(report.undecided), "tensor")
        text = f"the order of the axes is unknown for {many}: {listed(texts, most=3)}"
        yield MatchFinding("layout", text, remedy=remedy)


def _left(
    kind: str, rows: Sequence[tuple[str, str]], what: str, *, is_allowed: bool = True, most: int = 3
) -> Iterator[MatchFinding]:
    """Yield a problem for tensors, given as keys with a detail each."""
    if rows:
        many = f"{counted(len(rows), 'tensor')} {are(len(rows))}"
        argument = f"allow_{kind.replace('-', '_')}"
        remedy = _allowing(argument, [name for name, _ in rows]) if is_allowed else _NONE
        yield MatchFinding(kind, f"{many} {what}: {_listed(rows, most)}", remedy=remedy)


def _optimizer(report: MatchReport) -> Iterator[MatchFinding]:
    found = report.optimizer
    if found is None:
        return
    remedy = Remedy(note=found.remedy) if isinstance(found.remedy, str) else found.remedy
    for text in found.problems:
        yield MatchFinding("optimizer", text, remedy=remedy)
        remedy = _NONE


def _untied(report: MatchReport) -> Iterator[MatchFinding]:
    for names in report.untied:
        text = f"{_folded(names)} are tied in the model, but differ in the file"
        yield MatchFinding("untied", text, remedy=_UNTIED)


def _share(report: MatchReport) -> str:
    if not report.names:
        return "the model has no tensors"
    part = f"{report.fitting:,} of {counted(report.names, 'tensor')}"
    verb = "matches" if report.fitting == 1 else "match"
    return f"{part} {verb} ({_percent(report.coverage)} of the parameters)"


def _percent(share: float) -> str:
    """Return the share with one digit; 0% and 100% only for exactly 0 and 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < _SMALL:
        return "<0.1%"
    return f"{share:.1%}" if share <= 1 - _SMALL else ">99.9%"


def _all_of(remedies: Sequence[Remedy]) -> Remedy:
    """Return all remedies together, or only the impossible one, if any."""
    given = [one for one in remedies if one]
    return next((one for one in given if one is _SCATTERED), merge_remedies(given))


def _allowing(argument: str, names: Sequence[str]) -> Remedy:
    globs = _globs_of(names)
    if not globs:
        return _SCATTERED
    only = globs[0] if len(globs) == 1 < len(names) else globs
    return Remedy(((argument, only),))


def _globs_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the keys if they are few, otherwise globs of their common modules."""
    if len(names) <= _MOST_NAMED and all(len(name) <= _LONGEST for name in names):
        return tuple(map(escaped_glob, dict.fromkeys(names)))
    above = common_module(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        word = name[len(above) :].partition(".")[0]
        groups.setdefault("0" if word.isdigit() else word, []).append(name)
    found = []
    for some in groups.values():
        module = common_module(some)
        single = len(some) == 1 and len(some[0]) <= _LONGEST
        if not single and not module:
            return ()
        found.append(escaped_glob(some[0]) if single else f"{escaped_glob(module)}*")
    if len(found) > _MOST_GLOBS and above:
        found = [f"{escaped_glob(above)}*"]
    readable = len(found) <= _MOST_GLOBS and all(len(glob) <= _LONGEST for glob in found)
    return tuple(dict.fromkeys(found)) if readable else ()


def _folded(names: Sequence[str], most: int = 4) -> str:
    """Return `layers.{0..31}.weight, head.bias, and 4 more`."""
    return _listed([(name, "") for name in names], most)


def _listed(rows: Sequence[tuple[str, str]], most: int) -> str:
    """List keys with their details; fold repeated layers with the same detail."""
    few = rows[:_MOST_FOLDED]
    shown = [f"{one.label}{few[one.numbers[0]][1]}" for one in group_families(few)]
    return listed([*shown, *(name + text for name, text in rows[_MOST_FOLDED:])], most)
