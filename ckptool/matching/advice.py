"""What is advised where a state dict does not fit: the arguments that help, the safe ones first."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized

from ckptool.matching.report import Ambiguity, MatchReport

__all__ = ["is_of_another", "may_be_asked", "ruling", "text_of"]

_LITTLE = 4
"""A share of which one in so many is next to nothing."""
_MOST_RULES = 3
_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")


def is_of_another(report: MatchReport) -> bool:
    """Whether next to nothing of the model is met, by next to nothing of the file."""
    held = report.fitting + len(report.unexpected_keys)
    return _LITTLE * report.fitting < report.names and _LITTLE * report.fitting < held


def may_be_asked(report: MatchReport, unclear: Sequence[Ambiguity]) -> bool:
    """Whether a rule is likely to be what is wanted.

    Not where a lone module is all that speaks for it while the rest fits, nor where layers would
    get other numbers, nor where most would be as it was.
    """
    if any(_renumbers(one) for one in unclear) or not any(one.rules for one in unclear):
        return False
    if is_of_another(report):
        most = max(len(one.candidates) for one in unclear)
        return 2 * most >= len(report.missing_keys)
    return not all(_is_lone(one) for one in unclear)


def _is_lone(one: Ambiguity) -> bool:
    return len({name.rpartition(".")[0] for name in one.candidates}) < 2


def _renumbers(one: Ambiguity) -> bool:
    """Whether the names have numbers on both sides, and not the same."""
    own, wanted = (
        {tuple(_NUMBERS.findall(n)) for n in side} for side in (one.names, one.candidates)
    )
    return len(one.rules) < 2 and any(own) and any(wanted) and own.isdisjoint(wanted)


def ruling(unclear: Sequence[Ambiguity], missing: Sized, unexpected: Sized) -> str:
    """The rules that decide the questions, and what is to be allowed then."""
    unclear = [one for one in unclear if not _is_lone(one)] or unclear
    rules = [rule for one in unclear for rule in one.rules[:1]][:_MOST_RULES]
    text = f"rules=[{', '.join(map(text_of, rules)) or repr('REGEX=>REPL')}]"
    if len(missing) != len(unexpected):
        text += f", allow_{'unexpected' if len(missing) < len(unexpected) else 'missing'}=True"
    others = unclear[0].rules[1:_MOST_RULES] if len(unclear) == 1 else ()
    return text + "".join(f"; or rules=[{text_of(rule)}] instead" for rule in others)


def text_of(text: str) -> str:
    """A text as Python has it, backslashes as they are where that can be."""
    plain = "\\" in text and "'" not in text and text.isprintable() and not text.endswith("\\")
    return f"r'{text}'" if plain else repr(text)
