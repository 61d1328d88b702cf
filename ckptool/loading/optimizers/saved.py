"""The state of an optimizer as a file has it: groups, parameters, and the names kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.model import Path, Shape, TensorRef
from ckptool.optimizers import groups_of, shape_of
from ckptool.statedict import Section
from ckptool.tree import name_of
from ckptool.words import counted, printable

__all__ = ["Kept", "Names", "Saved", "is_flat", "place_of"]

Names = tuple[str, ...]
"""A name for each parameter of a file's optimizer, in the order of its groups."""

_FLAT = ("prev_flat_grad", "old_dirs")
"""Keys of LBFGS, which keeps of its first parameter what is of all of them, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One parameter of the file's optimizer, and what is kept of it."""

    group: int
    key: Any
    """Its number or name: in the group's `params`, and in `state`."""
    state: Any
    """None where nothing is kept of it."""

    @property
    def shape(self) -> Shape | None:
        """The parameter's shape, where what is kept says so for certain."""
        return None if is_flat(self.state) else shape_of(self.state)

    @property
    def likely_shape(self) -> Shape | None:
        """The same, or what all of its tensors have that are more than a number."""
        certain = self.shape
        if certain is not None or is_flat(self.state) or not isinstance(self.state, dict):
            return certain
        tensors = [value for value in self.state.values() if isinstance(value, TensorRef)]
        shapes = {tensor.shape for tensor in tensors if tensor.shape}
        return shapes.pop() if len(shapes) == 1 else None


def is_flat(state: Any) -> bool:
    """Whether it is of all parameters as one, in their order."""
    return isinstance(state, dict) and any(key in state for key in _FLAT)


@dataclass(frozen=True, eq=False)
class Saved:
    """What `Optimizer.state_dict()` was."""

    tree: Checkpoint
    """All of the file that it is in."""
    section: Section
    notes: tuple[str, ...] = ()
    """Where it was found, where that is not the file of the model."""

    @cached_property
    def options(self) -> list[dict[Any, Any]]:
        """The groups themselves: learning rates and the like."""
        found: list[dict[Any, Any]] = self.section.node["param_groups"]
        return found

    @cached_property
    def groups(self) -> tuple[tuple[Kept, ...], ...]:
        """The parameters of each group."""
        state = self.section.node["state"]
        if not any(key in state for keys in groups_of(self.section) for key in keys):
            state = {_number(key): held for key, held in state.items()}
        return tuple(
            tuple(Kept(number, key, _something(state.get(key))) for key in keys)
            for number, keys in enumerate(groups_of(self.section))
        )

    @cached_property
    def parameters(self) -> tuple[Kept, ...]:
        """Those of all groups."""
        return tuple(chain.from_iterable(self.groups))

    @cached_property
    def leftover(self) -> dict[Any, Any]:
        """State that is of none of the parameters."""
        known = {one.key for one in self.parameters}
        state = self.section.node["state"]
        return {key: held for key, held in state.items() if not {key, _number(key)} & known}

    @cached_property
    def shared(self) -> dict[str, Any]:
        """The part of it that is of the optimizer as a whole, by a word of its own."""
        if any(isinstance(one.key, str) for one in self.parameters):
            return {}
        return {key: held for key, held in self.leftover.items() if isinstance(key, str)}

    @property
    def strays(self) -> list[Any]:
        """The keys of the rest: of parameters that no group has."""
        return [key for key in self.leftover if key not in self.shared]

    def names(self) -> Names | None:
        """The names that the groups keep: in `param_names`, or where others keep numbers."""
        held = [group.get("param_names") for group in self.options]
        return self._in_order(held) or _distinct([one.key for one in self.parameters])

    def some_names(self) -> dict[int, str]:
        """By the places of parameters their names, of those groups that have them.

        Nothing where any group keeps something else, or a name is there twice.
        """
        held = [group.get("param_names") for group in self.options]
        ends = list(accumulate(len(group) for group in self.groups))
        named: dict[int, str] = {}
        for names, group, end in zip(held, self.groups, ends, strict=True):
            if names is None:
                continue
            if not isinstance(names, (list, tuple)) or len(names) != len(group):
                return {}
            named.update(zip(range(end - len(group), end), names, strict=True))
        return named if _distinct(list(named.values())) else {}

    @property
    def misnamed(self) -> str:
        """What is wrong with the names that the groups keep; empty: they keep none."""
        held = [group.get("param_names") for group in self.options]
        if all(one is None for one in held):
            return ""
        seen: set[str] = set()
        for number, (names, group) in enumerate(zip(held, self.groups, strict=True)):
            some = names if isinstance(names, (list, tuple)) else ()
            if len(some) != len(group):
                return f"group {number} has {counted(len(some), 'name')} for {len(group):,}"
            for name in some:
                if not isinstance(name, str):
                    return f"one of its names is of type {type(name).__name__}"
                if name in seen:
                    return f"{printable(name)} is there twice"
                seen.add(name)
        return ""

    def names_beside(self) -> list[Names]:
        """Lists of names that stand in the optimizer's dict or next to it, one for each parameter.

        What they are names of is for the caller to find out: there are lists of classes as well.
        """
        found: dict[Names, None] = {}
        for holder in (self.section.node, *_holders(self.tree.root, self.section.path)):
            for key, value in holder.items():
                if isinstance(key, str) and "name" in key.lower():
                    names = self._in_order(value)
                    if names is not None:
                        found[names] = None
        return list(found)

    def _in_order(self, held: Any) -> Names | None:
        """Names as a list, as a list for each group, or by what the groups call the parameters."""
        keys = [one.key for one in self.parameters]
        if isinstance(held, dict):
            turned = {value: key for key, value in held.items() if isinstance(value, (int, str))}
            by_key = held if all(key in held for key in keys) else turned
            return _distinct([by_key.get(key) for key in keys]) if len(held) == len(keys) else None
        if not isinstance(held, (list, tuple)):
            return None
        if len(held) == len(self.groups) and all(isinstance(one, (list, tuple)) for one in held):
            fits = all(len(one) == len(group) for one, group in zip(held, self.groups, strict=True))
            return _distinct(list(chain.from_iterable(held))) if fits else None
        return _distinct(held) if len(held) == len(keys) else None


def _number(key: Any) -> Any:
    """A number that was written as text, as a detour by JSON leaves it."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key


def _distinct(names: Any) -> Names | None:
    """The names, if they are names and each is another's."""
    if not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len(set(names)) == len(names) else None


def _something(state: Any) -> Any:
    """What is kept of a parameter; None where that is nothing: SGD's `momentum_buffer: None`."""
    if isinstance(state, dict) and all(value is None for value in state.values()):
        return None
    return state


def _holders(root: Any, path: Path) -> Iterator[dict[Any, Any]]:
    """The dict that the optimizer is in, also where a list is between."""
    nodes = [root]
    for key in path[:-1]:
        try:
            nodes.append(nodes[-1][key])
        except (TypeError, KeyError, IndexError):  # inside an object
            return
    for node in reversed(nodes if path else []):
        if isinstance(node, dict):
            yield node
            return


def place_of(saved: Saved, key: Any, *inside: Any) -> str:
    """The address of what is kept of a parameter."""
    return name_of((*saved.section.path, "state", key, *inside))
