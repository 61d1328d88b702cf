"""`ckptool doctor` as text: a block for each complaint, then the commands in their order."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from ckptool.inspection.doctor import Complaint, Diagnosis
from ckptool.render.terminal import Look
from ckptool.render.text import runnable
from ckptool.words import clean, counted

__all__ = ["diagnosis_lines"]

_INDENT = 10
_WIDEST = 100
"""Wider lines are not good to read. Where nobody said how wide they are, none is broken: what is
searched for is found."""


def diagnosis_lines(diagnosis: Diagnosis, look: Look) -> Iterator[str]:
    """What, where, why and what to run, for each complaint; then the plan."""
    name = clean(diagnosis.file)
    if not diagnosis.complaints:
        yield f"{look.bold(name)}: nothing is in the way of torch.load and load_state_dict"
        return
    yield f"{look.bold(name)}: {_summary(diagnosis)}"
    for number, complaint in enumerate(diagnosis.complaints, start=1):
        yield ""
        yield from _block(number, complaint, look)
    yield from _plan(diagnosis, look)


def _summary(diagnosis: Diagnosis) -> str:
    counts: Counter[str] = Counter(complaint.severity for complaint in diagnosis.complaints)
    words = {
        "fails": f"{counted(counts['fails'], 'reason')} to fail",
        "misleads": f"{counted(counts['misleads'], 'reason')} to mislead",
        "note": counted(counts["note"], "note"),
    }
    return ", ".join(text for severity, text in words.items() if counts[severity])


def _block(number: int, complaint: Complaint, look: Look) -> Iterator[str]:
    word = complaint.severity
    coloured = look.alarm(word) if word == "fails" else look.bold(word)
    first, *rest = _wrapped(complaint.what, look, len(f"{number}. {word}: "))
    yield f"{number}. {coloured}: {first}"
    yield from (f"   {line}" for line in rest)
    yield from _fact("where", ", ".join(map(clean, complaint.where)), look)
    yield from _fact("why", complaint.why, look)
    yield from _runs("run", complaint.commands, look)
    others = complaint.alternatives
    yield from _runs("one of" if len(others) > 1 else "or", others, look)
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
    """The commands of all complaints, each once, and the one that does the same."""
    if not diagnosis.commands:
        return
    yield ""
    yield look.bold("to run, in this order")
    yield from _commands(diagnosis.commands, look)
    if diagnosis.all_at_once is not None and len(diagnosis.commands) > 1:
        yield look.bold("or all at once")
        yield from _commands([diagnosis.all_at_once], look)


def _commands(commands: Iterable[str], look: Look) -> Iterator[str]:
    return (f"  {line}" for one in commands for line in _command_lines(one, look, 2))
