r"""Rules for whole lists of modules: `^layer_(\d+)\.=>layers.\1.`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence

from ckptool.matching.change_rules import escaped
from ckptool.matching.counters import BATCHES
from ckptool.matching.slots import Slot

__all__ = ["list_rules"]

_NUMBER = re.compile(r"[0-9]+(?=\.)")
"""That a component is, or ends in; of a module."""
_ANY = re.compile(r"[0-9]+")
_DEEPEST = 4
"""Numbers of a name that are looked at."""
_SEVERAL = 2
_MOST_ALIKE = 64
"""Lists of equal contents that are told apart."""

_Contents = dict[str, set[tuple[str, Hashable]]]
"""By number: what stands below it, and the shapes."""


def list_rules(
    unused: Mapping[str, Slot], missing: Mapping[str, Slot], *, fold: bool = False
) -> tuple[str, ...]:
    """For lists of the file that lack nothing of some of the model's but the name.

    Both have the same numbers, and the same names and shapes below each of them. Of several lists
    that are alike each is the one that it shares most of its name with; those of which that could
    be said twice are not told. With `fold` lists in repeated layers have one rule, whatever other
    layers there are.
    """
    ours, theirs = (_by_contents(side) for side in (unused, missing))
    found = []
    done: list[str] = []
    for contents, heads in ours.items():
        for own, wanted in _pairs(heads, theirs.get(contents, [])):
            if (
                _called(own) != _called(wanted)
                and not own.startswith(tuple(done))
                and _keeps_numbers(own, wanted)
            ):
                done.append(own)
                found.append((own, wanted))
    if fold:
        return tuple(map(_rule, _repeated(found)))
    return tuple(_rule([pair]) for pair in found)


def _repeated(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Those together that differ in numbers alone, in the same ones on both sides."""
    groups: dict[Hashable, list[tuple[str, str]]] = {}
    for own, wanted in pairs:
        alike = _ANY.findall(own) == _ANY.findall(wanted)
        kind = (*_ANY.split(own), None, *_ANY.split(wanted)) if alike else (own, wanted)
        groups.setdefault(kind, []).append((own, wanted))
    return [*groups.values()]


def _rule(pairs: Sequence[tuple[str, str]]) -> str:
    """What turns the first of each pair into the second, for any numbers where these differ."""
    own, wanted = pairs[0]
    columns = zip(*(_ANY.findall(one) for one, _ in pairs), strict=True)
    vary = [len(pairs) > 1 and len(set(column)) > 1 for column in columns]
    numbers, count = _ANY.findall(own), 0
    before = after = ""
    texts = zip(_ANY.split(own), _ANY.split(wanted), strict=False) if any(vary) else ()
    for at, (mine, theirs) in enumerate(texts):
        before += escaped(mine)
        after += theirs.replace("\\", r"\\")
        if at < len(numbers):
            count += vary[at]
            before += r"(\d+)" if vary[at] else numbers[at]
            after += rf"\{count}" if vary[at] else numbers[at]
    if not count:
        before, after = escaped(own), wanted.replace("\\", r"\\")
    return rf"^{before}(\d+)\.=>{after}\{count + 1}."


def _by_contents(side: Mapping[str, Slot]) -> dict[Hashable, list[str]]:
    """What stands before the numbers of lists, outer lists first, by what is in them."""
    lists: dict[str, _Contents] = {}
    for name, slot in side.items():
        if name.endswith(BATCHES):
            continue  # files and models may do without
        for head, number, rest in _places(name):
            lists.setdefault(head, {}).setdefault(number, set()).add((rest, slot.shape))
    found: dict[Hashable, list[str]] = {}
    for head in sorted(lists, key=lambda head: (head.count("."), head)):
        if len(lists[head]) >= _SEVERAL:
            held = frozenset((number, frozenset(below)) for number, below in lists[head].items())
            found.setdefault(held, []).append(head)
    return found


def _places(name: str) -> Iterator[tuple[str, str, str]]:
    for count, found in enumerate(_NUMBER.finditer(name)):
        if count == _DEEPEST:
            return
        yield name[: found.start()], found[0], name[found.end() :]


def _pairs(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each of ours with the one of theirs that is most like it, where the reverse is true too."""
    if len(ours) == len(theirs) == 1:
        yield ours[0], theirs[0]
    elif max(len(ours), len(theirs)) <= _MOST_ALIKE:
        for own in ours:
            best = _best(own, theirs)
            if best is not None and _best(best, ours) == own:
                yield own, best


def _best(own: str, others: Sequence[str]) -> str | None:
    """The one other that has most in common with a name; None for nothing, or several."""
    scores = {other: _likeness(own, other) for other in others}
    most = max(scores.values(), default=(False, 0))
    best = [other for other, score in scores.items() if score == most]
    return best[0] if len(best) == 1 and most > (False, 0) else None


def _called(head: str) -> str:
    """The list's own name, with its dot; what stands before that is no matter of the list's."""
    return ".".join(head.split(".")[-2:] if head.endswith(".") else head.split(".")[-1:])


def _keeps_numbers(own: str, wanted: str) -> bool:
    """Whether numbers are at most put in, or taken out: `features.0.` is no `features.2.`."""
    fewer, more = sorted((_ANY.findall(own), _ANY.findall(wanted)), key=len)
    rest = iter(more)
    return all(number in rest for number in fewer)


def _likeness(one: str, other: str) -> tuple[bool, int]:
    """Whether only the marks before the number differ, and how many components are equal."""
    same = 0
    for a, b in zip(one.split(".")[:-1], other.split(".")[:-1], strict=False):
        if a != b:
            break
        same += 1
    return one.rstrip("._") == other.rstrip("._"), same
