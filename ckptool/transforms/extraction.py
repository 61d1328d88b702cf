"""A part of a checkpoint: a section, some tensors, the weights alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.model import Opaque, OrderedMap, Path, Storage, TensorRef, find_tensors, remade
from ckptool.modules import holds_tensors, is_module
from ckptool.statedict import (
    MODEL_KINDS,
    OF_THE_MODEL,
    Section,
    model_state_dict,
    sections,
    values_inside,
    wrapped_names,
)
from ckptool.transforms.compacting import without_unseen
from ckptool.transforms.name_rules import similar
from ckptool.transforms.names import remaining_metadata
from ckptool.tree import name_of, rebuild, resolve, selected, walk
from ckptool.words import counted, listed, printable

__all__ = [
    "Pruned",
    "beside",
    "extract",
    "plain_state_dict",
    "pruned",
    "single_state_dict",
    "state_dict_alone",
    "weights_alone",
]

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
    made = remade(node, ((key, value) for key, value in node.items() if key not in dropped))
    if isinstance(made, OrderedMap) and isinstance(made.metadata, dict):
        names = wrapped_names(node)
        kept = [name for name in names if name not in dropped]
        versions = remaining_metadata(made.metadata, names, kept)
        made.attributes = {**made.attributes, "_metadata": versions}
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
            told.append((_parts_below(visit), visit.kept + visit.lost))
    for text, count in told[:_MOST_TOLD]:
        yield Change("left-out", text, count)
    if len(told) > _MOST_TOLD:
        count = sum(count for _, count in told[_MOST_TOLD:])
        places = counted(len(told) - _MOST_TOLD, "more place")
        yield Change("left-out", f"{counted(count, 'name')} in {places}", count)


def _parts_below(visit: _Visit) -> str:
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


_PROGRAMS = ("torchscript", "pt2")
"""Formats whose tensors are those of a module, as a pickled module's are."""
_VALUES = (bool, int, float, complex, str, type(None))


def single_state_dict(
    checkpoint: Checkpoint, key: Any = None, *, values: bool = True
) -> Checkpoint:
    """The checkpoint whose root is the one flat state dict (`statedict.model_state_dict`).

    A pickled module becomes what its `state_dict()` would be (`plain_state_dict`). All else is
    named among the changes, kind `left-out`; without `values` also those among the tensors.

    Raises:
        AmbiguousName: there are several state dicts and no `key`.
        NotFound: there is none, or nothing under that `key`.
    """
    alone = state_dict_alone if values else weights_alone
    return alone(checkpoint, model_state_dict(checkpoint, key))


def state_dict_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """The checkpoint whose root is one section's state dict; what else there is, `left-out`."""
    root = plain_state_dict(checkpoint, chosen)
    spread = sum(value.is_spread for value in chosen.node.values() if isinstance(value, TensorRef))
    spread -= sum(value.is_spread for value in root.values() if isinstance(value, TensorRef))
    if spread:
        text = f"{counted(spread, 'DTensor')}, all in this file, made plain"
        checkpoint = checkpoint.with_root(checkpoint.root, Change("gather", text, spread))
    if chosen.holder is checkpoint.root and isinstance(chosen.holder, OrderedMap):
        same = all(map(operator.is_, root.values(), chosen.holder.values()))
        return checkpoint if same else checkpoint.with_root(root)
    return checkpoint.with_root(root, *_left_out(checkpoint.root, chosen))


def weights_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """As `state_dict_alone`, without the values among the tensors, which no model takes."""
    alone = state_dict_alone(checkpoint, chosen)
    names = [name for name in values_inside(alone.root) if not holds_tensors(alone.root[name])]
    if not names:
        return alone
    gone = frozenset(names)
    root = remade(alone.root, ((key, one) for key, one in alone.root.items() if key not in gone))
    text = f"the values among the tensors: {listed(map(str, names), most=20)}"
    return alone.with_root(root, Change("left-out", text, len(names)))


def plain_state_dict(checkpoint: Checkpoint, chosen: Section) -> OrderedMap:
    """A section's state dict as a mapping of its own.

    Of a module or an exported program the tensors are detached, as `state_dict()` detaches them;
    what was saved as a state dict has what it was saved with. A DTensor of which the file has all
    is the plain tensor.
    """
    of_module = chosen.kind == "module" or checkpoint.format in _PROGRAMS
    root = OrderedMap(chosen.node)
    for name, value in chosen.node.items():
        if isinstance(value, TensorRef):
            plain = value.whole or value
            root[name] = _detached(plain) if of_module else plain
    if isinstance(chosen.node, OrderedMap):
        held = chosen.node.attributes  # alone it is the model's without saying so
        root.attributes = {key: value for key, value in held.items() if key != OF_THE_MODEL}
    return root


def _detached(tensor: TensorRef) -> TensorRef:
    """The tensor as `Tensor.detach()` gives it.

    No Parameter, no gradient, no hooks, no attributes; of a subclass it stays.
    """
    if not tensor.wrapping and not tensor.requires_grad and tensor.hooks is None:
        return tensor
    classes = tuple(
        replace(layer, requires_grad=False)
        for layer in tensor.wrapping
        if layer.kind == "type" and tensor.kind == "subclass"
    )
    return replace(tensor, requires_grad=False, hooks=None, wrapping=classes)


def _left_out(root: Any, chosen: Section) -> Iterator[Change]:
    """What is around and beside a state dict, and what could not be read of it."""
    if isinstance(chosen.holder, Opaque):
        text = f"the object of class {printable(chosen.holder.class_name)} around the state dict"
        known = {tensor.place for _, tensor in chosen.tensors()}
        hidden = {tensor.place for tensor in find_tensors(chosen.holder)} - known
        more = f" ({counted(len(hidden), 'tensor')} beside it)" if hidden else ""
        yield Change("left-out", f"{text}{more}", 1)
    for text, tensors in chosen.apart.items():
        yield Change("left-out", text, 1, needed=tensors > 0)
    yield from beside(root, chosen.path, chosen.holder)


def beside(root: Any, chosen: Path, holder: Any) -> Iterator[Change]:
    """What there is beside the node `holder` under the path `chosen`.

    A change for each section, and for loose tensors, values and objects.
    """
    for part in sections(root):
        if part.kind == "values":
            yield from _loose(part, chosen)
        elif part.holder is not holder and not _inside(part.path, chosen):
            count = sum(1 for path, _ in part.tensors() if not _inside(path, chosen))
            rest = "the rest of " if _inside(chosen, part.path) else ""
            text = f"{rest}the {part.kind} {printable(part.name) or 'at the root'}"
            yield Change("left-out", f"{text} ({counted(count, 'tensor')})", count)


def _inside(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer


def _loose(values: Section, chosen: Path) -> Iterator[Change]:
    """Leaves of no section, each under the name of the highest node that holds no chosen tensor."""
    groups: dict[str, dict[str, int]] = {"tensors": {}, "values": {}, "objects": {}}
    for path, leaf in values.node.items():
        if _inside(path, chosen):
            continue
        names = groups[_group(leaf)]
        shared = next(
            (at for at, (own, other) in enumerate(zip(path, chosen, strict=False)) if own != other),
            min(len(path), len(chosen)),
        )
        name = name_of(path[: shared + 1])
        names[name] = names.get(name, 0) + 1
    for group, names in groups.items():
        if names:
            yield Change("left-out", f"the {group} {listed(names, most=20)}", sum(names.values()))


def _group(leaf: Any) -> str:
    if isinstance(leaf, TensorRef):
        return "tensors"
    plain = isinstance(leaf, _VALUES) or (isinstance(leaf, Opaque) and leaf.plain is not None)
    return "values" if plain else "objects"


_WORTH_A_NOTE = 4096
"""Bytes of storages that no kept tensor uses."""


def extract(
    checkpoint: Checkpoint,
    *,
    key: Any = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    model_only: bool = False,
    trim: bool = True,
) -> Checkpoint:
    """Return a part of the checkpoint; changes of kind `left-out` name everything else.

    Plain values stay unless `model_only`. A container that needs a removed tensor is removed as a
    whole. Globs with a `/` are compared with the original names. If nothing is removed, the result
    is the same checkpoint.

    Args:
        checkpoint: An open checkpoint.
        key: The address of the section, container or tensor that becomes the root; a single tensor
            becomes a dict of one.
        include: Globs of the tensors to keep; default: all.
        exclude: Globs of the tensors to leave out.
        model_only: Keep only the state dict of the model (below `key`), without the plain values
            in it; a pickled module becomes its state dict.
        trim: Drop the bytes of storages that only removed tensors use. Formats without storages do
            not need it.

    Raises:
        AmbiguousName: several nodes have the address `key`; or there are several state dicts.
        NotFound: there is nothing at `key`, a glob of `include` matches nothing, or nothing is
            left.
        UsageError: `key` is empty or names a plain value; or a list or an object would lose some
            tensors.
    """
    globs = _Globs(include, exclude)
    part, where = _part(checkpoint, key, model_only)
    if globs:
        part = _chosen(checkpoint, part, where, globs)
    if all(change.kind == "warning" for change in part.changes[len(checkpoint.changes) :]):
        return part
    cut = without_unseen(checkpoint, part) if trim else part
    return cut.with_root(cut.root, *_totals(checkpoint, cut), *(_whole(cut) if trim else ()))


def _part(checkpoint: Checkpoint, key: Any, model_only: bool) -> tuple[Checkpoint, Path]:
    """What `key` and `model_only` choose, and the path that its root had."""
    if key == "":
        raise UsageError(
            "what has an empty name cannot be addressed",
            file=checkpoint.path or None,
            hint="without --key, the whole file is chosen",
        )
    if model_only:
        model = model_state_dict(checkpoint, key)
        return weights_alone(checkpoint, model), model.path
    if key is None:
        return checkpoint, ()
    path, node = _resolved(checkpoint, key)
    if node is checkpoint.root:
        return checkpoint, ()
    name = printable(name_of(path))
    left_out = list(beside(checkpoint.root, path, node))
    if isinstance(node, TensorRef):
        alone = {name_of(path[-1:]): node}
        change = Change("extract", f"the tensor {name} alone, in a dict", 1)
        return checkpoint.with_root(alone, change, *left_out), path[:-1]
    made = checkpoint.with_root(node, Change("extract", f"{name} becomes the root"), *left_out)
    return made, path


def _resolved(checkpoint: Checkpoint, key: Any) -> tuple[Path, Any]:
    try:
        return resolve(checkpoint, key, accept=_may_be_root)
    except AmbiguousName:
        raise
    except NotFound:
        path, _ = resolve(checkpoint, key)
        name, file = printable(name_of(path)), checkpoint.path
        raise UsageError(
            f"{name!r} is a value: no tensor, and nothing that holds any",
            file=file or None,
            hint=f"ckptool show {file} {name}" if file else None,
        ) from None


def _may_be_root(node: Any) -> bool:
    if isinstance(node, Opaque):
        return node.plain is None
    return isinstance(node, (dict, list, tuple, TensorRef))


class _Globs:
    """Which tensors are chosen, and which globs have matched none."""

    def __init__(self, include: Iterable[str], exclude: Iterable[str]) -> None:
        for given in (include, exclude):
            if isinstance(given, str):
                raise UsageError(f"a list of globs is wanted, not {given!r}", hint=f"[{given!r}]")
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._idle = dict.fromkeys((*self._include, *self._exclude))
        self._seen: list[Path] = []

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def choose(self, path: Path) -> bool:
        """Whether the tensor under that path is chosen."""
        self._seen.append(path)
        for glob in [glob for glob in self._idle if selected(path, (glob,))]:
            del self._idle[glob]
        return selected(path, self._include, self._exclude)

    def check(self, file: str) -> Iterator[Change]:
        """A warning for each glob of `exclude` that matched nothing.

        Raises:
            NotFound: one of `include` matched nothing.
        """
        for glob in self._idle:
            near = listed(self._near(glob))
            if glob in self._include:
                raise NotFound(
                    f"no tensor matches {printable(glob)!r}; there is {near}",
                    file=file or None,
                    hint=f"ckptool list {file}" if file else None,
                )
            yield Change("warning", f"no tensor matches {printable(glob)}; there is {near}")

    def _near(self, glob: str) -> list[str]:
        whole = "/" in glob
        names = list(dict.fromkeys(name_of(path if whole else path[-1:]) for path in self._seen))
        return similar(glob, names) or names


def _chosen(checkpoint: Checkpoint, part: Checkpoint, where: Path, globs: _Globs) -> Checkpoint:
    """The part without the tensors that the globs leave out."""
    rest = pruned(part.root, globs.choose, where=where, file=checkpoint.path)
    warnings = list(globs.check(checkpoint.path))
    if rest.root is None or not any(part.with_root(rest.root).tensors()):
        raise NotFound(
            "no tensor would be left",
            file=checkpoint.path or None,
            hint=_nothing_left(rest.left_out),
        )
    warnings.extend(
        Change("warning", f"{optimizer} still has the state of parameters that are left out")
        for optimizer in rest.stale
    )
    if rest.root is part.root and not warnings:
        return part
    return part.with_root(rest.root, *rest.left_out, *warnings)


def _nothing_left(left_out: Iterable[Change]) -> str:
    texts = [change.text for change in left_out]
    return f"this would go: {'; '.join(texts)}" if texts else "choose fewer with --exclude"


def _totals(before: Checkpoint, after: Checkpoint) -> Iterator[Change]:
    """How much is kept of how much."""
    every, kept = ([tensor for _, tensor in one.tensors()] for one in (before, after))
    text = f"{len(kept):,} of {len(every):,} tensors kept"
    yield Change("extract", f"{text}, {_bytes(kept):,} of {_bytes(every):,} bytes", len(kept))


def _whole(kept: Checkpoint) -> Iterator[Change]:
    """What a torch file holds beside what tensors see of their storages."""
    used, whole = _storages(tensor for _, tensor in kept.tensors())
    if whole - used >= max(used, _WORTH_A_NOTE):
        yield Change(
            "note",
            f"the tensors kept use {used:,} of the {whole:,} bytes of their storages, which a "
            "torch file holds whole: ckptool compact trims them",
        )


def _distinct(tensors: Iterable[TensorRef]) -> Iterable[TensorRef]:
    """Return the tensors, tied ones once."""
    return {tensor.place or id(tensor): tensor for tensor in tensors}.values()


def _bytes(tensors: Iterable[TensorRef]) -> int:
    return sum(tensor.nbytes for tensor in _distinct(tensors))


def _storages(tensors: Iterable[TensorRef]) -> tuple[int, int]:
    """The bytes that tensors use of their storages, and those of the storages."""
    used: dict[Storage, int] = {}
    for tensor in _distinct(tensors):
        storage = tensor.storage
        if storage is not None and storage.data is not None:
            used[storage] = min(storage.nbytes, used.get(storage, 0) + tensor.nbytes)
    return sum(used.values()), sum(storage.nbytes for storage in used)
