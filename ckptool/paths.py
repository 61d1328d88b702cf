"""Addresses inside a checkpoint: walk it, find a node by name, build a changed tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptool.errors import AmbiguousName, LimitExceeded, NotFound
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Path,
    Size,
    Storage,
    StorageRef,
    TensorRef,
)
from ckptool.modules import module_state

if TYPE_CHECKING:
    from ckptool.checkpoint import Checkpoint

__all__ = ["name_of", "rebuild", "resolve", "selected", "walk"]

Leaf = Any
_ROOT, _SAME = -1, -2  # owners of frames that are no container of their own
_VALUES = (bool, int, float, complex, str, type(None))


def name_of(path: Path) -> str:
    """The address of a path: its keys joined with `/`."""
    return "/".join(str(key) for key in path)


def walk(root: Any, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[Path, Leaf]]:
    """Every listed leaf with its path, in the order of the file.

    Leaves are tensors, plain values and objects. A pickled module gives the tensors that its
    `state_dict()` would have, each under its full name as one key. Any other object is given
    itself, then what it holds as a list or dict, then the tensors among its attributes and
    arguments. A container that holds itself is not entered again.

    Raises:
        LimitExceeded: nested deeper, or mentioned more often, than `limits` allows.
    """
    entered: set[int] = set()
    repeats = 0
    open_ids: set[int] = set()
    # One frame per open container: its id, the path to it, what is left of it, and whether only
    # tensors are wanted from it.
    frames: list[tuple[int, Path, Iterator[tuple[Any, Any]], bool]] = [
        (_ROOT, (), iter([(None, root)]), False)
    ]
    while frames:
        owner, path, entries, tensors_only = frames[-1]
        entry = next(entries, None)
        if entry is None:
            frames.pop()
            open_ids.discard(owner)
            continue
        key, node = entry
        here = path if owner == _ROOT else (*path, key)
        if type(node) in _LEAF_TYPES:
            if not tensors_only or isinstance(node, TensorRef):
                yield here, node
            continue
        if isinstance(node, Opaque) and not tensors_only and module_state(node) is None:
            yield here, node
        if id(node) in open_ids:
            continue
        if id(node) in entered:
            repeats += 1
            if repeats > limits.max_repeats:
                raise LimitExceeded(
                    f"the same containers are mentioned more than {limits.max_repeats:,} times"
                )
        entered.add(id(node))
        if len(frames) > limits.max_depth:
            raise LimitExceeded(f"containers are nested deeper than {limits.max_depth}")
        open_ids.add(id(node))
        owner = id(node)
        for inner, only in _contents(node, tensors_only):
            frames.append((owner, here, inner, only))
            owner = _SAME  # the frame below ends the container


def _contents(node: Any, tensors_only: bool) -> list[tuple[Iterator[tuple[Any, Any]], bool]]:
    """The parts of a container to walk, last one first, each with whether only tensors count."""
    if isinstance(node, dict):
        return [(iter(node.items()), tensors_only)]
    if isinstance(node, (list, tuple)):
        return [(iter(enumerate(node)), tensors_only)]
    module = module_state(node)
    if module is not None:
        return [(iter(module.items()), True)]
    held: list[tuple[Any, Any]] = []
    for kind, value in node.steps:
        if kind == "set":
            held.extend(value)
        elif kind in ("append", "add"):
            held.extend(enumerate(value, start=len(held)))
    hidden: list[tuple[Any, Any]] = []
    state = node.attributes
    if state:
        hidden.extend(state.items())
    elif node.state is not None:
        hidden.append(("state", node.state))
    if isinstance(node.args, tuple):
        hidden.extend(enumerate(node.args))
    return [(iter(hidden), True), (iter(held), tensors_only)]


_LEAF_TYPES = frozenset(
    (*_VALUES, bytes, bytearray, TensorRef, StorageRef, Storage, DeviceValue, Global)
)


def resolve(checkpoint: Checkpoint, address: Any) -> tuple[Path, Any]:
    """The path and node of an address: an exact name, else a unique suffix after a `/`.

    Containers answer as well as leaves. A tuple or list is taken as a path.

    Raises:
        NotFound: nothing answers to it; the message lists what is near.
        AmbiguousName: several do; the message lists them.
    """
    nodes = dict(_named_nodes(checkpoint.root))
    if isinstance(address, (tuple, list)):
        path = tuple(address)
        for known in nodes:
            if known == path:
                return known, nodes[known]
    wanted = name_of(tuple(address)) if isinstance(address, (tuple, list)) else str(address)
    exact = [path for path in nodes if name_of(path) == wanted]
    found = exact or [path for path in nodes if name_of(path).endswith("/" + wanted)]
    if len(found) == 1:
        return found[0], nodes[found[0]]
    file = checkpoint.path
    if found:
        names = _few(name_of(path) for path in found)
        raise AmbiguousName(f"{wanted!r} could be any of {names}", file=file, hint="give more of the name")
    near = [name for path in nodes if wanted.lower() in (name := name_of(path)).lower()]
    names = _few(near or [name_of(path) for path in nodes if len(path) == 1])
    raise NotFound(
        f"there is nothing named {wanted!r}; there is {names}",
        file=file,
        hint=f"ckptool list {file}",
    )


def _few(names: Any, most: int = 8) -> str:
    listed = list(names)
    shown = ", ".join(listed[:most])
    return shown + (f", and {len(listed) - most:,} more" if len(listed) > most else "") or "nothing"


def _named_nodes(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every container on the way to a leaf, and every leaf, with its path; the first wins."""
    seen: set[Path] = set()
    for path, leaf in walk(root):
        node = root
        for depth, key in enumerate(path[:-1], start=1):
            node = _child(node, key)
            if node is None:
                break
            if path[:depth] not in seen:
                seen.add(path[:depth])
                yield path[:depth], node
        if path not in seen:
            seen.add(path)
            yield path, leaf


def _child(node: Any, key: Any) -> Any:
    """The container under a key, None below an object."""
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, (list, tuple)) and isinstance(key, int) and key < len(node):
        return node[key]
    return None


def selected(path: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> bool:
    """Whether the globs let a tensor through.

    A glob is held against the tensor's own name (the last key), or against the whole name when
    it has a `/`. No `include` means all.
    """
    return (not include or _matches(path, include)) and not _matches(path, exclude)


def _matches(path: Path, globs: tuple[str, ...]) -> bool:
    own, whole = str(path[-1]) if path else "", name_of(path)
    return any(fnmatchcase(whole if "/" in glob else own, glob) for glob in globs)


def rebuild(
    root: Any,
    leaf: Callable[[Any], Any] | None = None,
    mapping: Callable[[dict[Any, Any]], dict[Any, Any]] | None = None,
) -> Any:
    """A new tree in which `leaf` has replaced leaves and `mapping` dicts; identity is kept.

    `leaf` gets each Storage, StorageRef, TensorRef, DeviceValue, Opaque and plain leaf once and returns what stands
    in its place (itself for no change); an Opaque that it returns unchanged is copied and its
    content treated. `mapping` gets each dict of the source before its values are treated and
    returns the one to go on with (itself for no change). Nothing of the source is changed.
    """
    return _Rebuilder(leaf or (lambda node: node), mapping or (lambda node: node)).node(root)


class _Rebuilder:
    """One pass over a tree; `done` keeps what is shared shared, and ends cycles."""

    def __init__(self, leaf: Callable[[Any], Any], mapping: Callable[[Any], Any]) -> None:
        self.leaf = leaf
        self.mapping = mapping
        self.done: dict[int, Any] = {}
        self.kept: list[Any] = []

    def node(self, node: Any) -> Any:
        if id(node) in self.done:
            return self.done[id(node)]
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, list):
            copy: list[Any] = self._remember(node, [])
            copy.extend(self.node(item) for item in node)
            return copy
        if isinstance(node, tuple):
            items = tuple(self.node(item) for item in node)
            return self._remember(node, Size(items) if isinstance(node, Size) else items)
        new = self.leaf(node)
        if isinstance(new, Opaque) and new is node:
            return self._opaque(node)
        return self._remember(node, new)

    def _dict(self, node: dict[Any, Any]) -> dict[Any, Any]:
        source = self.mapping(node)
        copy: dict[Any, Any] = self._remember(
            node, OrderedMap() if isinstance(source, OrderedMap) else {}
        )
        for key, value in source.items():
            copy[self.node(key)] = self.node(value)
        if isinstance(copy, OrderedMap) and isinstance(source, OrderedMap):
            copy.attributes = {key: self.node(value) for key, value in source.attributes.items()}
        return copy

    def _opaque(self, node: Opaque) -> Opaque:
        copy: Opaque = self._remember(node, replace(node, steps=[]))
        copy.func, copy.args, copy.kwargs = map(self.node, (node.func, node.args, node.kwargs))
        copy.steps.extend((kind, self.node(value)) for kind, value in node.steps)
        return copy

    def _remember(self, old: Any, new: Any) -> Any:
        self.done[id(old)] = new
        self.kept.append(old)
        return new
