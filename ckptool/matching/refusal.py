"""Say why a state dict is refused and what helps: imported where something does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.errors import MatchError
from ckptool.matching.align import common_module, escaped
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch, Renaming
from ckptool.names import families
from ckptool.remedies import Remedy, together
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    from ckptool.matching.allowance import Allowance

__all__ = ["Judgement", "Problem", "escaped_glob", "judged", "refusal"]

_MOST_FOLDED = 2000
"""Names that are folded for a message; it shows a few."""
_MOST_NAMED = 4
"""Names that a hint lists one by one, though a glob might do."""
_MOST_GLOBS = 8
"""More nobody reads."""
_LONGEST = 160
"""Characters of a name or glob in a hint."""
_LITTLE = 4
"""Less than one in so many names is next to nothing."""
_SMALL = 0.001
_SPECIAL = re.compile(r"[*?[]")
_NONE = Remedy()
_ANY_RULE = Remedy((("rules", ("REGEX=>REPL",)),), to_fill_in=True)
_RENAMING = Remedy(note="rules of yours, where only names differ")
_OTHER = Remedy(
    lead="is it of another model? ",
    instead=(
        Remedy((("key", "NAME"),), " takes another state dict of the file", to_fill_in=True),
        _ANY_RULE._replace(note=" renames"),
    ),
)
_SCATTERED = Remedy(
    note="too much is left, in too many places, to be allowed by a few globs; the report lists it"
)


class Problem(NamedTuple):
    """A reason to refuse, and what would help."""

    kind: str
    """`missing`, `unexpected`, `mismatched`, `untied`, `ambiguous`,
    `lossy-cast`, `coverage`, `optimizer`."""
    text: str
    """One line, names folded."""
    remedy: Remedy = _NONE
    """The arguments of `load_into` that help."""


class Judgement(NamedTuple):
    """Why a report is refused, the most telling first; no problems: it is accepted."""

    problems: tuple[Problem, ...]
    remedy: Remedy
    """What helps against all of them."""

    @property
    def accepted(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def judged(allowance: Allowance, report: MatchReport, untried: str) -> Judgement:
    """Return every reason to refuse, and what helps; see `Allowance.judged`."""
    missing, unexpected, mismatched, unclear = allowance.refused(report)
    is_nothing = allowance.is_nothing(report)
    unclear = [*report.ambiguous] if is_nothing else unclear
    question = _ruling(allowance, report, unclear) if missing or unexpected or is_nothing else _NONE
    besides = Remedy((("min_coverage", 0),)) if is_nothing else _NONE
    problems = tuple(
        chain(
            _nothing(report, mismatched) if is_nothing else (),
            _ambiguous(unclear, question),
            _mismatched(mismatched, besides),
            _missing(missing),
            _unexpected(unexpected),
            _shared_memory(report),
            _lossy(allowance.refused_casts(report)),
            _short(allowance, report) if allowance.is_short(report) else (),
            _optimizer(report),
        )
    )
    if problems and untried:
        note = f"{printable(untried)} loads in its own way, which could not be tried beforehand"
        does = "model.load_state_dict(ckptool.load_state_dict(path)) does what torch does"
        return Judgement(problems, Remedy(note=f"{note}: {does}"))
    if question:
        beside = _of(problems, "untied", "lossy-cast", "optimizer")
        ways = tuple(together((way, beside)) for way in question.instead)
        return Judgement(problems, together((question, beside))._replace(instead=ways))
    return Judgement(problems, _helping(report, problems))


def refusal(report: MatchReport, judgement: Judgement) -> MatchError | None:
    """Return the error to raise; None: it is accepted."""
    if judgement.accepted:
        return None
    texts = [problem.text for problem in judgement.problems]
    is_whole = bool(report.names) and report.fitting == report.names
    heading = f"{_verdict(report)}: {texts.pop(0) if is_whole else _share(report)}"
    lines = [heading, *texts[:2]]
    if report.proposed and judgement.remedy.arguments:
        lines[-1] += "; the rules in the hint would match more, and were not applied"
    return MatchError(
        "\n".join(lines),
        file=report.file or None,
        hint=judgement.remedy or None,
        report=report,
    )


def _ruling(allowance: Allowance, report: MatchReport, unclear: Sequence[Ambiguity]) -> Remedy:
    """Return the rules that are proposed, with what has to be allowed beside them.

    They are given together; where a question is open, each of its rules is a way of its own.
    """
    rules = [rule for one in unclear for rule in one.rules]
    if not rules:
        return _with_rest(allowance, report, report.proposed) if report.proposed else _NONE
    ways = [_with_rest(allowance, report, [one]) for one in report.proposed if one.rule in rules]
    return ways[0]._replace(instead=tuple(ways[1:])) if ways else _NONE


def _with_rest(allowance: Allowance, report: MatchReport, proposed: Sequence[Renaming]) -> Remedy:
    done = {name for one in proposed for pair in one.names for name in pair}
    missing, unexpected, mismatched, _ = allowance.refused(report)
    remedies, notes = [Remedy((("rules", tuple(one.rule for one in proposed)),))], []
    for argument, names, text in (
        ("allow_missing", missing, "keeps {} as the model has it"),
        ("allow_unexpected", unexpected, "leaves out {}"),
    ):
        rest = [name for name in names if name not in done]
        if rest:
            remedies.append(_allowing(argument, rest))
            notes.append(text.format(_folded(rest, most=3)))
    if mismatched:
        remedies.append(_allowing("allow_mismatched", [one.name for one in mismatched]))
    found = _all_of(remedies) if all(one.arguments for one in remedies) else remedies[0]
    return found._replace(note=f" ({'; '.join(notes)})" if notes else "")


def _nothing(report: MatchReport, mismatched: Sequence[Mismatch]) -> Iterator[Problem]:
    if mismatched:
        return
    if report.mismatched:
        text = "nothing is left to load: what the two have in common is of another shape"
        note = " where the model is to stay as it is"
        yield Problem("coverage", text, Remedy((("min_coverage", 0),), note))
    elif report.fitting:
        text = (
            f"none of the model's parameters is in it: {report.fitting:,} of its other "
            "tensors are all that fit"
        )
        yield Problem("coverage", text, _OTHER)
    else:
        own, wanted = _folded(report.unexpected_keys, 2), _folded(report.missing_keys, 2)
        own = own if report.unexpected_keys else "no tensors"
        text = f"nothing of it is in the model: it has {own}; the model has {wanted}"
        yield Problem("coverage", text, _OTHER)


def _short(allowance: Allowance, report: MatchReport) -> Iterator[Problem]:
    least = f"{100 * (allowance.min_coverage or 0):.6g}%"
    text = f"{_percent(report.coverage)} of the model's parameters are loaded; at least {least} "
    yield Problem("coverage", f"{text}must be")


def _ambiguous(unclear: Sequence[Ambiguity], remedy: Remedy) -> Iterator[Problem]:
    if unclear:
        first, others = unclear[0], len(unclear) - 1
        more = f", and {counted(others, 'other question')}" if others else ""
        text = f"not guessed: {_folded(first.names)} may be {_folded(first.candidates)}{more}"
        yield Problem("ambiguous", text, remedy)


def _mismatched(mismatched: Sequence[Mismatch], besides: Remedy) -> Iterator[Problem]:
    if mismatched:
        shown = _labels((one.name, (one.shape, one.wanted)) for one in mismatched)
        texts = [f"{name} {list(shape)} for {list(wanted)}" for name, (shape, wanted) in shown]
        text = f"{_are(mismatched)} of another shape: {listed(texts, most=3)}"
        allowed = _allowing("allow_mismatched", [one.name for one in mismatched])
        yield Problem("mismatched", text, _all_of([allowed, besides]))


def _missing(missing: Sequence[str]) -> Iterator[Problem]:
    if missing:
        text = f"{_are(missing)} missing in it: {_folded(missing)}"
        yield Problem("missing", text, _allowing("allow_missing", missing))


def _unexpected(unexpected: Sequence[str]) -> Iterator[Problem]:
    if unexpected:
        text = f"{_are(unexpected)} not in the model: {_folded(unexpected)}"
        yield Problem("unexpected", text, _allowing("allow_unexpected", unexpected))


def _lossy(lossy: Sequence[Cast]) -> Iterator[Problem]:
    if lossy:
        shown = _labels((one.name, (one.before, one.after, one.loss)) for one in lossy)
        texts = [
            f"{name} {before} -> {after}{f' ({loss})' if loss else ''}"
            for name, (before, after, loss) in shown
        ]
        text = f"{_are(lossy)} changed by a cast: {listed(texts, most=3)}"
        yield Problem(
            "lossy-cast", text, _allowing("allow_lossy_cast", [one.name for one in lossy])
        )


def _optimizer(report: MatchReport) -> Iterator[Problem]:
    found = report.optimizer
    if found is None:
        return
    remedy = Remedy(note=found.remedy) if isinstance(found.remedy, str) else found.remedy
    for text in found.problems:
        yield Problem("optimizer", text, remedy)
        remedy = _NONE


def _shared_memory(report: MatchReport) -> Iterator[Problem]:
    """Yield the groups of names that are one tensor in the model and differ in the file.

    The remedy against all groups is that of the first problem.
    """
    remedy = _one_of_each(report)
    for names in report.untied:
        text = f"{_folded(names)} are one tensor in the model, and differ in the file"
        yield Problem("untied", text, remedy)
        remedy = _NONE


def _one_of_each(report: MatchReport) -> Remedy:
    """Return the rules that pass over all names of each group but the first."""
    own = {new: own for one in report.renamed for own, new in one.names}
    extra = [own.get(name, name) for names in report.untied for name in names[1:]]
    if not extra:
        return _NONE
    rules = tuple(f"^{escaped(name)}$=>{_unused(name, n)}" for n, name in enumerate(extra))
    return _all_of([Remedy((("rules", rules),)), _allowing("allow_unexpected", extra)])


def _unused(name: str, number: int) -> str:
    """Return a name that no model has, in the same module: a common prefix stays common."""
    path, dot, _ = name.rpartition(".")
    return f"{path}{dot}unused.{number}".replace("\\", r"\\")


def _are(many: Sized) -> str:
    return "1 tensor is" if len(many) == 1 else f"{len(many):,} tensors are"


def _verdict(report: MatchReport) -> str:
    file = report.file if report.file.isprintable() else printable(report.file)
    return f"{file or 'the state dict'} does not fit {printable(report.model) or 'the model'}"


def _share(report: MatchReport) -> str:
    if not report.names:
        return "that has no tensors"
    part = f"{report.fitting:,} of its {counted(report.names, 'tensor')}"
    verb = "fits" if report.fitting == 1 else "fit"
    return f"{part} {verb} ({_percent(report.coverage)} of the parameters)"


def _percent(share: float) -> str:
    """Return the share with one digit; never 0% of something, nor 100% where something lacks."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < _SMALL:
        return "<0.1%"
    return f"{share:.1%}" if share <= 1 - _SMALL else ">99.9%"


def _of(problems: Iterable[Problem], *kinds: str) -> Remedy:
    return _all_of([one.remedy for one in problems if one.kind in kinds])


def _helping(report: MatchReport, problems: Sequence[Problem]) -> Remedy:
    """Return what helps where no rule is proposed: all that would have to be allowed."""
    kinds = {problem.kind: problem for problem in reversed(problems)}
    share = kinds.get("coverage")
    if share is not None and share.remedy:
        return share.remedy
    held = report.fitting + len(report.unexpected_keys)
    is_other = _LITTLE * report.fitting < min(report.names, held)
    if is_other and {"missing", "unexpected"} <= kinds.keys():
        return _OTHER
    allowed = _all_of([one.remedy for one in problems if one.remedy])
    if allowed.arguments and {"missing", "unexpected"} <= kinds.keys():
        return allowed._replace(instead=(_RENAMING,))
    return allowed


def _all_of(remedies: Sequence[Remedy]) -> Remedy:
    """Return all of them together; where one of them is not possible, only that."""
    given = [one for one in remedies if one]
    return next((one for one in given if one is _SCATTERED), together(given))


def _allowing(argument: str, names: Sequence[str]) -> Remedy:
    globs = _globs_of(names)
    if not globs:
        return _SCATTERED
    only = globs[0] if len(globs) == 1 < len(names) else globs
    return Remedy(((argument, only),))


def _globs_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if they are few, else globs of the modules that they have in common."""
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


def escaped_glob(name: str) -> str:
    """Return a glob that matches this name alone."""
    return _SPECIAL.sub(r"[\g<0>]", name)


def _folded(names: Sequence[str], most: int = 4) -> str:
    """Return `layers.{0..31}.weight, head.bias, and 4 more`."""
    shown = [label for label, _ in _labels((name, None) for name in names[:_MOST_FOLDED])]
    if len(names) <= _MOST_FOLDED:
        return listed(shown, most)
    known = f"the first {_MOST_FOLDED:,} of {len(names):,} are "
    return known + listed(shown[:most], most) + ", ..." * (len(shown) > most)


def _labels(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return names of repeated layers as one, with what they have in common."""
    some = list(islice(rows, _MOST_FOLDED))
    return [(one.label, some[one.numbers[0]][1]) for one in families(some)]
