"""Rename the keys of state dicts and the names in their optimizers: by rules, and wrappers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, OrderedMap, copy_with_items
from ckptool.core.modules import get_child_modules, get_own_tensors, to_module_state
from ckptool.core.names import (
    COLLISION_HINT,
    RULES_HINT,
    WRAPPERS,
    Renamer,
    StripResult,
    check_collisions,
    is_wrappable,
    make_module_prefixer,
    make_prefixer,
    split_partly_wrapped,
    strip_names,
)
from ckptool.core.optimizers import FLAT_KEY
from ckptool.core.sections import (
    MODEL_KINDS,
    Section,
    find_loose_optimizers,
    find_model_state_dict,
    is_flat_optimizer,
    is_optimizer,
    list_optimizer_names,
    list_wrappable_keys,
)
from ckptool.core.tree import describe_location, describe_path, rebuild, walk_everything
from ckptool.errors import NameCollision, NotFound, UsageError
from ckptool.transforms.metadata import move_metadata
from ckptool.transforms.name_rules import AppliedRules, Rule, RuleMatch, parse_rules
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable, shell

Naming = tuple[frozenset[str], Mapping[str, str]]
"""The keys of one state dict, and the keys that change, old to new."""


def find_new_names(names_in_optimizer: Iterable[str], namings: Iterable[Naming]) -> dict[str, str]:
    """Return the new names of an optimizer's parameters by old name, as in the state dicts.

    The state dict with most of its names decides first. Names in no state dict are left out.
    """
    own_names = frozenset(names_in_optimizer)
    new_names: dict[str, str] = {}
    shared_namings = [(own_names & keys, renamed) for keys, renamed in namings]
    for shared_names, renamed in sorted(shared_namings, key=lambda naming: -len(naming[0])):
        for name in shared_names - new_names.keys():
            new_names[name] = renamed.get(name, name)
    return new_names


@dataclass
class NamePlan:
    """The renames of one pass over the tree: the new dicts and objects, and their changes."""

    file: str
    """The path for messages; empty for dicts in memory."""
    collision_hint: str
    decides_module: Callable[[str], bool] = lambda name: True
    """Returns True if a key decides where its module moves: for wrappers, all but `n_averaged`."""
    replacements: dict[int, Any] = field(default_factory=dict)
    """The new dict or object by the identity of the old one."""
    changes: list[Change] = field(default_factory=list)
    _namings: list[Naming] = field(default_factory=list)

    def apply_to(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the changed checkpoint, or the same checkpoint if nothing changes."""
        if not self.changes:
            return checkpoint
        root = checkpoint.root
        if self.replacements:  # otherwise the changes are only warnings
            root = _replace_nodes(root, self.replacements)
        return checkpoint.with_root(root, *self.changes)

    def note_renames(self, names: Iterable[str], renamed: dict[str, str]) -> None:
        """Remember how the keys of a state dict change, for its optimizers."""
        self._namings.append((frozenset(names), renamed))

    def plan_state_dict(
        self,
        section: Section,
        names: list[str],
        renamed: dict[str, str],
        rename_module: Renamer | None = None,
    ) -> None:
        """Plan a state dict with its new keys and `_metadata`; note the renames for optimizers.

        `names` are all keys of the model, `renamed` the keys that change; `rename_module` is the
        same as for `move_metadata`.

        Raises:
            NameCollision: if two entries would get the same key.
        """
        self.note_renames(names, renamed)
        self._refuse_collisions(section, section.node, renamed)
        if not renamed:
            return
        if isinstance(section.holder, Opaque):
            self.replacements[id(section.holder)] = _rename_in_object(section.holder, renamed)
            return
        items = ((renamed.get(name, name), value) for name, value in section.holder.items())
        new_holder = copy_with_items(section.holder, items)
        if isinstance(new_holder, OrderedMap) and isinstance(new_holder.metadata, dict):
            new_key_by_key = {
                name: renamed.get(name, name) for name in names if self.decides_module(name)
            }
            new_metadata = move_metadata(new_holder.metadata, new_key_by_key, rename_module)
            new_holder.attributes = {**new_holder.attributes, "_metadata": new_metadata}
        self.replacements[id(section.holder)] = new_holder

    def plan_optimizers(
        self,
        root: Any,
        sections: Iterable[Section],
        rename_alone: Callable[[list[str]], dict[str, str]],
    ) -> None:
        """Plan the changes of the optimizers among `sections`, after the state dicts.

        Each changes like the state dicts that have its names. For an optimizer that shares no names
        with them, `rename_alone` returns the names that change, old to new. Flat states, with keys
        such as `state.NAME.exp_avg`, change wherever they are below `root`.

        Raises:
            NameCollision: if two names or keys would become the same.
        """
        all_sections = list(sections)
        loose_sections = (
            find_loose_optimizers(section.holder)
            for section in all_sections
            if section.kind == "values"
        )
        for section in chain(all_sections, *loose_sections):
            if section.kind == "optimizer":
                own_names = list_optimizer_names(section.node)
                new_names = find_new_names(own_names, self._namings)
                if new_names:
                    renamed = {name: new for name, new in new_names.items() if new != name}
                else:
                    renamed = rename_alone(own_names)
                self._plan_optimizer(section, own_names, renamed)
        # The parameters of flat states are those of state dicts, which may all keep their names.
        if any(renamed for _, renamed in self._namings):
            self._plan_flat_optimizers(root)

    def _plan_flat_optimizers(self, root: Any) -> None:
        """Plan the changes of flat optimizer states, whose keys contain the parameter names."""
        dicts = (node for node in walk_everything(root) if isinstance(node, dict))
        for flat in filter(is_flat_optimizer, dicts):
            matches = (FLAT_KEY.fullmatch(key) for key in flat if isinstance(key, str))
            parts = [match.groups() for match in matches if match]
            new_names = find_new_names((name for _, name, _ in parts), self._namings)
            renamed = {
                f"{front}{name}{end}": f"{front}{new_names[name]}{end}"
                for front, name, end in parts
                if new_names.get(name, name) != name
            }
            if renamed:
                check_collisions(flat, renamed, file=self.file or None, hint=self.collision_hint)
                items = ((renamed.get(key, key), value) for key, value in flat.items())
                self.replacements[id(flat)] = copy_with_items(flat, items)
                text = (
                    f"renamed {counted(len(renamed), 'key')} of the flat optimizer state to match"
                )
                self.changes.append(Change("follow", text, len(renamed)))

    def _plan_optimizer(self, section: Section, names: list[str], renamed: dict[str, str]) -> None:
        """Plan an optimizer with its new parameter names, in its state and groups.

        `names` are its old names. An optimizer without torch's `state` and `param_groups` stays.
        """
        optimizer = section.node
        self._refuse_collisions(section, names, renamed)
        if not renamed or not is_optimizer(optimizer):
            return
        state = optimizer["state"]
        new_keys = _rename_items(list(state), renamed)
        new_state = copy_with_items(state, zip(new_keys, state.values(), strict=True))
        self.replacements[id(state)] = new_state
        for group in optimizer["param_groups"]:
            new_group = dict(group)
            for key in {"params", "param_names"} & group.keys():
                new_group[key] = _rename_items(group[key], renamed)
            self.replacements[id(group)] = copy_with_items(group, new_group)
        subject = (
            f"the optimizer {describe_path(section.path)}" if section.path else "the optimizer"
        )
        text = f"renamed {counted(len(renamed), 'parameter')} in {subject} to match"
        self.changes.append(Change("follow", text, len(renamed)))

    def _refuse_collisions(
        self, section: Section, names: Iterable[Any], renamed: dict[str, str]
    ) -> None:
        """Refuse renames that give two of the `names` the same new name.

        Raises:
            NameCollision: if two would become the same.
        """
        check_collisions(
            names,
            renamed,
            file=self.file or None,
            location=describe_path(section.path),
            hint=self.collision_hint,
        )


def replace_entries(
    checkpoint: Checkpoint, items: Mapping[int, Iterable[tuple[Any, Any]]], *changes: Change
) -> Checkpoint:
    """Return the checkpoint with new entries in some dicts; `items` has them by the dict's id.

    Raises:
        UsageError: if a state dict is in a pickled module or object, or next to other sections.
    """
    replaced = set[int]()

    def replace_items(old: dict[Any, Any]) -> dict[Any, Any]:
        """Return the dict with its new entries, or the dict itself."""
        if id(old) not in items:
            return old
        replaced.add(id(old))
        return copy_with_items(old, items[id(old)])

    root = rebuild(checkpoint.root, None, replace_items)
    if replaced != items.keys():
        raise UsageError(
            "the weights are in a pickled module or object, or mixed with other sections",
            file=checkpoint.path,
            hint=f"ckptool convert {shell(checkpoint.path)} OUT --model-only extracts them",
        )
    return checkpoint.with_root(root, *changes)


def _replace_nodes(root: Any, replacements: dict[int, Any]) -> Any:
    """Return the tree with the replacements, which are by the identity of the old nodes."""

    def replace_node(node: Any) -> Any:
        """Return the replacement of a node, or the node itself."""
        return replacements.get(id(node), node)

    return rebuild(root, leaf=replace_node, mapping=replace_node)


def list_distinct_sections(sections: Iterable[Section]) -> list[Section]:
    """Return each section once, at its first path, even if the file has it under several."""
    # In reverse, because the last of several sections with one holder wins in a dict.
    by_holder = {id(section.holder): section for section in reversed(list(sections))}
    return list(reversed(by_holder.values()))


def find_changed_keys(names: Iterable[str], rename: Renamer) -> dict[str, str]:
    """Return the keys that `rename` changes, old to new."""
    return {name: new for name in names if (new := rename(name)) != name}


def unchanged_module_warning(section: Section) -> Change:
    """Return the warning that the keys of a pickled module cannot change."""
    path = describe_path(section.path)
    text = f"the pickled module at {path} is unchanged: its class defines its keys"
    return Change("warning", text, len(section.node))


def _rename_in_object(holder: Opaque, renamed: dict[str, str]) -> Opaque:
    """Return a state dict that is an object of a subclass of `dict`, with its new keys."""

    def rename_step(kind: str, value: Any) -> tuple[str, Any]:
        """Return a step of the pickle with renamed keys, if it sets items."""
        if kind != "set":
            return kind, value
        return kind, [(renamed.get(name, name), item) for name, item in value]

    return replace(holder, steps=[rename_step(kind, value) for kind, value in holder.steps])


def _rename_items(items: Any, renamed: dict[str, str]) -> Any:
    """Return a list or tuple of names with the new names; any other value unchanged."""
    if not isinstance(items, (list, tuple)):
        return items
    return type(items)(renamed.get(item, item) if isinstance(item, str) else item for item in items)


@dataclass
class Unwrapped:
    """The replacements of the wrappers in a pickled module, and the keys that change."""

    replacements: dict[int, Any] = field(default_factory=dict)
    """The module directly inside each wrapper, by the identity of the wrapper."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The keys of the whole module that change, old to new."""
    stripped: StripResult | None = None
    """The result of stripping by the keys only; None if there is nothing to unwrap."""

    @property
    def keeps_wrappers(self) -> bool:
        """True if keys look wrapped but stay, because the class is not a wrapper."""
        return self.stripped is not None and self.renamed != self.stripped.renamed


def unwrap_modules(
    root: Opaque,
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> Unwrapped:
    """Return the replacements that unwrap a pickled module. Options: see `core.names.strip_names`.

    A wrapper has one child with the name that the wrapper gives it, and no tensors of its own. If
    that name is `module`, it must also be outermost, with a class like `DataParallel`.

    Raises:
        NameCollision: if two keys would become the same.
    """
    names = list_wrappable_keys(to_module_state(root) or OrderedMap())
    stripped = strip_names(names, only=only, levels=levels, at=at)
    start: Opaque | None = root
    for name in at.split(".") if at else ():
        start = start and get_child_modules(start).get(name)
    if start is None or not stripped.renamed:
        return Unwrapped()
    wrappers = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    replacements = _find_wrapped_modules(start, wrappers, levels)
    unwrapped_state = to_module_state(_replace_nodes(root, replacements)) or OrderedMap()
    new_names = list_wrappable_keys(unwrapped_state)
    if len(new_names) != len(names):  # for example if the file has a module under several keys
        raise NameCollision("two keys of a module would become the same key", hint=COLLISION_HINT)
    renamed = {name: new for name, new in zip(names, new_names, strict=True) if new != name}
    return Unwrapped(replacements, renamed, stripped)


def _find_wrapped_modules(
    start: Opaque, wrappers: Container[str], levels: int | None
) -> dict[int, Any]:
    """Return the module inside each wrapper to remove at or below `start`, by the wrapper's id.

    On each path down the modules, at most `levels` wrappers are removed; None means all of them.
    A child `module` is only removed from a DataParallel class, which only other wrappers contain.
    """
    replacements: dict[int, Any] = {}
    pending = [(start, frozenset[int](), 0, True)]
    while pending:
        module, ancestors, n_removed, is_outermost = pending.pop()
        children = get_child_modules(module)
        child_name = next(iter(children), "")
        is_wrapper = len(children) == 1 and child_name in WRAPPERS and not get_own_tensors(module)
        can_remove = child_name in wrappers and (levels is None or n_removed < levels)
        if child_name == "module":  # also a usual name for a layer
            is_parallel = "DataParallel" in module.class_name.rpartition(".")[2]
            can_remove = can_remove and is_outermost and is_parallel
        is_removed = is_wrapper and can_remove
        if is_removed:
            replacements[id(module)] = children[child_name]
        path_modules = ancestors | {id(module)}  # A hostile file may have a module inside itself.
        pending.extend(
            (child, path_modules, n_removed + is_removed, is_outermost and is_wrapper)
            for child in children.values()
            if id(child) not in path_modules
        )
    return replacements


_BELOW = "z"
"""A stand-in for a key below a module that has none."""


@dataclass(frozen=True)
class Rename(Step):
    r"""Rename the keys of every state dict, or of the state dict at `key`.

    Rules apply in order, each to the result of the previous rule. `_metadata` and the parameter
    names in optimizers change accordingly. Pickled modules do not change. They cause a warning, as
    do rules that match no key.
    """

    options: ClassVar[Mapping[str, str]] = {"rules": "rename", "prefixes": "prefix", "key": ""}

    rules: Iterable[str | Rule] = ()
    r"""Texts `REGEX=>REPL`, such as `^backbone\.=>encoder.`, or rules from `table_rule` etc."""
    prefixes: Iterable[str] = ()
    """Texts `OLD=NEW`, applied after `rules` to whole components at the start of a key."""
    key: Any = None
    """The path of one state dict to change. Default: all of them."""

    def __post_init__(self) -> None:
        """Check the rules.

        Raises:
            UsageError: if an item is not a rule, or a list is a single rule.
        """
        for name in ("rules", "prefixes"):
            rules = getattr(self, name)
            if not isinstance(rules, (str, Rule)):  # a single rule is refused below
                object.__setattr__(self, name, tuple(rules))
        parse_rules(self.rules, self.prefixes)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with renamed keys.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if there is no entry at `key`.
            UsageError: if a rule makes a key empty.
        """
        checkpoint = checkpoint.with_late_values()
        rules = _Renaming(parse_rules(self.rules, self.prefixes), checkpoint.path)
        plan = NamePlan(checkpoint.path, RULES_HINT)
        sections = list_distinct_sections(checkpoint.sections)
        chosen = sections if self.key is None else [find_model_state_dict(checkpoint, self.key)]
        for section in chosen:
            names = list_wrappable_keys(section.node)
            if section.kind == "state_dict":
                plan.plan_state_dict(
                    section, names, rules.find_renamed_keys(names), rules.rename_module
                )
            elif section.kind == "module":
                for name in names:
                    rules.rename_key(name)  # only so that the rules count as used
                plan.changes.append(unchanged_module_warning(section))
        plan.plan_optimizers(
            checkpoint.root,
            sections,
            lambda own_names: rules.find_renamed_keys(own_names) if self.key is None else {},
        )
        plan.changes[:0] = rules.list_changes()
        plan.changes.extend(Change("warning", text) for text in rules.describe_unused())
        plan.changes.extend(_suggest_move(checkpoint, rules))
        return plan.apply_to(checkpoint)


def _suggest_move(checkpoint: Checkpoint, rules: _Renaming) -> Iterator[Change]:
    """Yield a note for each rule `OLD=NEW` without a match if OLD is a key of the root instead.

    Such a key, for example `model` of `model/conv.weight`, is renamed by --move.
    """
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    for rule, count in zip(rules.rules, rules.counts, strict=True):
        old, _, new = rule.text.partition("=")
        old, new = old.removesuffix("."), new.removesuffix(".")
        is_prefix_rule = bool(new) and not rule.regex
        if is_prefix_rule and not count and old in root:
            command = shlex.join(["ckptool", "convert", checkpoint.path, "OUT", "--move"])
            text = (
                f"{printable(old)} is a key of the file, not of a state dict; to rename "
                f"it: {command} "
            )
            yield Change("note", f"{text}{shlex.quote(f'{old}={new}')}")


class _Renaming(AppliedRules):
    """The rules of a rename, with the number of keys that each changed."""

    def __init__(self, rules: list[Rule], file: str) -> None:
        """Start without renamed keys; both lists have an item for each rule."""
        super().__init__(rules, file)
        self._changed = [0 for _ in rules]
        self._examples: list[RuleMatch | None] = [None for _ in rules]

    def find_renamed_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys that change, old to new, and count the keys that each rule changes.

        Raises:
            UsageError: if a new key has a slash, which separates the keys of a path.
        """
        new_keys = self.rename_keys(names)
        for name, new in new_keys.items():
            if "/" in new and "/" not in name:
                raise UsageError(
                    f"key {printable(new)!r} contains a slash, so it would have no path",
                    file=self.file or None,
                    hint="separate the parts of a key with dots",
                )
            for match in self.matches_by_key[name]:
                if match.old != match.new:
                    self._changed[match.rule] += 1
                    self._examples[match.rule] = self._examples[match.rule] or match  # the first
        return {name: new for name, new in new_keys.items() if new != name}

    @property
    def counts(self) -> list[int]:
        """The number of keys that each rule changed."""
        return self._changed

    def rename_module(self, path: str) -> str:
        """Return the new path of a module without parameters, as if it had a key below it.

        It keeps its path if the rules change the last part of that key.
        """
        key = f"{path}.{_BELOW}" if path else _BELOW
        matches = self.find_matches(key)
        new_key = matches[-1].new if matches else key
        parent, _, last = new_key.rpartition(".")
        return parent if last == _BELOW else path

    def list_changes(self) -> Iterator[Change]:
        """Yield a change for each rule that renamed keys, with an example."""
        for rule, count, example in zip(self.rules, self._changed, self._examples, strict=True):
            if example is not None:
                sample = f"{printable(example.old)} -> {printable(example.new)}"
                text = f"renamed {counted(count, 'key')} with {printable(rule.text)} ({sample})"
                yield Change("rename", text, count)


@dataclass(frozen=True)
class Strip(Step):
    """Remove wrapper prefixes, such as `module.` and `_orig_mod.`, from every state dict.

    `_metadata` and the parameter names in optimizers change accordingly. A pickled wrapper module
    is replaced with the module inside.
    """

    options: ClassVar[Mapping[str, str]] = {"only": "", "levels": ""}

    only: str | Sequence[str] | None = None
    """Remove only this wrapper, or these, for example `_orig_mod`."""
    levels: int | None = None
    """Remove at most this many nested wrappers; 0 keeps them all."""
    at: str | None = None
    """Remove only the wrapper of the submodule at this path."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: if `only` is not a known wrapper, or `levels` is less than 0.
        """
        if self.only is not None and not isinstance(self.only, str):
            object.__setattr__(self, "only", tuple(self.only))
        # Stripping no keys checks the options; levels=0, no stripping, is not an option of it.
        strip_names((), **{**self._options, "levels": self.levels or None})

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        if self.at is None:
            yield from ("--wrappers", "keep" if self.levels == 0 else "strip")
        yield from super().words()

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments for `strip_names` and `unwrap_modules`."""
        return {"only": self.only, "levels": self.levels, "at": self.at}

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without wrapper prefixes; itself if there is nothing to report.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if no key starts with the path `at`.
        """
        if self.levels == 0:
            return checkpoint
        # The names in an optimizer may be in separate files.
        checkpoint = checkpoint.with_late_values()
        plan = NamePlan(checkpoint.path, COLLISION_HINT, is_wrappable)
        options = self._options
        sections = list_distinct_sections(checkpoint.sections)
        _require_submodule(checkpoint, sections, self.at)
        for section in sections:
            if section.kind == "state_dict":
                names = list_wrappable_keys(section.node)
                result = strip_names(names, **options)
                plan.plan_state_dict(section, names, result.renamed, result.rename_module)
                if result.renamed:
                    plan.changes.append(_make_strip_change(section, result, result.renamed))
                if self.at is None:  # with `at`, the other keys are meant to keep theirs
                    remaining = [result.renamed.get(name, name) for name in names]
                    plan.changes.extend(_warn_of_partial_wrapper(section, remaining, self.only))
            elif section.kind == "module":
                _plan_unwrapping(plan, section, unwrap_modules(section.holder, **options))
        plan.plan_optimizers(
            checkpoint.root, sections, lambda own_names: strip_names(own_names, **options).renamed
        )
        return plan.apply_to(checkpoint)


@dataclass(frozen=True)
class Wrap(Step):
    """Add a wrapper prefix to the keys of every state dict, or of the state dict at `key`.

    Keys that already have the prefix get it again, with a warning. Pickled modules do not change,
    with a warning too.
    """

    options: ClassVar[Mapping[str, str]] = {"wrapper": "", "at": "", "key": ""}

    wrapper: str = "module"
    """The wrapper name to add."""
    at: str | None = None
    """Wrap only the submodule at this path."""
    key: Any = None
    """The path of one state dict to change. Default: all of them."""

    def __post_init__(self) -> None:
        """Check the wrapper.

        Raises:
            UsageError: if it is not a known wrapper.
        """
        make_prefixer(self.wrapper)  # raises it

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with wrapped keys.

        Optimizers follow with their parameter names, except with `key`: which of several state
        dicts an optimizer belongs to is then not known.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if there is no entry at `key`, or no key starts with the path `at`.
        """
        checkpoint = checkpoint.with_late_values()
        plan = NamePlan(checkpoint.path, COLLISION_HINT, is_wrappable)
        rename = make_prefixer(self.wrapper, self.at)
        all_sections = list_distinct_sections(checkpoint.sections)
        chosen_sections = (
            all_sections if self.key is None else [find_model_state_dict(checkpoint, self.key)]
        )
        _require_submodule(checkpoint, chosen_sections, self.at)
        for section in chosen_sections:
            if section.kind == "state_dict":
                _plan_prefix(plan, section, self.wrapper, self.at)
            elif section.kind == "module":
                plan.changes.append(unchanged_module_warning(section))
        plan.plan_optimizers(
            checkpoint.root,
            all_sections,
            lambda own_names: find_changed_keys(own_names, rename) if self.key is None else {},
        )
        return plan.apply_to(checkpoint)


def _plan_unwrapping(plan: NamePlan, section: Section, unwrapped: Unwrapped) -> None:
    """Plan to replace the wrappers in a pickled module; warn if some keep their prefixes."""
    names = list_wrappable_keys(section.node)
    plan.replacements.update(unwrapped.replacements)
    plan.note_renames(names, unwrapped.renamed)
    if unwrapped.replacements and unwrapped.stripped is not None:
        plan.changes.append(_make_strip_change(section, unwrapped.stripped, unwrapped.renamed))
    if unwrapped.keeps_wrappers:
        text = f"the pickled module at {describe_path(section.path)} keeps keys with wrapper "
        text += "prefixes: its class defines them"
        plan.changes.append(Change("warning", text, len(names)))


def _require_submodule(checkpoint: Checkpoint, sections: list[Section], at: str | None) -> None:
    """Refuse the path of a submodule if no key of a model starts with it.

    Raises:
        NotFound: if no key does; the message lists the submodules.
    """
    if at is None:
        return
    models = [section for section in sections if section.kind in MODEL_KINDS]
    names = [name for section in models for name in list_wrappable_keys(section.node)]
    if not any(name.startswith(f"{at}.") for name in names):
        submodules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
        raise NotFound(
            f"no key starts with {printable(at)!r}; the submodules are {listed(submodules)}",
            file=checkpoint.path or None,
        )


def _plan_prefix(plan: NamePlan, section: Section, wrapper: str, at: str | None) -> None:
    """Plan to add the wrapper prefix to the keys of a state dict, or of its submodule `at`.

    Warn if all of these keys already start with it.
    """
    names = list_wrappable_keys(section.node)
    renamed = find_changed_keys(names, make_prefixer(wrapper, at))
    prefix = f"{at}.{wrapper}." if at else f"{wrapper}."
    if renamed and all(name.startswith(prefix) for name in renamed):
        text = f'the keys{describe_location(section.path)} already started with "{prefix}"'
        plan.changes.append(Change("warning", text, len(renamed)))
    plan.plan_state_dict(section, names, renamed, make_module_prefixer(wrapper, at))
    if renamed:
        keys = counted(len(renamed), "key")
        text = f'added "{prefix}" to {keys}{describe_location(section.path)}'
        plan.changes.append(Change("add", text, len(renamed)))


def _warn_of_partial_wrapper(
    section: Section, names: list[str], only: str | Sequence[str] | None
) -> Iterator[Change]:
    """Warn if most keys have `module.`, which stays because not all keys have it."""
    with_prefix, others = split_partly_wrapped(names, only=only)
    if with_prefix:
        text = (
            f'kept "module." on {counted(len(with_prefix), "key")}'
            f"{describe_location(section.path)}, because {printable(others[0])} does "
            "not have it; to remove it: ckptool rename --prefix module.="
        )
        yield Change("warning", text, len(with_prefix))


def _make_strip_change(section: Section, result: StripResult, renamed: dict[str, str]) -> Change:
    """Return the change for the removed prefixes of a section."""
    prefixes = " and ".join(f'"{wrapper}."' for wrapper in result.wrappers)
    levels = f" ({result.levels} levels)" if result.levels > 1 else ""
    keys = f"{counted(len(renamed), 'key')}{describe_location(section.path)}"
    text = f"removed {prefixes} from {keys}{levels}"
    return Change("strip", text, len(renamed))
