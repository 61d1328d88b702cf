"""What helps, as options of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ckptool.remedies import Given, Remedy
from ckptool.render.text import runnable

__all__ = ["as_options", "option_words"]

_WITH_EQUALS = ("--allow-", "--min-")
"""Of `--allow-missing a` the `a` may be the file."""


def option_words(remedy: Remedy, *, rule: str = "--map") -> list[str]:
    """Return the words that a command is given for the arguments, none quoted."""
    return [word for argument in remedy.arguments for word in _words(*argument, rule)]


def as_options(remedy: Remedy, *, rule: str = "--map") -> str:
    """Return the text, with options in place of the library's arguments, as a shell takes them.

    `rule` is the option that is given a rule.
    """
    return remedy.told(lambda name, given: " ".join(map(_quoted, _words(name, given, rule))), " ")


def _words(name: str, given: Given, rule: str) -> Iterator[str]:
    option = rule if name == "rules" else f"--{name.replace('_', '-')}"
    if isinstance(given, bool):
        yield from [option] * given
        return
    for one in given if isinstance(given, tuple) else (given,):
        text = one if isinstance(one, str) else f"{one:g}"
        if option.startswith(_WITH_EQUALS) or text.startswith("-"):
            yield f"{option}={text}"
        else:
            yield from (option, text)


def _quoted(word: str) -> str:
    """Return the option as it is, and what it is given in quotes where a shell needs them."""
    option, equals, text = word.partition("=")
    if word.startswith("--") and equals:
        return f"{option}={runnable(shlex.quote(text))}"
    return runnable(shlex.quote(word))
