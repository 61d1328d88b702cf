"""Wrapper names taken off, or put on, throughout a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NotFound
from ckptool.model import Opaque, OrderedMap
from ckptool.paths import listed, printable, rebuild
from ckptool.statedict import (
    MODEL_KINDS,
    Section,
    is_optimizer,
    model_state_dict,
    optimizer_names,
    sections,
    wrapped_names,
)
from ckptool.transforms.unwrapping import unwrapped_modules
from ckptool.wrappers import (
    Rename,
    add_name,
    check_collisions,
    counts,
    moved_metadata,
    prefixed,
    strip_names,
)

__all__ = ["add_module", "strip_module"]


@dataclass
class _Plan:
    """What a pass over the tree is to change, by the identity of the objects concerned."""

    instead: dict[int, Any] = field(default_factory=dict)
    """What stands in place of a dict or object."""
    namings: list[_Naming] = field(default_factory=list)
    """How the names of each state dict change, for the optimizers to follow."""
    changes: list[Change] = field(default_factory=list)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with all of it done; itself where nothing changes."""
        if not self.changes:
            return checkpoint

        def chosen(node: Any) -> Any:
            return self.instead.get(id(node), node)

        root = rebuild(checkpoint.root, leaf=chosen, mapping=chosen)
        return checkpoint.with_root(root, *self.changes)


@dataclass(frozen=True)
class _Naming:
    """The names of one state dict, and those of them that change."""

    names: frozenset[str]
    renamed: dict[str, str]


def strip_module(
    checkpoint: Checkpoint,
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> Checkpoint:
    """Take wrapper components off the names of every state dict (`wrappers.strip_names`).

    `_metadata` follows, and so do optimizers that hold names. A pickled wrapper module gives way
    to the module inside. Nothing to change: the same checkpoint comes back.

    Raises:
        NameCollision: two tensors would get one name.
        NotFound: no name begins with the path `at`.
        UsageError: `only` names no wrapper, or `levels` is less than 1.
    """
    plan = _Plan()
    parts = _distinct(sections(checkpoint.root))
    _check_path(checkpoint, parts, at)
    for part in parts:
        names = wrapped_names(part.node)
        if part.kind == "state_dict":
            result = strip_names(names, only=only, levels=levels, at=at)
            _rename(plan, part, names, result.renamed, result.rename_module)
            if result.renamed:
                plan.changes.append(_stripped(part, result.wrappers, result.levels, result.renamed))
        elif part.kind == "module":
            _unwrap(plan, part, names, only=only, levels=levels, at=at)
    for part in parts:
        if part.kind == "optimizer":
            own = optimizer_names(part.node)
            renamed = _followed(plan, own)
            if renamed is None:
                renamed = strip_names(own, only=only, levels=levels, at=at).renamed
            _rename_optimizer(plan, part, own, renamed)
    return plan.applied(checkpoint)


def add_module(
    checkpoint: Checkpoint, *, wrapper: str = "module", at: str | None = None, key: Any = None
) -> Checkpoint:
    """Put a wrapper component before the names of every state dict, or of the one under `key`.

    `at` puts it around the submodule of that path. Names that have it already get it once more,
    with a warning among the changes; so does a pickled module, which stays as it is.

    Raises:
        NameCollision: two tensors would get one name.
        NotFound: nothing of that `key`, or no name begins with the path `at`.
        UsageError: `wrapper` is none that is known.
    """
    plan = _Plan()
    rename, every = prefixed(wrapper, at), _distinct(sections(checkpoint.root))
    parts = every if key is None else [model_state_dict(checkpoint, key)]
    _check_path(checkpoint, parts, at)
    for part in parts:
        if part.kind == "state_dict":
            _add(plan, part, wrapper, at)
        elif part.kind == "module":
            text = f"the pickled module {_place(part)} stays as it is: its class names its parts"
            plan.changes.append(Change("warning", text, len(part.node)))
    for part in every:
        if part.kind == "optimizer":
            own = optimizer_names(part.node)
            renamed = _followed(plan, own)
            if renamed is None and key is None:
                renamed = _changed(own, rename)
            _rename_optimizer(plan, part, own, renamed or {})
    return plan.applied(checkpoint)


def _distinct(parts: Iterable[Section]) -> list[Section]:
    """Each once, also where the file mentions one under several paths."""
    return list({id(part.holder): part for part in reversed(list(parts))}.values())[::-1]


def _check_path(checkpoint: Checkpoint, parts: list[Section], at: str | None) -> None:
    if at is None:
        return
    models = [part for part in parts if part.kind in MODEL_KINDS]
    names = [name for part in models for name in wrapped_names(part.node)]
    if not any(name.startswith(f"{at}.") for name in names):
        known = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
        raise NotFound(
            f"no name begins with {printable(at)!r}; the modules are {listed(known)}",
            file=checkpoint.path or None,
        )


def _changed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    return {name: new for name in names if (new := rename(name)) != name}


def _add(plan: _Plan, part: Section, wrapper: str, at: str | None) -> None:
    names = wrapped_names(part.node)
    renamed = _changed(names, prefixed(wrapper, at))
    before = f"{at}.{wrapper}." if at else f"{wrapper}."
    counted = [name for name in renamed if counts(name)]
    if counted and all(name.startswith(before) for name in counted):
        text = f"the names in {_place(part)} began with {before} before"
        plan.changes.append(Change("warning", text, len(renamed)))
    _rename(plan, part, names, renamed, add_name(wrapper, at), fresh=at or "")
    if renamed:
        text = f"{before} put before {len(renamed)} names in {_place(part)}"
        plan.changes.append(Change("add", text, len(renamed)))


def _place(part: Section) -> str:
    return printable(part.name) or "the root"


def _stripped(
    part: Section, kinds: tuple[str, ...], levels: int, renamed: dict[str, str] | int
) -> Change:
    count = renamed if isinstance(renamed, int) else len(renamed)
    going = "1 level" if levels == 1 else f"{levels} levels"
    text = f"{', '.join(kinds)} taken off {count} names in {_place(part)} ({going})"
    return Change("strip", text, count)


def _rename(
    plan: _Plan,
    part: Section,
    names: list[str],
    renamed: dict[str, str],
    rename_module: Rename,
    fresh: str | None = None,
) -> None:
    """Plan a state dict under its new names, `_metadata` too."""
    plan.namings.append(_Naming(frozenset(names), renamed))
    check_collisions(part.node, renamed)
    if not renamed:
        return
    if isinstance(part.holder, Opaque):
        plan.instead[id(part.holder)] = _renamed_object(part.holder, renamed)
        return
    made = type(part.holder)()
    made.update((renamed.get(name, name), value) for name, value in part.holder.items())
    if isinstance(made, OrderedMap):
        made.attributes = dict(part.holder.attributes)
        if isinstance(made.metadata, dict):
            made.attributes["_metadata"] = moved_metadata(made.metadata, rename_module, fresh)
    plan.instead[id(part.holder)] = made


def _renamed_object(holder: Opaque, renamed: dict[str, str]) -> Opaque:
    """A state dict of a class derived from `dict`, under its new names."""

    def step(kind: str, value: Any) -> tuple[str, Any]:
        if kind != "set":
            return kind, value
        return kind, [(renamed.get(name, name), item) for name, item in value]

    return replace(holder, steps=[step(kind, value) for kind, value in holder.steps])


def _unwrap(plan: _Plan, part: Section, names: list[str], **options: Any) -> None:
    """Plan the pickled wrappers inside a module away."""
    found = unwrapped_modules(part.holder, **options)
    plan.instead.update(found.instead)
    plan.namings.append(_Naming(frozenset(names), found.renamed))
    if found.instead:
        plan.changes.append(_stripped(part, found.wrappers, found.levels, len(found.renamed)))
    if found.keeps:
        text = (
            f"the pickled module {_place(part)} keeps names that look wrapped: its class has them"
        )
        plan.changes.append(Change("warning", text, len(names)))


def _followed(plan: _Plan, own: list[str]) -> dict[str, str] | None:
    """How an optimizer's names change with the state dict that has most of them; None: no one's."""
    wanted = frozenset(own)
    best = sorted(plan.namings, key=lambda naming: len(wanted & naming.names), reverse=True)
    if not best or not wanted & best[0].names:
        return None
    renamed: dict[str, str] = {}
    for naming in best:
        for name in wanted & naming.names - renamed.keys():
            renamed[name] = naming.renamed.get(name, name)
    return {name: new for name, new in renamed.items() if new != name}


def _rename_optimizer(plan: _Plan, part: Section, own: list[str], renamed: dict[str, str]) -> None:
    """Plan an optimizer's state dict under its new names."""
    optimizer = part.node
    check_collisions(own, renamed)
    if not renamed or not is_optimizer(optimizer):
        return
    state = optimizer["state"]
    plan.instead[id(state)] = _with_items(
        state, [(renamed.get(key, key) if isinstance(key, str) else key, value)
                for key, value in state.items()]
    )  # fmt: skip
    for group in optimizer["param_groups"]:
        items = [
            (key, _renamed_items(value, renamed) if key in ("params", "param_names") else value)
            for key, value in group.items()
        ]
        plan.instead[id(group)] = _with_items(group, items)
    text = f"{len(renamed)} names in the optimizer {_place(part)} follow"
    plan.changes.append(Change("follow", text, len(renamed)))


def _with_items(mapping: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = type(mapping)(items)
    if isinstance(made, OrderedMap) and isinstance(mapping, OrderedMap):
        made.attributes = mapping.attributes
    return made


def _renamed_items(held: Any, renamed: dict[str, str]) -> Any:
    if not isinstance(held, (list, tuple)):
        return held
    return type(held)(renamed.get(item, item) if isinstance(item, str) else item for item in held)
