"""Remedies as options of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ckptool.remedies import Given, Remedy
from ckptool.render.text import runnable

__all__ = ["as_options", "option_words"]

_WITH_EQUALS = ("--allow-", "--min-")
"""Options written with `=`, because the word behind `--allow-missing` may be the file."""


def option_words(remedy: Remedy) -> list[str]:
    """Return the words of a command line for the arguments, without quotes."""
    return [word for argument in remedy.arguments for word in _words(*argument)]


def as_options(remedy: Remedy) -> str:
    """Return the text of a remedy, its arguments as options that can be copied to a shell."""
    return remedy.told(lambda name, given: " ".join(map(_quoted, _words(name, given))), " ")


def _words(name: str, given: Given) -> Iterator[str]:
    option = "--map" if name == "rules" else f"--{name.replace('_', '-')}"
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
    """Return a word, or the value of `--option=value`, in quotes if a shell needs them."""
    option, equals, text = word.partition("=")
    if word.startswith("--") and equals:
        return f"{option}={runnable(shlex.quote(text))}"
    return runnable(shlex.quote(word))
