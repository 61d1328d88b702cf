"""Rename the keys of state dicts, with their `_metadata` and optimizers: wrappers and rules."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
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
from ckptool.transforms.name_rules import AppliedRules, Rule, RuleMatch, rules_of
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable, shell

Targets = dict[Any, int]
"""The new paths of one module, each with its rank. If two modules get the same path, the entry with
the lower rank wins."""

# Ranks of the evidence for the new path of a module, the strongest first: a key directly below it
# keeps the path; keys moved away from it (`module.fc` to `fc`); only keys further below keep it; no
# key decides, and the rule for modules moves it, or does not.
_OWN_STAYS, _MOVES, _STAYS, _LOOSE_MOVES, _LOOSE_STAYS = range(5)


def moved_metadata(
    metadata: dict[Any, Any], names: Mapping[str, str], rename_module: Renamer | None = None
) -> dict[Any, Any]:
    """Return `_metadata` under the new paths.

    A module moves with the keys below it. `names` maps all keys, old to new, also those that stay.
    If the keys move to several paths, each gets a copy of the entry. A module without keys moves by
    `rename_module`. If that is None, it moves with the nearest module above, and modules that merge
    into another one (a parametrization, a plain weight) are removed. An entry that moves replaces
    the entry at its new path. If a module, such as the root, moves into a new one, the new one gets
    an entry with version 1.
    """
    found = _follow_keys(metadata, names)
    if rename_module is None:
        rename_module, metadata = _follow_nearest(names), _without_merged(metadata, names, found)
    targets = {
        path: found[path] if path in found else _targets_by_rule(path, rename_module)
        for path in metadata
    }
    every = [(rank, new, path) for path, ranks in targets.items() for new, rank in ranks.items()]
    claims: dict[Any, Any] = {}
    for _, new, path in sorted(every, key=itemgetter(0)):
        claims.setdefault(new, path)
    moved = type(metadata)()
    for path, entry in metadata.items():
        if path not in claims and any(_is_below(new, path) for new in targets[path]):
            moved[path] = {"version": 1}
        moved.update((new, entry) for new in targets[path] if claims[new] == path)
    return moved


def _follow_keys(metadata: Container[Any], names: Mapping[str, str]) -> dict[str, Targets]:
    """Return the new paths of modules by the keys below them, as long as only the front changes."""
    found: dict[str, Targets] = {}
    modules = dict.fromkeys((_parent(name), _parent(new)) for name, new in names.items())
    for path, new in modules:
        own = True
        while path in metadata:
            ranks = found.setdefault(path, {})
            rank = _MOVES if path != new else _OWN_STAYS if own else _STAYS
            known = ranks.get(new)
            ranks[new] = rank if known is None else min(rank, known)
            apart = path.rpartition(".")[2] != new.rpartition(".")[2]
            if apart or not path or not new or (known is not None and not own):
                break
            path, new, own = _parent(path), _parent(new), False
    return found


def _follow_nearest(names: Mapping[str, str]) -> Renamer:
    above_names = {""}  # `_metadata` may lack some
    for name in names:
        path = _parent(name)
        while path not in above_names:
            above_names.add(path)
            path = _parent(path)
    found = _follow_keys(above_names, names)

    def rename(path: str) -> str:
        above = path
        while above and above not in found:
            above = _parent(above)
        ranks, rest = found.get(above, {above: 0}), path[len(above) :].removeprefix(".")
        return ".".join(filter(None, (min(ranks, key=ranks.__getitem__), rest)))

    return rename


def _without_merged(
    metadata: dict[Any, Any], names: Mapping[str, str], found: Mapping[str, Targets]
) -> dict[Any, Any]:
    """Return `_metadata` without the modules that get the path of a module above them."""
    first: dict[Any, str] = {}
    for path in sorted(found, key=len):
        for new in found[path]:
            first.setdefault(new, path)
    own = set(first.values())
    return remaining_metadata(metadata, names, (one for one in names if _parent(one) in own))


def _targets_by_rule(path: Any, rename_module: Renamer) -> Targets:
    new = rename_module(path) if isinstance(path, str) else path
    return {new: _LOOSE_STAYS if new == path else _LOOSE_MOVES}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_below(path: Any, above: Any) -> bool:
    return isinstance(path, str) and (not above or path.startswith(f"{above}."))


def remaining_metadata(
    metadata: dict[Any, Any], names: Iterable[str], kept: Iterable[str]
) -> dict[Any, Any]:
    """Return `_metadata` without the modules that lost all keys below them, and those inside.

    The root stays.
    """
    gone = _modules(metadata, names) - _modules(metadata, kept) - {""}
    return type(metadata)(
        (path, entry)
        for path, entry in metadata.items()
        if not (isinstance(path, str) and _inside_any(path, gone, metadata))
    )


def _modules(metadata: Mapping[Any, Any], names: Iterable[str]) -> set[str]:
    """Return the modules above the keys, upwards until an entry is missing."""
    found: set[str] = set()
    for name in names:
        path = _parent(name)
        while path in metadata and path not in found:
            found.add(path)
            path = _parent(path)
    return found


def _inside_any(path: str, gone: set[str], metadata: Mapping[Any, Any]) -> bool:
    while path and path in metadata:
        if path in gone:
            return True
        path = _parent(path)
    return False


Naming = tuple[frozenset[str], Mapping[str, str]]
"""The keys of one state dict, and the keys that change, old to new."""


def followed(own: Iterable[str], namings: Iterable[Naming]) -> dict[str, str]:
    """Return the new names in an optimizer, from the state dicts that have most of its names.

    Names that are in no state dict are left out.
    """
    wanted = frozenset(own)
    found: dict[str, str] = {}
    for names, renamed in sorted(namings, key=lambda naming: -len(wanted & naming[0])):
        for name in wanted & names - found.keys():
            found[name] = renamed.get(name, name)
    return found


@dataclass
class NamePlan:
    """The changes for one pass over the tree, by the identity of the objects."""

    file: str
    """The path for messages; empty for dicts in memory."""
    collision_hint: str
    tells: Callable[[str], bool] = lambda name: True
    """Returns True if a key decides where its module moves."""
    instead: dict[int, Any] = field(default_factory=dict)
    """The replacements of dicts and objects."""
    changes: list[Change] = field(default_factory=list)
    _namings: list[Naming] = field(default_factory=list)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the changed checkpoint, or the same checkpoint if nothing changes."""
        if not self.changes:
            return checkpoint
        if not self.instead:
            return checkpoint.with_root(checkpoint.root, *self.changes)

        root = _replace_nodes(checkpoint.root, self.instead)
        return checkpoint.with_root(root, *self.changes)

    def note(self, names: Iterable[str], renamed: dict[str, str]) -> None:
        """Remember how the keys of a state dict change, for its optimizers."""
        self._namings.append((frozenset(names), renamed))

    def rename(
        self,
        part: Section,
        names: list[str],
        renamed: dict[str, str],
        rename_module: Renamer | None = None,
    ) -> None:
        """Plan a state dict with its new keys and `_metadata`.

        `names` are all keys of the model, `renamed` the keys that change; `rename_module` is the
        same as for `moved_metadata`.

        Raises:
            NameCollision: if two entries would get the same key.
        """
        self.note(names, renamed)
        self._check(part, part.node, renamed)
        if not renamed:
            return
        if isinstance(part.holder, Opaque):
            self.instead[id(part.holder)] = _renamed_object(part.holder, renamed)
            return
        items = ((renamed.get(name, name), value) for name, value in part.holder.items())
        made = copy_with_items(part.holder, items)
        if isinstance(made, OrderedMap) and isinstance(made.metadata, dict):
            telling = {name: renamed.get(name, name) for name in names if self.tells(name)}
            moved = moved_metadata(made.metadata, telling, rename_module)
            made.attributes = {**made.attributes, "_metadata": moved}
        self.instead[id(part.holder)] = made

    def follow(
        self, root: Any, parts: Iterable[Section], alone: Callable[[list[str]], dict[str, str]]
    ) -> None:
        """Plan the optimizers of a tree with the sections `parts`, after its state dicts.

        Each changes like the state dicts that have its names. `alone` renames in an optimizer that
        shares no names with them. The keys of a flat state are like `state.NAME.exp_avg`.

        Raises:
            NameCollision: if two names or keys would become the same.
        """
        every = list(parts)
        loose = (find_loose_optimizers(part.holder) for part in every if part.kind == "values")
        for part in chain(every, *loose):
            if part.kind == "optimizer":
                own = list_optimizer_names(part.node)
                found = followed(own, self._namings)
                renamed = {name: new for name, new in found.items() if new != name}
                self._rename_optimizer(part, own, renamed if found else alone(own))
        if any(renamed for _, renamed in self._namings):
            self._follow_flat(root)

    def _follow_flat(self, root: Any) -> None:
        dicts = (node for node in walk_everything(root) if isinstance(node, dict))
        for flat in filter(is_flat_optimizer, dicts):
            found = (FLAT_KEY.fullmatch(key) for key in flat if isinstance(key, str))
            parts = [one.groups() for one in found if one]
            new = followed((name for _, name, _ in parts), self._namings)
            renamed = {
                f"{front}{name}{end}": f"{front}{new[name]}{end}"
                for front, name, end in parts
                if new.get(name, name) != name
            }
            if renamed:
                check_collisions(flat, renamed, file=self.file or None, hint=self.collision_hint)
                items = ((renamed.get(key, key), value) for key, value in flat.items())
                self.instead[id(flat)] = copy_with_items(flat, items)
                text = (
                    f"renamed {counted(len(renamed), 'key')} of the flat optimizer state to match"
                )
                self.changes.append(Change("follow", text, len(renamed)))

    def _rename_optimizer(self, part: Section, own: list[str], renamed: dict[str, str]) -> None:
        """Plan an optimizer's state dict with its new names."""
        optimizer = part.node
        self._check(part, own, renamed)
        if not renamed or not is_optimizer(optimizer):
            return
        state = optimizer["state"]
        self.instead[id(state)] = copy_with_items(
            state, [(renamed.get(key, key) if isinstance(key, str) else key, value)
                    for key, value in state.items()]
        )  # fmt: skip
        for group in optimizer["param_groups"]:
            items = [
                (key, _renamed_items(value, renamed) if key in ("params", "param_names") else value)
                for key, value in group.items()
            ]
            self.instead[id(group)] = copy_with_items(group, items)
        which = f"the optimizer {describe_path(part.path)}" if part.path else "the optimizer"
        text = f"renamed {counted(len(renamed), 'parameter')} in {which} to match"
        self.changes.append(Change("follow", text, len(renamed)))

    def _check(self, part: Section, names: Iterable[Any], renamed: dict[str, str]) -> None:
        check_collisions(
            names,
            renamed,
            file=self.file or None,
            location=describe_path(part.path),
            hint=self.collision_hint,
        )


def with_items(
    checkpoint: Checkpoint, items: Mapping[int, Iterable[tuple[Any, Any]]], *changes: Change
) -> Checkpoint:
    """Return the checkpoint with other entries in its state dicts, by the identity of each.

    Raises:
        UsageError: if a state dict is in a pickled module or object, or next to other sections.
    """
    found = set[int]()

    def mapping(old: dict[Any, Any]) -> dict[Any, Any]:
        if id(old) not in items:
            return old
        found.add(id(old))
        return copy_with_items(old, items[id(old)])

    root = rebuild(checkpoint.root, None, mapping)
    if found != items.keys():
        raise UsageError(
            "the weights are in a pickled module or object, or mixed with other sections",
            file=checkpoint.path,
            hint=f"ckptool convert {shell(checkpoint.path)} OUT --model-only extracts them",
        )
    return checkpoint.with_root(root, *changes)


def _replace_nodes(root: Any, instead: dict[int, Any]) -> Any:
    def chosen(node: Any) -> Any:
        return instead.get(id(node), node)

    return rebuild(root, leaf=chosen, mapping=chosen)


def distinct(parts: Iterable[Section]) -> list[Section]:
    """Return each section once, even if the file has it under several paths."""
    return list({id(part.holder): part for part in reversed(list(parts))}.values())[::-1]


def changed(names: Iterable[str], rename: Renamer) -> dict[str, str]:
    """Return the keys that `rename` changes, old to new."""
    return {name: new for name in names if (new := rename(name)) != name}


def stays(part: Section) -> Change:
    """Return the warning that the keys of a pickled module cannot change."""
    text = (
        f"the pickled module at {describe_path(part.path)} is unchanged: its class defines its keys"
    )
    return Change("warning", text, len(part.node))


def _renamed_object(holder: Opaque, renamed: dict[str, str]) -> Opaque:
    """Return a state dict of a subclass of `dict`, with its new keys."""

    def step(kind: str, value: Any) -> tuple[str, Any]:
        if kind != "set":
            return kind, value
        return kind, [(renamed.get(name, name), item) for name, item in value]

    return replace(holder, steps=[step(kind, value) for kind, value in holder.steps])


def _renamed_items(held: Any, renamed: dict[str, str]) -> Any:
    if not isinstance(held, (list, tuple)):
        return held
    return type(held)(renamed.get(item, item) if isinstance(item, str) else item for item in held)


@dataclass
class Unwrapped:
    """The replacements of wrapper modules, and the resulting keys."""

    instead: dict[int, Any] = field(default_factory=dict)
    """The module directly inside each wrapper, by the identity of the wrapper."""
    renamed: dict[str, str] = field(default_factory=dict)
    wanted: StripResult | None = None
    """The result of stripping by the keys only."""

    @property
    def keeps(self) -> bool:
        """True if keys look wrapped but stay, because the class is not a wrapper."""
        return self.wanted is not None and self.renamed != self.wanted.renamed


def unwrapped_modules(
    root: Opaque,
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> Unwrapped:
    """Return the replacements that unwrap a pickled module; options as for `names.strip_names`.

    A wrapper has one child with the name that the wrapper gives it, and no tensors of its own. If
    that name is `module`, it must also be outermost, with a class like `DataParallel`.

    Raises:
        NameCollision: if two keys would become the same.
    """
    names = list_wrappable_keys(to_module_state(root) or OrderedMap())
    wanted = strip_names(names, only=only, levels=levels, at=at)
    start: Opaque | None = root
    for name in at.split(".") if at else ():
        start = start and get_child_modules(start).get(name)
    if start is None or not wanted.renamed:
        return Unwrapped()
    kinds = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    instead: dict[int, Any] = {}
    todo = [(start, frozenset[int](), 0, True)]
    while todo:
        module, above, taken, outermost = todo.pop()
        children = get_child_modules(module)
        word = next(iter(children), None)
        wraps = len(children) == 1 and word in WRAPPERS and not get_own_tensors(module)
        goes = wraps and word in kinds and (levels is None or taken < levels)
        if word == "module":
            is_parallel = "DataParallel" in module.class_name.rpartition(".")[2]
            goes = goes and outermost and is_parallel
        if goes:
            instead[id(module)] = children[word]
        inside = above | {id(module)}
        todo.extend(
            (child, inside, taken + goes, outermost and wraps)
            for child in children.values()
            if id(child) not in inside
        )
    after = list_wrappable_keys(to_module_state(_replace_nodes(root, instead)) or OrderedMap())
    if len(after) != len(names):  # modules that the file has under several keys
        raise NameCollision("two keys of a module would become the same key", hint=COLLISION_HINT)
    renamed = {name: new for name, new in zip(names, after, strict=True) if new != name}
    return Unwrapped(instead, renamed, wanted)


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
        """Make the rules.

        Raises:
            UsageError: if a text is not a rule, or a rule makes a key empty.
        """
        for name in ("rules", "prefixes"):
            given = getattr(self, name)
            single = isinstance(given, (str, Rule))  # rejected below
            object.__setattr__(self, name, given if single else tuple(given))
        rules_of(self.rules, self.prefixes)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with renamed keys.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if there is no entry at `key`.
            UsageError: if a rule makes a key empty.
        """
        checkpoint = checkpoint.with_late_values()
        made = _Renaming(rules_of(self.rules, self.prefixes), checkpoint.path)
        plan = NamePlan(checkpoint.path, RULES_HINT)
        every = distinct(checkpoint.sections)
        for part in every if self.key is None else [find_model_state_dict(checkpoint, self.key)]:
            names = list_wrappable_keys(part.node)
            if part.kind == "state_dict":
                plan.rename(part, names, made.renamed(names), made.module)
            elif part.kind == "module":
                for name in names:
                    made.new(name)
                plan.changes.append(stays(part))
        plan.follow(
            checkpoint.root, every, lambda own: made.renamed(own) if self.key is None else {}
        )
        plan.changes[:0] = made.changes()
        plan.changes.extend(Change("warning", text) for text in made.idle())
        plan.changes.extend(_keys_of_the_tree(checkpoint, made))
        return plan.applied(checkpoint)


def _keys_of_the_tree(checkpoint: Checkpoint, made: _Renaming) -> Iterator[Change]:
    """Yield a note for each prefix that matches no key because it is part of the path instead."""
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    for rule, count in zip(made.rules, made.counts, strict=True):
        old, equals, new = rule.text.partition("=")
        old, new = old.removesuffix("."), new.removesuffix(".")
        if not count and equals and not rule.regex and old in root and new:
            command = shlex.join(["ckptool", "convert", checkpoint.path, "OUT", "--move"])
            text = (
                f"{printable(old)} is a key of the file, not of a state dict; to rename "
                f"it: {command} "
            )
            yield Change("note", f"{text}{shlex.quote(f'{old}={new}')}")


class _Renaming(AppliedRules):
    """The rules of a rename, with the number of keys that each changed."""

    def __init__(self, rules: list[Rule], file: str) -> None:
        super().__init__(rules, file)
        self._changed = [0 for _ in rules]
        self._examples: list[RuleMatch | None] = [None for _ in rules]

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys that change, old to new, and count the matches of each rule."""
        found = self.of(names)
        for name, new in found.items():
            if "/" in new and "/" not in name:
                raise UsageError(
                    f"key {printable(new)!r} contains a slash, so it would have no path",
                    file=self.file or None,
                    hint="separate the parts of a key with dots",
                )
            for step in self.steps[name]:
                if step.old != step.new:
                    self._changed[step.rule] += 1
                    self._examples[step.rule] = self._examples[step.rule] or step
        return {name: new for name, new in found.items() if new != name}

    @property
    def counts(self) -> list[int]:
        """The number of keys that each rule changed."""
        return self._changed

    def module(self, path: str) -> str:
        """Return the new path of a module without parameters."""
        before = f"{path}." if path else ""
        new = self.run(f"{before}{_BELOW}")
        name = new[-1].new if new else f"{before}{_BELOW}"
        above, _, last = name.rpartition(".")
        return above if last == _BELOW else path

    def changes(self) -> Iterator[Change]:
        """Yield a change for each rule."""
        for rule, count, example in zip(self.rules, self._changed, self._examples, strict=True):
            if example is not None:
                such = f"{printable(example.old)} -> {printable(example.new)}"
                text = f"renamed {counted(count, 'key')} with {printable(rule.text)} ({such})"
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
        strip_names((), **{**self._options, "levels": self.levels or None})

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        if self.at is None:
            yield from ("--wrappers", "keep" if self.levels == 0 else "strip")
        yield from super().words()

    @property
    def _options(self) -> dict[str, Any]:
        return {"only": self.only, "levels": self.levels, "at": self.at}

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without wrapper prefixes; itself if there is nothing to report.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if no key starts with the path `at`.
        """
        if self.levels == 0:
            return checkpoint
        checkpoint = (
            checkpoint.with_late_values()
        )  # the names in an optimizer may be in separate files
        plan = NamePlan(checkpoint.path, COLLISION_HINT, is_wrappable)
        options = self._options
        parts = distinct(checkpoint.sections)
        _check_path(checkpoint, parts, self.at)
        for part in parts:
            names = list_wrappable_keys(part.node)
            if part.kind == "state_dict":
                result = strip_names(names, **options)
                plan.rename(part, names, result.renamed, result.rename_module)
                if result.renamed:
                    plan.changes.append(_strip_change(part, result, result.renamed))
                if self.at is None:
                    left = [result.renamed.get(name, name) for name in names]
                    plan.changes.extend(_warn_of_partial_wrapper(part, left, self.only))
            elif part.kind == "module":
                found = unwrapped_modules(part.holder, **options)
                plan.instead.update(found.instead)
                plan.note(names, found.renamed)
                if found.instead and found.wanted is not None:
                    plan.changes.append(_strip_change(part, found.wanted, found.renamed))
                if found.keeps:
                    where = describe_path(part.path)
                    text = f"the pickled module at {where} keeps keys with wrapper prefixes"
                    plan.changes.append(
                        Change("warning", f"{text}: its class defines them", len(names))
                    )
        plan.follow(checkpoint.root, parts, lambda own: strip_names(own, **options).renamed)
        return plan.applied(checkpoint)


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
        make_prefixer(self.wrapper, self.at)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with wrapped keys.

        Raises:
            NameCollision: if two keys would become the same.
            NotFound: if there is no entry at `key`, or no key starts with the path `at`.
        """
        checkpoint = checkpoint.with_late_values()
        plan = NamePlan(checkpoint.path, COLLISION_HINT, is_wrappable)
        rename, every = make_prefixer(self.wrapper, self.at), distinct(checkpoint.sections)
        parts = every if self.key is None else [find_model_state_dict(checkpoint, self.key)]
        _check_path(checkpoint, parts, self.at)
        for part in parts:
            if part.kind == "state_dict":
                _add(plan, part, self.wrapper, self.at)
            elif part.kind == "module":
                plan.changes.append(stays(part))
        plan.follow(
            checkpoint.root, every, lambda own: changed(own, rename) if self.key is None else {}
        )
        return plan.applied(checkpoint)


def _check_path(checkpoint: Checkpoint, parts: list[Section], at: str | None) -> None:
    if at is None:
        return
    models = [part for part in parts if part.kind in MODEL_KINDS]
    names = [name for part in models for name in list_wrappable_keys(part.node)]
    if not any(name.startswith(f"{at}.") for name in names):
        known = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
        raise NotFound(
            f"no key starts with {printable(at)!r}; the submodules are {listed(known)}",
            file=checkpoint.path or None,
        )


def _add(plan: NamePlan, part: Section, wrapper: str, at: str | None) -> None:
    names = list_wrappable_keys(part.node)
    renamed = changed(names, make_prefixer(wrapper, at))
    before = f"{at}.{wrapper}." if at else f"{wrapper}."
    own = [name for name in renamed if is_wrappable(name)]
    if own and all(name.startswith(before) for name in own):
        text = f'the keys{describe_location(part.path)} already started with "{before}"'
        plan.changes.append(Change("warning", text, len(renamed)))
    plan.rename(part, names, renamed, make_module_prefixer(wrapper, at))
    if renamed:
        keys = counted(len(renamed), "key")
        text = f'added "{before}" to {keys}{describe_location(part.path)}'
        plan.changes.append(Change("add", text, len(renamed)))


def _warn_of_partial_wrapper(
    part: Section, names: list[str], only: str | Sequence[str] | None
) -> Iterator[Change]:
    """Warn if most keys have `module.`, which stays because not all keys have it."""
    within, others = split_partly_wrapped(names, only=only)
    if within:
        text = (
            f'kept "module." on {counted(len(within), "key")}{describe_location(part.path)}, '
            f"because {printable(others[0])} does not have it; to remove it: "
            "ckptool rename --prefix module.="
        )
        yield Change("warning", text, len(within))


def _strip_change(part: Section, result: StripResult, renamed: dict[str, str]) -> Change:
    prefixes = " and ".join(f'"{wrapper}."' for wrapper in result.wrappers)
    levels = f" ({result.levels} levels)" if result.levels > 1 else ""
    keys = f"{counted(len(renamed), 'key')}{describe_location(part.path)}"
    text = f"removed {prefixes} from {keys}{levels}"
    return Change("strip", text, len(renamed))
