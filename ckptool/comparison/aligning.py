"""Pair the entries of two checkpoints.

Sections are paired first: by path, else if each side has only one of their kind (a state dict
below `state_dict` and a flat file). Entries of a pair of sections are matched by key, without
wrapper prefixes; entries outside of sections by path.
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
from ckptool.inspection.equality import find_first_difference
from ckptool.matching.align import align as pair_keys
from ckptool.matching.report import slots_of
from ckptool.transforms.extraction import select_part
from ckptool.transforms.name_rules import AppliedRules, Rule
from ckptool.transforms.names import find_new_names, unwrap_modules
from ckptool.words import listed, printable

_PAIRED_KIND = {"state_dict": "model", "module": "model"}
"""Kinds of section that may be paired with each other, others only with their own kind."""

Couple = tuple[Section, Section]

Renamed = dict[str, str]
"""Old name to new, of the names that change."""


@dataclass(frozen=True, slots=True)
class _NewNames:
    """The new names of the entries of a section."""

    shown: Renamed
    """For the screen: without wrapper prefixes."""
    compared: Renamed
    """For the comparison: without wrapper prefixes, then with the rules applied."""


_UNCHANGED_NAMES = _NewNames({}, {})
STRICT_HINT = "add --strict-names to compare the keys unchanged"
RULES_HINT = "make the rules more specific"


@dataclass
class _SideNames:
    """The names of one checkpoint as they are compared."""

    file: str
    strict: bool = False
    rules: AppliedRules = field(default_factory=lambda: AppliedRules(()))
    _names_of_models: list[tuple[frozenset[str], _NewNames]] = field(default_factory=list)
    """The keys of each model so far, with their new names, for the optimizers."""

    def resolve_names(
        self, part: Section, stripped: Renamed, prefixed: Renamed | None = None
    ) -> _NewNames:
        """Return the compared names of a model, and remember them for the optimizers.

        `prefixed` replaces the compared names if a prefix distinguishes them from the other file's.

        Raises:
            NameCollision: two entries would get one name.
        """
        names = [name for name in part.node if isinstance(name, str)]
        renamed = self._apply_rules(names, stripped) if prefixed is None else prefixed
        hint = RULES_HINT if self.rules.rules else STRICT_HINT
        where = printable(part.name) or "the root"
        check_collisions(part.node, renamed, file=self.file or None, location=where, hint=hint)
        resolved = _NewNames(stripped, renamed)
        self._names_of_models.append((frozenset(names), resolved))
        return resolved

    def resolve_optimizer_names(self, part: Section) -> _NewNames:
        """Return the compared names of an optimizer: those of its model.

        If no model has its names, they are renamed like the keys of a model.
        """
        names_of_optimizer = list_optimizer_names(part.node)
        shown = find_new_names(
            names_of_optimizer,
            [(names, resolved.shown) for names, resolved in self._names_of_models],
        )
        if shown:
            compared_names = [
                (names, resolved.compared) for names, resolved in self._names_of_models
            ]
            return _NewNames(shown, find_new_names(names_of_optimizer, compared_names))
        stripped = self.strip(names_of_optimizer)
        return _NewNames(stripped, self._apply_rules(names_of_optimizer, stripped))

    def strip(self, names: list[str]) -> Renamed:
        """Return the names that change without wrapper prefixes: old name -> new name.

        Raises:
            NameCollision: two names would become one.
        """
        if self.strict:
            return {}
        try:
            return strip_names(names).renamed
        except NameCollision as error:
            raise NameCollision(error.message, file=self.file or None, hint=STRICT_HINT) from error

    def _apply_rules(self, names: Sequence[str], stripped: Renamed) -> Renamed:
        """Return the names that change by removing prefixes and applying rules: old -> new."""
        ruled = self.rules.rename_keys(stripped.get(name, name) for name in names)
        new_names = {name: ruled[stripped.get(name, name)] for name in names}
        return {name: new_name for name, new_name in new_names.items() if new_name != name}


@dataclass(frozen=True, slots=True)
class Alignment:
    """The common entries, and those of only one file, in the order of the sections and of A."""

    pairs: tuple[Pair, ...]
    only_a: tuple[DiffEntry, ...]
    only_b: tuple[DiffEntry, ...]
    notes: tuple[str, ...] = ()
    """Sentences on pairs that could not be decided, and rules that matched nothing."""


def align(
    a: Checkpoint,
    b: Checkpoint,
    *,
    strict_names: bool = False,
    rules: Sequence[Rule] = (),
    key: Any = None,
    model_only: bool = False,
) -> Alignment:
    """Pair the entries of two checkpoints, from their headers only.

    Args:
        a: The checkpoint to which `rules` apply.
        b: The other.
        strict_names: Compare names with their wrapper prefixes.
        rules: Applied in order, after the wrapper prefixes are removed.
        key: Pair only the entry at this path (`addressing.resolve`). If one file is a flat state
            dict without this path, the whole file.
        model_only: Pair only the weights, as `Take(key=key, model_only=True)` selects them.

    Raises:
        NameCollision: two entries of one file would be compared under one name.
        NotFound: nothing is at `key`, or the file has no model, or several (`AmbiguousName`).
        LimitExceeded: a tree is nested or repeated more than the limits allow.
    """
    error: NotFound | None = None
    if model_only:
        scope_a, scope_b = (_select_weights(checkpoint, key) for checkpoint in (a, b))
    else:
        scope_a, scope_b, error = _resolve_scopes(a, b, key)
    is_whole = error is None and not (scope_a.entry or scope_b.entry)
    aligned = _Aligner(
        scope_a,
        scope_b,
        _SideNames(a.path, strict_names, AppliedRules(rules, a.path)),
        _SideNames(b.path, strict_names),
        whole=is_whole,
    ).run()
    if is_whole:
        return aligned
    name = name_of(tuple(key)) if isinstance(key, (tuple, list)) else str(key)

    def is_selected(entry: DiffEntry, selected: DiffEntry | None) -> bool:
        """Return True if an entry is at the selected path, or has the name if no path is known."""
        if error is None:
            return selected is not None and entry.path == selected.path
        return entry.name == name or entry.name.endswith(f"/{name}")

    pairs = [
        pair
        for pair in aligned.pairs
        if is_selected(pair.a, scope_a.entry) or is_selected(pair.b, scope_b.entry)
    ]
    only_a = [entry for entry in aligned.only_a if is_selected(entry, scope_a.entry)]
    only_b = [entry for entry in aligned.only_b if is_selected(entry, scope_b.entry)]
    # Two entries that were both selected are a pair, even if their names differ.
    if scope_a.entry and scope_b.entry and (only_a or only_b or not pairs):
        pairs, only_a, only_b = [Pair(scope_a.entry, scope_b.entry)], [], []
    if not (pairs or only_a or only_b):
        raise error or NotFound(f"no entry is named {printable(name)!r}")
    return replace(aligned, pairs=tuple(pairs), only_a=tuple(only_a), only_b=tuple(only_b))


@dataclass(frozen=True, slots=True)
class Scope:
    """The compared node of a checkpoint, its path, and the one selected entry, if any."""

    root: Any
    base: Path = ()
    entry: DiffEntry | None = None


def _resolve_scopes(a: Checkpoint, b: Checkpoint, key: Any) -> tuple[Scope, Scope, NotFound | None]:
    """Return the compared node at `key` in each checkpoint, or the roots if `key` is None.

    For a single entry it is the section around it, in which it finds its pair. If only one file has
    `key`, and the other is a flat state dict, the root of the other is compared. The third item is
    the error to raise if neither file has `key`, nor a compared entry with this name.

    Raises:
        NotFound: a file that is not one flat state dict does not have the address.
        AmbiguousName: the address matches several nodes.
    """
    if key is None:
        return Scope(a.root), Scope(b.root), None
    results = [(checkpoint, _find_scope(checkpoint, key)) for checkpoint in (a, b)]
    nodes = [result.root for _, result in results if isinstance(result, Scope)]
    is_entry = not (nodes and all(map(_is_container, nodes)))
    scopes: list[Scope] = []
    error = None
    for checkpoint, result in results:
        if isinstance(result, Scope):
            scopes.append(_find_enclosing_section(checkpoint, result) if is_entry else result)
            continue
        if not is_entry and not is_flat(checkpoint.root):
            raise result
        error = error or result
        scopes.append(Scope(checkpoint.root))
    return scopes[0], scopes[1], None if nodes else error


def _select_weights(checkpoint: Checkpoint, key: Any) -> Scope:
    """Return the scope of a checkpoint's weights, with `key` if it is not a flat state dict."""
    part, base = select_part(checkpoint, None if is_flat(checkpoint.root) else key, model_only=True)
    return Scope(part.root, base)


def _find_scope(checkpoint: Checkpoint, key: Any) -> Scope | NotFound:
    """Return the node at `key`, or the error if the checkpoint does not have it."""
    try:
        path, node = resolve(checkpoint, key)
    except AmbiguousName:
        raise
    except NotFound as error:
        return error
    return Scope(node, path)


def _is_container(node: Any) -> bool:
    """Return True for a dict, list, tuple or module, or an object that has items."""
    if isinstance(node, Opaque):
        return is_module(node) or bool(list_items(node))
    return isinstance(node, (dict, list, tuple))


def _find_enclosing_section(checkpoint: Checkpoint, scope: Scope) -> Scope:
    """Return the section around a node, with the node as its selected entry."""
    entry = DiffEntry(name_of(scope.base), scope.base, scope.root)
    for part in _find_sections(checkpoint.root):
        if is_within(scope.base, part.path):
            return Scope(part.holder, part.path, entry)
    return Scope(checkpoint.root, entry=entry)


@dataclass
class _Aligner:
    """One alignment: the compared scope of either side, and the pairs so far."""

    a: Scope
    b: Scope
    names_a: _SideNames
    names_b: _SideNames
    whole: bool
    """True if no entry is left out later."""
    pairs: list[Pair] = field(default_factory=list)
    only_a: list[DiffEntry] = field(default_factory=list)
    only_b: list[DiffEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Alignment:
        """Pair the sections and their entries, then all entries outside of paired sections."""
        parts_a, parts_b = _find_sections(self.a.root), _find_sections(self.b.root)
        couples = _pair_sections(parts_a, parts_b)
        paired_ids = {id(part) for couple in couples for part in couple}
        names = self._resolve_all_names(couples, parts_a, parts_b, paired_ids)
        for section_a, section_b in couples:
            self._pair_entries(section_a, section_b, names)
        has_remaining = self._pair_remaining(parts_a, parts_b, paired_ids, names)
        unpaired_names = [
            [
                name_of(scope.base + part.path) or "the root"
                for part in _find_unpaired(parts, "model", paired_ids)
            ]
            for scope, parts in ((self.a, parts_a), (self.b, parts_b))
        ]
        self.notes.extend(_describe_unpaired(unpaired_names[0], unpaired_names[1]))
        if has_remaining and self.whole:
            self.notes.extend(_suggest_model_only(couples))
        self.notes.extend(self.names_a.rules.describe_unused())
        return Alignment(
            tuple(self.pairs), tuple(self.only_a), tuple(self.only_b), tuple(self.notes)
        )

    def _resolve_all_names(
        self,
        couples: list[Couple],
        parts_a: list[Section],
        parts_b: list[Section],
        paired_ids: set[int],
    ) -> dict[int, _NewNames]:
        """Return the compared names of every section, by the section's identity.

        Models come first, because optimizers use their names.
        """
        resolved: dict[int, _NewNames] = {}
        for section_a, section_b in couples:
            if section_a.kind in MODEL_KINDS:
                stripped = self._choose_stripped_names(section_a, section_b)
                prefixed = self._remove_common_prefix(
                    section_a, stripped[0], section_b, stripped[1]
                )
                resolved[id(section_a)] = self.names_a.resolve_names(
                    section_a, stripped[0], prefixed[0]
                )
                resolved[id(section_b)] = self.names_b.resolve_names(
                    section_b, stripped[1], prefixed[1]
                )
        for side, parts in ((self.names_a, parts_a), (self.names_b, parts_b)):
            for part in parts:
                if part.kind in MODEL_KINDS and id(part) not in paired_ids:
                    resolved[id(part)] = side.resolve_names(
                        part, side.strip(list_wrappable_keys(part.node))
                    )
            for part in parts:
                if part.kind == "optimizer":
                    resolved[id(part)] = side.resolve_optimizer_names(part)
        return resolved

    def _choose_stripped_names(
        self, section_a: Section, section_b: Section
    ) -> tuple[Renamed, Renamed]:
        """Return the new names, without wrapper prefixes, of the keys that change on each side.

        Prefixes are removed from both sides, or only from sides where more names agree then: a
        model may have a layer `module`, and a file nothing but this layer.
        """
        stripped_a = self.names_a.strip(list_wrappable_keys(section_a.node))
        stripped_b = self.names_b.strip(list_wrappable_keys(section_b.node))
        candidates = [(stripped_a, stripped_b), (stripped_a, {}), ({}, stripped_b), ({}, {})]
        if not (stripped_a or stripped_b) or _count_common_names(
            section_a, stripped_a, section_b, stripped_b
        ) == len(section_a.node):
            return stripped_a, stripped_b
        return max(
            candidates, key=lambda pair: _count_common_names(section_a, pair[0], section_b, pair[1])
        )

    def _remove_common_prefix(
        self, section_a: Section, stripped_a: Renamed, section_b: Section, stripped_b: Renamed
    ) -> tuple[Renamed | None, Renamed | None]:
        """Return the names of both without the one prefix that `load_into` would remove.

        A Lightning file has `net.` before each key. None for both if no side has such a prefix.
        """
        if self.names_a.strict or self.names_a.rules.rules:
            return None, None
        if 2 * _count_common_names(section_a, stripped_a, section_b, stripped_b) > max(
            len(section_a.node), len(section_b.node)
        ):
            return None, None  # more equal names than any prefix could add
        aligned = pair_keys(slots_of(section_a), slots_of(section_b))
        if not aligned.pairs or all(step.kind != "prefix" for step in aligned.steps):
            return None, None
        bare_a, bare_b = ({full: name for name, full in names.items()} for names in aligned.bare)
        for part, bare in ((section_a, bare_a), (section_b, bare_b)):
            if len({bare.get(name, name) for name in part.node}) < len(part.node):
                return None, None  # two keys would become one
        self.notes.extend(
            f"keys are compared without a prefix: {'AB'[step.side]} has "
            f"{printable(step.text.partition(' ')[0])!r} before its keys"
            for step in aligned.steps
            if step.kind == "prefix"
        )
        return bare_a, bare_b

    def _pair_entries(
        self, section_a: Section, section_b: Section, names: dict[int, _NewNames]
    ) -> None:
        """Pair the entries of two sections, and compare their holders and `_metadata`.

        Names are shown with the path of A, unless only the scopes of the two files differ.
        """
        base_a, base_b = self.a.base + section_a.path, self.b.base + section_b.path
        prefix = base_a if base_a == base_b else ()
        if base_a != base_b and section_a.path == section_b.path:
            prefix = section_a.path
        regions = Region(), Region()
        for region, part, base in zip(
            regions, (section_a, section_b), (base_a, base_b), strict=True
        ):
            _fill_region(region, part, base, names.get(id(part), _UNCHANGED_NAMES), outer=prefix)
            region.leaves.pop((), None)  # an object that is the section itself
            region.containers.pop((), None)
        self._pair_regions(*regions)
        if isinstance(section_a.holder, Opaque) and isinstance(section_b.holder, Opaque):
            name = name_of(prefix or base_a)
            a, b = _unwrap_module(section_a.holder), _unwrap_module(section_b.holder)
            self.pairs.append(Pair(DiffEntry(name, base_a, a), DiffEntry(name, base_b, b)))
        self._compare_metadata(section_a, section_b, name_of(base_a))

    def _pair_remaining(
        self,
        parts_a: list[Section],
        parts_b: list[Section],
        paired_ids: set[int],
        names: dict[int, _NewNames],
    ) -> bool:
        """Pair values and unpaired sections by path; return True if any exist."""
        regions = Region(), Region()
        outer = self.a.base if self.a.base == self.b.base else ()
        for region, scope, parts in zip(regions, (self.a, self.b), (parts_a, parts_b), strict=True):
            skip = frozenset(part.path for part in parts)
            region.fill(scope.root, scope.base, outer=outer, skip=skip)
            for part in parts:
                if id(part) not in paired_ids:
                    base, resolved = scope.base + part.path, names.get(id(part), _UNCHANGED_NAMES)
                    _fill_region(region, part, base, resolved, outer=outer, before=part.path)
        self._pair_regions(*regions)
        return any(region.leaves for region in regions)

    def _pair_regions(self, a: Region, b: Region) -> None:
        """Pair the entries of two regions, and keep the result."""
        pairs, only_a, only_b = pair_regions(a, b)
        self.pairs.extend(pairs)
        self.only_a.extend(only_a)
        self.only_b.extend(only_b)

    def _compare_metadata(self, section_a: Section, section_b: Section, name: str) -> None:
        """Note that the module versions in `_metadata` of two state dicts differ."""
        versions_a, versions_b = (
            _read_module_versions(part.node) for part in (section_a, section_b)
        )
        if versions_a is None or versions_b is None or versions_a.keys() != versions_b.keys():
            return
        difference = find_first_difference(versions_a, versions_b)
        if difference is not None:
            where = printable(difference.place)
            before = f"{name}: " if name else ""
            self.notes.append(f"{before}the versions in _metadata differ ({where})")


def _find_sections(root: Any) -> list[Section]:
    """Return the sections of a tree, except plain values."""
    return [part for part in find_sections(root) if part.kind != "values"]


def _pair_sections(parts_a: list[Section], parts_b: list[Section]) -> list[Couple]:
    """Return pairs of sections: with equal paths, else the only ones of their kind.

    The sections of a kind that are still unpaired make a pair if, on each side, all of them are
    one and the same object of the file (their `holder`), reached by several paths.
    """
    by_path = {(part.path, _normalize_kind(part)): part for part in parts_b}
    couples = [
        (part, by_path[part.path, _normalize_kind(part)])
        for part in parts_a
        if (part.path, _normalize_kind(part)) in by_path
    ]
    paired_ids = {id(part) for couple in couples for part in couple}
    for kind in dict.fromkeys(map(_normalize_kind, parts_a)):
        unpaired = [_find_unpaired(parts, kind, paired_ids) for parts in (parts_a, parts_b)]
        if all(len({id(part.holder) for part in parts}) == 1 for parts in unpaired):
            couples.append((unpaired[0][0], unpaired[1][0]))
    return couples


def _find_unpaired(parts: list[Section], kind: str, paired_ids: set[int]) -> list[Section]:
    """Return the sections of one kind that are not paired yet."""
    return [part for part in parts if _normalize_kind(part) == kind and id(part) not in paired_ids]


def _normalize_kind(part: Section) -> str:
    """Return the kind that two sections must share to be paired."""
    return _PAIRED_KIND.get(part.kind, part.kind)


def _fill_region(
    region: Region,
    part: Section,
    base: Path,
    names: _NewNames,
    *,
    outer: Path = (),
    before: Path = (),
) -> None:
    """Add the entries of a section to a region, under their compared names."""
    rename_entry = _rename_optimizer_entry if part.kind == "optimizer" else _rename_model_entry

    def change_entry(path: Path, leaf: Any) -> tuple[Path, Any, Path]:
        """Return the compared path and leaf of an entry, and its shown path."""
        key, compared = rename_entry(path, leaf, names.compared)
        return key, compared, rename_entry(path, leaf, names.shown)[0]

    region.fill(
        part.holder, base, outer=outer, before=before,
        changed=change_entry if names.compared or names.shown else _keep_entry,
        weights=part.kind in MODEL_KINDS,
    )  # fmt: skip


def _rename_model_entry(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return the path and leaf of a model's entry, with its new name."""
    return (renamed.get(path[0], path[0]), *path[1:]) if path else path, leaf


def _rename_optimizer_entry(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return the path and leaf of an optimizer's entry, with its new name.

    The names of parameters are keys of `state`, and items in the groups.
    """
    if path[:1] == ("state",) and len(path) > 1:
        return ("state", renamed.get(path[1], path[1]), *path[2:]), leaf
    named = path[:1] == ("param_groups",) and path[2:3] in (("params",), ("param_names",))
    return path, renamed.get(leaf, leaf) if named and isinstance(leaf, str) else leaf


def _unwrap_module(holder: Opaque) -> Opaque:
    """Return a pickled module without the pickled wrappers around it; other objects unchanged."""
    if not is_module(holder):
        return holder
    replacements = unwrap_modules(holder).replacements
    while id(holder) in replacements:
        holder = replacements[id(holder)]
    return holder


def _read_module_versions(node: Any) -> dict[Any, Any] | None:
    """Return the `_metadata` of a state dict; None if it is empty or missing."""
    metadata = node.metadata if isinstance(node, OrderedMap) else None
    return metadata if isinstance(metadata, dict) and metadata else None


def _count_common_names(
    section_a: Section, renamed_a: Renamed, section_b: Section, renamed_b: Renamed
) -> int:
    """Return how many names two sections share after each is renamed."""
    names = {renamed_a.get(name, name) for name in section_a.node}
    return sum(renamed_b.get(name, name) in names for name in section_b.node)


def _describe_unpaired(paths_a: list[str], paths_b: list[str]) -> Iterator[str]:
    """Yield a note on the paths of state dicts that have no pair, if both files have some."""
    if paths_a and paths_b:
        yield (
            f"A has the state dicts {listed(paths_a)} and B has {listed(paths_b)}: they are not "
            "compared, because their names do not match; add --key to choose one"
        )


def _suggest_model_only(couples: list[Couple]) -> Iterator[str]:
    """Yield a note if one file is a state dict and the other has more next to it."""
    for section_a, section_b in couples:
        if section_a.kind in MODEL_KINDS and bool(section_a.path) != bool(section_b.path):
            part, whole = "BA" if section_a.path else "AB"
            yield f"{part} is only a state dict; add --model-only to leave out the rest of {whole}"


Changed = Callable[[Path, Any], tuple[Path, Any, Path]]
"""Maps the path and leaf of an entry to its compared path, compared leaf, and shown path."""


def _keep_entry(path: Path, leaf: Any) -> tuple[Path, Any, Path]:
    """Return the path and leaf of an entry unchanged, as a `Changed`."""
    return path, leaf, path


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """An entry of a checkpoint, with its shown name.

    `leaf` is a leaf of `tree.walk`, or a container that itself differs.
    """

    name: str
    path: Path
    """From the root of its file, unchanged."""
    leaf: Any
    is_weight: bool = False
    """True in the section of a model."""
    container: str | None = None
    """The outermost container around an unpaired entry that the other file does not have."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two entries that are compared; the shown name is A's."""

    a: DiffEntry
    b: DiffEntry

    @property
    def name(self) -> str:
        """The name for the screen."""
        return self.a.name


@dataclass
class Region:
    """Entries of a section by compared path, in the order of the file, and its containers."""

    leaves: dict[Key, DiffEntry] = field(default_factory=dict)
    containers: dict[Key, DiffEntry] = field(default_factory=dict)
    entered: dict[Key, str] = field(default_factory=dict)
    """The names of containers and of objects with entries of their own."""
    _repeats: dict[Key, int] = field(default_factory=dict)

    def fill(
        self,
        root: Any,
        base: Path,
        *,
        outer: Path = (),
        before: Path = (),
        skip: frozenset[Path] = frozenset(),
        changed: Changed = _keep_entry,
        weights: bool = False,
    ) -> None:
        """Add the entries and containers below `root`, whose path in the file is `base`.

        `before` is put before each key, and `outer` before that in names only; `skip` has the
        paths below `root` that are left out. `changed` renames entries. `weights` is True for the
        section of a model.
        """

        def should_enter(path: Path, node: Any) -> bool:
            """Record a container, and return True to add the entries in it.

            Skipped paths, and sets, have no entries of their own.
            """
            if path in skip:
                return False
            compared_path, _, shown_path = changed(path, node)
            name = name_of(outer + before + shown_path)
            self.entered[to_comparable(before + compared_path)] = name
            if isinstance(node, Opaque):
                return not is_set(node)
            entry = DiffEntry(name_of(outer + before + path), base + path, node)
            self.containers[to_comparable(before + path)] = entry
            return True

        for path, leaf in walk(root, enter=should_enter):
            compared_path, leaf, shown_path = changed(path, leaf)
            entry = DiffEntry(name_of(outer + before + shown_path), base + path, leaf, weights)
            self._add(to_comparable(before + compared_path), entry)

    def _add(self, key: Key, entry: DiffEntry) -> None:
        """Add an entry; a repeated key (two objects as keys of a dict) gets a number."""
        if key in self.leaves:
            number = self._repeats[key] = self._repeats.get(key, 1) + 1
            key = (*key, ("again", number))
        self.leaves[key] = entry


def pair_regions(a: Region, b: Region) -> tuple[list[Pair], list[DiffEntry], list[DiffEntry]]:
    """Return the common entries by key, those of only A, and those of only B, in file order.

    A container is an entry if its counterpart is not a container, or if it is empty and unpaired.
    """
    pairs: list[Pair] = []
    only_a: list[DiffEntry] = []
    only_b: list[DiffEntry] = []
    for key, entry in a.leaves.items():
        counterpart = b.leaves.get(key) or b.containers.get(key)
        if counterpart is not None:
            pairs.append(Pair(entry, counterpart))
        else:
            only_a.append(_add_missing_container(key, entry, a, b))
    for key, entry in b.leaves.items():
        if key in a.containers and key not in a.leaves:
            pairs.append(Pair(a.containers[key], entry))
        elif key not in a.leaves:
            only_b.append(_add_missing_container(key, entry, b, a))
    for key, entry in a.containers.items():
        counterpart = b.containers.get(key)
        if counterpart is not None and not _is_same_container_type(entry.leaf, counterpart.leaf):
            pairs.append(Pair(entry, counterpart))
    return pairs, [*only_a, *_find_empty_containers(a, b)], [*only_b, *_find_empty_containers(b, a)]


def _add_missing_container(key: Key, entry: DiffEntry, here: Region, there: Region) -> DiffEntry:
    """Return an entry with its outermost container that `there` does not have."""
    outer = (key[:end] for end in range(1, len(key) + 1))
    missing = (here.entered[at] for at in outer if at in here.entered and at not in there.entered)
    return replace(entry, container=next(missing, None))


def _is_same_container_type(a: Any, b: Any) -> bool:
    """Return True if both are dicts, both lists or both tuples, of any subclass."""
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (dict, list, tuple))


def _find_empty_containers(here: Region, there: Region) -> Iterator[DiffEntry]:
    """Yield empty containers that have no counterpart on the other side."""
    for key, entry in here.containers.items():
        if not entry.leaf and key not in there.containers and key not in there.leaves:
            yield _add_missing_container(key, entry, here, there)
