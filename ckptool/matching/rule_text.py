r"""The text of a rule for just some names: `^layers\.(\d+)\.attn\.=>blocks.\1.attention.`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from ckptool.errors import UsageError
from ckptool.matching.numbering import ANY_NUMBER
from ckptool.matching.swaps import MOST_PARTS, Head, Names, Swap
from ckptool.transforms.name_rules import regex_rule

__all__ = ["rule_text", "segment_text", "swap_text"]

_MOST_TRIED = 1_000
"""Names on which a rule is tried that holds for all by the way it is made."""
_MOST_HEADS = 64
"""In a rule's text; more nobody reads."""


def swap_text(swap: Swap) -> str:
    """The rule for people: `backbone. -> encoder.`, `model. taken off`."""
    if not swap.new:
        return f"{_shown(swap.old)} taken off"
    if not swap.old:
        return f"{_shown(swap.new)} put before"
    return f"{_shown(swap.old)} -> {_shown(swap.new)}"


def _shown(head: Head) -> str:
    return "".join("*." if part is None else f"{part}." for part in head)


def rule_text(swap: Swap, names: Mapping[str, str], have: Names) -> str:
    """A rule that gives these names of a file, old to new, their new ones, and touches no other.

    Empty where none does it that could be read.
    """
    touched = have.under(swap.old)
    others = [name for name in touched if name not in names]
    start = swap.old[: swap.old.index(None)] if None in swap.old else swap.old
    near = [name for name in have.under(start) if name not in names]
    regex, replacement = _regex(swap.old), _replacement(swap.new)
    if not others and names:  # then it does what the swap does, by which they were found
        text = _as_rule(f"^{regex}", replacement)
        some = dict(islice(names.items(), _MOST_TRIED))
        return text if _does(text, some, near) else ""
    for before, after in _guards(len(swap.old), names, others):
        text = _as_rule(f"^{before}{regex}{after}", replacement)
        if _does(text, names, near):
            return text
    return ""


def segment_text(swap: Swap, names: Mapping[str, str], have: Names) -> str:
    """The same for a rule that replaces components wherever they stand; empty if that errs."""
    lead, old, new = swap.parts
    if not (lead and old):
        return ""
    text = _as_rule(rf"\.{_regex(old)}", f".{_replacement(new)}")
    return text if _does(text, names, (name for name in have.slots if name not in names)) else ""


def _as_rule(regex: str, replacement: str) -> str:
    regex = regex.replace("=>", r"=\>")  # the first one parts the two
    return f"{regex}=>{replacement}"


def _regex(head: Head) -> str:
    return "".join(r"(\d+)\." if part is None else rf"{re.escape(part)}\." for part in head)


def _replacement(head: Head) -> str:
    text, group = "", 0
    for part in head:
        if part is None:
            group += 1
            text += f"\\{group}."
        else:
            text += part.replace("\\", r"\\") + "."
    return text


def _does(text: str, names: Mapping[str, str], others: Iterable[str]) -> bool:
    try:
        rule = regex_rule(text)
    except UsageError:
        return False
    return all(rule.apply(old) == new for old, new in names.items()) and not any(
        rule.apply(name) is not None for name in others
    )


def _guards(
    parts: int, names: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, str]]:
    """What to put before and after a head so that it is found in `names` and not in `others`."""
    if not others:
        yield "", ""
        return
    for cut, is_open in ((parts, True), (parts, False), (0, True), (0, False)):
        inside, outside = (
            {tuple(part.split(".")[cut:]) for part in (_opened(side) if is_open else side)}
            for side in (names, others)
        )
        wanted, spared = _cover(inside, outside), _cover(outside, inside)
        if wanted and (not spared or len(wanted) <= len(spared)):
            guard = f"(?={_either(wanted)})"
        elif spared:
            guard = f"(?!{_either(spared)})"
        else:
            continue
        yield ("", guard) if cut else (guard, "")


_OPEN = "\0"
"""Stands for any number; no name that comes from a file is likely to have it, and it is tried."""


def _opened(names: Iterable[str]) -> set[str]:
    return {ANY_NUMBER.sub(_OPEN, name) for name in names}


_Parts = tuple[str, ...]


def _cover(inside: Iterable[_Parts], outside: Collection[_Parts]) -> list[str]:
    """The shortest heads that all of some names begin with, and none of the others.

    Empty where there are none or too many of them.
    """
    found: dict[str, None] = {}
    rest = set(inside)
    for depth in range(1, MOST_PARTS):
        taken = {name[:depth] for name in outside}
        for name in list(rest):
            head = name[:depth]
            if head not in taken:
                if len(found) > _MOST_HEADS:
                    return []
                found[_head(head) + (r"\." if len(name) > depth else "$")] = None
                rest.discard(name)
        if not rest:
            break
        # a name that others go on from, or that the numbers alone tell apart
        for name in [name for name in rest if len(name) <= depth]:
            if name in outside:
                return []
            found[_head(name) + "$"] = None
            rest.discard(name)
        if not rest:
            break
    return list(found) if not rest and len(found) <= _MOST_HEADS else []


def _head(head: _Parts) -> str:
    return r"\.".join(r"\d+" if part == _OPEN else re.escape(part) for part in head)


def _either(heads: Collection[str]) -> str:
    heads = sorted(heads)
    return heads[0] if len(heads) == 1 else f"(?:{'|'.join(heads)})"
