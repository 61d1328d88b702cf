"""A tree without some of its tensors, and what has to go with them.

A dict loses entries. A list cannot without renumbering the rest, nor an object, whose class names
its parts: each goes as a whole where none of its tensors is kept. An optimizer goes as a whole with
the first of its tensors, for what is left of its state would be wrong. What has become empty goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Change
from ckptool.errors import UsageError
from ckptool.model import Opaque, OrderedMap, Path, TensorRef, find_tensors
from ckptool.modules import is_module
from ckptool.paths import name_of, rebuild, walk
from ckptool.statedict import MODEL_KINDS, Section, sections, wrapped_names
from ckptool.transforms.metadata import remaining_metadata
from ckptool.words import counted, listed, printable

__all__ = ["Pruned", "pruned"]

_MOST_TOLD = 20
"""Places that have a sentence of their own."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What is left of a tree."""

    root: Any
    """The same object where nothing went; None where nothing is left."""
    left_out: tuple[Change, ...] = ()
    stale: tuple[str, ...] = ()
    """Optimizers that stay, with a state, although weights of a model went."""


@dataclass(eq=False)
class _Visit:
    """A container on one of its paths, and what becomes of it there."""

    path: Path
    name: str
    """Its address, as it was in the file."""
    node: Any
    part: Section | None
    own: frozenset[Any]
    """The keys of a state dict that are the model's own, values among them."""
    chosen: dict[Any, bool] = field(default_factory=dict)
    """Whether an entry is kept: tensors, and what is `own`."""
    inside: list[_Visit] = field(default_factory=list)
    kept: int = 0
    """Tensors below that are chosen, and that nothing in between takes away."""
    lost: int = 0
    dropped: frozenset[Any] = frozenset()
    """Keys of the entries that go one by one."""
    gone: bool = False
    torn: bool = False
    """Whether it would lose a part, and can only stay or go."""

    @property
    def place(self) -> str:
        """Its address, with what it is where that says more."""
        where = self.name if self.path else f"at {self.name}"
        if self.part is not None:
            return f"the {self.part.kind} {where}"
        return f"the object {where}" if isinstance(self.node, Opaque) else self.name

    def note(self, key: Any, value: Any, chosen: bool) -> None:
        """Take down that an entry is chosen, or is not."""
        if key not in self.chosen:
            self.chosen[key] = chosen
            count = sum(1 for _ in find_tensors(value))
            self.kept += count if chosen else 0
            self.lost += 0 if chosen else count

    def settle(self) -> None:
        """Decide what becomes of it, when all inside have."""
        for one in self.inside:
            self.kept += 0 if one.gone else one.kept
            self.lost += one.kept + one.lost if one.gone else one.lost
        leaving = {key for key, chosen in self.chosen.items() if not chosen}
        leaving.update(one.path[-1] for one in self.inside if one.gone)
        keys = self._keys()
        touched = leaving | {one.path[-1] for one in self.inside if one.lost}
        if self.part is not None and self.part.kind == "optimizer":
            self.gone = self.lost > 0
        elif (leaving if isinstance(self.node, (list, tuple)) else touched) <= keys:
            self.dropped = frozenset(leaving)
            self.gone = bool(leaving) and len(leaving) == len(keys)
        else:
            self.gone, self.torn = not self.kept, self.kept > 0

    def _keys(self) -> set[Any]:
        """The keys of the entries that can go one by one."""
        if isinstance(self.node, dict):
            return set(self.node)
        if isinstance(self.node, Opaque) and not is_module(self.node):
            entries = [value for kind, value in self.node.steps if kind == "set"]
            return {key for items in entries for key, _ in items}
        return set()


def pruned(
    root: Any, choose: Callable[[Path], bool], *, where: Path = (), file: str = ""
) -> Pruned:
    """The tree with the tensors that `choose` is true of, by their path, and what is no tensor.

    What is the model's own in a state dict (`statedict.wrapped_names`) is asked for as well, an
    `_extra_state` as one. `_metadata` loses the modules that lost all their names. `where` is the
    path of the root in the `file`: paths begin with it.

    Raises:
        UsageError: a list or an object would lose some of its tensors; or one dict that the file
            has under two names would become two.
    """
    visits = _visits(root, choose, where)
    if not visits:
        lost = isinstance(root, TensorRef) and not choose(where)
        return Pruned(None if lost else root)
    for visit in reversed(visits):
        visit.settle()
    staying = [visit for visit in visits[:1] if not visit.gone]
    for visit in staying:
        staying.extend(one for one in visit.inside if not one.gone)
    if not staying:
        return Pruned(None, tuple(_told(visits, set(staying))))
    dropped = _dropped(staying, file or None)
    if not any(dropped.values()):
        return Pruned(root)
    return Pruned(
        _without(root, dropped), tuple(_told(visits, set(staying))), tuple(_stale(staying))
    )


def _visits(root: Any, choose: Callable[[Path], bool], where: Path) -> list[_Visit]:
    """Every container on each of its paths, before what is in it, with the choices made."""
    parts = {id(part.holder): part for part in sections(root) if part.kind != "values"}
    found: list[_Visit] = []
    open_visits: list[_Visit] = []

    def around(path: Path) -> _Visit | None:
        while open_visits and open_visits[-1].path != path[:-1]:
            open_visits.pop()
        return open_visits[-1] if path and open_visits else None

    def enter(path: Path, node: Any) -> bool:
        outer = around(path)
        if outer is not None and path[-1] in outer.own:
            outer.note(path[-1], node, choose(where + path))
            return False
        part = parts.get(id(node))
        named = part is not None and part.kind == "state_dict"
        own = frozenset(wrapped_names(part.node)) if part is not None and named else frozenset()
        visit = _Visit(path, printable(name_of(where + path)) or "the root", node, part, own)
        found.append(visit)
        open_visits.append(visit)
        if outer is not None:
            outer.inside.append(visit)
        return True

    for path, leaf in walk(root, enter=enter):
        outer = around(path)
        if outer is not None and (isinstance(leaf, TensorRef) or path[-1] in outer.own):
            outer.note(path[-1], leaf, choose(where + path))
    return found


def _dropped(staying: list[_Visit], file: str | None) -> dict[int, frozenset[Any]]:
    """The keys that each dict or object loses, by its identity."""
    dropped: dict[int, _Visit] = {}
    for visit in staying:
        if visit.torn:
            raise _torn(visit, file)
        before = dropped.setdefault(id(visit.node), visit)
        if before.dropped != visit.dropped:
            raise UsageError(
                f"{before.name} and {visit.name} are one in this file, and would not be the same",
                file=file,
                hint="choose the same names of both, or one of them by --key",
            )
    return {key: visit.dropped for key, visit in dropped.items()}


def _torn(visit: _Visit, file: str | None) -> UsageError:
    if isinstance(visit.node, (list, tuple)):
        return UsageError(
            f"{visit.name} is a list: without some of its entries the rest would be renumbered",
            file=file,
            hint="choose all of its tensors or none, or one entry by --key",
        )
    whole = "--model-only makes a plain state dict of it" if is_module(visit.node) else ""
    return UsageError(
        f"{visit.name} is an object of class {printable(visit.node.class_name)}, which cannot do "
        "without some of its tensors",
        file=file,
        hint=whole or "choose all of its tensors or none",
    )


def _without(root: Any, dropped: dict[int, frozenset[Any]]) -> Any:
    def leaf(node: Any) -> Any:
        keys = dropped.get(id(node))
        if not keys or not isinstance(node, Opaque):
            return node
        steps = [
            (kind, [item for item in value if item[0] not in keys] if kind == "set" else value)
            for kind, value in node.steps
        ]
        return replace(node, steps=steps)

    def mapping(node: dict[Any, Any]) -> dict[Any, Any]:
        keys = dropped.get(id(node))
        return _thinned(node, keys) if keys else node

    return rebuild(root, leaf, mapping)


def _thinned(node: dict[Any, Any], dropped: frozenset[Any]) -> dict[Any, Any]:
    made = type(node)((key, value) for key, value in node.items() if key not in dropped)
    if isinstance(made, OrderedMap) and isinstance(node, OrderedMap):
        made.attributes = dict(node.attributes)
        if isinstance(node.metadata, dict):
            names = wrapped_names(node)
            kept = [name for name in names if name not in dropped]
            made.attributes["_metadata"] = remaining_metadata(node.metadata, names, kept)
    return made


def _stale(staying: list[_Visit]) -> Iterator[str]:
    kinds = {visit.part.kind for visit in staying if visit.part is not None and visit.lost}
    if not kinds.isdisjoint(MODEL_KINDS):
        for visit in staying:
            part = visit.part
            if part is not None and part.kind == "optimizer" and part.node["state"]:
                yield visit.place


def _told(visits: list[_Visit], staying: set[_Visit]) -> Iterator[Change]:
    """What went: the outermost of what is gone, and the entries of what stays."""
    above: set[_Visit] = set(visits[:1])
    above.update(one for visit in staying for one in visit.inside)
    told: list[tuple[str, int]] = []
    for visit in visits:
        if visit in staying:
            names = [str(key) for key, chosen in visit.chosen.items() if not chosen]
            if names:
                text = f"{counted(len(names), 'name')} of {visit.name}: {listed(names)}"
                told.append((text, len(names)))
        elif visit in above:
            told.append((_whole(visit), visit.kept + visit.lost))
    for text, count in told[:_MOST_TOLD]:
        yield Change("left-out", text, count)
    if len(told) > _MOST_TOLD:
        count = sum(count for _, count in told[_MOST_TOLD:])
        places = counted(len(told) - _MOST_TOLD, "more place")
        yield Change("left-out", f"{counted(count, 'name')} in {places}", count)


def _whole(visit: _Visit) -> str:
    inner: list[str] = []
    todo = list(visit.inside)
    while todo:
        one = todo.pop(0)
        if one.part is not None:
            inner.append(one.place)
        else:
            todo.extend(one.inside)
    count = counted(visit.kept + visit.lost, "tensor")
    text = f"{visit.place} ({count}{': ' + listed(inner) if inner else ''})"
    return f"{text}, as not all of it is chosen" if visit.kept else text
