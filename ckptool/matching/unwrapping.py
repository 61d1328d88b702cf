"""Names without their wrapper components, in one pass whatever they nest.

`wrappers.strip_names` takes levels off one by one and can stop at any; here all are to go, from
names of which there may be many, or which may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckptool.wrappers import WRAPPERS

__all__ = ["Bare", "bare_forms", "common_front", "is_average_counter", "wrapped_submodules"]

Bare = Mapping[str, str]
"""A name to the same without some components, for those that change."""

_LONGEST = 1000
"""Characters of a name of which every part is looked at."""
_NOBODYS = frozenset(WRAPPERS) - {"module"}
"""Components that no layer is called."""
_FRONT = "module."
_INSIDE = ".module."
_COUNTER = re.compile(r"(?:module\.)*n_averaged")
"""As an average around the whole model has it."""


def is_average_counter(name: str) -> bool:
    """Whether it is called as the counter of `AveragedModel`, which stands beside its wrapper."""
    return name == "n_averaged" or name.endswith(".n_averaged")


def bare_forms(names: Collection[str]) -> list[Bare]:
    """The names as they are, without wrappers, and without `module` on submodules too.

    Forms that change nothing more, or that make two names one, are left out.
    """
    forms: list[Bare] = [{}]
    outer = _without_wrappers(names)
    if outer and _distinct(names, outer):
        forms.append(outer)
    last = forms[-1]
    inner = _without_submodules([last.get(name, name) for name in names] if last else names)
    if inner:
        both = {name: inner.get(last.get(name, name), last.get(name, name)) for name in names}
        changed = {name: new for name, new in both.items() if name != new}
        if _distinct(names, changed):
            forms.append(changed)
    return forms


def _distinct(names: Collection[str], renamed: Bare) -> bool:
    if len(renamed) == len(names):
        return len(set(renamed.values())) == len(names)
    return len({renamed.get(name, name) for name in names}) == len(names)


def _without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Old name to new: what `strip_names` comes to when it takes all off."""
    text = "\n".join(names)
    words = [f"{word}." for word in _NOBODYS if f"{word}." in text]
    left: dict[str, str] = {}
    if words:
        for name in names:
            if any(word in name for word in words):
                *above, last = name.split(".")
                left[name] = ".".join([*(part for part in above if part not in _NOBODYS), last])
    bare = [left.get(name, name) for name in names] if left else list(names)
    count = _shared_front(bare)
    if count:
        front = _FRONT * count
        bare = [
            name[len(front) :] if name.startswith(front) else _less_front(name, count)
            for name in bare
        ]
        left = dict(zip(names, bare, strict=True))
    return {name: short for name, short in left.items() if name != short}


def _shared_front(names: Collection[str]) -> int:
    """With how many `module.` all of the names begin."""
    if any("n_averaged" in name for name in names):
        names = [name for name in names if not _COUNTER.fullmatch(name)]
    front, count = common_front(names), 0
    while front.startswith(_FRONT, count * len(_FRONT)):
        count += 1
    return count


def common_front(names: Collection[str]) -> str:
    """The characters with which all names begin."""
    # What the first and the last in order have in common stands before all between them.
    first, last = (min(names), max(names)) if names else ("", "")
    ends = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(ends, len(first))]


def _less_front(name: str, count: int) -> str:
    """The name without as many `module.` in front."""
    at = 0
    while count and name.startswith(_FRONT, at):
        count, at = count - 1, at + len(_FRONT)
    return name[at:]


def _without_submodules(names: Collection[str]) -> dict[str, str]:
    """Old name to new, without the `module` of submodules that have nothing else."""
    heads = {name.partition(".")[0] for name in names if _INSIDE in name}
    if not heads:
        return {}
    near = [name for name in names if name.partition(".")[0] in heads]
    paths = set(wrapped_submodules(name for name in near if not is_average_counter(name)))
    return {
        name: short
        for name in near
        if _INSIDE in name and (short := _less_submodules(name, paths)) != name
    }


def _less_submodules(name: str, paths: set[str]) -> str:
    if len(name) > _LONGEST:
        return name
    kept, path = [], ""
    for part in name.split("."):
        if part != "module" or path not in paths:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def wrapped_submodules(names: Iterable[str]) -> list[str]:
    """Paths of submodules below which every name goes on with `module`, outermost ones first.

    So saved models whose features alone were parallel. Names that no model has are passed over.
    """
    below: dict[str, set[str]] = {}
    for name in names:
        path = ""
        for part in name.split(".") if len(name) <= _LONGEST else ():
            below.setdefault(path, set()).add(part)
            path = f"{path}.{part}" if path else part
    return [
        path
        for path, parts in below.items()
        if path and parts == {"module"} and f"{path}.module" in below
    ]
