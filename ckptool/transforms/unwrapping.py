"""Pickled wrapper modules (`DataParallel(net)`) replaced by the module that they wrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptool.model import Opaque, OrderedMap
from ckptool.modules import child_modules, module_state, own_tensors
from ckptool.names import WRAPPERS, strip_names
from ckptool.statedict import wrapped_names

__all__ = ["Unwrapped", "unwrapped_modules"]


@dataclass
class Unwrapped:
    """Which objects stand in place of which, and what that does to the names."""

    instead: dict[int, Opaque] = field(default_factory=dict)
    """By the identity of a wrapper, the module directly inside it."""
    renamed: dict[str, str] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    levels: int = 0
    keeps: bool = False
    """Whether names look wrapped and stay: the class only looks like a wrapper."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A module on the way down, with its prefix before and after."""

    module: Opaque
    old: str
    new: str
    above: frozenset[int]
    taken: tuple[str, ...] = ()
    outermost: bool = True


def unwrapped_modules(
    root: Opaque,
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> Unwrapped:
    """What takes the wrappers out of a pickled module, options as `wrappers.strip_names`.

    A wrapper has one child, named as wrappers name it, and no tensors of its own; where the name
    is `module` it must be outermost as well, and of a class that is a kind of `DataParallel`.
    """
    names = wrapped_names(module_state(root) or OrderedMap())
    wanted = strip_names(names, only=only, levels=levels, at=at)
    found = Unwrapped()
    start = _module_at(root, at)
    if start is None or not wanted.renamed:
        return found
    kinds = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    prefix = f"{at}." if at else ""
    todo = [_Visit(start, prefix, prefix, frozenset())]
    while todo:
        visit = todo.pop()
        _note_names(visit, found)
        todo.extend(_below(visit, kinds, levels, found))
    found.keeps = found.renamed != wanted.renamed
    return found


def _module_at(module: Opaque, at: str | None) -> Opaque | None:
    for name in at.split(".") if at else ():
        child = child_modules(module).get(name)
        if child is None:
            return None
        module = child
    return module


def _note_names(visit: _Visit, found: Unwrapped) -> None:
    own = own_tensors(visit.module)
    if visit.old != visit.new:
        found.renamed.update((f"{visit.old}{name}", f"{visit.new}{name}") for name in own)
    if own and len(visit.taken) > found.levels:
        found.levels = len(visit.taken)
    if own:
        found.wrappers = tuple(dict.fromkeys((*found.wrappers, *visit.taken)))


def _below(
    visit: _Visit, kinds: tuple[str, ...], levels: int | None, found: Unwrapped
) -> list[_Visit]:
    """The children to go on with; a wrapper's one child takes its place."""
    above = visit.above | {id(visit.module)}
    children = child_modules(visit.module)
    word = next(iter(children), None)
    wraps = len(children) == 1 and word in WRAPPERS and not own_tensors(visit.module)
    goes = wraps and word in kinds and (levels is None or len(visit.taken) < levels)
    if goes and word == "module":
        goes = visit.outermost and "DataParallel" in visit.module.class_name.rpartition(".")[2]
    if goes and word is not None:
        found.instead[id(visit.module)] = children[word]
        taken = (*visit.taken, word)
        old = f"{visit.old}{word}."
        return [_Visit(children[word], old, visit.new, above, taken, visit.outermost)]
    return [
        _Visit(
            child, f"{visit.old}{name}.", f"{visit.new}{name}.", above, visit.taken,
            visit.outermost and wraps,
        )
        for name, child in children.items()
        if id(child) not in above
    ]  # fmt: skip
