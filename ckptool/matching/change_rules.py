"""One `REGEX=>REPL` that makes the changes that were made to some names."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from ckptool.transforms.name_rules import expansion
from ckptool.wrappers import WRAPPERS

__all__ = ["Change", "Others", "below", "differing", "escaped", "moved_head", "regex_of"]

Change = tuple[str, str]
"""A name before a step and after it."""


def differing(before: str, after: str) -> tuple[str, str, str, str]:
    """What two names have in front in common, what they have not, and what they have behind."""
    old, new = before.split("."), after.split(".")
    tail = 0
    while tail < min(len(old), len(new)) and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    head = 0
    while head < min(len(old), len(new)) - tail and old[head] == new[head]:
        head += 1
    behind = "".join(f".{part}" for part in old[len(old) - tail :])
    front = "".join(f"{part}." for part in old[:head])
    mine, theirs = (
        ".".join(parts[head : len(parts) - tail]) + "." * bool(tail and len(parts) > head + tail)
        for parts in (old, new)
    )
    return front, mine, theirs, behind.removeprefix(".")


class Others:
    """Names that a rule is to leave alone; those that it changes may be among them."""

    def __init__(self, names: Iterable[str]) -> None:
        """Sorted, so that of a rule for what names begin with few are tried."""
        self._names = sorted(names)

    def near(self, regex: str) -> Sequence[str]:
        """Those that an expression may find, by the text that it begins with."""
        start = _start(regex)
        first = bisect_left(self._names, start)
        if not start:
            return self._names
        last = bisect_left(self._names, True, first, key=lambda name: not name.startswith(start))
        return self._names[first:last]


_START = re.compile(r"\^((?:[A-Za-z0-9_]|\\[^A-Za-z0-9])*)(?![*+?{])")
"""The text that an expression wants at the front, where it has no choice."""


def _start(regex: str) -> str:
    found = None if "|" in regex else _START.match(regex)
    return found[1].replace("\\", "") if found else ""


def regex_of(
    changes: Sequence[Change], others: Iterable[str] | Others = (), *, proposed: Sequence[str] = ()
) -> str:
    """A rule that makes all these changes and leaves the other names alone; empty for none.

    Those that are proposed are tried first.
    """
    if not changes:
        return ""
    others = others if isinstance(others, Others) else list(others)
    tried = (*proposed, *_candidates(*changes[0]))
    return next((rule for rule in tried if _does(rule, changes, others)), "")


def _candidates(before: str, after: str) -> Iterator[str]:
    """Rules that may make the change, those that say less about the name first."""
    head, old, new, tail = differing(before, after)
    if not head:
        yield _rule(f"^{escaped(old)}", new)
    if not tail:
        yield _rule(rf"(^|\.){escaped(old)}$", rf"\1{_literal(new)}", literal=False)
    if tail and not new:
        yield _rule(rf"(^|\.){escaped(old)}", r"\1", literal=False)
    yield _rule(f"^{escaped(head + old)}", head + new)
    numbers = iter(range(1, 100))
    pattern = re.sub(r"(?<![^.])\d+(?=\\\.)", r"(\\d+)", escaped(head))
    groups = re.sub(r"(?<![^.])\d+(?=\.)", lambda _: rf"\g<{next(numbers)}>", _literal(head))
    yield _rule(f"^{pattern}{escaped(old)}", groups + _literal(new), literal=False)


def _rule(pattern: str, replacement: str, *, literal: bool = True) -> str:
    return f"{pattern}=>{_literal(replacement) if literal else replacement}"


def escaped(text: str) -> str:
    """As a regular expression, in which no arrow ends it."""
    return re.escape(text).replace("=>", "=[>]")


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def below(front: str, rule: str) -> str:
    """The rule for names that have `front` before those that it is for."""
    regex, arrow, replacement = rule.partition("=>")
    if not front or not arrow or not regex.startswith("^"):
        return rule
    return f"^{escaped(front)}{regex[1:]}=>{_literal(front)}{replacement}"


def moved_head(full: str, bare: str, new: str) -> str:
    """The whole name with that done to its head which made `new` of its bare name.

    Wrappers inside stay where they are; those between the two are gone.
    """
    if full == bare:
        return new
    old, made, parts = bare.split("."), new.split("."), full.split(".")
    same = 0
    while same < min(len(old), len(made)) - 1 and old[-1 - same] == made[-1 - same]:
        same += 1
    if not same:
        return new
    at = 0
    for part in old[: len(old) - same]:
        at = parts.index(part, at) + 1 if part in parts[at:] else at
    while at < len(parts) and parts[at] in WRAPPERS and parts[at] != old[len(old) - same]:
        at += 1
    return ".".join([*made[: len(made) - same], *parts[at:]])


def _does(rule: str, changes: Sequence[Change], others: Sequence[str] | Others) -> bool:
    regex, arrow, replacement = rule.partition("=>")
    if not arrow or not regex:
        return False
    try:
        replace, made = re.compile(regex).sub, expansion(replacement)
        if not all(replace(made, old) == new for old, new in changes):
            return False
        if isinstance(others, Others):
            moved = {old for old, _ in changes}
            others = [name for name in others.near(regex) if name not in moved]
        return all(replace(made, name) == name for name in others)
    except (re.error, IndexError, OverflowError, RecursionError):
        return False
