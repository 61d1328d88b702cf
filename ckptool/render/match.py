"""`ckptool match` as text, and `print` of a report, in the form that transformers uses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import NamedTuple

from ckptool.core.names import split_numbers
from ckptool.core.values import format_shape
from ckptool.matching.judging import Allowance, Judgement
from ckptool.matching.report import DtypeChange, MatchReport, Renaming
from ckptool.remedies import Remedy
from ckptool.render.diff import folded
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, as_options, share, shorten, titled_commands, wrapped
from ckptool.words import clean, counted

_MOST_NAMED = 3
"""The most patterns of names in one cell."""
_MOST_ROWS = 100
"""The most rows of one status in a folded table."""
_MOST_LETTERS = 300
"""The most characters of a cell in a folded table."""


class _Row(NamedTuple):
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
    """Return the lines of a match report: a summary, a table of differences and their meaning.

    With `fold` repeated layers are one row, and a long table is cut. A `judgement` decides whether
    the file fits. Advice names arguments of the library, or `options` of the command line. With
    `look.fmt` the result is the table alone, without folded rows.
    """
    if look.fmt:
        return _table(_rows(report, fold=False), look)
    heading = _heading(report, look, judgement or Allowance().judged(report))
    if _is_plain(report) and not _untabulated_reasons(judgement):
        ties = ", ".join(f"{row.key} {row.details}" for row in _tied(report, fold=True))
        lines = wrapped(f"tied: {ties}", look.width) if ties else ()
        return apart([(*heading, *lines), _optimizer(report, look)])
    rows = _rows(report, fold=fold)
    shown = [*_cut(rows)] if fold else rows
    notes = note_lines(report, look, judgement=judgement, options=options, rows=rows)
    if len(shown) < len(rows):
        whole = "--no-fold shows" if options else "the fields of the report have"
        notes = chain(
            notes, wrapped(f"note: some rows are not shown; {whole} all keys", look.width)
        )
    return apart([heading, _table(shown, look) if rows else (), notes, _optimizer(report, look)])


def match_line(report: MatchReport) -> str:
    """Return the heading."""
    return next(_heading(report, PLAIN, Allowance().judged(report)))


def advice_lines(judgement: Judgement, look: Look, *, command: str = "") -> Iterator[str]:
    """Yield the options that help, and for an accepted file the `command` that writes it."""
    if judgement.remedy:
        yield ""
        yield f"hint: {clean(_hint(judgement.remedy))}"  # on one line, to paste it
    if judgement.accepted and command:
        yield ""
        yield from titled_commands("To save it with the model's keys:", [command], look)


def _hint(remedy: Remedy) -> str:
    """Return `add --rename ... to apply the proposed rule`, or the text of another remedy."""
    options = as_options(remedy)
    if remedy != Remedy(remedy.arguments):
        return options
    arguments = dict(remedy.arguments)
    rules = arguments.get("rename", ())
    several = "s" * (isinstance(rules, tuple) and len(rules) > 1)
    purpose = f" to apply the proposed rule{several}" if [*arguments] == ["rename"] else ""
    return f"add {options}{purpose}"


def _untabulated_reasons(judgement: Judgement | None) -> list[str]:
    """Return the reasons for a refusal that the table does not show."""
    problems = () if judgement is None else judgement.problems
    return [problem.text for problem in problems if problem.kind == "coverage"]


def note_lines(
    report: MatchReport,
    look: Look,
    *,
    judgement: Judgement | None = None,
    options: bool = False,
    rows: Iterable[_Row] | None = None,
) -> Iterator[str]:
    """Yield the meaning of each status in the report or its `rows`, and its option."""
    rows = _rows(report, fold=True) if rows is None else rows
    names = ("allow_missing", "allow_unexpected", "allow_mismatched", "allow_lossy_cast")
    spelled = {
        name: f"--{name.replace('_', '-')}" if options else name
        for name in (*names, "transpose", "no_transpose")
    }
    rule = "a --rename rule" if options else _deciding(report)
    meanings = {**_MEANINGS}
    if not any(cast.lossy for cast in report.cast):
        meanings["CAST"] = "converted to the model's dtype on loading"
    for status in dict.fromkeys(row.status for row in rows):
        if status in meanings:
            text = meanings[status].format(rule=rule, **spelled)
            yield from wrapped(f"{status}: {text}", look.width)
    for note in (*report.notes, *_untabulated_reasons(judgement)):
        yield from wrapped(f"note: {clean(note)}", look.width)


def _deciding(report: MatchReport) -> str:
    """Return the rule that decides an ambiguity, unless it is for one layer of several."""
    rules = [rule for one in report.ambiguous for rule in one.rules]
    return f"`{clean(str(Remedy((('rename', tuple(rules[:1])),))))}`" if rules else "a rename rule"


def _is_plain(report: MatchReport) -> bool:
    changes = (report.renamed, report.layouts, report.cast, report.ambiguous)
    return report.fits and not any((*changes, report.left_out, report.kept, report.notes))


def _heading(report: MatchReport, look: Look, judgement: Judgement) -> Iterator[str]:
    """Yield `model.pth does not fit ResNet: 60 of 62 tensors match (98.1% of the parameters)`.

    If all tensors match, but the file is refused, the heading has the first reason instead.
    """
    file, model = clean(report.file) or "the state dict", clean(report.model) or "the model"
    verdict = "fits" if judgement.accepted else "does not fit"
    allowed = " with the allowed differences" if judgement.accepted and not report.fits else ""
    whole = max(report.parameters, 1)
    part = share(report.loaded if report.parameters else whole, whole)
    tensors, verb = counted(report.names, "tensor"), "matches" if report.fitting == 1 else "match"
    several = "all " * (report.names > 1) if report.fits else f"{report.fitting:,} of "
    reason = f"{several}{tensors} {verb} ({part} of the parameters)"
    if not report.names:
        reason = "the model has no tensors"
    elif not report.fits and report.fitting == report.names and not judgement.accepted:
        reason = clean(judgement.problems[0].text)
    text = f"{file} {verdict} {model}{allowed}: {reason}"
    if judgement.is_of_the_optimizer:
        text = f"{file}: the optimizer state cannot be loaded: {reason}"
    yield from (look.bold(line) for line in wrapped(text, look.width))


def _table(rows: Sequence[_Row], look: Look) -> Iterator[str]:
    return table(["Key", "Status", "Details"], rows, look, flexible=(0, 2), ruled=True)


def _rows(report: MatchReport, *, fold: bool) -> list[_Row]:
    """Return the differences, then the matches after a change, then other remarks."""
    unclear = [(one.names, one.candidates, "could be") for one in report.ambiguous]
    ambiguous = {name for names, _, _ in unclear for name in names}
    unexpected = [name for name in report.unexpected_keys if name not in ambiguous]
    shapes = (
        (one.name, f"file {format_shape(one.shape)}, model {format_shape(one.wanted)}")
        for one in report.mismatched
    )
    layouts = ((one.name, f"axes {list(one.axes)}") for one in report.layouts if one.axes)
    casts = {
        is_lossy: [(one.name, _change(one)) for one in report.cast if one.lossy == is_lossy]
        for is_lossy in (True, False)
    }
    return [
        *_name_rows("MISSING", ((name, "") for name in report.missing_keys), fold),
        *_name_rows("UNEXPECTED", ((name, "") for name in unexpected), fold),
        *_name_rows("MISMATCH", shapes, fold),
        *_paired_rows("AMBIGUOUS", unclear, fold),
        *_name_rows("LAYOUT", ((one.name, one.reason) for one in report.undecided), fold),
        *_grouped_rows("PROPOSED", _renames(report.proposed, fold), fold),
        *_paired_rows("UNTIED", ((one[:1], one[1:], "!=") for one in report.untied), fold),
        *_grouped_rows("CAST", casts[True], fold),
        *_grouped_rows("RENAMED", _renames(report.renamed, fold), fold),
        *_name_rows("TRANSPOSED", layouts, fold),
        *_grouped_rows("CAST", casts[False], fold),
        *_tied(report, fold),
        *_name_rows("KEPT", report.kept, fold),
        *_name_rows("LEFT OUT", report.left_out, fold),
    ]


def _cut(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield the first rows of each status, and the number of its other rows."""
    for status, alike in groupby(rows, key=lambda row: row.status):
        for row in islice(alike, _MOST_ROWS):
            yield _Row(shorten(row.key, _MOST_LETTERS), status, shorten(row.details, _MOST_LETTERS))
        rest = sum(1 for _ in alike)
        if rest:
            yield _Row(f"and {rest:,} more", status, "")


def _name_rows(status: str, found: Iterable[tuple[str, str]], fold: bool) -> list[_Row]:
    """Return a row for each name; repeated layers with the same details are one row."""
    rows = list(found)
    return [
        _Row(_label(one.label), status, clean(rows[one.numbers[0]][1]))
        for one in folded(rows, fold=fold)
    ]


def _grouped_rows(status: str, found: Iterable[tuple[str, str]], fold: bool) -> list[_Row]:
    """Return a row for each name; with `fold` names with the same details are one row."""
    if not fold:
        return _name_rows(status, found, fold)
    names: dict[str, list[str]] = {}
    for name, details in found:
        names.setdefault(details, []).append(name)
    return [
        _Row(_patterns(alike, most=1), status, clean(details)) for details, alike in names.items()
    ]


def _renames(found: Iterable[Renaming], fold: bool) -> Iterator[tuple[str, str]]:
    for renaming in found:
        for own, new in renaming.names:
            yield own, renaming.text if fold else f"{_label(new)} ({renaming.text})"


def _change(one: DtypeChange) -> str:
    lossy = f" (lossy: {one.loss})" if one.loss else " (lossy)"
    return f"{one.before} -> {one.after}{lossy if one.lossy else ''}"


def _tied(report: MatchReport, fold: bool) -> Iterator[_Row]:
    return _paired_rows("TIED", ((one[:1], one[1:], "=") for one in report.tied), fold)


def _paired_rows(
    status: str, found: Iterable[tuple[Sequence[str], Sequence[str], str]], fold: bool
) -> Iterator[_Row]:
    """Yield rows of names and related names. Names whose numbers change in step are folded."""
    named = [one for one in found if one[0]]
    steps = [(names[0], _in_step(names[0], (*names[1:], *others))) for names, others, _ in named]
    for family in folded(steps, fold=fold):
        alike = [named[n] for n in family.numbers]
        key = _patterns(
            (name for names, _, _ in alike for name in names), fold, 1 if fold else _MOST_NAMED
        )
        others = _patterns((name for _, others, _ in alike for name in others), fold)
        yield _Row(key, status, f"{alike[0][2]} {others}" if others else "")


def _in_step(name: str, others: Sequence[str]) -> Hashable:
    own = split_numbers(name)[1]
    pairs = map(split_numbers, others)
    return tuple(texts if place == own else (texts, place) for texts, place in pairs)


def _patterns(names: Iterable[str], fold: bool = True, most: int = _MOST_NAMED) -> str:
    """Return names for a cell, each once: `a.{0..3}.w, b.w and 4 more`."""
    found = folded([(name, None) for name in dict.fromkeys(names)], fold=fold)
    rest = sum(len(one.names) for one in found[most:])
    shown = ", ".join(_label(one.label) for one in found[:most])
    return f"{shown} and {rest:,} more" if rest else shown


def _label(name: str) -> str:
    return clean(name) or "''"


_MEANINGS = {
    "MISSING": "only in the model; {allow_missing} keeps the model's tensor",
    "UNEXPECTED": "only in the file; {allow_unexpected} leaves it out",
    "MISMATCH": "the shapes differ; {allow_mismatched} keeps the model's tensor",
    "AMBIGUOUS": "several keys could match by name and shape; {rule} decides",
    "LAYOUT": "neither the format nor the type of the module shows the order of the axes; "
    "{transpose} or {no_transpose} decides",
    "TRANSPOSED": "matches with the axes in torch's order, shown by their numbers in the file",
    "UNTIED": "tied in the model, but different tensors in the file: a different model",
    "CAST": "the model has another dtype, and the cast loses precision; {allow_lossy_cast} "
    "accepts that",
    "RENAMED": "matches with this rule",
    "PROPOSED": "would match with this rule, which was not applied",
    "TIED": "keys that share one tensor, which is loaded once",
}


def _optimizer(report: MatchReport, look: Look) -> Iterator[str]:
    found = report.optimizer
    if found is None:
        return
    state = f"the state of {found.matched:,} of {counted(found.parameters, 'parameter')} by name"
    if found.by == "position":
        state = f"{counted(found.matched, 'state')} by position"
    yield from wrapped(f"optimizer: matched {state}", look.width)
    for problem in found.problems:
        yield from wrapped(f"optimizer: {clean(problem)}", look.width)
    if found.problems and found.remedy:
        yield f"hint: {clean(str(found.remedy))}"
    casts = ((one.name, _change(one)) for one in found.cast)
    for row in _cut(_grouped_rows("", casts, fold=True)):
        yield from wrapped(f"optimizer: {row.key} {row.details}", look.width)
    for note in found.notes:
        yield from wrapped(f"note: {clean(note)}", look.width)
