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
from ckptool.render.diff import fold_names
from ckptool.render.table import separate_blocks, table_lines
from ckptool.render.text import (
    PLAIN,
    Look,
    format_share,
    shorten,
    titled_commands,
    to_options_text,
    wrap_text,
)
from ckptool.words import clean, counted

_MAX_PATTERNS = 3
"""The most patterns of names in one cell."""
_MAX_ROWS = 100
"""The most rows of one status in a folded table."""
_MAX_CELL_LENGTH = 300
"""The most characters of a cell in a folded table."""


class _Row(NamedTuple):
    """A row of the table: keys, the status such as MISSING, and details."""

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

    If all keys match unchanged there is no table, only the summary and the tied keys.

    With `fold` repeated layers are one row, and a long table is cut. A `judgement` decides whether
    the file fits. Advice names arguments of the library, or `options` of the command line. With
    `look.fmt` the result is the table alone, without folded rows.
    """
    if look.fmt:
        return _match_table(_make_rows(report, fold=False), look)
    heading = _heading_lines(report, look, judgement or Allowance().judge(report))
    if _has_no_remarks(report) and not _reasons_outside_table(judgement):
        ties = ", ".join(f"{row.key} {row.details}" for row in _tied_rows(report, fold=True))
        tied_lines = wrap_text(f"tied: {ties}", look.width) if ties else ()
        return separate_blocks([(*heading, *tied_lines), _optimizer_lines(report, look)])
    rows = _make_rows(report, fold=fold)
    shown = [*_limit_rows(rows)] if fold else rows
    notes = note_lines(report, look, judgement=judgement, options=options, rows=rows)
    if len(shown) < len(rows):
        source = "--no-fold shows" if options else "the fields of the report have"
        notes = chain(
            notes, wrap_text(f"note: some rows are not shown; {source} all keys", look.width)
        )
    return separate_blocks(
        [heading, _match_table(shown, look) if rows else (), notes, _optimizer_lines(report, look)]
    )


def match_line(report: MatchReport) -> str:
    """Return the heading."""
    return next(_heading_lines(report, PLAIN, Allowance().judge(report)))


def advice_lines(judgement: Judgement, look: Look, *, command: str = "") -> Iterator[str]:
    """Yield the options that help, and for an accepted file the `command` that writes it."""
    if judgement.remedy:
        yield ""
        yield f"hint: {clean(_format_hint(judgement.remedy))}"  # on one line, to paste it
    if judgement.accepted and command:
        yield ""
        yield from titled_commands("To save it with the model's keys:", [command], look)


def _format_hint(remedy: Remedy) -> str:
    """Return `add --rename ... to apply the proposed rule`, or the text of another remedy."""
    options = to_options_text(remedy)
    if remedy != Remedy(remedy.arguments):  # it has its own sentence
        return options
    arguments = dict(remedy.arguments)
    rules = arguments.get("rename", ())
    plural = "s" * (isinstance(rules, tuple) and len(rules) > 1)
    purpose = f" to apply the proposed rule{plural}" if [*arguments] == ["rename"] else ""
    return f"add {options}{purpose}"


def _reasons_outside_table(judgement: Judgement | None) -> list[str]:
    """Return the reasons for a refusal that the table does not show: too little is loaded."""
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
    """Yield the meaning of each status in the report or its `rows`, with its option; then notes.

    The last notes are the reasons of a `judgement` that no row shows. Options are named as on the
    command line, or as arguments of the library unless `options`.
    """
    rows = _make_rows(report, fold=True) if rows is None else rows
    names = ("allow_missing", "allow_unexpected", "allow_mismatched", "allow_lossy_cast")
    option_names = {
        name: f"--{name.replace('_', '-')}" if options else name
        for name in (*names, "transpose", "no_transpose")
    }
    rule = "a --rename rule" if options else _deciding_rule(report)
    meanings = {**_MEANING_BY_STATUS}
    if not any(cast.lossy for cast in report.cast):
        meanings["CAST"] = "converted to the model's dtype on loading"
    for status in dict.fromkeys(row.status for row in rows):
        if status in meanings:
            text = meanings[status].format(rule=rule, **option_names)
            yield from wrap_text(f"{status}: {text}", look.width)
    for note in (*report.notes, *_reasons_outside_table(judgement)):
        yield from wrap_text(f"note: {clean(note)}", look.width)


def _deciding_rule(report: MatchReport) -> str:
    """Return the first rule that decides an ambiguity, as Python; "a rename rule" without one."""
    rules = [rule for ambiguity in report.ambiguous for rule in ambiguity.rules]
    if not rules:
        return "a rename rule"
    argument = Remedy((("rename", (rules[0],)),))
    return f"`{clean(str(argument))}`"


def _has_no_remarks(report: MatchReport) -> bool:
    """Return True if all keys match unchanged, so that no table is needed."""
    changes = (report.renamed, report.layouts, report.cast, report.ambiguous)
    return report.fits and not any((*changes, report.left_out, report.kept, report.notes))


def _heading_lines(report: MatchReport, look: Look, judgement: Judgement) -> Iterator[str]:
    """Yield `model.pth does not fit ResNet: 60 of 62 tensors match (98.1% of the parameters)`.

    If all tensors match, but the file is refused, the heading has the first reason instead.
    """
    file, model = clean(report.file) or "the state dict", clean(report.model) or "the model"
    accepted = judgement.accepted or report.accepted
    verdict = "fits" if accepted else "does not fit"
    allowed = " with the allowed differences" if accepted and not report.fits else ""
    share = format_share(report.loaded, report.parameters) if report.parameters else "100%"
    tensors, verb = counted(report.names, "tensor"), "matches" if report.fitting == 1 else "match"
    all_names = "all " if report.names > 1 else ""
    matched = all_names if report.fits else f"{report.fitting:,} of "
    reason = f"{matched}{tensors} {verb} ({share} of the parameters)"
    if not report.names:
        reason = "the model has no tensors"
    elif not report.fits and report.fitting == report.names and not accepted:
        reason = clean(judgement.problems[0].text)
    text = f"{file} {verdict} {model}{allowed}: {reason}"
    if judgement.is_of_the_optimizer and not accepted:
        text = f"{file}: the optimizer state cannot be loaded: {reason}"
    yield from (look.bold(line) for line in wrap_text(text, look.width))


def _match_table(rows: Sequence[_Row], look: Look) -> Iterator[str]:
    """Return the lines of the table of keys, with rules between the columns."""
    return table_lines(["Key", "Status", "Details"], rows, look, flexible=(0, 2), ruled=True)


def _make_rows(report: MatchReport, *, fold: bool) -> list[_Row]:
    """Return the rows of the table: differences, then matches after a change, then other remarks.

    An ambiguous key is not listed as unexpected too.
    """
    ambiguities = [(item.names, item.candidates, "could be") for item in report.ambiguous]
    ambiguous_names = {name for names, _, _ in ambiguities for name in names}
    unexpected = [name for name in report.unexpected_keys if name not in ambiguous_names]
    shapes = (
        (item.name, f"file {format_shape(item.shape)}, model {format_shape(item.wanted)}")
        for item in report.mismatched
    )
    layouts = ((item.name, f"axes {list(item.axes)}") for item in report.layouts if item.axes)
    lossy_casts = ((item.name, _describe_cast(item)) for item in report.cast if item.lossy)
    exact_casts = ((item.name, _describe_cast(item)) for item in report.cast if not item.lossy)
    return [
        *_rows_by_name("MISSING", ((name, "") for name in report.missing_keys), fold),
        *_rows_by_name("UNEXPECTED", ((name, "") for name in unexpected), fold),
        *_rows_by_name("MISMATCH", shapes, fold),
        *_rows_of_related("AMBIGUOUS", ambiguities, fold),
        *_rows_by_name("LAYOUT", ((item.name, item.reason) for item in report.undecided), fold),
        *_rows_by_details("PROPOSED", _rename_pairs(report.proposed, fold), fold),
        *_rows_of_related("UNTIED", ((keys[:1], keys[1:], "!=") for keys in report.untied), fold),
        *_rows_by_details("CAST", lossy_casts, fold),
        *_rows_by_details("RENAMED", _rename_pairs(report.renamed, fold), fold),
        *_rows_by_name("TRANSPOSED", layouts, fold),
        *_rows_by_details("CAST", exact_casts, fold),
        *_tied_rows(report, fold),
        *_rows_by_name("KEPT", report.kept, fold),
        *_rows_by_name("LEFT OUT", report.left_out, fold),
    ]


def _limit_rows(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield the first rows of each status, and the number of its other rows."""
    for status, group in groupby(rows, key=lambda row: row.status):
        for row in islice(group, _MAX_ROWS):
            yield _Row(
                shorten(row.key, _MAX_CELL_LENGTH), status, shorten(row.details, _MAX_CELL_LENGTH)
            )
        hidden = sum(1 for _ in group)
        if hidden:
            yield _Row(f"and {hidden:,} more", status, "")


def _rows_by_name(status: str, pairs: Iterable[tuple[str, str]], fold: bool) -> list[_Row]:
    """Return a row for each name; repeated layers with the same details are one row."""
    rows = list(pairs)
    details = [text for _, text in rows]
    return [
        _Row(_format_key(family.label), status, clean(details[family.numbers[0]]))
        for family in fold_names(rows, fold=fold)
    ]


def _rows_by_details(status: str, pairs: Iterable[tuple[str, str]], fold: bool) -> list[_Row]:
    """Return a row for each name; with `fold` names with the same details are one row."""
    if not fold:
        return _rows_by_name(status, pairs, fold)
    names_by_details: dict[str, list[str]] = {}
    for name, details in pairs:
        names_by_details.setdefault(details, []).append(name)
    return [
        _Row(_format_patterns(names, max_count=1), status, clean(details))
        for details, names in names_by_details.items()
    ]


def _rename_pairs(renamings: Iterable[Renaming], fold: bool) -> Iterator[tuple[str, str]]:
    """Yield each renamed key of the file, and its rule; without `fold` also the new key."""
    for renaming in renamings:
        for old, new in renaming.names:
            yield old, renaming.text if fold else f"{_format_key(new)} ({renaming.text})"


def _describe_cast(cast: DtypeChange) -> str:
    """Return `float32 -> int64 (lossy: REASON)`."""
    lossy = f" (lossy: {cast.loss})" if cast.loss else " (lossy)"
    return f"{cast.before} -> {cast.after}{lossy if cast.lossy else ''}"


def _tied_rows(report: MatchReport, fold: bool) -> Iterator[_Row]:
    """Yield a row for each group of tied keys."""
    return _rows_of_related("TIED", ((group[:1], group[1:], "=") for group in report.tied), fold)


def _rows_of_related(
    status: str, related: Iterable[tuple[Sequence[str], Sequence[str], str]], fold: bool
) -> Iterator[_Row]:
    """Yield rows of names and related names. Names whose numbers change in step are folded.

    Each item of `related` has names, their related names, and the word between them.
    """
    nonempty = [group for group in related if group[0]]
    keyed_names = [
        (names[0], _step_key(names[0], (*names[1:], *related_names)))
        for names, related_names, _ in nonempty
    ]
    for family in fold_names(keyed_names, fold=fold):
        members = [nonempty[number] for number in family.numbers]
        names = (name for names, _, _ in members for name in names)
        all_related = (name for _, related_names, _ in members for name in related_names)
        related_text = _format_patterns(all_related, fold)
        _, _, word = members[0]
        yield _Row(
            # A folded row shows one pattern, and counts the others.
            _format_patterns(names, fold, max_count=1 if fold else _MAX_PATTERNS),
            status,
            f"{word} {related_text}" if related_text else "",
        )


def _step_key(name: str, related_names: Sequence[str]) -> Hashable:
    """Return a key that is equal for names whose numbers change together with related names.

    A related name with the numbers of `name` counts without them: `a.1.w` and `b.1.w` are like
    `a.2.w` and `b.2.w`.
    """
    _texts, name_numbers = split_numbers(name)
    return tuple(
        texts if numbers == name_numbers else (texts, numbers)
        for texts, numbers in map(split_numbers, related_names)
    )


def _format_patterns(
    names: Iterable[str], fold: bool = True, max_count: int = _MAX_PATTERNS
) -> str:
    """Return names for a cell, each once: `a.{0..3}.w, b.w and 4 more`."""
    folded = fold_names([(name, None) for name in dict.fromkeys(names)], fold=fold)
    hidden = sum(len(family.names) for family in folded[max_count:])
    shown = ", ".join(_format_key(family.label) for family in folded[:max_count])
    return f"{shown} and {hidden:,} more" if hidden else shown


def _format_key(name: str) -> str:
    """Return a key for a cell; quotes if it is empty."""
    return clean(name) or "''"


_MEANING_BY_STATUS = {
    "MISSING": "only in the model; {allow_missing} keeps the model's tensor",
    "UNEXPECTED": "only in the file; {allow_unexpected} leaves it out",
    "MISMATCH": "the shapes differ; {allow_mismatched} keeps the model's tensor",
    "AMBIGUOUS": "several keys could match by name and shape; add {rule} to choose one",
    "LAYOUT": "neither the format nor the type of the module shows the order of the axes; "
    "add {transpose} or {no_transpose}",
    "TRANSPOSED": "matches after its axes are put in torch's order; the numbers are those of "
    "the axes in the file",
    "UNTIED": "tied in the model, but different tensors in the file: a different model",
    "CAST": "the model has another dtype, and the cast loses precision; {allow_lossy_cast} "
    "accepts that",
    "RENAMED": "matches with this rule",
    "PROPOSED": "would match with this rule, which was not applied",
    "TIED": "keys that share one tensor, which is loaded once",
}


def _optimizer_lines(report: MatchReport, look: Look) -> Iterator[str]:
    """Yield the matched states of an optimizer, its problems, casts and notes."""
    optimizer = report.optimizer
    if optimizer is None:
        return
    parameters = counted(optimizer.parameters, "parameter")
    state = f"the state of {optimizer.matched:,} of {parameters} by name"
    if optimizer.by == "position":
        state = f"{counted(optimizer.matched, 'state')} by position"
    yield from wrap_text(f"optimizer: matched {state}", look.width)
    for problem in optimizer.problems:
        yield from wrap_text(f"optimizer: {clean(problem)}", look.width)
    if optimizer.problems and optimizer.remedy:
        yield f"hint: {clean(str(optimizer.remedy))}"
    casts = ((cast.name, _describe_cast(cast)) for cast in optimizer.cast)
    for row in _limit_rows(_rows_by_details(status="", pairs=casts, fold=True)):
        yield from wrap_text(f"optimizer: {row.key} {row.details}", look.width)
    for note in optimizer.notes:
        yield from wrap_text(f"note: {clean(note)}", look.width)
