"""`ckptool doctor`, `verify` and `scan` as text: a verdict, its reasons, a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptool.errors import CheckpointError
from ckptool.formats import load_format
from ckptool.inspection.blockers import summarize_calls
from ckptool.inspection.scan_calls import CANNOT_TELL, DATA, RUNS, VERDICTS
from ckptool.render.table import table_lines
from ckptool.render.text import (
    PLAIN,
    Look,
    files_line,
    format_size,
    limit_lines,
    resume_title,
    titled_commands,
    wrap_text,
)
from ckptool.words import clean, counted, listed

if TYPE_CHECKING:
    from ckptool.diagnosis import Complaint, Diagnosis
    from ckptool.inspection.scan import Scan, Stream
    from ckptool.inspection.verify import ManifestOutcome, Verdict

_FAILURE = "does not load on this machine"
_WORD_BY_SEVERITY = {"fails": "error", "misleads": "warning", "note": "note"}


def diagnosis_lines(
    diagnosis: Diagnosis, look: Look = PLAIN, *, explain: bool = False
) -> Iterator[str]:
    """Yield the verdict, the complaints (where and why with `explain`), and the commands."""
    name = clean(diagnosis.file)
    verdict = verdict_text(diagnosis)
    # `a.pth does not load ...` is a sentence; any other verdict follows a colon.
    yield f"{look.bold(name)}{' ' if verdict.startswith(_FAILURE) else ': '}{verdict}"
    if not diagnosis.complaints:
        if explain and (remark := load_format(diagnosis.format or "").remark):
            yield from _fact_lines("why", remark, look)
        return
    if diagnosis.would_run:
        yield look.alarm(clean(f"would run {listed(summarize_calls(diagnosis.would_run))}"))
    quoted: dict[str, int] = {}  # each error text is shown once: the number of its complaint
    for number, complaint in enumerate(diagnosis.complaints, start=1):
        yield ""
        yield from _complaint_lines(number, complaint, look, explain, quoted)
    plan = list(_plan_lines(diagnosis, look))
    yield from ("", *plan) if plan else ()


def verdict_text(diagnosis: Diagnosis) -> str:
    """Return `does not load on this machine: 2 errors, 1 note`, or that it loads."""
    if not diagnosis.complaints:
        return f"no problems found with {_loader_name(diagnosis)} or load_state_dict"
    counts: Counter[str] = Counter(complaint.severity for complaint in diagnosis.complaints)
    text = ", ".join(
        counted(counts[kind], word) for kind, word in _WORD_BY_SEVERITY.items() if counts[kind]
    )
    if diagnosis.reader:
        others = f", {_loader_name(diagnosis)} does not: " if counts["fails"] else "; "
        return clean(f"{diagnosis.reader} reads it as is{others}{text}")
    if counts["fails"]:
        return f"{_FAILURE}: {text}"
    return f"{_loader_name(diagnosis)} opens it; {text}"


def _loader_name(diagnosis: Diagnosis) -> str:
    """Return the function that loads this format."""
    is_flat = load_format(diagnosis.format or "").tensors_only  # only new torch.load opens it
    return "safetensors.torch.load_file" if is_flat else "torch.load"


def complaint_text(number: int, complaint: Complaint) -> str:
    """Return `1. error: it contains objects that ...`."""
    return f"{number}. {_WORD_BY_SEVERITY[complaint.severity]}: {_join_lines(complaint.text)}"


def _complaint_lines(
    number: int, complaint: Complaint, look: Look, explain: bool, quoted: dict[str, int]
) -> Iterator[str]:
    """Yield a complaint: the fact, then the error or its effect, and a hint if no command helps.

    With `explain` also the place, all effects and each hint; without, a note has only the fact.
    `quoted` has the first number of each kind of quoted error.
    """
    word = _WORD_BY_SEVERITY[complaint.severity]
    colored = look.alarm(word) if complaint.severity == "fails" else look.bold(word)
    lines = wrap_text(complaint_text(number, complaint), look.width, indent="   ")
    yield lines[0].replace(word, colored, 1)
    yield from lines[1:]
    if explain:
        yield from _fact_lines("where", ", ".join(complaint.where), look)
        why = filter(None, (_quote_error(complaint, number, quoted), complaint.effect))
        yield from _fact_lines("why", "; ".join(why), look)
    elif complaint.severity != "note":
        text = _quote_error(complaint, number, quoted)
        if not text and complaint.effect:  # its first clause, as a sentence
            text = complaint.effect.partition("; ")[0].rstrip(".") + "."
        yield from wrap_text(f"   {_join_lines(text)}", look.width, indent="   ")
    if explain or not (complaint.commands or complaint.alternatives):
        yield from _fact_lines("hint", complaint.hint or "", look)


def _quote_error(complaint: Complaint, number: int, quoted: dict[str, int]) -> str:
    """Return the error of another library, or the number at which it was quoted before."""
    if complaint.quote is None:
        return ""
    first_number = quoted.setdefault(complaint.quote.kind, number)
    if first_number != number:
        return f"{complaint.quote.call} fails as in {first_number}"
    return str(complaint.quote)


def _fact_lines(name: str, text: str, look: Look) -> Iterator[str]:
    """Yield a name and a text, wrapped; nothing without a text."""
    if text:
        yield from wrap_text(f"   {name:<7}{_join_lines(text)}", look.width, indent=" " * 10)


def _join_lines(text: str) -> str:
    """Return a text as one line."""
    return clean("; ".join(text.split("\n")))  # a refusal may have several lines


def _plan_lines(diagnosis: Diagnosis, look: Look) -> Iterator[str]:
    """Yield the commands that write the weights, resume the training, or fix one complaint.

    The last line has the numbers of the complaints that no command fixes, if some are fixed.
    """
    numbered = list(enumerate(diagnosis.complaints, start=1))
    if diagnosis.commands:
        numbers = [str(number) for number, complaint in numbered if complaint.commands]
        fixed = listed(numbers, most=len(numbers)) if len(numbered) > 1 else ""
        title = f"To fix {fixed or 'it'}:"
        if diagnosis.resume:
            title = "To use the weights" + (f" (fixes {fixed}):" if fixed else ":")
        yield from titled_commands(title, diagnosis.commands, look)
    if diagnosis.resume is not None:
        yield from titled_commands(resume_title(diagnosis.training), [diagnosis.resume], look)
    if diagnosis.code:
        title = "Or in Python:" if diagnosis.resume else resume_title(diagnosis.training)
        yield from (look.bold(title), f"  {clean(diagnosis.code)}")
    # The numbers of the complaints, by their alternative commands and the code that loads these.
    choices: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for number, complaint in numbered:
        if complaint.alternatives:
            choice = complaint.alternatives, complaint.code
            choices.setdefault(choice, []).append(str(number))
    for (commands, code), numbers in choices.items():
        several = len(commands) > 1
        title = f"Possible fix{'es' * several} for {listed(numbers, most=len(numbers))}"
        yield from titled_commands(f"{title}{' (choose one)' * several}:", commands, look)
        if code:
            yield from (look.bold("Then in Python:"), f"  {clean(code)}")
    unfixed = [
        str(number)
        for number, complaint in numbered
        if not (complaint.commands or complaint.alternatives)
    ]
    if 0 < len(unfixed) < len(numbered):
        yield f"Not fixed: {', '.join(unfixed)}"


_MAX_PROBLEMS = 40
"""The most problems of one file."""


def verdict_lines(verdict: Verdict, look: Look = PLAIN) -> Iterator[str]:
    """Yield `model.pth: ok (...)`, or the number of problems and the problems."""
    name = look.bold(clean(verdict.file))
    if verdict.ok:
        yield f"{name}: ok ({', '.join(_list_facts(verdict))})"
        return
    yield f"{name}: {look.alarm(counted(len(verdict.problems), 'problem'))}"
    hints = set()
    for problem in verdict.problems[:_MAX_PROBLEMS]:
        place = f"{clean(problem.place)}: " if problem.place else ""
        yield from wrap_text(f"  {place}{clean(problem.text)}", look.width, indent="    ")
        if problem.hint and problem.hint not in hints:
            hints.add(problem.hint)
            yield f"    {look.faint('hint:')} {clean(problem.hint)}"
    hidden = len(verdict.problems) - _MAX_PROBLEMS
    if hidden > 0:
        yield f"  and {counted(hidden, 'problem')} more (--json lists all)"


def _list_facts(verdict: Verdict) -> Iterator[str]:
    """Yield the facts about an intact file: counts, size and verified checksums."""
    if verdict.shards:
        yield counted(verdict.shards, "shard")
    if verdict.records:
        yield counted(verdict.records, "record")
    else:
        yield counted(verdict.tensors, "tensor")
    yield format_size(verdict.size)
    if verdict.summed and verdict.checked:  # not without bytes, as in a file of empty tensors
        covers_all = verdict.summed == verdict.records  # every record had a CRC-32 to verify
        yield "CRC-32" if covers_all else f"{verdict.summed:,} CRC-32 checksums"
    elif not verdict.manifest:
        yield "no CRC-32 stored" if verdict.records else "no checksums in this format"
    if verdict.manifest:
        yield "SHA-256 matches the manifest"
    if verdict.values:
        yield "no NaN, no Inf"


def verify_summary(verdicts: Sequence[Verdict], errors: int, look: Look) -> str:
    """Return `3 files: 2 ok, 1 with 2 problems`."""
    damaged = [verdict for verdict in verdicts if not verdict.ok]
    parts = [f"{len(verdicts) - len(damaged):,} ok"]
    if damaged:
        count = sum(len(verdict.problems) for verdict in damaged)
        parts.append(look.alarm(f"{len(damaged):,} with {counted(count, 'problem')}"))
    return files_line(len(verdicts), errors, parts)


def manifest_line(outcome: ManifestOutcome) -> str:
    """Return the sentence about a manifest: written, not written, or compared."""
    name = clean(outcome.file)
    if outcome.reason == "problem":
        return f"did not write {name}: some files have problems"
    if outcome.reason == "error":
        return f"did not write {name}: some files could not be read"
    tensors = f"{counted(outcome.tensors, 'tensor')} in {counted(outcome.files, 'file')}"
    if outcome.action == "written":
        unhashed = f"{outcome.unhashed:,} without a hash because they are sparse or quantized"
        return f"wrote {name} (SHA-256 of {tensors}{f'; {unhashed}' if outcome.unhashed else ''})"
    return f"compared {tensors} with {name}"


def verdict_table(results: Iterable[Verdict | CheckpointError], look: Look) -> Iterator[str]:
    """Return a row for each file without problems, and for each problem."""
    rows = [row for result in results for row in _make_rows(result)]
    return table_lines(["file", "verdict", "place", "what"], rows, look, flexible=3)


def _make_rows(result: Verdict | CheckpointError) -> list[list[str]]:
    """Return the rows of one file: ok, an error, or each problem."""
    if isinstance(result, CheckpointError):
        return [[clean(result.file or ""), "error", "", clean(result.message)]]
    if result.ok:
        return [[clean(result.file), "ok", "", ", ".join(_list_facts(result))]]
    return [
        [clean(result.file), problem.kind, clean(problem.place), clean(problem.text)]
        for problem in result.problems
    ]


_MAX_CALLS = 20
"""The most calls of one file."""


def scan_lines(report: Scan, look: Look = PLAIN) -> Iterator[str]:
    """Yield the verdict, for example `model.pth: runs code`, and the calls behind it."""
    name = look.bold(clean(report.file))
    if report.skipped:
        yield f"{name}: {'Python code, not checked' if report.code else 'no pickle'}"
    elif report.verdict == DATA:
        yield f"{name}: data ({counted(report.pickles, 'pickle')})"
    else:
        is_bad = report.verdict in (RUNS, CANNOT_TELL)
        modules = f" (imports {listed(report.modules)})" if report.modules else ""
        shown = _describe_scan(report.verdict)
        yield f"{name}: {look.alarm(shown) if is_bad else shown}{modules}"
    lines = (line for stream in report.streams for line in _stream_lines(stream))
    yield from (f"  {line}" for line in limit_lines(lines, _MAX_CALLS))


def _stream_lines(stream: Stream) -> Iterator[str]:
    """Yield a line for each call of a stream, and its fault."""
    place = f"{clean(stream.where)}, " * bool(stream.where)
    for call in stream.calls:
        yield f"{place}byte {call.offset:,}, {call.opcode}: {clean(call.text)}"
    if stream.fault:
        yield f"{place}byte {stream.offset:,}: {clean(stream.fault)}"


def _describe_scan(verdict: str) -> str:
    """Return a verdict as in a sentence: `runs code` for `runs`."""
    return "runs code" if verdict == RUNS else verdict


def scan_summary(results: Sequence[Scan], errors: int, look: Look) -> str:
    """Return `3 files: 1 runs code, 2 data`, the worst first."""
    counts = Counter("without a pickle" if report.skipped else report.verdict for report in results)
    parts = [
        look.alarm(f"{counts[verdict]:,} {_describe_scan(verdict)}")
        if verdict in (RUNS, CANNOT_TELL)
        else f"{counts[verdict]:,} {verdict}"
        for verdict in (*reversed(VERDICTS), "without a pickle")
        if counts[verdict]
    ]
    code = sum(bool(report.code) for report in results)
    if code:
        parts.append(f"{code:,} with Python code, which is not checked")
    return files_line(len(results), errors, parts)
