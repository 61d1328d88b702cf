"""Two checkpoints side by side: which entry of one stands for which of the other.

Sections are paired first: by path, else the only one of its sort on either side (a state dict
below `state_dict` and a flat file). Inside a pair entries are held against each other by name,
wrapper components off; what no section holds, by path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, OrderedMap, Path
from ckptool.core.modules import is_module
from ckptool.core.names import check_collisions, strip_names
from ckptool.core.sections import (
    MODEL_KINDS,
    Section,
    find_sections,
    is_flat,
    list_optimizer_names,
    list_wrappable_keys,
)
from ckptool.core.tree import is_within, list_items, name_of, walk
from ckptool.core.values import Key, is_set, to_comparable
from ckptool.errors import AmbiguousName, NameCollision, NotFound
from ckptool.inspection.equality import first_difference
from ckptool.matching.align import align as pair_keys
from ckptool.matching.report import slots_of
from ckptool.transforms.extraction import part_of
from ckptool.transforms.name_rules import AppliedRules, Rule
from ckptool.transforms.names import followed, unwrapped_modules
from ckptool.words import listed, printable

_SORTS = {"state_dict": "model", "module": "model"}
"""Kinds of section that may stand for each other; the others only for their own."""

Couple = tuple[Section, Section]

Renamed = dict[str, str]
"""Old name to new, of the names that change."""


@dataclass(frozen=True, slots=True)
class _Names:
    """How the names of a section change."""

    shown: Renamed
    """For the screen: wrapper components off."""
    compared: Renamed
    """For the comparison: the rules applied to that as well."""


_AS_THEY_ARE = _Names({}, {})
STRICT_HINT = "add --strict-names to compare the keys unchanged"
RULES_HINT = "make the rules more specific"


@dataclass
class _SideNames:
    """How the names of one checkpoint change for the comparison."""

    file: str
    strict: bool = False
    rules: AppliedRules = field(default_factory=lambda: AppliedRules(()))
    _namings: list[tuple[frozenset[str], _Names]] = field(default_factory=list)

    def resolve_names(
        self, part: Section, stripped: Renamed, prefixed: Renamed | None = None
    ) -> _Names:
        """Return a model's names as they are compared, remembered for the optimizers.

        `prefixed` has the names to compare, where a prefix sets them apart from the other file's.

        Raises:
            NameCollision: two entries would get one name.
        """
        names = [name for name in part.node if isinstance(name, str)]
        renamed = self._ruled(names, stripped) if prefixed is None else prefixed
        hint = RULES_HINT if self.rules.rules else STRICT_HINT
        where = printable(part.name) or "the root"
        check_collisions(part.node, renamed, file=self.file or None, place=where, hint=hint)
        resolved = _Names(stripped, renamed)
        self._namings.append((frozenset(names), resolved))
        return resolved

    def optimizer(self, part: Section) -> _Names:
        """Return an optimizer's names as they are compared: as those of its model."""
        own = list_optimizer_names(part.node)
        shown = followed(own, [(names, resolved.shown) for names, resolved in self._namings])
        if shown:
            namings = [(names, resolved.compared) for names, resolved in self._namings]
            return _Names(shown, followed(own, namings))
        stripped = self.strip(own)
        return _Names(stripped, self._ruled(own, stripped))

    def strip(self, names: list[str]) -> Renamed:
        """Return the wrapper components taken off names.

        Raises:
            NameCollision: two names would become one.
        """
        if self.strict:
            return {}
        try:
            return strip_names(names).renamed
        except NameCollision as error:
            raise NameCollision(error.message, file=self.file or None, hint=STRICT_HINT) from error

    def _ruled(self, names: Sequence[str], stripped: Renamed) -> Renamed:
        ruled = self.rules.of(stripped.get(name, name) for name in names)
        new = {name: ruled[stripped.get(name, name)] for name in names}
        return {name: to for name, to in new.items() if to != name}


@dataclass(frozen=True, slots=True)
class Alignment:
    """What both have, and what only one has, in the order of the sections and of A."""

    pairs: tuple[Pair, ...]
    only_a: tuple[DiffEntry, ...]
    only_b: tuple[DiffEntry, ...]
    notes: tuple[str, ...] = ()
    """Sentences on what could not be decided, rules that matched nothing, and the like."""


def align(
    a: Checkpoint,
    b: Checkpoint,
    *,
    strict_names: bool = False,
    rules: Sequence[Rule] = (),
    key: Any = None,
    model_only: bool = False,
) -> Alignment:
    """Hold the entries of two checkpoints against each other, from their headers alone.

    Args:
        a: One of them; `rules` make of its names those of the other.
        b: The other.
        strict_names: Compare names as they are, with their wrapper components.
        rules: Applied in order, after the wrappers are off.
        key: An address (`tree.resolve`): only what stands there. Where one file is a flat state
            dict and has no such address, all of it.
        model_only: Only the weights of both, as `Take(key=key, model_only=True)` has them.

    Raises:
        NameCollision: two entries of one file would be compared under one name.
        NotFound: there is nothing at `key`, no model, or several (`AmbiguousName`).
        LimitExceeded: a tree is nested deeper, or mentioned more often, than real ones are.
    """
    if model_only:
        (one, other), error = (_weights_of(checkpoint, key) for checkpoint in (a, b)), None
    else:
        one, other, error = _scopes(a, b, key)
    whole = error is None and not (one.entry or other.entry)
    aligned = _Alignment(
        one,
        other,
        _SideNames(a.path, strict_names, AppliedRules(rules, a.path)),
        _SideNames(b.path, strict_names),
        whole=whole,
    ).run()
    if whole:
        return aligned
    text = name_of(tuple(key)) if isinstance(key, (tuple, list)) else str(key)

    def wanted(entry: DiffEntry, asked: DiffEntry | None) -> bool:
        if error is None:
            return asked is not None and entry.path == asked.path
        return entry.name == text or entry.name.endswith(f"/{text}")

    pairs = [p for p in aligned.pairs if wanted(p.a, one.entry) or wanted(p.b, other.entry)]
    only_a = [entry for entry in aligned.only_a if wanted(entry, one.entry)]
    only_b = [entry for entry in aligned.only_b if wanted(entry, other.entry)]
    if one.entry and other.entry and (only_a or only_b or not pairs):
        pairs, only_a, only_b = [Pair(one.entry, other.entry)], [], []
    if not (pairs or only_a or only_b):
        raise error or NotFound(f"no entry is named {printable(text)!r}")
    return replace(aligned, pairs=tuple(pairs), only_a=tuple(only_a), only_b=tuple(only_b))


@dataclass(frozen=True, slots=True)
class Scope:
    """The node of a checkpoint that is compared, its path, and the one entry that is asked for."""

    root: Any
    base: Path = ()
    entry: DiffEntry | None = None


def _scopes(a: Checkpoint, b: Checkpoint, key: Any) -> tuple[Scope, Scope, NotFound | None]:
    """Return what an address stands for in each; all of both without one.

    Of an entry it is the section around, in which it finds its like. The error is to be raised
    where neither has the address, and none of the names that are compared.

    Raises:
        NotFound: nothing answers to it in a file that is not one flat state dict.
        AmbiguousName: several things do.
    """
    if key is None:
        return Scope(a.root), Scope(b.root), None
    found = [(checkpoint, _found(checkpoint, key)) for checkpoint in (a, b)]
    nodes = [scope.root for _, scope in found if isinstance(scope, Scope)]
    is_entry = not (nodes and all(map(_is_container, nodes)))
    scopes: list[Scope] = []
    error = None
    for checkpoint, scope in found:
        if isinstance(scope, Scope):
            scopes.append(_section_around(checkpoint, scope) if is_entry else scope)
            continue
        if not is_entry and not is_flat(checkpoint.root):
            raise scope
        error = error or scope
        scopes.append(Scope(checkpoint.root))
    return scopes[0], scopes[1], None if nodes else error


def _weights_of(checkpoint: Checkpoint, key: Any) -> Scope:
    part, base = part_of(checkpoint, None if is_flat(checkpoint.root) else key, model_only=True)
    return Scope(part.root, base)


def _found(checkpoint: Checkpoint, key: Any) -> Scope | NotFound:
    try:
        path, node = resolve(checkpoint, key)
    except AmbiguousName:
        raise
    except NotFound as error:
        return error
    return Scope(node, path)


def _is_container(node: Any) -> bool:
    if isinstance(node, Opaque):
        return is_module(node) or bool(list_items(node))
    return isinstance(node, (dict, list, tuple))


def _section_around(checkpoint: Checkpoint, scope: Scope) -> Scope:
    entry = DiffEntry(name_of(scope.base), scope.base, scope.root)
    for part in _parts(checkpoint.root):
        if is_within(scope.base, part.path):
            return Scope(part.holder, part.path, entry)
    return Scope(checkpoint.root, entry=entry)


@dataclass
class _Alignment:
    """One run: what is to be compared of either side, and what has been found so far."""

    a: Scope
    b: Scope
    names_a: _SideNames
    names_b: _SideNames
    whole: bool
    """Whether all that is found will be kept."""
    pairs: list[Pair] = field(default_factory=list)
    only_a: list[DiffEntry] = field(default_factory=list)
    only_b: list[DiffEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Alignment:
        """Align all sections, models before the optimizers that hold their names."""
        parts_a, parts_b = _parts(self.a.root), _parts(self.b.root)
        couples = _coupled(parts_a, parts_b)
        taken = {id(part) for couple in couples for part in couple}
        names = self._models(couples, parts_a, parts_b, taken)
        for one, other in couples:
            self._couple(one, other, names)
        rest = self._rest(parts_a, parts_b, taken, names)
        left = [
            [name_of(scope.base + part.path) or "the root" for part in _left(parts, "model", taken)]
            for scope, parts in ((self.a, parts_a), (self.b, parts_b))
        ]
        self.notes.extend(_unpaired(left[0], left[1]))
        if rest and self.whole:
            self.notes.extend(_weights_alone(couples))
        self.notes.extend(self.names_a.rules.idle())
        return Alignment(
            tuple(self.pairs), tuple(self.only_a), tuple(self.only_b), tuple(self.notes)
        )

    def _models(
        self, couples: list[Couple], parts_a: list[Section], parts_b: list[Section], taken: set[int]
    ) -> dict[int, _Names]:
        """Return how the names of every section change, by the section's identity."""
        resolved: dict[int, _Names] = {}
        for one, other in couples:
            if one.kind in MODEL_KINDS:
                stripped = self._stripped(one, other)
                prefixed = self._prefixed(one, stripped[0], other, stripped[1])
                resolved[id(one)] = self.names_a.resolve_names(one, stripped[0], prefixed[0])
                resolved[id(other)] = self.names_b.resolve_names(other, stripped[1], prefixed[1])
        for side, parts in ((self.names_a, parts_a), (self.names_b, parts_b)):
            for part in parts:
                if part.kind in MODEL_KINDS and id(part) not in taken:
                    resolved[id(part)] = side.resolve_names(
                        part, side.strip(list_wrappable_keys(part.node))
                    )
            for part in parts:
                if part.kind == "optimizer":
                    resolved[id(part)] = side.optimizer(part)
        return resolved

    def _stripped(self, one: Section, other: Section) -> tuple[Renamed, Renamed]:
        """Take wrappers off both, unless more names agree where one or both stay as they are.

        They do where a layer is called `module` by its author, and one file has nothing else.
        """
        mine = self.names_a.strip(list_wrappable_keys(one.node))
        others = self.names_b.strip(list_wrappable_keys(other.node))
        ways = [(mine, others), (mine, {}), ({}, others), ({}, {})]
        if not (mine or others) or _common(one, mine, other, others) == len(one.node):
            return mine, others
        return max(ways, key=lambda way: _common(one, way[0], other, way[1]))

    def _prefixed(
        self, one: Section, mine: Renamed, other: Section, others: Renamed
    ) -> tuple[Renamed | None, Renamed | None]:
        """Return the names of both without the one prefix that `load_into` would take off.

        A Lightning file has `net.` before each key. None where there is no such prefix.
        """
        if self.names_a.strict or self.names_a.rules.rules:
            return None, None
        if 2 * _common(one, mine, other, others) > max(len(one.node), len(other.node)):
            return None, None  # more equal names than any prefix could add
        aligned = pair_keys(slots_of(one), slots_of(other))
        if not aligned.pairs or all(step.kind != "prefix" for step in aligned.steps):
            return None, None
        mine_bare, others_bare = (
            {full: name for name, full in names.items()} for names in aligned.bare
        )
        for part, bare in ((one, mine_bare), (other, others_bare)):
            if len({bare.get(name, name) for name in part.node}) < len(part.node):
                return None, None  # two keys would become one
        self.notes.extend(
            f"keys are compared without a prefix: {'AB'[step.side]} has "
            f"{printable(step.text.partition(' ')[0])!r} before its keys"
            for step in aligned.steps
            if step.kind == "prefix"
        )
        return mine_bare, others_bare

    def _couple(self, one: Section, other: Section, names: dict[int, _Names]) -> None:
        here, there = self.a.base + one.path, self.b.base + other.path
        before = here if here == there else ()
        if here != there and one.path == other.path:
            before = one.path
        regions = Region(), Region()
        for region, part, base in zip(regions, (one, other), (here, there), strict=True):
            _fill(region, part, base, names.get(id(part), _AS_THEY_ARE), outer=before)
            region.leaves.pop((), None)  # an object that is the section itself
            region.containers.pop((), None)
        self._take(*regions)
        if isinstance(one.holder, Opaque) and isinstance(other.holder, Opaque):
            name = name_of(before or here)
            a, b = _bare(one.holder), _bare(other.holder)
            self.pairs.append(Pair(DiffEntry(name, here, a), DiffEntry(name, there, b)))
        self._metadata(one, other, name_of(here))

    def _rest(
        self,
        parts_a: list[Section],
        parts_b: list[Section],
        taken: set[int],
        names: dict[int, _Names],
    ) -> bool:
        """Values, and sections that nothing stands against: by path; whether there are any."""
        pools = Region(), Region()
        outer = self.a.base if self.a.base == self.b.base else ()
        for pool, scope, parts in zip(pools, (self.a, self.b), (parts_a, parts_b), strict=True):
            skip = frozenset(part.path for part in parts)
            pool.fill(scope.root, scope.base, outer=outer, skip=skip)
            for part in parts:
                if id(part) not in taken:
                    base, own = scope.base + part.path, names.get(id(part), _AS_THEY_ARE)
                    _fill(pool, part, base, own, outer=outer, before=part.path)
        self._take(*pools)
        return any(pool.leaves for pool in pools)

    def _take(self, a: Region, b: Region) -> None:
        pairs, only_a, only_b = pair_regions(a, b)
        self.pairs.extend(pairs)
        self.only_a.extend(only_a)
        self.only_b.extend(only_b)

    def _metadata(self, one: Section, other: Section, name: str) -> None:
        """Note where two state dicts differ in the versions of their modules alone."""
        mine, others = (_versions(part.node) for part in (one, other))
        if mine is None or others is None or mine.keys() != others.keys():
            return
        unlike = first_difference(mine, others)
        if unlike is not None:
            where = printable(unlike.place)
            before = f"{name}: " if name else ""
            self.notes.append(f"{before}the versions in _metadata differ ({where})")


def _parts(root: Any) -> list[Section]:
    return [part for part in find_sections(root) if part.kind != "values"]


def _coupled(parts_a: list[Section], parts_b: list[Section]) -> list[Couple]:
    """Sections that stand for each other: of one path, else the only ones left of their sort."""
    by_path = {(part.path, _sort(part)): part for part in parts_b}
    couples = [
        (part, by_path[part.path, _sort(part)])
        for part in parts_a
        if (part.path, _sort(part)) in by_path
    ]
    taken = {id(part) for couple in couples for part in couple}
    for sort in dict.fromkeys(map(_sort, parts_a)):
        left = [_left(parts, sort, taken) for parts in (parts_a, parts_b)]
        if all(len({id(part.holder) for part in parts}) == 1 for parts in left):
            couples.append((left[0][0], left[1][0]))
    return couples


def _left(parts: list[Section], sort: str, taken: set[int]) -> list[Section]:
    return [part for part in parts if _sort(part) == sort and id(part) not in taken]


def _sort(part: Section) -> str:
    return _SORTS.get(part.kind, part.kind)


def _fill(
    region: Region,
    part: Section,
    base: Path,
    names: _Names,
    *,
    outer: Path = (),
    before: Path = (),
) -> None:
    """Take what a section holds, under the names by which it is compared."""
    under = _optimizer_names if part.kind == "optimizer" else _model_names

    def changed(path: Path, leaf: Any) -> tuple[Path, Any, Path]:
        key, compared = under(path, leaf, names.compared)
        return key, compared, under(path, leaf, names.shown)[0]

    region.fill(
        part.holder, base, outer=outer, before=before,
        changed=changed if names.compared or names.shown else _unchanged,
        weights=part.kind in MODEL_KINDS,
    )  # fmt: skip


def _model_names(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return an entry of a model's section under its new name."""
    return (renamed.get(path[0], path[0]), *path[1:]) if path else path, leaf


def _optimizer_names(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return an entry of an optimizer: names are keys of `state`, and items in the groups."""
    if path[:1] == ("state",) and len(path) > 1:
        return ("state", renamed.get(path[1], path[1]), *path[2:]), leaf
    named = path[:1] == ("param_groups",) and path[2:3] in (("params",), ("param_names",))
    return path, renamed.get(leaf, leaf) if named and isinstance(leaf, str) else leaf


def _bare(holder: Opaque) -> Opaque:
    """Return a pickled module without the pickled wrappers around it."""
    if not is_module(holder):
        return holder
    instead = unwrapped_modules(holder).instead
    while id(holder) in instead:
        holder = instead[id(holder)]
    return holder


def _versions(node: Any) -> dict[Any, Any] | None:
    """`_metadata` of a state dict, where it says something."""
    metadata = node.metadata if isinstance(node, OrderedMap) else None
    return metadata if isinstance(metadata, dict) and metadata else None


def _common(one: Section, mine: Renamed, other: Section, others: Renamed) -> int:
    """Return how many names both have after these changes."""
    names = {mine.get(name, name) for name in one.node}
    return sum(others.get(name, name) in names for name in other.node)


def _unpaired(left_a: list[str], left_b: list[str]) -> Iterator[str]:
    """Yield what to tell of state dicts, by address, that nothing stands against."""
    if left_a and left_b:
        yield (
            f"A has the state dicts {listed(left_a)} and B has {listed(left_b)}: they are not "
            "compared, because their names do not match; add --key to choose one"
        )


def _weights_alone(couples: list[Couple]) -> Iterator[str]:
    """Yield what to tell where one file is a state dict and the other holds more beside it."""
    for one, other in couples:
        if one.kind in MODEL_KINDS and bool(one.path) != bool(other.path):
            part, whole = "BA" if one.path else "AB"
            yield f"{part} is only a state dict; add --model-only to leave out the rest of {whole}"


Changed = Callable[[Path, Any], tuple[Path, Any, Path]]
"""Of a leaf: its path below its part, itself, both as they are compared, and the path as shown."""


def _unchanged(path: Path, leaf: Any) -> tuple[Path, Any, Path]:
    return path, leaf, path


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """Something that a checkpoint holds, under the name that the screen has for it.

    `leaf` is what `tree.walk` gives, or a container where that itself is what differs.
    """

    name: str
    path: Path
    """From the root of its file, as it is there."""
    leaf: Any
    is_weight: bool = False
    """True in the section of a model."""
    container: str | None = None
    """The outermost container around an unpaired entry that the other file does not have."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What both have, under the name that the screen has for A's."""

    a: DiffEntry
    b: DiffEntry

    @property
    def name(self) -> str:
        """The name for the screen."""
        return self.a.name


@dataclass
class Region:
    """Entries of a part, by key, in the order of the file; containers beside them."""

    leaves: dict[Key, DiffEntry] = field(default_factory=dict)
    containers: dict[Key, DiffEntry] = field(default_factory=dict)
    entered: dict[Key, str] = field(default_factory=dict)
    """The names of containers and of objects with entries of their own."""
    _again: dict[Key, int] = field(default_factory=dict)

    def fill(
        self,
        root: Any,
        base: Path,
        *,
        outer: Path = (),
        before: Path = (),
        skip: frozenset[Path] = frozenset(),
        changed: Changed = _unchanged,
        weights: bool = False,
    ) -> None:
        """Take what stands below `root`, whose path in the file is `base`.

        `before` is put before each key, and `outer` before that in names alone; `skip` has the
        paths below `root` that are left out. `weights` is True for the section of a model.
        """

        def enter(path: Path, node: Any) -> bool:
            if path in skip:
                return False
            key, _, compared = changed(path, node)
            self.entered[to_comparable(before + key)] = name_of(outer + before + compared)
            if isinstance(node, Opaque):
                return not is_set(node)
            shown = before + path
            entry = DiffEntry(name_of(outer + shown), base + path, node)
            self.containers[to_comparable(shown)] = entry
            return True

        for path, leaf in walk(root, enter=enter):
            key, leaf, shown = changed(path, leaf)
            entry = DiffEntry(name_of(outer + before + shown), base + path, leaf, weights)
            self._add(to_comparable(before + key), entry)

    def _add(self, key: Key, entry: DiffEntry) -> None:
        """Take an entry; one more of the same key (two objects as keys of a dict) is kept apart."""
        if key in self.leaves:
            count = self._again[key] = self._again.get(key, 1) + 1
            key = (*key, ("again", count))
        self.leaves[key] = entry


def pair_regions(a: Region, b: Region) -> tuple[list[Pair], list[DiffEntry], list[DiffEntry]]:
    """Return what both have by key, what only A has, what only B has, each in its file's order.

    A container is an entry where it stands against something else, or is empty and alone.
    """
    pairs: list[Pair] = []
    only_a: list[DiffEntry] = []
    only_b: list[DiffEntry] = []
    for key, entry in a.leaves.items():
        against = b.leaves.get(key) or b.containers.get(key)
        if against is not None:
            pairs.append(Pair(entry, against))
        else:
            only_a.append(_unpaired_entry(key, entry, a, b))
    for key, entry in b.leaves.items():
        if key in a.containers and key not in a.leaves:
            pairs.append(Pair(a.containers[key], entry))
        elif key not in a.leaves:
            only_b.append(_unpaired_entry(key, entry, b, a))
    for key, entry in a.containers.items():
        against = b.containers.get(key)
        if against is not None and not _same_container(entry.leaf, against.leaf):
            pairs.append(Pair(entry, against))
    return pairs, [*only_a, *_empty(a, b)], [*only_b, *_empty(b, a)]


def _unpaired_entry(key: Key, entry: DiffEntry, here: Region, there: Region) -> DiffEntry:
    """Return an entry with the outermost container around it that `there` does not have."""
    outer = (key[:end] for end in range(1, len(key) + 1))
    alone = (here.entered[at] for at in outer if at in here.entered and at not in there.entered)
    return replace(entry, container=next(alone, None))


def _same_container(a: Any, b: Any) -> bool:
    """Return whether two containers are of one kind: what order a dict keeps is no matter."""
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (dict, list, tuple))


def _empty(here: Region, there: Region) -> Iterator[DiffEntry]:
    """Yield empty containers that nothing on the other side stands against."""
    for key, entry in here.containers.items():
        if not entry.leaf and key not in there.containers and key not in there.leaves:
            yield _unpaired_entry(key, entry, here, there)
