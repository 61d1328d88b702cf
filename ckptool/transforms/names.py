"""Wrapper names taken off, or put on, throughout a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NotFound
from ckptool.statedict import MODEL_KINDS, Section, model_state_dict, sections, wrapped_names
from ckptool.transforms.naming import NamePlan, changed, distinct, place, stays
from ckptool.transforms.unwrapping import unwrapped_modules
from ckptool.words import counted, listed, printable
from ckptool.wrappers import (
    COLLISION_HINT,
    add_name,
    counts,
    prefixed,
    strip_names,
    wrapped_in_part,
)

__all__ = ["add_module", "strip_module"]


def strip_module(
    checkpoint: Checkpoint,
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> Checkpoint:
    """Take wrapper components off the names of every state dict (`wrappers.strip_names`).

    `_metadata` follows, and so do optimizers that hold names. A pickled wrapper module gives way
    to the module inside. Nothing to change or to tell: the same checkpoint comes back.

    Raises:
        NameCollision: two tensors would get one name.
        NotFound: no name begins with the path `at`.
        UsageError: `only` names no wrapper, or `levels` is less than 1.
    """
    plan = NamePlan(checkpoint.path, COLLISION_HINT, counts)
    parts = distinct(sections(checkpoint.root))
    _check_path(checkpoint, parts, at)
    for part in parts:
        names = wrapped_names(part.node)
        if part.kind == "state_dict":
            result = strip_names(names, only=only, levels=levels, at=at)
            plan.rename(part, names, result.renamed, result.rename_module)
            if result.renamed:
                plan.changes.append(_stripped(part, result.wrappers, result.levels, result.renamed))
            if at is None:
                left = [result.renamed.get(name, name) for name in names]
                plan.changes.extend(_kept_in_part(part, left, only))
        elif part.kind == "module":
            _unwrap(plan, part, names, only=only, levels=levels, at=at)
    plan.follow(parts, lambda own: strip_names(own, only=only, levels=levels, at=at).renamed)
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
    plan = NamePlan(checkpoint.path, COLLISION_HINT, counts)
    rename, every = prefixed(wrapper, at), distinct(sections(checkpoint.root))
    parts = every if key is None else [model_state_dict(checkpoint, key)]
    _check_path(checkpoint, parts, at)
    for part in parts:
        if part.kind == "state_dict":
            _add(plan, part, wrapper, at)
        elif part.kind == "module":
            plan.changes.append(stays(part))
    plan.follow(every, lambda own: changed(own, rename) if key is None else {})
    return plan.applied(checkpoint)


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


def _add(plan: NamePlan, part: Section, wrapper: str, at: str | None) -> None:
    names = wrapped_names(part.node)
    renamed = changed(names, prefixed(wrapper, at))
    before = f"{at}.{wrapper}." if at else f"{wrapper}."
    own = [name for name in renamed if counts(name)]
    if own and all(name.startswith(before) for name in own):
        text = f"the names in {place(part)} began with {before} before"
        plan.changes.append(Change("warning", text, len(renamed)))
    plan.rename(part, names, renamed, add_name(wrapper, at))
    if renamed:
        text = f"{before} put before {counted(len(renamed), 'name')} in {place(part)}"
        plan.changes.append(Change("add", text, len(renamed)))


def _kept_in_part(
    part: Section, names: list[str], only: str | Sequence[str] | None
) -> Iterator[Change]:
    """A warning where most names look wrapped, and `module.` stays as not all of them do."""
    within, others = wrapped_in_part(names, only=only)
    if within:
        text = (
            f"module. stays before {counted(len(within), 'name')} in {place(part)}, as "
            f"{printable(others[0])} has none: ckptool rename --prefix module.= takes it off"
        )
        yield Change("warning", text, len(within))


def _stripped(
    part: Section, kinds: tuple[str, ...], levels: int, renamed: dict[str, str] | int
) -> Change:
    count = renamed if isinstance(renamed, int) else len(renamed)
    names, going = counted(count, "name"), counted(levels, "level")
    text = f"{', '.join(kinds)} taken off {names} in {place(part)} ({going})"
    return Change("strip", text, count)


def _unwrap(plan: NamePlan, part: Section, names: list[str], **options: Any) -> None:
    """Plan the pickled wrappers inside a module away."""
    found = unwrapped_modules(part.holder, **options)
    plan.instead.update(found.instead)
    plan.note(names, found.renamed)
    if found.instead:
        plan.changes.append(_stripped(part, found.wrappers, found.levels, len(found.renamed)))
    if found.keeps:
        text = f"the pickled module {place(part)} keeps names that look wrapped: its class has them"
        plan.changes.append(Change("warning", text, len(names)))
