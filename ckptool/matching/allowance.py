"""What of a report is accepted: the policy of `load_into`, `match` and `convert --like`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from ckptool.errors import MatchError, UsageError
from ckptool.matching.advice import is_of_another, may_be_asked, ruling, text_of
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch
from ckptool.paths import counted, listed, printable
from ckptool.patterns import families

__all__ = ["Allowance", "Allowed", "Problem"]

_MOST_FOLDED = 2000
"""Names that are folded for a message; it shows a few."""
_MOST_NAMED = 3
"""Names that an argument lists."""
_MOST_REMEDIES = 4
_SMALL = 0.001

_OTHER = (
    "is it of another model? key=NAME takes another state dict of the file, "
    "rules=['REGEX=>REPL'] renames"
)

Allowed = bool | str | Sequence[str] | None
"""Yes or no for all names, or globs of the names that are allowed; None: as `strict` says."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse, and what would help."""

    kind: str
    """`missing`, `unexpected`, `mismatched`, `untied`, `ambiguous`, `lossy-cast`, `coverage`,
    `optimizer`."""
    text: str
    """One line, names folded."""
    remedy: str = ""
    """The argument of `load_into`, or the option of `ckptool match`, that helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What may differ between a state dict and a model.

    `strict=False` allows missing and unexpected names, as torch does. Where nothing at all fits,
    that is refused whatever is allowed, unless `min_coverage` is 0.
    """

    strict: bool = True
    missing: Allowed = None
    unexpected: Allowed = None
    mismatched: Allowed = False
    lossy_cast: Allowed = False
    min_coverage: float | None = None

    def __post_init__(self) -> None:
        """Take nothing that would be understood as something else.

        Raises:
            UsageError: a value is of no use.
        """
        if not isinstance(self.strict, bool):
            raise UsageError(f"strict is True or False, and not {self.strict!r}")
        for what in ("missing", "unexpected", "mismatched", "lossy_cast"):
            value = getattr(self, what)
            if not (value is None or isinstance(value, bool) or _are_globs(value)):
                raise UsageError(
                    f"allow_{what} is True, False, or globs of names, and not {value!r}",
                    hint=f"allow_{what}=['head.*']",
                )
        least = self.min_coverage
        if least is not None and not _is_share(least):
            raise UsageError(f"min_coverage is a share from 0 to 1, and not {least!r}")

    def problems(self, report: MatchReport) -> tuple[Problem, ...]:
        """Every reason to refuse, the most telling first; none: it is accepted."""
        return self._judged(report)[0]

    def _judged(self, report: MatchReport) -> tuple[tuple[Problem, ...], bool]:
        """The same, and whether what is ambiguous is to be decided by a rule."""
        missing = _refused(report.missing_keys, self.missing, otherwise=not self.strict)
        unexpected = _refused(report.unexpected_keys, self.unexpected, otherwise=not self.strict)
        refused = {*missing, *unexpected}
        unclear = [one for one in report.ambiguous if refused & {*one.names, *one.candidates}]
        mismatched = [one for one in report.mismatched if _counts(one, self.mismatched)]
        lossy = [one for one in report.cast if one.lossy and _counts(one, self.lossy_cast)]
        questions = list(_ambiguous(unclear, missing, unexpected))
        asked = may_be_asked(report, unclear)
        found = chain(
            self._nothing(report),
            questions if asked else (),
            _mismatched(mismatched, ", min_coverage=0" * self._is_nothing(report)),
            _missing(missing),
            _unexpected(unexpected),
            () if asked else questions,
            _untied(report),
            _lossy(lossy),
            self._coverage(report),
            _optimizer(report),
        )
        return tuple(found), asked

    def _is_nothing(self, report: MatchReport) -> bool:
        return self.min_coverage != 0 and _fits_nowhere(report)

    def _nothing(self, report: MatchReport) -> Iterator[Problem]:
        if not self._is_nothing(report):
            return
        if any(_counts(one, self.mismatched) for one in report.mismatched):
            return  # the shapes are told, with what helps
        if report.mismatched:
            text = "nothing is left to load: what the two have in common is of another shape"
            yield Problem("coverage", text, "min_coverage=0 where the model is to stay as it is")
        elif report.fitting:
            text = (
                f"none of the model's parameters is in it: {report.fitting:,} of its other "
                "tensors are all that fit"
            )
            yield Problem("coverage", text, _OTHER)
        else:
            own = report.unexpected_keys
            wanted = report.missing_keys
            text = (
                f"nothing of it is in the model: it has {_folded(own, 2) or 'no tensors'}; "
                f"the model has {_folded(wanted, 2)}"
            )
            yield Problem("coverage", text, _OTHER)

    def _coverage(self, report: MatchReport) -> Iterator[Problem]:
        least = self.min_coverage
        if least is not None and report.coverage < least and not _fits_nowhere(report):
            text = (
                f"{_percent(report.coverage)} of the model's parameters are loaded; min_coverage "
                f"asks for {100 * least:.6g}%"
            )
            yield Problem("coverage", text)

    def refusal(self, report: MatchReport) -> MatchError | None:
        """The error to raise; None: it is accepted.

        Its text is the three most useful lines, its hint the argument or command that helps most.
        """
        problems, asked = self._judged(report)
        if not problems:
            return None
        lines = [_heading(report), *(problem.text for problem in problems[:2])]
        moved = _moved(report, problems)
        if moved:
            lines[-1] += f"; {moved}"
        return MatchError(
            "\n".join(lines),
            file=report.file or None,
            hint=_hint(report, problems, asked) if not moved else _renumbering(problems),
            report=report,
        )


def _refused(names: Iterable[str], allowed: Allowed, *, otherwise: bool = False) -> list[str]:
    """The names that are not allowed."""
    takes = _taker(otherwise if allowed is None else allowed)
    return [name for name in names if not takes(name)]


def _counts(one: Mismatch | Cast, allowed: Allowed) -> bool:
    """Whether a tensor is not allowed by either of its names."""
    takes = _taker(allowed or False)
    return not (takes(one.name) or takes(one.own))


def _taker(allowed: bool | str | Sequence[str]) -> Callable[[str], Any]:
    if isinstance(allowed, bool):
        return lambda name: allowed
    globs = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    return _matching(globs)


@lru_cache(maxsize=16)
def _matching(globs: tuple[str, ...]) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, globs)) or "(?!)").match


def _are_globs(value: object) -> bool:
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(glob, str) for glob in value)


def _is_share(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1  # type: ignore[operator]


def _fits_nowhere(report: MatchReport) -> bool:
    """Whether nothing is met, or none of what the model has to be loaded for."""
    if report.names and not report.fitting:
        return True
    return report.parameters > 0 and not report.loaded


def _ambiguous(
    unclear: Sequence[Ambiguity], missing: Sized, unexpected: Sized
) -> Iterator[Problem]:
    """What a rule decides, and what is left over on the larger side then."""
    if not unclear:
        return
    first, others = unclear[0], len(unclear) - 1
    more = f", and {counted(others, 'other question')}" if others else ""
    text = f"not guessed: {_folded(first.names)} may be {_folded(first.candidates)}{more}"
    yield Problem("ambiguous", text, ruling(unclear, missing, unexpected))


def _mismatched(mismatched: Sequence[Mismatch], besides: str) -> Iterator[Problem]:
    if mismatched:
        shown = _labels((one.name, (one.shape, one.wanted)) for one in mismatched)
        texts = [f"{name} {list(shape)} for {list(wanted)}" for name, (shape, wanted) in shown]
        text = f"{_are(mismatched)} of another shape: {listed(texts, most=3)}"
        yield Problem("mismatched", text, _argument("allow_mismatched", mismatched) + besides)


def _missing(missing: Sequence[str]) -> Iterator[Problem]:
    if missing:
        text = f"{_are(missing)} missing in it: {_folded(missing)}"
        yield Problem("missing", text, _argument("allow_missing", missing))


def _unexpected(unexpected: Sequence[str]) -> Iterator[Problem]:
    if unexpected:
        text = f"{_are(unexpected)} not in the model: {_folded(unexpected)}"
        yield Problem("unexpected", text, _argument("allow_unexpected", unexpected))


def _untied(report: MatchReport) -> Iterator[Problem]:
    """What lets the first name of each group have its way is told with the first of them."""
    own = {wanted: own for one in report.renamed for own, wanted in one.names}
    extra = [own.get(name, name) for names in report.untied for name in names[1:]]
    rules = (f"^{re.escape(name)}$=>unused.{number}" for number, name in enumerate(extra))
    remedy = f"rules=[{', '.join(map(text_of, rules))}], {_argument('allow_unexpected', extra)}"
    for names in report.untied:
        text = f"{_folded(names)} are one tensor in the model, and differ in the file"
        yield Problem("untied", text, remedy)
        remedy = ""


def _lossy(lossy: Sequence[Cast]) -> Iterator[Problem]:
    if lossy:
        shown = _labels((one.name, (one.before, one.after, one.loss)) for one in lossy)
        texts = [
            f"{name} {before} -> {after}{f' ({loss})' if loss else ''}"
            for name, (before, after, loss) in shown
        ]
        text = f"{_are(lossy)} changed by a cast: {listed(texts, most=3)}"
        yield Problem("lossy-cast", text, _argument("allow_lossy_cast", lossy))


def _optimizer(report: MatchReport) -> Iterator[Problem]:
    found = report.optimizer
    for number, text in enumerate(found.problems if found is not None else ()):
        yield Problem("optimizer", text, found.remedy if found and not number else "")


def _are(many: Sized) -> str:
    return "1 tensor is" if len(many) == 1 else f"{len(many):,} tensors are"


def _folded(names: Sequence[str], most: int = 4) -> str:
    labels = [label for label, _ in _labels((name, None) for name in names)]
    if len(names) <= _MOST_FOLDED:
        return listed(labels, most)
    shown, known = labels[:most], f"the first {_MOST_FOLDED:,} of {len(names):,} are "
    return known + listed(shown, most) + ", ..." * (len(labels) > most)


def _labels(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Names of repeated layers as one, with what they have in common; many are not looked at."""
    some = list(islice(rows, _MOST_FOLDED))
    return [(one.label, some[one.numbers[0]][1]) for one in families(some)]


def _argument(name: str, some: Sequence[str | Mismatch | Cast]) -> str:
    """The argument that allows just these: by names, by what they begin with, or any."""
    names = [one if isinstance(one, str) else one.name for one in some]
    if len(names) <= _MOST_NAMED and not any(set("*?[") & set(one) for one in names):
        return f"{name}={[printable(one) for one in names]!r}"
    front = _common_front(min(names), max(names))
    return f"{name}={front + '*'!r}" if front and not set("*?[") & set(front) else f"{name}=True"


def _common_front(first: str, last: str) -> str:
    """The components, each with its dot, with which both names begin."""
    end = 0
    while (dot := first.find(".", end) + 1) and first[:dot] == last[:dot]:
        end = dot
    return first[:end]


def _moved(report: MatchReport, problems: Sequence[Problem]) -> str:
    """The lists that may be counted otherwise, where that is why names are left."""
    asked = {problem.kind for problem in problems}
    return listed(report.moved, 2) if report.moved and asked & {"missing", "unexpected"} else ""


def _renumbering(problems: Sequence[Problem]) -> str:
    """What helps where layers have other numbers: no rule for just one of them."""
    allowed = [one.remedy for one in problems if one.kind in ("missing", "unexpected")]
    return (
        "give the layers of the file their new numbers first, all of the list; "
        f"{', '.join(allowed)} where equal numbers are the same layers"
    )


def _heading(report: MatchReport) -> str:
    file = report.file if report.file.isprintable() else printable(report.file)
    said = f"{file or 'the state dict'} does not fit {printable(report.model) or 'the model'}"
    if not report.names:
        return said
    if report.fitting == report.names:
        return f"{said}: all of its {report.names:,} tensors are met"
    part = f"{report.fitting:,} of its {counted(report.names, 'tensor')}"
    verb = "fits" if report.fitting == 1 else "fit"
    return f"{said}: {part} {verb} ({_percent(report.coverage)} of the parameters)"


def _percent(share: float) -> str:
    """With one digit; never 0% of something, nor 100% where something lacks."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < _SMALL:
        return "<0.1%"
    return f"{share:.1%}" if share <= 1 - _SMALL else ">99.9%"


def _hint(report: MatchReport, problems: Sequence[Problem], asked: bool) -> str | None:
    """What helps: a rule where it is likely, else all that would have to be allowed."""
    kinds = {problem.kind: problem for problem in reversed(problems)}
    question, share = kinds.get("ambiguous"), kinds.get("coverage")
    if question is not None and asked:
        return question.remedy
    if share is not None and share.remedy:
        return share.remedy
    if is_of_another(report) and "unexpected" in kinds:
        return _OTHER
    remedies = [one.remedy for one in problems if one.remedy and one.kind != "ambiguous"]
    if len(remedies) > _MOST_REMEDIES:
        return None
    allowed = ", ".join(remedies)
    if question is not None:
        rules = question.remedy.partition("]")[0] + "]"
        return f"{allowed}; or {rules} where that is the same layer"
    if {"missing", "unexpected"} <= kinds.keys():
        return f"{allowed}; or rules=['REGEX=>REPL'] where only names differ"
    return allowed or None
