"""Modules that load in a way of their own: what is below them is meant as the file has it.

Such a module is given the names that it saved once, or that others did, and makes its own of them.
Only what stands before its own path may be changed: a name that is already today's would never
be converted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from ckptool.matching.ways import Side
from ckptool.wrappers import WRAPPERS

__all__ = ["Closed"]

_T = TypeVar("_T")


class Closed:
    """Paths of such modules, among bare names."""

    def __init__(self, paths: Collection[str], want: Side) -> None:
        """`paths` as the model has them, `want` its names."""
        self._whole: dict[str, str] = {}
        """Path among bare names to that of the model, of the modules on the way too."""
        self._paths: set[str] = set()
        if not paths:
            return
        closed = set(paths)
        for short, full in want.names.items():
            ways = _aligned(full, short)
            for path, bare in ways:  # of those that differ by wrappers, the innermost
                self._whole[bare] = max(path, self._whole.get(bare, ""), key=len)
            self._paths.update(bare for path, bare in ways if path in closed)
            closed.difference_update(path for path, _ in ways)
        for path in closed:  # without names of their own
            self._paths.add(".".join(part for part in path.split(".") if part not in WRAPPERS))
        self._deepest = max(path.count(".") + 1 for path in (*self._paths, *self._whole))

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._paths)

    def below(self, name: str) -> str | None:
        """What of a bare name stands below the outermost of the modules that it is in."""
        if not self._paths:
            return None
        if "" in self._paths:
            return name
        end = -1
        for _ in range(self._deepest):
            end = name.find(".", end + 1)
            if end < 0:
                return None
            if name[:end] in self._paths:
                return name[end + 1 :]
        return None

    def outside(self, names: Mapping[str, _T]) -> dict[str, _T]:
        """Those of some bare names that are in none of the modules."""
        return {name: held for name, held in names.items() if self.below(name) is None}

    def forbids(self, pairs: Mapping[str, str]) -> bool:
        """Whether a rule, of the model's name to the file's, changes what is below a module."""
        return bool(self._paths) and not all(map(self._keeps, pairs, pairs.values()))

    def _keeps(self, name: str, mine: str) -> bool:
        if name == mine:
            return True
        rest = self.below(name)
        return self.below(mine) is None and (rest is None or f".{mine}".endswith(f".{rest}"))

    def placed(self, names: Iterable[str]) -> dict[str, str]:
        """Bare names in the modules, each as the model would call it."""
        return {name: self._placed(name) for name in names if self.below(name) is not None}

    def _placed(self, name: str) -> str:
        whole, rest, end = self._whole.get("", ""), name, -1
        for _ in range(self._deepest):
            end = name.find(".", end + 1)
            if end < 0:
                break
            if name[:end] in self._whole:
                whole, rest = self._whole[name[:end]], name[end + 1 :]
        return f"{whole}.{rest}" if whole else rest


def _aligned(full: str, bare: str) -> list[tuple[str, str]]:
    """The paths of the modules above a name, from the root on, each without wrappers and front."""
    parts, kept = full.split("."), bare.split(".")
    at = len(kept)
    counts = []
    for part in reversed(parts):
        if at and kept[at - 1] == part:
            at -= 1
        counts.append(at)
    counts.reverse()  # how many of the bare components stand before each
    return [(".".join(parts[:end]), ".".join(kept[:count])) for end, count in enumerate(counts)]
