"""A short digest of what has no bytes of its own: objects, and tensors that are made of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ckptool.inspection.diff_regions import is_set
from ckptool.inspection.equality import own_parts, portions, raw_elements, type_name
from ckptool.inspection.values import set_items
from ckptool.model import DeviceValue, Global, Opaque, OrderedMap, StorageRef, TensorRef

__all__ = ["Fingerprints"]

_LENGTH = 16
_CONTAINERS = (dict, list, tuple, Opaque, TensorRef)


class Fingerprints:
    """Digests of nodes: equal where the content is, whatever order sets and dicts have it in.

    Devices of tensors and requires_grad do not count.
    """

    def __init__(self, elements: Callable[[TensorRef], str]) -> None:
        """Ask `elements` what to say of a plain array of elements: its own digest, usually."""
        self._elements = elements
        self._known: dict[int, bytes] = {}

    def of(self, root: Any) -> str:
        """Return the digest of a node, 16 hexadecimal digits; the tree must outlive this object."""
        stack: list[Any] = [root]
        entered: set[int] = set()
        while stack:
            node = stack[-1]
            if id(node) not in entered and id(node) not in self._known:
                entered.add(id(node))
                within = (child for child in _children(node) if isinstance(child, _CONTAINERS))
                stack += [child for child in within if id(child) not in entered]
            elif id(stack.pop()) not in self._known:
                self._known[id(node)] = self._digest(node)
        return self._known[id(root)].hex()[:_LENGTH]

    def _digest(self, node: Any) -> bytes:
        found = [self._known_or_plain(child) for child in _children(node)]
        if isinstance(node, (dict, TensorRef)):
            found = sorted(a + b for a, b in zip(found[::2], found[1::2], strict=True))
        elif isinstance(node, Opaque) and is_set(node):
            found.sort()
        return _hash(self._head(node).encode("utf-8", "backslashreplace"), *found)

    def _known_or_plain(self, node: Any) -> bytes:
        if isinstance(node, _CONTAINERS):
            return self._known.get(id(node), b"itself")
        return _hash(self._head(node).encode("utf-8", "backslashreplace"))

    def _head(self, node: Any) -> str:
        """Return what a node is beside its children."""
        if isinstance(node, (TensorRef, StorageRef)):
            raw = raw_elements(node)
            content = "" if raw is None else self._elements(raw)
            if isinstance(node, StorageRef):
                return f"{node.class_name} {content}"
            return f"tensor {node.kind} {node.dtype} {node.shape} {content}"
        if isinstance(node, Opaque):
            if node.plain is not None:
                return f"{node.plain!r}"
            kinds = (
                ""
                if is_set(node)
                else " ".join(f"{kind} {len(held)}" for kind, held in portions(node))
            )
            return f"{node.class_name} {kinds}"
        if isinstance(node, DeviceValue):
            return f"device {node.tag}"
        if isinstance(node, Global):
            return f"global {node.qualified}"
        if isinstance(node, dict):
            return "dict"
        return type_name(node) if isinstance(node, _CONTAINERS) else f"{type_name(node)} {node!r}"


def _hash(head: bytes, *parts: bytes) -> bytes:
    import hashlib  # OpenSSL: a list without hashes has no use for it

    digest = hashlib.sha256(len(head).to_bytes(8, "little") + head)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _children(node: Any) -> Iterable[Any]:
    """Return what a node is made of; of a mapping and of a tensor, keys and values in turns."""
    if isinstance(node, dict):
        more = node.attributes if isinstance(node, OrderedMap) else {}
        return chain(_flat(node.items()), ("attributes", more) if more else ())
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, TensorRef):
        parts: list[tuple[str, Any]] = list(own_parts(node).items())
        for number, layer in enumerate(node.wrapping):
            parts += [(f"type {number}", layer.type), (f"state {number}", layer.state)]
        return _flat((key, part) for key, part in parts if part is not None)
    if isinstance(node, Opaque) and node.plain is None:
        return _of_object(node)
    return ()


def _of_object(node: Opaque) -> Iterator[Any]:
    if is_set(node):
        yield from set_items(node)
        return
    yield from (node.args, node.kwargs)
    if not isinstance(node.func, Global):
        yield node.func
    for _, held in portions(node):
        yield from held


def _flat(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(pairs)
