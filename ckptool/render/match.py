"""`ckptool match` as text, and what `print` shows of a report: the form of transformers' own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice

from ckptool.inspection.values import shape_text
from ckptool.matching.judging import Allowance, Judgement
from ckptool.matching.report import Cast, MatchReport, Renaming
from ckptool.names import numbered
from ckptool.remedies import Remedy
from ckptool.render.diff import folded
from ckptool.render.remedies import as_options
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, command_lines, count, share, shorten, wrapped
from ckptool.words import clean, counted

__all__ = ["advice_lines", "match_line", "match_lines", "note_lines"]

_MOST_NAMED = 3
"""Patterns that one cell names."""
_MOST_ROWS = 100
"""Of one status, where repeated layers are folded: the rest is counted."""
_MOST_LETTERS = 300
"""Of a cell there."""
_IN_MEMORY = "the state dict"
_NO_CLASS = "the model"


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    status: str
    details: str = ""


def match_lines(
    report: MatchReport,
    look: Look = PLAIN,
    *,
    fold: bool = True,
    judgement: Judgement | None = None,
    options: bool = False,
) -> Iterator[str]:
    """Whether it fits and how much of it, a row for each thing worth knowing, what each means.

    With `fold` repeated layers are one row, and of a long table the beginning is shown. By a
    `judgement` it may be taken whatever it lacks. What helps is told as arguments of the library,
    or as `options` of the command line. Where tables are all that is asked for (`look.fmt`), the
    table alone, no row folded.
    """
    if look.fmt:
        return _table(_rows(report, fold=False), look)
    heading = _heading(report, look, judgement or Allowance().judged(report))
    unseen = _unseen(judgement)
    if _is_plain(report) and not unseen:
        return apart([(*heading, *_ties(report, look)), _optimizer(report, look)])
    rows = _rows(report, fold=fold)
    shown = [*_cut(rows)] if fold else rows
    notes = _notes(rows, report, look, options, unseen)
    if len(shown) < len(rows):
        notes = chain(notes, wrapped(f"note: {_WHOLE[options]}", look.width))
    return apart([heading, _table(shown, look) if rows else (), notes, _optimizer(report, look)])


def match_line(report: MatchReport) -> str:
    """Return the heading, by which a report is known."""
    return next(_heading(report, PLAIN, Allowance().judged(report)))


def note_lines(
    report: MatchReport, look: Look, *, judgement: Judgement | None = None, options: bool = False
) -> Iterator[str]:
    """Return what each status of the report means, and what helps."""
    return _notes(_rows(report, fold=True), report, look, options, _unseen(judgement))


def advice_lines(judgement: Judgement, look: Look, *, command: str = "") -> Iterator[str]:
    """Yield what helps, as options; of what is accepted the `command` that writes it."""
    if judgement.remedy:
        yield ""
        yield f"hint: {clean(as_options(judgement.remedy))}"  # broken, no shell would take it
    if judgement.accepted and command:
        yield ""
        yield look.bold("to write it under these names")
        yield from command_lines(command, look.width)


def _unseen(judgement: Judgement | None) -> list[str]:
    """Why it is refused, as far as no row of the table says so."""
    problems = () if judgement is None else judgement.problems
    return [problem.text for problem in problems if problem.kind == "coverage"]


def _notes(
    rows: Iterable[_Row], report: MatchReport, look: Look, options: bool, unseen: Iterable[str]
) -> Iterator[str]:
    for status in dict.fromkeys(row.status for row in rows):
        text = _meaning(status, report, options)
        if text:
            yield from wrapped(f"{status}: {text}", look.width)
    other_forms = (text for text, _ in report.reformed)
    for note in (*report.moved, *report.respelled, *other_forms, *report.notes, *unseen):
        yield from wrapped(f"note: {clean(note)}", look.width)


def _is_plain(report: MatchReport) -> bool:
    """Return whether all of it fits as it is."""
    beside = (
        report.renamed,
        report.layouts,
        report.cast,
        report.ambiguous,
        report.left_out,
        report.kept,
    )
    return report.fits and not any((*beside, report.notes))


def _heading(report: MatchReport, look: Look, judgement: Judgement) -> Iterator[str]:
    """`model.pth does not fit ResNet: 60 of its 62 tensors fit (98.1% of the parameters)`.

    Where all of them do, the first reason why it is refused all the same.
    """
    file, model = clean(report.file) or _IN_MEMORY, clean(report.model) or _NO_CLASS
    taken = judgement.accepted
    verdict = "fits" if taken else "does not fit"
    allowed = " with what is allowed" if taken and not report.fits else ""
    whole = max(report.parameters, 1)
    part = share(report.loaded if report.parameters else whole, whole)
    tensors, parameters = counted(report.names, "tensor"), f"{part} of the parameters"
    verb = "fits" if report.fitting == 1 else "fit"
    met = f"{count(report.fitting)} of its {tensors} {verb} ({parameters})"
    if report.fits:
        met = f"{tensors}, {parameters}"
    elif not report.names:
        met = "that has no tensors"
    elif report.fitting == report.names and not taken:
        met = clean(judgement.problems[0].text)
    elif report.fitting == report.names:
        met = f"all of its {tensors} are met" if report.names > 1 else "its 1 tensor is met"
    text = f"{file} {verdict} {model}{allowed}: {met}"
    yield from (look.bold(line) for line in wrapped(text, look.width))


def _ties(report: MatchReport, look: Look) -> Iterator[str]:
    if report.tied:
        rows = _tied("", report.tied, fold=True)
        text = ", ".join(f"{row.key} {row.details}" for row in rows[:_MOST_NAMED])
        text += f", and {count(len(rows) - _MOST_NAMED)} more" if len(rows) > _MOST_NAMED else ""
        yield from wrapped(f"tied: {text}", look.width)


def _table(rows: Sequence[_Row], look: Look) -> Iterator[str]:
    cells = [[row.key, row.status, row.details] for row in rows]
    return table(["Key", "Status", "Details"], cells, look, flexible=(0, 2), ruled=True)


def _rows(report: MatchReport, *, fold: bool) -> list[_Row]:
    """Return what does not fit, then what fits by a change, then what is by the way."""
    unclear = {name for ambiguity in report.ambiguous for name in ambiguity.names}
    unexpected = [name for name in report.unexpected_keys if name not in unclear]
    return [
        *_named("MISSING", ((name, "") for name in report.missing_keys), fold),
        *_named("UNEXPECTED", ((name, "") for name in unexpected), fold),
        *_named(
            "MISMATCH",
            (
                (one.name, f"{shape_text(one.shape)} for {shape_text(one.wanted)}")
                for one in report.mismatched
            ),
            fold,
        ),
        *_ambiguous(report, fold),
        *_named("LAYOUT", ((one.name, one.reason) for one in report.undecided), fold),
        *(row for one in report.proposed for row in _renamed(one, fold, "PROPOSED")),
        *_tied("UNTIED", report.untied, fold),
        *_cast([cast for cast in report.cast if cast.lossy], fold),
        *(row for renaming in report.renamed for row in _renamed(renaming, fold)),
        *_named(
            "TRANSPOSED",
            ((one.name, f"axes {list(one.axes)}") for one in report.layouts if one.axes),
            fold,
        ),
        *_cast([cast for cast in report.cast if not cast.lossy], fold),
        *_tied("TIED", report.tied, fold),
        *_named("KEPT", report.kept, fold),
        *_named("LEFT OUT", report.left_out, fold),
    ]


def _cut(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield the first rows of each status, and how many there are more."""
    for status, alike in groupby(rows, key=lambda row: row.status):
        for row in islice(alike, _MOST_ROWS):
            yield _Row(shorten(row.key, _MOST_LETTERS), status, shorten(row.details, _MOST_LETTERS))
        rest = sum(1 for _ in alike)
        if rest:
            yield _Row(f"and {count(rest)} more", status, "")


def _named(status: str, found: Iterable[tuple[str, str]], fold: bool) -> list[_Row]:
    """Yield names with their remarks; names with the same remark are folded."""
    rows = list(found)
    return [
        _Row(_label(one.label), status, clean(rows[one.numbers[0]][1]))
        for one in folded(rows, fold=fold)
    ]


def _ambiguous(report: MatchReport, fold: bool) -> list[_Row]:
    held = [(one.names, one.candidates) for one in report.ambiguous if one.names]
    rows = []
    for members in _alike([(names[0], (*names[1:], *others)) for names, others in held], fold):
        names = [name for n in members for name in held[n][0]]
        others = [name for n in members for name in held[n][1]]
        could = f"could be {_patterns(others, fold)}" if others else ""
        key = _patterns(names, fold, most=1 if fold else _MOST_NAMED)
        rows.append(_Row(key, "AMBIGUOUS", could))
    return rows


def _tied(status: str, groups: Sequence[tuple[str, ...]], fold: bool) -> list[_Row]:
    rows, mark = [], "!=" if status == "UNTIED" else "="
    for members in _alike([(group[0], group[1:]) for group in groups], fold):
        first = _patterns((groups[n][0] for n in members), fold)
        others = _patterns((name for n in members for name in groups[n][1:]), fold)
        rows.append(_Row(first, status, f"{mark} {others}"))
    return rows


def _cast(found: Sequence[Cast], fold: bool) -> list[_Row]:
    """Yield a row for each pair of types whose casts say nothing more."""
    if not fold:
        return [_Row(_label(one.name), "CAST", _change(one)) for one in found]
    kinds: dict[str, list[Cast]] = {}
    for one in found:
        kinds.setdefault(_change(one), []).append(one)
    rows = []
    for change, casts in kinds.items():
        names = [one.name for one in casts]
        if casts[0].loss:
            rows += _named("CAST", ((name, change) for name in names), fold)
        else:
            rows.append(_Row(_patterns(names, most=1), "CAST", change))
    return rows


def _change(one: Cast) -> str:
    change = f"{clean(one.before)} -> {clean(one.after)}"
    if not one.lossy:
        return change
    return f"{change} (lossy: {clean(one.loss)})" if one.loss else f"{change} (lossy)"


def _renamed(renaming: Renaming, fold: bool, status: str = "RENAMED") -> list[_Row]:
    text = clean(renaming.text)
    if not renaming.names:
        return []
    if fold:
        return [_Row(_patterns((own for own, _ in renaming.names), most=1), status, text)]
    return [_Row(_label(own), status, f"{_label(new)} ({text})") for own, new in renaming.names]


def _alike(found: Sequence[tuple[str, Sequence[str]]], fold: bool) -> list[tuple[int, ...]]:
    """Group the names of one row: their numbers change in step."""
    names = [(name, _in_step(name, others)) for name, others in found]
    return [one.numbers for one in folded(names, fold=fold)]


def _in_step(name: str, others: Sequence[str]) -> Hashable:
    own = numbered(name)[1]
    pairs = map(numbered, others)
    return tuple(texts if place == own else (texts, place) for texts, place in pairs)


def _patterns(names: Iterable[str], fold: bool = True, most: int = _MOST_NAMED) -> str:
    """Return names for a cell, each once: `a.{0..3}.w, b.w and 4 more`."""
    found = folded([(name, None) for name in dict.fromkeys(names)], fold=fold)
    rest = sum(len(one.names) for one in found[most:])
    shown = ", ".join(_label(one.label) for one in found[:most])
    return f"{shown} and {count(rest)} more" if rest else shown


def _label(name: str) -> str:
    return clean(name) or "''"


def _meaning(status: str, report: MatchReport, options: bool) -> str:
    if status == "AMBIGUOUS":
        decides = "a rule of yours" if options else _deciding(report)
        return f"names and shapes do not settle it, and none is guessed; {decides} decides it"
    if status == "CAST" and not any(cast.lossy for cast in report.cast):
        return "becomes the model's type as it is loaded"
    text = _MEANINGS.get(status, "")
    if status == "LAYOUT":
        return text.format(*("--", "-") if options else ("", "_"))
    name = _ALLOWED.get(status, "")
    return text.format(f"--{name.replace('_', '-')}" if options else name)


def _deciding(report: MatchReport) -> str:
    """Return the first rule, if there is one that is not for a single layer of several."""
    is_more = report.moved or report.respelled or report.reformed
    rules = [] if is_more else [rule for one in report.ambiguous for rule in one.rules]
    return f"`{clean(str(Remedy((('rules', tuple(rules[:1])),))))}`" if rules else "a rule of yours"


_WHOLE = {
    False: "some rows are only counted; the fields of the report have all names",
    True: "some rows are only counted; --no-fold has one for each name",
}
_ALLOWED = {
    "MISSING": "allow_missing",
    "UNEXPECTED": "allow_unexpected",
    "MISMATCH": "allow_mismatched",
    "CAST": "allow_lossy_cast",
}
_MEANINGS = {
    "MISSING": "in the model, but not in the file; {} keeps the model's own tensor",
    "UNEXPECTED": "in the file, but not in the model; {} leaves it out",
    "MISMATCH": "the shapes differ; {} keeps the model's own tensor",
    "LAYOUT": "neither the format nor the type of the module tells the order of the axes; "
    "{0}transpose or {0}no{1}transpose decides it",
    "TRANSPOSED": "the axes are put in torch's order, each shown by its number in the file",
    "UNTIED": "one tied tensor in the model, but different tensors in the file: another model",
    "CAST": "the model has another type, and a lossy cast changes values; {} accepts that",
    "RENAMED": "matches after the renaming shown",
    "PROPOSED": "would match after the rule shown, which was not applied",
    "TIED": "one tensor under several names, which is loaded once",
}


def _optimizer(report: MatchReport, look: Look) -> Iterator[str]:
    found = report.optimizer
    if found is None:
        return
    state = f"{count(found.matched)} of {counted(found.parameters, 'parameter')}"
    yield from wrapped(f"optimizer: the state of {state}, by {clean(found.by)}", look.width)
    for problem in found.problems:
        yield from wrapped(f"optimizer: {clean(problem)}", look.width)
    if found.problems and found.remedy:
        yield f"what helps: {clean(str(found.remedy))}"
    for row in _cut(_cast(found.cast, fold=True)):
        yield from wrapped(f"optimizer: {row.key} {row.details}", look.width)
    for note in found.notes:
        yield from wrapped(f"note: {clean(note)}", look.width)
