"""State dicts under new names, and all that follows: `_metadata`, optimizers that hold names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.model import Opaque, OrderedMap
from ckptool.paths import rebuild
from ckptool.statedict import Section, is_optimizer, optimizer_names
from ckptool.transforms.metadata import moved_metadata
from ckptool.words import counted, printable
from ckptool.wrappers import Rename, check_collisions

__all__ = ["NamePlan", "changed", "distinct", "place", "stays"]


@dataclass(frozen=True)
class _Naming:
    """The names of one state dict, and those of them that change."""

    names: frozenset[str]
    renamed: dict[str, str]


@dataclass
class NamePlan:
    """What a pass over the tree is to change, by the identity of the objects concerned."""

    file: str
    """For messages; empty for dicts in memory."""
    collision_hint: str
    tells: Callable[[str], bool] = lambda name: True
    """Whether a name says where its module goes."""
    instead: dict[int, Any] = field(default_factory=dict)
    """What stands in place of a dict or object."""
    changes: list[Change] = field(default_factory=list)
    _namings: list[_Naming] = field(default_factory=list)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with all of it done; itself where nothing changes."""
        if not self.changes:
            return checkpoint
        if not self.instead:
            return checkpoint.with_root(checkpoint.root, *self.changes)

        def chosen(node: Any) -> Any:
            return self.instead.get(id(node), node)

        root = rebuild(checkpoint.root, leaf=chosen, mapping=chosen)
        return checkpoint.with_root(root, *self.changes)

    def note(self, names: Iterable[str], renamed: dict[str, str]) -> None:
        """Remember how the names of a state dict change, for the optimizers to follow."""
        self._namings.append(_Naming(frozenset(names), renamed))

    def rename(
        self, part: Section, names: list[str], renamed: dict[str, str], rename_module: Rename
    ) -> None:
        """Plan a state dict under its new names, `_metadata` too.

        `names` are all of the model's own, `renamed` those that change; `rename_module` does the
        same to the path of a module without names.

        Raises:
            NameCollision: two entries would get one name.
        """
        self.note(names, renamed)
        self._check(part, part.node, renamed)
        if not renamed:
            return
        if isinstance(part.holder, Opaque):
            self.instead[id(part.holder)] = _renamed_object(part.holder, renamed)
            return
        made = type(part.holder)()
        made.update((renamed.get(name, name), value) for name, value in part.holder.items())
        if isinstance(made, OrderedMap):
            made.attributes = dict(part.holder.attributes)
            if isinstance(made.metadata, dict):
                telling = {name: renamed.get(name, name) for name in names if self.tells(name)}
                moved = moved_metadata(made.metadata, telling, rename_module)
                made.attributes["_metadata"] = moved
        self.instead[id(part.holder)] = made

    def follow(
        self, parts: Iterable[Section], alone: Callable[[list[str]], dict[str, str]]
    ) -> None:
        """Plan the optimizers among `parts`, once all state dicts are planned.

        Each goes with the state dicts that have its names; `alone` says how the names change of one
        that has none of theirs.

        Raises:
            NameCollision: two of its names would become one.
        """
        for part in parts:
            if part.kind == "optimizer":
                own = optimizer_names(part.node)
                renamed = self._followed(own)
                self._rename_optimizer(part, own, alone(own) if renamed is None else renamed)

    def _followed(self, own: list[str]) -> dict[str, str] | None:
        """How an optimizer's names change with the state dict that has most of them.

        None where no state dict has any of them.
        """
        wanted = frozenset(own)
        best = sorted(self._namings, key=lambda naming: len(wanted & naming.names), reverse=True)
        if not best or not wanted & best[0].names:
            return None
        renamed: dict[str, str] = {}
        for naming in best:
            for name in wanted & naming.names - renamed.keys():
                renamed[name] = naming.renamed.get(name, name)
        return {name: new for name, new in renamed.items() if new != name}

    def _rename_optimizer(self, part: Section, own: list[str], renamed: dict[str, str]) -> None:
        """Plan an optimizer's state dict under its new names."""
        optimizer = part.node
        self._check(part, own, renamed)
        if not renamed or not is_optimizer(optimizer):
            return
        state = optimizer["state"]
        self.instead[id(state)] = _with_items(
            state, [(renamed.get(key, key) if isinstance(key, str) else key, value)
                    for key, value in state.items()]
        )  # fmt: skip
        for group in optimizer["param_groups"]:
            items = [
                (key, _renamed_items(value, renamed) if key in ("params", "param_names") else value)
                for key, value in group.items()
            ]
            self.instead[id(group)] = _with_items(group, items)
        verb = "follows" if len(renamed) == 1 else "follow"
        text = f"{counted(len(renamed), 'name')} in the optimizer {place(part)} {verb}"
        self.changes.append(Change("follow", text, len(renamed)))

    def _check(self, part: Section, names: Iterable[Any], renamed: dict[str, str]) -> None:
        check_collisions(
            names, renamed, file=self.file or None, place=place(part), hint=self.collision_hint
        )


def distinct(parts: Iterable[Section]) -> list[Section]:
    """Each once, also where the file mentions one under several paths."""
    return list({id(part.holder): part for part in reversed(list(parts))}.values())[::-1]


def changed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """Old name to new, of the names that `rename` changes."""
    return {name: new for name in names if (new := rename(name)) != name}


def place(part: Section) -> str:
    """A section's address for a sentence."""
    return printable(part.name) or "the root"


def stays(part: Section) -> Change:
    """The warning that the names of a pickled module cannot change."""
    text = f"the pickled module {place(part)} stays as it is: its class names its parts"
    return Change("warning", text, len(part.node))


def _renamed_object(holder: Opaque, renamed: dict[str, str]) -> Opaque:
    """A state dict of a class derived from `dict`, under its new names."""

    def step(kind: str, value: Any) -> tuple[str, Any]:
        if kind != "set":
            return kind, value
        return kind, [(renamed.get(name, name), item) for name, item in value]

    return replace(holder, steps=[step(kind, value) for kind, value in holder.steps])


def _with_items(mapping: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = type(mapping)(items)
    if isinstance(made, OrderedMap) and isinstance(mapping, OrderedMap):
        made.attributes = mapping.attributes
    return made


def _renamed_items(held: Any, renamed: dict[str, str]) -> Any:
    if not isinstance(held, (list, tuple)):
        return held
    return type(held)(renamed.get(item, item) if isinstance(item, str) else item for item in held)
