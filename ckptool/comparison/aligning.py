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

_SHARED_KIND = {"state_dict": "model", "module": "model"}
"""By kind of section, a common kind: a state dict may be paired with a module. Other kinds are only
paired with themselves."""

SectionPair = tuple[Section, Section]

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
        self, section: Section, stripped: Renamed, bare: Renamed | None = None
    ) -> _NewNames:
        """Return the compared names of a model, and remember them for the optimizers.

        `stripped` are its names without wrapper prefixes, to which the rules apply. `bare`, if
        given, are the compared names instead: without a prefix that only one file has.

        Raises:
            NameCollision: two entries would get one name.
        """
        names = [name for name in section.node if isinstance(name, str)]
        renamed = self._apply_rules(names, stripped) if bare is None else bare
        hint = RULES_HINT if self.rules.rules else STRICT_HINT
        where = printable(section.name) or "the root"
        check_collisions(section.node, renamed, file=self.file or None, location=where, hint=hint)
        resolved = _NewNames(stripped, renamed)
        self._names_of_models.append((frozenset(names), resolved))
        return resolved

    def resolve_optimizer_names(self, section: Section) -> _NewNames:
        """Return the new names of an optimizer's parameters, to print and to compare: its model's.

        If no model has its names, they are renamed like the keys of a model.
        """
        parameters = list_optimizer_names(section.node)
        models = self._names_of_models
        shown = find_new_names(parameters, [(names, new.shown) for names, new in models])
        if shown:
            compared = find_new_names(parameters, [(names, new.compared) for names, new in models])
            return _NewNames(shown, compared)
        stripped = self.strip(parameters)
        return _NewNames(stripped, self._apply_rules(parameters, stripped))

    def strip(self, names: list[str]) -> Renamed:
        """Return the names that change without wrapper prefixes: old name -> new name.

        None change in a strict comparison.

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
        bare_names = {name: stripped.get(name, name) for name in names}
        new_by_bare = self.rules.rename_keys(bare_names.values())
        return {
            name: new_by_bare[bare]
            for name, bare in bare_names.items()
            if new_by_bare[bare] != name
        }


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
    not_found: NotFound | None = None  # raised at the end, if no entry has the name `key` either
    if model_only:
        scope_a, scope_b = (_select_weights(checkpoint, key) for checkpoint in (a, b))
    else:
        scope_a, scope_b, not_found = _resolve_scopes(a, b, key)
    keeps_all = not_found is None and not (scope_a.entry or scope_b.entry)
    aligned = _Aligner(
        scope_a,
        scope_b,
        _SideNames(a.path, strict_names, AppliedRules(rules, a.path)),
        _SideNames(b.path, strict_names),
        keeps_all=keeps_all,
    ).run()
    if keeps_all:
        return aligned
    return _select_entry(aligned, scope_a.entry, scope_b.entry, key, not_found)


def _select_entry(
    aligned: Alignment,
    selected_a: DiffEntry | None,
    selected_b: DiffEntry | None,
    key: Any,
    error: NotFound | None,
) -> Alignment:
    """Return the alignment of only one entry: the selected one of either file, with its pair.

    With an `error`, neither file has an entry at `key`; then entries with this compared name count.

    Raises:
        NotFound: `error`, if no entry has the name either.
    """
    name = name_of(tuple(key)) if isinstance(key, (tuple, list)) else str(key)

    def is_selected(entry: DiffEntry, selected: DiffEntry | None) -> bool:
        """Return True if an entry is at the selected path, or has the name if no path is known."""
        if error is None:
            return selected is not None and entry.path == selected.path
        return entry.name == name or entry.name.endswith(f"/{name}")

    pairs = [
        pair
        for pair in aligned.pairs
        if is_selected(pair.a, selected_a) or is_selected(pair.b, selected_b)
    ]
    only_a = [entry for entry in aligned.only_a if is_selected(entry, selected_a)]
    only_b = [entry for entry in aligned.only_b if is_selected(entry, selected_b)]
    # Two entries that were both selected are a pair, even if their names differ: the alignment
    # has each of them alone then, or in no pair.
    if selected_a and selected_b and (only_a or only_b or not pairs):
        pairs, only_a, only_b = [Pair(selected_a, selected_b)], [], []
    if not (pairs or only_a or only_b):
        raise error or NotFound(f"no entry is named {printable(name)!r}")
    return replace(aligned, pairs=tuple(pairs), only_a=tuple(only_a), only_b=tuple(only_b))


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a checkpoint that is compared."""

    root: Any
    """The node below which entries are compared."""
    base: Path = ()
    """The path of `root` in the checkpoint."""
    entry: DiffEntry | None = None
    """The entry of which alone the result is kept, if the user chose a single one."""


def _resolve_scopes(a: Checkpoint, b: Checkpoint, key: Any) -> tuple[Scope, Scope, NotFound | None]:
    """Return the compared node at `key` in each checkpoint, or the roots if `key` is None.

    For a single entry it is the section around it, in which it finds its pair. If only one file has
    `key`, and the other is a flat state dict, the root of the other is compared. The third item is
    the error to raise if neither file has `key`, nor a compared entry with this name (`weight` may
    be the compared name of `module.weight`).

    Raises:
        NotFound: a file that is not one flat state dict does not have `key`.
        AmbiguousName: `key` matches several nodes.
    """
    if key is None:
        return Scope(a.root), Scope(b.root), None
    scopes_or_errors = [_find_scope(checkpoint, key) for checkpoint in (a, b)]
    nodes = [result.root for result in scopes_or_errors if isinstance(result, Scope)]
    # A key that neither file has can only be the compared name of an entry.
    is_single_entry = not nodes or not all(map(_is_container, nodes))
    scopes: list[Scope] = []
    first_error = None
    for checkpoint, result in zip((a, b), scopes_or_errors, strict=True):
        if isinstance(result, Scope):
            if is_single_entry:
                result = _find_enclosing_section(checkpoint, result)
            scopes.append(result)
        elif is_single_entry or is_flat(checkpoint.root):
            first_error = first_error or result
            scopes.append(Scope(checkpoint.root))
        else:
            raise result
    return scopes[0], scopes[1], None if nodes else first_error


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
    """Return the section around a node, with the node as its selected entry.

    Outside of all sections it is the whole file.
    """
    entry = DiffEntry(name_of(scope.base), scope.base, scope.root)
    for section in _find_sections(checkpoint.root):
        if is_within(scope.base, section.path):
            return Scope(section.holder, section.path, entry)
    return Scope(checkpoint.root, entry=entry)


@dataclass
class _Aligner:
    """One alignment: the compared scope of either side, and the pairs so far."""

    a: Scope
    b: Scope
    names_a: _SideNames
    names_b: _SideNames
    keeps_all: bool
    """True unless only one selected entry of the result is kept."""
    pairs: list[Pair] = field(default_factory=list)
    only_a: list[DiffEntry] = field(default_factory=list)
    only_b: list[DiffEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Alignment:
        """Pair the sections and their entries, then all entries outside of paired sections."""
        sections_a, sections_b = _find_sections(self.a.root), _find_sections(self.b.root)
        section_pairs = _pair_sections(sections_a, sections_b)
        paired_ids = {id(section) for section_pair in section_pairs for section in section_pair}
        names = self._resolve_all_names(section_pairs, sections_a, sections_b, paired_ids)
        for section_a, section_b in section_pairs:
            self._pair_entries(section_a, section_b, names)
        has_remaining = self._pair_remaining(sections_a, sections_b, paired_ids, names)
        unpaired_names = [
            [
                name_of(scope.base + section.path) or "the root"
                for section in _find_unpaired(sections, "model", paired_ids)
            ]
            for scope, sections in ((self.a, sections_a), (self.b, sections_b))
        ]
        self.notes.extend(_describe_unpaired(unpaired_names[0], unpaired_names[1]))
        if has_remaining and self.keeps_all:
            self.notes.extend(_suggest_model_only(section_pairs))
        self.notes.extend(self.names_a.rules.describe_unused())  # the rules apply only to A
        return Alignment(
            tuple(self.pairs), tuple(self.only_a), tuple(self.only_b), tuple(self.notes)
        )

    def _resolve_all_names(
        self,
        section_pairs: list[SectionPair],
        sections_a: list[Section],
        sections_b: list[Section],
        paired_ids: set[int],
    ) -> dict[int, _NewNames]:
        """Return the compared names of every section, by the section's identity.

        Models come first, because optimizers use their names.
        """
        resolved: dict[int, _NewNames] = {}
        for section_a, section_b in section_pairs:
            if section_a.kind in MODEL_KINDS:
                stripped_a, stripped_b = self._choose_stripped_names(section_a, section_b)
                bare_a, bare_b = self._remove_extra_prefix(
                    section_a, stripped_a, section_b, stripped_b
                )
                # Stripped names are shown; bare ones are compared, or, if None, the stripped ones
                # with the rules applied.
                resolved[id(section_a)] = self.names_a.resolve_names(section_a, stripped_a, bare_a)
                resolved[id(section_b)] = self.names_b.resolve_names(section_b, stripped_b, bare_b)
        for side, sections in ((self.names_a, sections_a), (self.names_b, sections_b)):
            for section in sections:
                if section.kind in MODEL_KINDS and id(section) not in paired_ids:
                    resolved[id(section)] = side.resolve_names(
                        section, side.strip(list_wrappable_keys(section.node))
                    )
            for section in sections:
                if section.kind == "optimizer":
                    resolved[id(section)] = side.resolve_optimizer_names(section)
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
        # The first of equally good candidates is taken: with the prefixes removed from both sides.
        candidates = [(stripped_a, stripped_b), (stripped_a, {}), ({}, stripped_b), ({}, {})]
        return max(
            candidates if stripped_a or stripped_b else candidates[:1],
            key=lambda names: _count_common_names(section_a, names[0], section_b, names[1]),
        )

    def _remove_extra_prefix(
        self, section_a: Section, stripped_a: Renamed, section_b: Section, stripped_b: Renamed
    ) -> tuple[Renamed | None, Renamed | None]:
        """Return, for both, the bare name by key, without a prefix that only one side has.

        As `load_into` does: a Lightning file has `net.` before each key. None for both if no side
        has such a prefix, or the user decides the names.
        """
        if self.names_a.strict or self.names_a.rules.rules:
            return None, None
        if 2 * _count_common_names(section_a, stripped_a, section_b, stripped_b) > max(
            len(section_a.node), len(section_b.node)
        ):
            return None, None  # more equal names than any prefix could add
        aligned = pair_keys(slots_of(section_a), slots_of(section_b))
        prefix_steps = [step for step in aligned.steps if step.kind == "prefix"]
        if not aligned.pairs or not prefix_steps:
            return None, None
        # `aligned.bare` has, for each side, the full name by the name without the prefix.
        bare_a, bare_b = ({full: name for name, full in names.items()} for names in aligned.bare)
        for section, bare in ((section_a, bare_a), (section_b, bare_b)):
            if len({bare.get(name, name) for name in section.node}) < len(section.node):
                return None, None  # two keys would become one
        self.notes.extend(
            f"keys are compared without a prefix: {'AB'[step.side]} has "
            f"{printable(step.text.partition(' ')[0])!r} before its keys"
            for step in prefix_steps  # a text such as "net. removed"
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
            prefix = section_a.path  # only the scopes, below which the user compares, differ
        regions = Region(), Region()
        for region, section, base in zip(
            regions, (section_a, section_b), (base_a, base_b), strict=True
        ):
            _fill_region(
                region, section, base, names.get(id(section), _UNCHANGED_NAMES), outer=prefix
            )
            # The section itself has the path (), and its holder is compared below.
            region.leaves.pop((), None)
            region.containers.pop((), None)
        self._pair_regions(*regions)
        if isinstance(section_a.holder, Opaque) and isinstance(section_b.holder, Opaque):
            name = name_of(prefix or base_a)
            a, b = _unwrap_module(section_a.holder), _unwrap_module(section_b.holder)
            self.pairs.append(Pair(DiffEntry(name, base_a, a), DiffEntry(name, base_b, b)))
        self._compare_metadata(section_a, section_b, name_of(base_a))

    def _pair_remaining(
        self,
        sections_a: list[Section],
        sections_b: list[Section],
        paired_ids: set[int],
        names: dict[int, _NewNames],
    ) -> bool:
        """Pair values and unpaired sections by path; return True if any exist.

        `names` has the new names of the entries of some sections, by the `id` of the section. The
        values are everything outside sections; the entries of the unpaired sections are added.
        """
        regions = Region(), Region()
        # The path of the compared scope is printed before all names, if both files have the same.
        shown_base = self.a.base if self.a.base == self.b.base else ()
        for region, scope, sections in zip(
            regions, (self.a, self.b), (sections_a, sections_b), strict=True
        ):
            skip = frozenset(section.path for section in sections)
            region.fill(scope.root, scope.base, outer=shown_base, skip=skip)
            for section in sections:
                if id(section) not in paired_ids:
                    base = scope.base + section.path
                    new_names = names.get(id(section), _UNCHANGED_NAMES)
                    _fill_region(
                        region, section, base, new_names, outer=shown_base, before=section.path
                    )
        self._pair_regions(*regions)
        return any(region.leaves for region in regions)

    def _pair_regions(self, a: Region, b: Region) -> None:
        """Pair the entries of two regions, and keep the result."""
        pairs, only_a, only_b = pair_regions(a, b)
        self.pairs.extend(pairs)
        self.only_a.extend(only_a)
        self.only_b.extend(only_b)

    def _compare_metadata(self, section_a: Section, section_b: Section, name: str) -> None:
        """Note that the module versions in `_metadata` of two state dicts differ.

        If the two list other modules, their keys differ, which is reported anyway.
        """
        versions_a, versions_b = (
            _read_module_versions(section.node) for section in (section_a, section_b)
        )
        if versions_a is None or versions_b is None or versions_a.keys() != versions_b.keys():
            return
        difference = find_first_difference(versions_a, versions_b)
        if difference is not None:
            where = printable(difference.place)
            subject = f"{name}: " if name else ""
            self.notes.append(f"{subject}the versions in _metadata differ ({where})")


def _find_sections(root: Any) -> list[Section]:
    """Return the sections of a tree, except plain values."""
    return [section for section in find_sections(root) if section.kind != "values"]


def _pair_sections(sections_a: list[Section], sections_b: list[Section]) -> list[SectionPair]:
    """Return pairs of sections: with equal paths, else the only ones of their kind.

    The sections of a kind that are still unpaired make a pair if, on each side, all of them are
    one and the same object of the file (their `holder`), reached by several paths.
    """
    by_path = {(section.path, _normalize_kind(section)): section for section in sections_b}
    section_pairs = [
        (section, by_path[section.path, _normalize_kind(section)])
        for section in sections_a
        if (section.path, _normalize_kind(section)) in by_path
    ]
    paired_ids = {id(section) for section_pair in section_pairs for section in section_pair}
    for kind in dict.fromkeys(map(_normalize_kind, sections_a)):
        unpaired = [
            _find_unpaired(sections, kind, paired_ids) for sections in (sections_a, sections_b)
        ]
        if all(len({id(section.holder) for section in sections}) == 1 for sections in unpaired):
            section_pairs.append((unpaired[0][0], unpaired[1][0]))
    return section_pairs


def _find_unpaired(sections: list[Section], kind: str, paired_ids: set[int]) -> list[Section]:
    """Return the sections of one kind that are not paired yet."""
    return [
        section
        for section in sections
        if _normalize_kind(section) == kind and id(section) not in paired_ids
    ]


def _normalize_kind(section: Section) -> str:
    """Return the kind that two sections must share to be paired."""
    return _SHARED_KIND.get(section.kind, section.kind)


def _fill_region(
    region: Region,
    section: Section,
    base: Path,
    names: _NewNames,
    *,
    outer: Path = (),
    before: Path = (),
) -> None:
    """Add the entries of a section to a region, under their compared names.

    Shown names start with `outer` and `before`, compared paths with `before`.
    """
    rename_entry = _rename_optimizer_entry if section.kind == "optimizer" else _rename_model_entry

    def change_entry(path: Path, leaf: Any) -> tuple[Path, Any, Path]:
        """Return the path and leaf by which an entry is paired, and the path that is printed."""
        compared_path, compared_leaf = rename_entry(path, leaf, names.compared)
        shown_path, _ = rename_entry(path, leaf, names.shown)
        return compared_path, compared_leaf, shown_path

    region.fill(
        section.holder, base, outer=outer, before=before,
        changed=change_entry if names.compared or names.shown else _keep_entry,
        weights=section.kind in MODEL_KINDS,
    )  # fmt: skip


def _rename_model_entry(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return the path and leaf of a model's entry, with its new name."""
    return (renamed.get(path[0], path[0]), *path[1:]) if path else path, leaf


def _rename_optimizer_entry(path: Path, leaf: Any, renamed: Renamed) -> tuple[Path, Any]:
    """Return the path and leaf of an optimizer's entry, with its new name.

    The names of parameters are keys (`state/NAME/exp_avg`), and items in the groups
    (`param_groups/0/params/0` is NAME).
    """
    match path:
        case ("state", name, *rest):
            return ("state", renamed.get(name, name), *rest), leaf
        case ("param_groups", _, "params" | "param_names", *_) if isinstance(leaf, str):
            return path, renamed.get(leaf, leaf)
    return path, leaf


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


def _suggest_model_only(section_pairs: list[SectionPair]) -> Iterator[str]:
    """Yield a note if one file is a state dict and the other has more next to it."""
    for section_a, section_b in section_pairs:
        is_root_a, is_root_b = not section_a.path, not section_b.path
        if section_a.kind in MODEL_KINDS and is_root_a != is_root_b:
            bare, whole = "AB" if is_root_a else "BA"
            yield f"{bare} is only a state dict; add --model-only to leave out the rest of {whole}"


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
    """Dicts, lists and tuples, by the path before any renaming."""
    container_names: dict[Key, str] = field(default_factory=dict)
    """By compared path, the shown name of each container or object that has entries."""
    _repeats: dict[Key, int] = field(default_factory=dict)
    """By key, how many entries have it, if several do."""

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

        Compared paths start with `before`, shown names with `outer` and `before`. `skip` has the
        paths below `root` that are left out. `changed` renames entries. `weights` is True for the
        section of a model.
        """

        def should_enter(path: Path, node: Any) -> bool:
            """Record a container, or only the name of an object; return True to add its entries.

            Skipped paths, and sets, have no entries of their own. The entry of a container has its
            own names; only those that are printed follow a renaming.
            """
            if path in skip:
                return False
            compared_path, _, shown_path = changed(path, node)
            name = name_of(outer + before + shown_path)
            self.container_names[to_comparable(before + compared_path)] = name
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

    A container is an entry if its counterpart is not a container or has another type, or if it is
    empty and has no counterpart. Entries of only one get their outermost container that the other
    does not have, with which they can be shown as one line.
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
        # Leaves have renamed paths, and containers those of the file, so both may have one key.
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
    """Return an entry with its outermost container that `there` does not have.

    So a whole optimizer of only one file can be shown as one line.
    """
    outer_keys = (key[:length] for length in range(1, len(key) + 1))
    missing = (
        here.container_names[outer_key]
        for outer_key in outer_keys
        if outer_key in here.container_names and outer_key not in there.container_names
    )
    return replace(entry, container=next(missing, None))


def _is_same_container_type(a: Any, b: Any) -> bool:
    """Return True if both are dicts, both lists or both tuples, of any subclass."""
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (dict, list, tuple))


def _find_empty_containers(here: Region, there: Region) -> Iterator[DiffEntry]:
    """Yield empty containers that have no counterpart on the other side."""
    for key, entry in here.containers.items():
        if not entry.leaf and key not in there.containers and key not in there.leaves:
            yield _add_missing_container(key, entry, here, there)
