"""Words, numbers and options as text for a terminal."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ckptool.remedies import Given, Remedy
from ckptool.words import clean, counted

_NARROWEST = 20  # columns for a sentence; a word a line is harder to read than a broken line
_QUOTED = re.compile(r"'([^']*)'|\"[^\"]*\"")
"""A quoted word or part of a word, as written by `shlex.quote`."""


def format_label(name: str, path: Sequence[Any]) -> str:
    """Return the name of a row, or words for the root."""
    return (clean(name) or "''") if path else "(the whole file)"


def make_pasteable(command: str) -> str:
    r"""Return a command that can be copied from the screen to a shell.

    A quoted word with control characters, bytes that are not UTF-8, or characters that the encoding
    of stdout lacks cannot be printed. It becomes `$'a\nb'`, which bash, zsh and ksh read.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def escape(match: re.Match[str]) -> str:
        """Return a quoted word, as `$'...'` if it cannot be displayed."""
        if _is_displayable(match[0], encoding):
            return match[0]
        return f"$'{''.join(_escape_as_c(character, encoding) for character in match[1])}'"

    return clean(_QUOTED.sub(escape, command))


def command_lines(command: str, width: int | None, *, first: str = "  ") -> Iterator[str]:
    r"""Yield a command behind `first`, in lines that fit, which a shell joins at `\\`.

    Only commands of ckptool are wrapped: others may have pipes, which are no words.
    """
    whole = first + make_pasteable(command)
    if width is None or len(whole) <= width or not command.startswith("ckptool "):
        yield whole
        return
    indent, line = " " * len(first), ""
    for word in map(make_pasteable, map(shlex.quote, shlex.split(command))):
        # One space before the word, and a space and a backslash after it.
        if line and len(first) + len(line) + len(word) + 3 > width:
            yield f"{first}{line} \\"
            first, line = indent, f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    yield f"{first}{line}"


def resume_title(training: Sequence[str]) -> str:
    """Return the title of a command that keeps the training state of the file."""
    *others, last = training or ("",)
    parts = f"{', '.join(others)} and {last}" if others else last
    return f"To resume training{f', with the {parts}' if parts else ''}:"


def titled_commands(title: str, commands: Iterable[str], look: Look) -> Iterator[str]:
    """Yield a title, and the commands below it."""
    yield look.bold(title)
    for command in commands:
        yield from command_lines(command, look.width)


def format_size(nbytes: int) -> str:
    """Return bytes as people read them: `512 B`, `1.5 KiB`, `4.7 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    number = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if number < 999.95:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} PiB"


def format_duration(seconds: float) -> str:
    """Return seconds as people read them: `50 s`, `12 min`, `3 h 5 min`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds_left} s"


def format_share(part: int, whole: int, *, none: str = "0%") -> str:
    """Return `12.3%`; `none` only for no part, and `100%` only for the whole."""
    if part in (0, whole):
        return "100%" if part else none
    percent = 100 * part / whole
    if percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent <= 99.9 else ">99.9%"


def shorten(text: str, max_length: int) -> str:
    """Return at most `max_length` characters (8 or more) of a text, without its middle."""
    if len(text) <= max_length:
        return text
    room = max(max_length, 8) - len("...")
    return f"{text[: room - room // 2]}...{text[len(text) - room // 2 :]}"


def limit_lines(lines: Iterable[str], max_count: int) -> Iterator[str]:
    """Yield the first `max_count` lines, then the number of the rest."""
    all_lines = list(lines)
    yield from all_lines[:max_count]
    if len(all_lines) > max_count:
        yield f"and {len(all_lines) - max_count:,} more (--json lists all)"


def files_line(files: int, errors: int, parts: Iterable[str]) -> str:
    """Return `3 files: 1 ok, 1 with 2 problems, 1 not read`."""
    unread = [f"{errors:,} not read"] if errors else []
    return f"{counted(files + errors, 'file')}: {', '.join([*parts, *unread])}"


def wrap_text(text: str, width: int | None, *, indent: str = "  ") -> list[str]:
    """Return a sentence in lines of `width` (20 or more) characters; break longer words.

    `indent` begins every line but the first.
    """
    if width is None or len(text) <= width:
        return [text]
    import textwrap

    width = max(width, _NARROWEST + len(indent))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def format_number(value: Any) -> str:
    """Return an element of a tensor, a float with six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value.real:.6g}{value.imag:+.6g}j"
    return str(value)


_C_NAMED = dict(zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True))


def quote_as_git(text: str) -> str:
    r"""Return the text as git prints a path (`core.quotePath=false`): `"a\tb\342\200\256"`.

    Printable text without double quotes and backslashes is unchanged.
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return f'"{"".join(map(_escape_as_c, text))}"'


def _is_displayable(text: str, encoding: str) -> bool:
    """Return True if a terminal of this encoding displays each character unchanged."""
    return text.isprintable() and text == text.encode(encoding, "ignore").decode(encoding)


def _escape_as_c(character: str, encoding: str = "utf-8") -> str:
    """Return a character as in a string of C, bytes of UTF-8 in octal."""
    if character in _C_NAMED:
        return f"\\{_C_NAMED[character]}"
    if _is_displayable(character, encoding):
        return character
    is_byte = "\udc80" <= character <= "\udcff"  # of os.fsdecode
    raw = character.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)


def json_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a JSON document: a line for each key and for each object in a list.

    This is fast for 100,000 rows, and works with `grep` and `diff`.
    """
    from json import JSONEncoder

    # Without an indent, so that the C encoder does the work. ASCII, so that no text has control
    # characters for the terminal.
    encode = JSONEncoder(ensure_ascii=True, allow_nan=False).encode
    last = len(document) - 1
    yield "{"
    for index, (key, value) in enumerate(document.items()):
        comma = "," if index < last else ""
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"  {encode(key)}: ["
            for row in value[:-1]:
                yield f"    {encode(row)},"
            yield f"    {encode(value[-1])}"
            yield f"  ]{comma}"
        else:
            yield f"  {encode(key)}: {encode(value)}{comma}"
    yield "}"


@dataclass(frozen=True, slots=True)
class Look:
    """The width of the terminal (None: unlimited), and True for ANSI colors.

    With `fmt`, a format of `table`, only tables are drawn.
    """

    width: int | None = None
    color: bool = False
    fmt: str | None = None

    def bold(self, text: str) -> str:
        """Return a heading."""
        return f"\x1b[1m{text}\x1b[0m" if self.color else text

    def faint(self, text: str) -> str:
        """Return a text of less importance."""
        return f"\x1b[2m{text}\x1b[0m" if self.color else text

    def alarm(self, text: str) -> str:
        """Return a text about a problem."""
        return f"\x1b[31m{text}\x1b[0m" if self.color else text


PLAIN = Look()


def detect_look(stream: TextIO) -> Look:
    """Return the look for a stream: only a terminal has a width, and colors unless NO_COLOR."""
    if not stream.isatty():
        return PLAIN
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Look(detect_columns(stream), not plain)


def detect_columns(stream: TextIO) -> int | None:
    """Return the columns of a terminal from COLUMNS or the system, or None."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated) > 0:
        return int(stated)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None  # 0 if it is unknown
    except (OSError, ValueError):
        return None


_WITH_EQUALS = ("--allow-", "--min-")
"""Options written with `=`, because the word behind `--allow-missing` may be the file."""
_OPTIONS = {"overwrite": "--force"}
"""Options with a name other than the library's argument."""


def to_option_words(remedy: Remedy) -> list[str]:
    """Return the words of a command line for the arguments, without quotes."""
    return [word for argument in remedy.arguments for word in _to_option_words(*argument)]


def to_options_text(remedy: Remedy) -> str:
    """Return the text of a remedy, its arguments as options that can be copied to a shell."""
    return remedy.spell(
        lambda name, value: " ".join(map(_quote_option, _to_option_words(name, value))), " "
    )


def _to_option_words(name: str, value: Given) -> Iterator[str]:
    """Yield the words of one argument: an option, with a value unless it is a flag."""
    option = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        if value:  # a flag; False is its default
            yield option
        return
    for item in value if isinstance(value, tuple) else (value,):
        text = item if isinstance(item, str) else f"{item:g}"
        if option.startswith(_WITH_EQUALS) or text.startswith("-"):
            yield f"{option}={text}"
        else:
            yield from (option, text)


def _quote_option(word: str) -> str:
    """Return a word, or the value of `--option=value`, in quotes if a shell needs them."""
    option, equals, text = word.partition("=")
    if word.startswith("--") and equals:
        return f"{option}={make_pasteable(shlex.quote(text))}"
    return make_pasteable(shlex.quote(word))
