"""A part of a checkpoint as entries by comparable keys, and two such parts held side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptool.inspection.values import Key, comparable, is_set
from ckptool.model import Opaque, Path
from ckptool.tree import name_of, walk

__all__ = ["Entry", "Pair", "Region", "pair_regions"]

Changed = Callable[[Path, Any], tuple[Path, Any, Path]]
"""Of a leaf: its path below its part, itself, both as they are compared, and the path as shown."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that a checkpoint holds, under the name that the screen has for it.

    `leaf` is what `paths.walk` gives, or a container where that itself is what differs.
    """

    name: str
    path: Path
    """From the root of its file, as it is there."""
    leaf: Any


@dataclass(frozen=True, slots=True)
class Pair:
    """What both have, under the name that the screen has for A's."""

    a: Entry
    b: Entry

    @property
    def name(self) -> str:
        """The name for the screen."""
        return self.a.name


@dataclass
class Region:
    """Entries of a part, by key, in the order of the file; containers beside them."""

    leaves: dict[Key, Entry] = field(default_factory=dict)
    containers: dict[Key, Entry] = field(default_factory=dict)
    _again: dict[Key, int] = field(default_factory=dict)

    def fill(
        self,
        root: Any,
        base: Path,
        *,
        outer: Path = (),
        before: Path = (),
        skip: frozenset[Path] = frozenset(),
        changed: Changed | None = None,
    ) -> None:
        """Take what stands below `root`, whose path in the file is `base`.

        `before` is put before each key, and `outer` before that in names alone; `skip` has the
        paths below `root` that are left out.
        """

        def enter(path: Path, node: Any) -> bool:
            if path in skip:
                return False
            if isinstance(node, Opaque):
                return not is_set(node)
            shown = before + path
            entry = Entry(name_of(outer + shown), base + path, node)
            self.containers[comparable(shown)] = entry
            return True

        for path, leaf in walk(root, enter=enter):
            key, leaf, shown = (path, leaf, path) if changed is None else changed(path, leaf)
            entry = Entry(name_of(outer + before + shown), base + path, leaf)
            self._add(comparable(before + key), entry)

    def _add(self, key: Key, entry: Entry) -> None:
        """Take an entry; one more of the same key (two objects as keys of a dict) is kept apart."""
        if key in self.leaves:
            count = self._again[key] = self._again.get(key, 1) + 1
            key = (*key, ("again", count))
        self.leaves[key] = entry


def pair_regions(a: Region, b: Region) -> tuple[list[Pair], list[Entry], list[Entry]]:
    """Return what both have by key, what only A has, what only B has, each in its file's order.

    A container is an entry where it stands against something else, or is empty and alone.
    """
    pairs: list[Pair] = []
    only_a: list[Entry] = []
    only_b: list[Entry] = []
    for key, entry in a.leaves.items():
        against = b.leaves.get(key) or b.containers.get(key)
        if against is not None:
            pairs.append(Pair(entry, against))
        else:
            only_a.append(entry)
    for key, entry in b.leaves.items():
        if key in a.containers and key not in a.leaves:
            pairs.append(Pair(a.containers[key], entry))
        elif key not in a.leaves:
            only_b.append(entry)
    for key, entry in a.containers.items():
        against = b.containers.get(key)
        if against is not None and not _same_container(entry.leaf, against.leaf):
            pairs.append(Pair(entry, against))
    return pairs, [*only_a, *_empty(a, b)], [*only_b, *_empty(b, a)]


def _same_container(a: Any, b: Any) -> bool:
    """Return whether two containers are of one kind: what order a dict keeps is no matter."""
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (dict, list, tuple))


def _empty(here: Region, there: Region) -> Iterator[Entry]:
    """Yield empty containers that nothing on the other side stands against."""
    for key, entry in here.containers.items():
        if not entry.leaf and key not in there.containers and key not in there.leaves:
            yield entry
