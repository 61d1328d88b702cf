"""Why a state dict is refused and what helps, in words: asked where something does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from itertools import chain, starmap
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import MatchError
from ckptool.matching.advice import (
    BELOW,
    allowing,
    allowing_all,
    by_torch,
    by_who_wrote_it,
    deciding,
    doubted,
    either,
    elsewhere,
    is_named_otherwise,
    is_of_another,
    may_be_asked,
    naming,
    renumbering,
    ruling,
    tried,
)
from ckptool.matching.again import Again
from ckptool.matching.folding import folded, folded_within, labels
from ckptool.matching.list_rules import list_rules
from ckptool.matching.nested_rules import nested_rules, twin_rules
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch
from ckptool.matching.shared_memory import of_shared_memory
from ckptool.remedies import Argument, Remedy, together
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    from ckptool.matching.allowance import Allowance

__all__ = ["Judgement", "Problem", "judged", "refusal"]

_MOST_REMEDIES = 4
_SMALL = 0.001
_MOST = 0.5
_NONE = Remedy()
_RENAMING = Remedy(note="rules of yours, where only names differ")
_MORE = Remedy(note=" (more is asked then)")


class Problem(NamedTuple):
    """A reason to refuse, and what would help."""

    kind: str
    """`missing`, `unexpected`, `mismatched`, `untied`, `overlapping`, `ambiguous`,
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
        """Whether there are none."""
        return not self.problems


def judged(
    allowance: Allowance, report: MatchReport, again: Again | None, untried: str
) -> Judgement:
    """Every reason to refuse, and what helps; see `Allowance.judged`."""
    missing, unexpected, mismatched, unclear = allowance.refused(report)
    if allowance.is_nothing(report):
        unclear = [*report.ambiguous]  # whatever is allowed, they are why
    of_lists = _for_lists(allowance, report, again) if missing and unexpected else _NONE
    question = of_lists
    if unclear and not question:
        question = ruling(unclear, lambda rules: _rest(allowance, report, rules, again))
    asked = bool(of_lists) or (bool(question) and may_be_asked(report, unclear))
    questions = list(_ambiguous(unclear, question))
    own, wanted = (again.have, again.want) if again is not None else ((), ())
    found = chain(
        _nothing(allowance, report, again),
        questions if asked else (),
        _mismatched(mismatched, wanted, (("min_coverage", 0),) * allowance.is_nothing(report)),
        _missing(missing, wanted),
        _unexpected(unexpected, own),
        () if asked else questions,
        starmap(Problem, of_shared_memory(report, own, wanted)),
        _lossy(allowance.refused_casts(report), wanted),
        _coverage(allowance, report),
        _optimizer(report),
    )
    problems = tuple(found)
    if problems and untried:
        return Judgement(problems, by_torch(untried))
    if (problems and asked and not (report.moved or _is_reformed(report, problems))) or of_lists:
        beside = _of(problems, "untied", "overlapping", "lossy-cast", "optimizer")
        others = tuple(together((way, beside)) for way in question.instead)
        remedy = together((question, beside))._replace(instead=others)
    else:
        remedy = _helping(allowance, report, problems, again)
    if missing and unexpected and again is not None and again.maker:
        remedy = by_who_wrote_it(again.maker, remedy)
    return Judgement(problems, remedy)


def refusal(report: MatchReport, judgement: Judgement) -> MatchError | None:
    """The error to raise; None: it is accepted."""
    problems = judgement.problems
    if not problems:
        return None
    texts = [problem.text for problem in problems]
    is_met = bool(report.names) and report.fitting == report.names
    heading = f"{_said(report)}: {texts.pop(0) if is_met else _share(report)}"
    lines = [heading, *texts[:2]]
    moved = _moved(report, problems)
    if moved:
        lines[-1] += f"; {moved}"
    return MatchError(
        "\n".join(lines),
        file=report.file or None,
        hint=judgement.remedy or None,
        report=report,
    )


def _for_lists(allowance: Allowance, report: MatchReport, again: Again | None) -> Remedy:
    """The rules for whole lists, and what has to be allowed then; nothing where they do no good."""
    if again is None:
        return _NONE
    left = again.unmet(report)
    for rules in dict.fromkeys(list_rules(*left, fold=fold) for fold in (True, False)):
        rest = _rest(allowance, report, rules, again) if rules else None
        if rest is not None:
            return Remedy((("rules", rules), *rest.arguments), rest.note)
    return _NONE


def _rest(
    allowance: Allowance, before: MatchReport, rules: Sequence[str], again: Again | None
) -> Remedy | None:
    """What has to be allowed where such rules are given, and what that leaves out.

    None for rules that do no good.
    """
    report = tried(before, rules, again and again.report)
    if report is None or not report.fitting:
        return None
    missing, unexpected, mismatched, unclear = allowance.refused(report)
    own, wanted = (again.have, again.want) if again is not None else ((), ())
    other = report.respelled or (report.reformed and unexpected)
    if may_be_asked(report, unclear) or (other and missing):
        return _MORE
    remedies: list[Remedy] = []
    told: list[str] = []
    if unexpected:
        told.append(f"passes over {folded_within(unexpected)}")
        remedies.append(allowing("allow_unexpected", unexpected, own))
    if missing:
        if unexpected and elsewhere(report, again):
            return _MORE
        told.append(f"leaves {folded_within(missing)} as the model has it")
        remedies.insert(0, allowing("allow_missing", missing, wanted))
    if mismatched:
        remedies.append(allowing("allow_mismatched", mismatched, wanted))
    allowed = allowing_all(remedies)
    if remedies and not allowed.arguments:
        return _MORE
    return Remedy(allowed.arguments, f" ({'; '.join(told)})" if told else "")


def _nothing(allowance: Allowance, report: MatchReport, again: Again | None) -> Iterator[Problem]:
    if not allowance.is_nothing(report):
        return
    if allowance.refused(report)[2]:
        return  # the shapes are told, with what helps
    if report.mismatched:
        text = "nothing is left to load: what the two have in common is of another shape"
        note = " where the model is to stay as it is"
        yield Problem("coverage", text, Remedy((("min_coverage", 0),), note))
    elif report.fitting:
        text = (
            f"none of the model's parameters is in it: {report.fitting:,} of its other "
            "tensors are all that fit"
        )
        yield Problem("coverage", text, naming(report, again))
    else:
        own = report.unexpected_keys
        wanted = report.missing_keys
        text = (
            f"nothing of it is in the model: it has {folded(own, 2) or 'no tensors'}; "
            f"the model has {folded(wanted, 2)}"
        )
        yield Problem("coverage", text, naming(report, again))


def _coverage(allowance: Allowance, report: MatchReport) -> Iterator[Problem]:
    if allowance.is_short(report):
        text = (
            f"{_percent(report.coverage)} of the model's parameters are loaded; "
            f"{100 * (allowance.min_coverage or 0):.6g}% is the least that is to be"
        )
        yield Problem("coverage", text)


def _ambiguous(unclear: Sequence[Ambiguity], remedy: Remedy) -> Iterator[Problem]:
    if not unclear:
        return
    first, others = unclear[0], len(unclear) - 1
    more = f", and {counted(others, 'other question')}" if others else ""
    text = f"not guessed: {folded(first.names)} may be {folded(first.candidates)}{more}"
    yield Problem("ambiguous", text, remedy)


def _mismatched(
    mismatched: Sequence[Mismatch], known: Collection[str], besides: tuple[Argument, ...]
) -> Iterator[Problem]:
    if mismatched:
        shown = labels((one.name, (one.shape, one.wanted)) for one in mismatched)
        texts = [f"{name} {list(shape)} for {list(wanted)}" for name, (shape, wanted) in shown]
        text = f"{_are(mismatched)} of another shape: {listed(texts, most=3)}"
        allowed = allowing("allow_mismatched", mismatched, known)
        yield Problem("mismatched", text, allowing_all([allowed, Remedy(besides)]))


def _missing(missing: Sequence[str], known: Collection[str]) -> Iterator[Problem]:
    if missing:
        text = f"{_are(missing)} missing in it: {folded(missing)}"
        yield Problem("missing", text, allowing("allow_missing", missing, known))


def _unexpected(unexpected: Sequence[str], known: Collection[str]) -> Iterator[Problem]:
    if unexpected:
        text = f"{_are(unexpected)} not in the model: {folded(unexpected)}"
        yield Problem("unexpected", text, allowing("allow_unexpected", unexpected, known))


def _lossy(lossy: Sequence[Cast], known: Collection[str]) -> Iterator[Problem]:
    if lossy:
        shown = labels((one.name, (one.before, one.after, one.loss)) for one in lossy)
        texts = [
            f"{name} {before} -> {after}{f' ({loss})' if loss else ''}"
            for name, (before, after, loss) in shown
        ]
        text = f"{_are(lossy)} changed by a cast: {listed(texts, most=3)}"
        yield Problem("lossy-cast", text, allowing("allow_lossy_cast", lossy, known))


def _optimizer(report: MatchReport) -> Iterator[Problem]:
    found = report.optimizer
    if found is None:
        return
    remedy = Remedy(note=found.remedy) if isinstance(found.remedy, str) else found.remedy
    for text in found.problems:
        yield Problem("optimizer", text, remedy)
        remedy = _NONE


def _are(many: Sized) -> str:
    return "1 tensor is" if len(many) == 1 else f"{len(many):,} tensors are"


def _moved(report: MatchReport, problems: Sequence[Problem]) -> str:
    """The lists that may be counted otherwise, where that is why names are left."""
    asked = {problem.kind for problem in problems}
    told = report.moved or [text for text, _ in report.reformed] or report.respelled
    return listed(told, 2) if told and asked & {"missing", "unexpected"} else ""


def _said(report: MatchReport) -> str:
    file = report.file if report.file.isprintable() else printable(report.file)
    return f"{file or 'the state dict'} does not fit {printable(report.model) or 'the model'}"


def _share(report: MatchReport) -> str:
    if not report.names:
        return "that has no tensors"
    part = f"{report.fitting:,} of its {counted(report.names, 'tensor')}"
    verb = "fits" if report.fitting == 1 else "fit"
    return f"{part} {verb} ({_percent(report.coverage)} of the parameters)"


def _percent(share: float) -> str:
    """With one digit; never 0% of something, nor 100% where something lacks."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < _SMALL:
        return "<0.1%"
    return f"{share:.1%}" if share <= 1 - _SMALL else ">99.9%"


def _of(problems: Iterable[Problem], *kinds: str) -> Remedy:
    return allowing_all([one.remedy for one in problems if one.kind in kinds])


def _helping(
    allowance: Allowance, report: MatchReport, problems: Sequence[Problem], again: Again | None
) -> Remedy:
    """What helps where no rule is likely: all that would have to be allowed, if it can be told."""
    kinds = {problem.kind: problem for problem in reversed(problems)}
    question, share = kinds.get("ambiguous"), kinds.get("coverage")
    if report.moved and _moved(report, problems):
        rules = again.renumbering() if again is not None else ()
        rest = _rest(allowance, report, rules, again) if rules else None
        given = (
            None if rest is None else Remedy((("rules", tuple(rules)), *rest.arguments), rest.note)
        )
        return renumbering(report.moved, given)
    if _is_reformed(report, problems):
        return Remedy(note="; ".join(dict.fromkeys(helps for _, helps in report.reformed)))
    if share is not None and share.remedy:
        return share.remedy
    if is_of_another(report) and "unexpected" in kinds:
        return naming(report, again)
    remedies = [one.remedy for one in problems if one.remedy and one.kind != "ambiguous"]
    if len(remedies) > _MOST_REMEDIES:
        return _NONE
    if report.respelled and "missing" in kinds:  # allowed, they would stay as they are at random
        return question.remedy if question is not None and question.remedy else BELOW
    allowed = allowing_all(remedies)
    if not {"missing", "unexpected"} <= kinds.keys():
        return allowed
    if question is not None and question.remedy:
        return either(deciding(question.remedy), allowed)
    doubts = elsewhere(report, again)
    if doubts:
        return _elsewhere(allowance, report, again, allowed, doubts)
    return allowed._replace(instead=(_RENAMING,)) if allowed.arguments else allowed


def _elsewhere(
    allowance: Allowance,
    report: MatchReport,
    again: Again | None,
    allowed: Remedy,
    doubts: Sequence[str],
) -> Remedy:
    """What helps where the file may have, under another name, what the model lacks."""
    rules = nested_rules(*again.unmet(report)) if again is not None else ()
    rest = _rest(allowance, report, rules, again) if rules else None
    if rest is not None:
        return Remedy((("rules", rules), *rest.arguments), rest.note)
    if again is not None:
        ours, theirs = again.unmet(report)
        rules = twin_rules(ours, {name: theirs[name] for name in doubts})
    rest = _rest(allowance, report, rules, again) if rules else None
    if rest is not None:
        return either(deciding(Remedy((("rules", rules), *rest.arguments), rest.note)), allowed)
    if is_named_otherwise(report, again, _MOST) and len(_modules(report.missing_keys)) > 1:
        return naming(report, again)
    return doubted(doubts, allowed)


def _is_reformed(report: MatchReport, problems: Iterable[Problem]) -> bool:
    """Whether what is left has another form, and no allowance would load it."""
    kinds = {problem.kind for problem in problems}
    return bool(report.reformed) and {"missing", "unexpected"} <= kinds


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}
