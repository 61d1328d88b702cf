"""Trees made from trees: the same identities, other leaves, dicts with other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptool.errors import NameCollision
from ckptool.model import (
    ByteString,
    Global,
    Opaque,
    OrderedMap,
    Size,
    TensorRef,
    children,
)

__all__ = ["everything", "rebuild"]

_PLAIN = frozenset((
    bool, int, float, complex, str, ByteString, type(None), bytes, bytearray, Global,
))  # fmt: skip
_UNTREATED = _PLAIN - {Global}
_HOLDERS = frozenset((dict, OrderedMap, list, tuple, Size, Opaque))


def everything(root: Any) -> Iterator[Any]:
    """Every node below `root` that is no plain value, itself included, each once.

    Unlike `paths.walk` it looks into objects, keys, and what tensors are made of (not their
    storages).
    """
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if type(node) in _PLAIN or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        inside = _composition(node) if isinstance(node, TensorRef) else list(children(node))
        todo.extend(reversed(inside))


def _composition(tensor: TensorRef) -> list[Any]:
    """What a tensor is made of beside its storage; empty for nearly every tensor.

    The array that carries a tensor of a TPU counts as its storage.
    """
    if tensor.parts is None and not tensor.wrapping and tensor.hooks is None:
        return []
    layers = [part for layer in tensor.wrapping for part in (layer.hooks, layer.type, layer.state)]
    return [tensor.hooks, *_own_parts(tensor).values(), *layers]


def _own_parts(tensor: TensorRef) -> Mapping[str, Any]:
    parts = tensor.parts or {}
    return {} if "carrier" in parts else parts


def rebuild(
    root: Any,
    leaf: Callable[[Any], Any] | None = None,
    mapping: Callable[[dict[Any, Any]], dict[Any, Any]] | None = None,
) -> Any:
    """A new tree in which `leaf` has replaced leaves and `mapping` dicts; identity is kept.

    `leaf` gets each Storage, StorageRef, TensorRef, DeviceValue, Opaque and Global (also those that
    an object or tensor is made by) and returns what stands in its place (itself for no change). A
    tensor comes with its parts and wrapping treated; its storage (or what carries it, on a TPU) is
    left to `leaf`. An Opaque is asked for before its content is treated. `mapping` gets each dict
    of the source and returns the one to go on with (itself for no change). A container or object
    given in place of another is treated in turn. Plain values pass through. Nothing of the source
    is changed, and no depth of nesting is too deep.

    Raises:
        NameCollision: two keys of one dict have become equal.
    """
    return _Rebuilder(leaf, mapping).run(root)


class _Rebuilder:
    """One pass: copies of mutable nodes are made empty, and filled when every node has its own.

    That ends cycles (each goes through a mutable node), and keeps shared what is shared.
    """

    def __init__(
        self, leaf: Callable[[Any], Any] | None, mapping: Callable[[Any], Any] | None
    ) -> None:
        self.leaf = leaf
        self.mapping = mapping
        self.done: dict[int, Any] = {}
        self.instead: dict[int, Any] = {}
        self.copies: list[tuple[Any, Any]] = []

    def run(self, root: Any) -> Any:
        todo: list[tuple[Any, bool]] = []
        self._ask((root,), todo)
        while todo:
            node, content_done = todo.pop()
            if id(node) in self.done:
                continue
            if content_done:
                self.done[id(node)] = self._finish(node)
            else:
                self._open(node, todo)
        for source, copy in self.copies:
            self._fill(source, copy)
        return self._of(root)

    def _ask(self, nodes: Iterable[Any], todo: list[tuple[Any, bool]]) -> None:
        """Settle the leaves among the nodes; what holds something goes on `todo`."""
        done, leaf = self.done, self.leaf
        for node in nodes:
            kind = type(node)
            if kind in _UNTREATED or id(node) in done:
                continue
            if kind in _HOLDERS or (kind is TensorRef and leaf and _composition(node)):
                todo.append((node, False))
            else:
                done[id(node)] = leaf(node) if leaf else node

    def _open(self, node: Any, todo: list[tuple[Any, bool]]) -> None:
        """Copy a mutable node; put another one back on `todo`, below what it is made of."""
        if isinstance(node, (dict, list)):
            source = self.mapping(node) if self.mapping and isinstance(node, dict) else node
            self._copy(node, source, type(source)(), todo)
        elif isinstance(node, Opaque):
            self._open_object(node, todo)
        else:
            todo.append((node, True))
            self._ask(node if isinstance(node, tuple) else _composition(node), todo)

    def _open_object(self, node: Opaque, todo: list[tuple[Any, bool]]) -> None:
        if id(node) not in self.instead:
            self.instead[id(node)] = self.leaf(node) if self.leaf else node
        new = self.instead[id(node)]
        if new is node:
            self._copy(node, node, replace(node, steps=[]), todo)
        else:
            todo.append((node, True))
            self._ask((new,), todo)

    def _copy(self, node: Any, source: Any, copy: Any, todo: list[tuple[Any, bool]]) -> None:
        self.done[id(node)] = self.done[id(source)] = copy
        self.copies.append((source, copy))
        self._ask(children(source), todo)

    def _finish(self, node: Any) -> Any:
        if isinstance(node, tuple):
            items = [self._of(item) for item in node]
            if all(new is old for new, old in zip(items, node, strict=True)):
                return node
            return Size(items) if isinstance(node, Size) else tuple(items)
        if isinstance(node, TensorRef):
            return self.leaf(self._composed(node)) if self.leaf else node
        return self._of(self.instead[id(node)])

    def _composed(self, tensor: TensorRef) -> TensorRef:
        """The tensor over treated parts; itself where none of them changed."""
        if all(self._of(part) is part for part in _composition(tensor)):
            return tensor
        own = {name: self._of(part) for name, part in _own_parts(tensor).items()}
        return replace(
            tensor,
            hooks=self._of(tensor.hooks),
            parts=own or tensor.parts,
            wrapping=tuple(
                replace(
                    layer,
                    hooks=self._of(layer.hooks),
                    type=self._of(layer.type),
                    state=self._of(layer.state),
                )
                for layer in tensor.wrapping
            ),
        )

    def _fill(self, source: Any, copy: Any) -> None:
        if isinstance(source, Opaque):
            copy.func, copy.args = self._of(source.func), self._of(source.args)
            copy.kwargs = self._of(source.kwargs)
            copy.steps.extend((kind, self._of(value)) for kind, value in source.steps)
        elif isinstance(source, list):
            copy.extend(map(self._of, source))
        else:
            copy.update((self._of(key), self._of(value)) for key, value in source.items())
            if len(copy) != len(source):
                raise NameCollision(
                    f"of {len(source)} keys of a dict only {len(copy)} remain apart"
                )
        if isinstance(source, OrderedMap):
            copy.attributes = {key: self._of(value) for key, value in source.attributes.items()}

    def _of(self, node: Any) -> Any:
        return node if type(node) in _UNTREATED else self.done[id(node)]
