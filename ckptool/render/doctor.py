"""`ckptool doctor` as text: two lines for each complaint, then the commands."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from ckptool.diagnosis import Complaint, Diagnosis
from ckptool.render.terminal import Look
from ckptool.render.text import runnable
from ckptool.words import clean, counted

__all__ = ["diagnosis_lines"]

_INDENT = 10
_WIDEST = 100
"""Wider lines are not good to read. Where nobody said how wide they are, none is broken: what is
searched for is found."""
_NOTHING = "nothing is in the way of torch.load and load_state_dict"
_OTHER_LOADER = (
    "torch.load is its loader; torch.jit.load says: PytorchStreamReader failed locating file "
    "constants.pkl: file not found"
)


def diagnosis_lines(diagnosis: Diagnosis, look: Look, *, explain: bool = False) -> Iterator[str]:
    """What is wrong and what to run, for each complaint; where and why too with `explain`."""
    name = clean(diagnosis.file)
    if not diagnosis.complaints:
        yield f"{look.bold(name)}: {_NOTHING}"
        if explain and diagnosis.format == "torch-zip":
            yield from _fact("why", _OTHER_LOADER, look)
        return
    worst = diagnosis.complaints[0]
    if worst.kind == "malicious":
        yield f"{look.bold(name)}: {look.alarm(clean(worst.what.partition(':')[0]))}"
    yield f"{look.bold(name)}: {_summary(diagnosis)}"
    for number, complaint in enumerate(diagnosis.complaints, start=1):
        yield ""
        yield from _block(number, complaint, look, explain, _shared(diagnosis))
    yield from _plan(diagnosis, look)


def _summary(diagnosis: Diagnosis) -> str:
    counts: Counter[str] = Counter(complaint.severity for complaint in diagnosis.complaints)
    words = {
        "fails": f"{counted(counts['fails'], 'reason')} to fail",
        "misleads": f"{counted(counts['misleads'], 'reason')} to mislead",
        "note": counted(counts["note"], "note"),
    }
    text = ", ".join(text for severity, text in words.items() if counts[severity])
    return f"{text}; torch.load opens it" if diagnosis.ok else text


def _shared(diagnosis: Diagnosis) -> str | None:
    """The command that stands below, where it mends more than one complaint."""
    mended = sum(bool(complaint.commands) for complaint in diagnosis.complaints)
    return diagnosis.all_at_once if mended > 1 or diagnosis.resume else None


def _block(
    number: int, complaint: Complaint, look: Look, explain: bool, shared: str | None
) -> Iterator[str]:
    word = complaint.severity
    coloured = look.alarm(word) if word == "fails" else look.bold(word)
    first, *rest = _wrapped(complaint.what, look, len(f"{number}. {word}: "))
    yield f"{number}. {coloured}: {first}"
    yield from (f"   {line}" for line in rest)
    if explain:
        yield from _fact("where", ", ".join(map(clean, complaint.where)), look)
        yield from _fact("why", complaint.why, look)
    others = complaint.alternatives
    if shared is not None and shared in complaint.commands:
        yield from _fact("run", "the command below", look)
    else:
        yield from _runs("run", complaint.commands, look)
    if explain or not complaint.commands:
        yield from _runs("one of" if len(others) > 1 else "or" if explain else "run", others, look)
    if explain or not (complaint.commands or others):
        yield from _fact("helps", complaint.remedy, look)


def _runs(name: str, commands: Iterable[str], look: Look) -> Iterator[str]:
    """Commands in a block, the first behind a name."""
    for command in commands:
        for line in _command_lines(command, look, _INDENT):
            yield f"   {name:<{_INDENT - 3}}{line}"
            name = ""


def _command_lines(command: str, look: Look, taken: int) -> Iterator[str]:
    """A command in lines that fit the terminal, broken as a shell takes them together again."""
    fits = look.width is None or taken + len(runnable(command)) <= look.width
    if fits or look.width is None or not command.startswith("ckptool "):
        yield runnable(command)
        return
    line = ""
    for word in map(runnable, map(shlex.quote, shlex.split(command))):
        if line and taken + len(line) + len(word) + 3 > look.width:
            yield f"{line} \\"
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    yield line


def _fact(name: str, text: str, look: Look) -> Iterator[str]:
    if not text:
        return
    lines = _wrapped(text, look, _INDENT)
    yield f"   {name:<{_INDENT - 3}}{lines[0]}"
    yield from (f"{'':<{_INDENT}}{line}" for line in lines[1:])


def _wrapped(text: str, look: Look, taken: int) -> list[str]:
    """The text in lines that fit beside what is `taken`; a word that is longer stays whole."""
    if look.width is None:
        return [clean(text)]
    width = max(min(look.width, _WIDEST) - taken, 30)
    return textwrap.wrap(clean(text), width, break_long_words=False, break_on_hyphens=False) or [""]


def _plan(diagnosis: Diagnosis, look: Look) -> Iterator[str]:
    """The commands: for the weights, and for resuming the training that saved the file."""
    if _shared(diagnosis) is None:
        return
    yield ""
    yield look.bold("to use the weights" if diagnosis.resume else "to run")
    yield from _commands(diagnosis.commands, look)
    if diagnosis.resume is not None:
        yield look.bold("to resume the training, with optimizer, epoch and schedule")
        yield from _commands([diagnosis.resume], look)


def _commands(commands: Iterable[str], look: Look) -> Iterator[str]:
    return (f"  {line}" for one in commands for line in _command_lines(one, look, 2))
