"""A part of a checkpoint as entries by comparable keys, and two such parts held side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptool.inspection.values import Key, comparable, is_set
from ckptool.model import Opaque, Path
from ckptool.tree import walk

__all__ = ["Entry", "Pair", "Region", "pair_regions", "same_container"]

Found = tuple[Path, Any, Path]
"""The path of an entry from the root of its file, its leaf, and its path as the screen has it."""

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
    """What both have."""

    name: str
    a: Entry
    b: Entry


@dataclass
class Region:
    """Entries of a part, by key, in the order of the file; containers beside them."""

    leaves: dict[Key, Found] = field(default_factory=dict)
    containers: dict[Key, Found] = field(default_factory=dict)
    _again: dict[Key, int] = field(default_factory=dict)

    def fill(
        self,
        root: Any,
        base: Path,
        *,
        before: Path = (),
        skip: frozenset[Path] = frozenset(),
        changed: Changed | None = None,
    ) -> None:
        """Take what stands below `root`, whose path in the file is `base`.

        `before` is put before each key, `skip` has the paths below `root` that are left out.
        """

        def enter(path: Path, node: Any) -> bool:
            if path in skip:
                return False
            if isinstance(node, Opaque):
                return not is_set(node)
            self.containers[comparable(before + path)] = base + path, node, before + path
            return True

        for path, leaf in walk(root, enter=enter):
            key, leaf, shown = (path, leaf, path) if changed is None else changed(path, leaf)
            self._add(comparable(before + key), (base + path, leaf, before + shown))

    def _add(self, key: Key, found: Found) -> None:
        """Take an entry; one more of the same key (two objects as keys of a dict) is kept apart."""
        if key in self.leaves:
            count = self._again[key] = self._again.get(key, 1) + 1
            key = (*key, ("again", count))
        self.leaves[key] = found


def same_container(a: Any, b: Any) -> bool:
    """Return whether two containers are of one kind: what order a dict keeps is no matter."""
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (dict, list, tuple))


def pair_regions(
    a: Region, b: Region, named: Callable[[Path], str]
) -> tuple[list[Pair], list[Entry], list[Entry]]:
    """Return what both have by key, what only A has, what only B has, each in its file's order.

    A container is an entry where it stands against something else, or is empty and alone.
    """
    pairs: list[Pair] = []
    only_a: list[Entry] = []
    only_b: list[Entry] = []

    def entry(found: Found) -> Entry:
        return Entry(named(found[2]), found[0], found[1])

    def pair(one: Found, other: Found) -> None:
        name = named(one[2])
        pairs.append(Pair(name, Entry(name, *one[:2]), Entry(name, *other[:2])))

    for key, found in a.leaves.items():
        against = b.leaves.get(key) or b.containers.get(key)
        if against is not None:
            pair(found, against)
        else:
            only_a.append(entry(found))
    for key, found in b.leaves.items():
        if key in a.leaves:
            continue
        if key in a.containers:
            pair(a.containers[key], found)
        else:
            only_b.append(entry(found))
    for one, other in _unlike(a, b):
        pair(one, other)
    only_a.extend(entry(found) for found in _empty(a, b))
    only_b.extend(entry(found) for found in _empty(b, a))
    return pairs, only_a, only_b


def _unlike(a: Region, b: Region) -> Iterator[tuple[Found, Found]]:
    """Containers of one key and different kinds."""
    for key, found in a.containers.items():
        against = b.containers.get(key)
        if against is not None and not same_container(found[1], against[1]):
            yield found, against


def _empty(here: Region, there: Region) -> Iterator[Found]:
    """Empty containers that nothing on the other side stands against."""
    for key, found in here.containers.items():
        if not found[1] and key not in there.containers and key not in there.leaves:
            yield found
