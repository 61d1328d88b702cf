"""`ckptool doctor` as text: the verdict, each complaint with torch's error, then the commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckptool.diagnosis import Complaint, Diagnosis
from ckptool.formats import format_of
from ckptool.render.text import PLAIN, RESUME, Look, titled_commands, wrapped
from ckptool.words import clean, counted, listed

__all__ = ["diagnosis_lines"]

_WORDS = {"fails": "error", "misleads": "warning", "note": "note"}


def diagnosis_lines(
    diagnosis: Diagnosis, look: Look = PLAIN, *, explain: bool = False
) -> Iterator[str]:
    """Yield the verdict, the complaints (where and why with `explain`) and what to run."""
    name = clean(diagnosis.file)
    if not diagnosis.complaints:
        yield f"{look.bold(name)}: no problem found for {_loader(diagnosis)} and load_state_dict"
        if explain and (remark := format_of(diagnosis.format or "").remark):
            yield from _fact("why", remark, look)
        return
    yield f"{look.bold(name)}: {_summary(diagnosis)}"
    if diagnosis.would_run:
        yield look.alarm(clean(f"would run {listed(diagnosis.would_run)}"))
    for number, complaint in enumerate(diagnosis.complaints, start=1):
        yield ""
        yield from _block(number, complaint, look, explain)
    plan = list(_plan(diagnosis, look))
    yield from ("", *plan) if plan else ()


def _summary(diagnosis: Diagnosis) -> str:
    counts: Counter[str] = Counter(complaint.severity for complaint in diagnosis.complaints)
    text = ", ".join(counted(counts[kind], word) for kind, word in _WORDS.items() if counts[kind])
    if counts["fails"]:
        return f"does not load here: {text}"
    return f"{_loader(diagnosis)} opens it; {text}"


def _loader(diagnosis: Diagnosis) -> str:
    is_flat = format_of(diagnosis.format or "").tensors_only  # only new torch.load opens it
    return "safetensors.torch.load_file" if is_flat else "torch.load"


def _block(number: int, complaint: Complaint, look: Look, explain: bool) -> Iterator[str]:
    word = _WORDS[complaint.severity]
    coloured = look.alarm(word) if complaint.severity == "fails" else look.bold(word)
    what = wrapped(f"{number}. {word}: {_sentence(complaint.what)}", look.width, indent="   ")
    yield what[0].replace(word, coloured, 1)
    yield from what[1:]
    if explain:
        yield from _fact("where", ", ".join(complaint.where), look)
        yield from _fact("why", complaint.why, look)
    elif complaint.severity != "note":
        why = _sentence(complaint.why.partition("; ")[0])
        yield from wrapped(f"   {why}", look.width, indent="   ")
    if explain or not (complaint.commands or complaint.alternatives):
        yield from _fact("hint", complaint.remedy, look)


def _fact(name: str, text: str, look: Look) -> Iterator[str]:
    if text:
        yield from wrapped(f"   {name:<7}{_sentence(text)}", look.width, indent=" " * 10)


def _sentence(text: str) -> str:
    return clean("; ".join(text.split("\n")))  # a refusal may have several lines


def _plan(diagnosis: Diagnosis, look: Look) -> Iterator[str]:
    """Yield the commands that write the weights, resume the training, or fix one complaint."""
    every = list(enumerate(diagnosis.complaints, start=1))
    if diagnosis.commands:
        numbers = [str(number) for number, complaint in every if complaint.commands]
        fixed = listed(numbers, most=len(numbers)) if len(every) > 1 else ""
        title = f"to fix {fixed or 'it'}"
        if diagnosis.resume:
            title = "to use the weights" + (f" (fixes {fixed})" if fixed else "")
        yield from titled_commands(title, diagnosis.commands, look)
    if diagnosis.resume is not None:
        yield from titled_commands(RESUME, [diagnosis.resume], look)
    choices: dict[tuple[str, ...], list[str]] = {}
    for number, complaint in every:
        if complaint.alternatives:
            choices.setdefault(complaint.alternatives, []).append(str(number))
    for commands, numbers in choices.items():
        title = f"for {listed(numbers, most=len(numbers))}"
        yield from titled_commands(title + ", one of" * (len(commands) > 1), commands, look)
