"""Plain values and objects compared structurally, without the classes that made them.

Two things are equal where a program that loads them could not tell them apart: mappings whatever
their order, floats that are NaN with themselves, sets whatever order they were written in. `1`,
`1.0` and `True` are not equal: their types differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from ckptool.dtypes import CODES, PACKED
from ckptool.errors import LimitExceeded
from ckptool.inspection.reading import RepeatedBytes, content_hash
from ckptool.inspection.values import comparable, is_set, set_items, summarise
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Path,
    StorageRef,
    TensorRef,
    Wrapping,
)
from ckptool.tree import name_of

__all__ = [
    "ITSELF",
    "Fingerprints",
    "Same",
    "Unlike",
    "first_difference",
    "is_made_of_parts",
    "raw_elements",
    "type_name",
]

Same = Callable[[TensorRef, TensorRef, bool], bool]
"""Whether two plain arrays of one dtype and shape have equal elements.

The third says that they are no values: positions, sizes, scales, codes and bytes are equal or not,
whatever tolerance the values have.
"""

ITSELF = "."
"""The place of a difference that is not inside."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_PARTS = frozenset({"strided", "numpy", "meta"})
"""Kinds that are all said by their header and their elements."""
_IN_HEADER = frozenset({"args", "layout", "size"})
"""Parts that only repeat the header."""
_QUANTIZER = ("scheme", "scale", "zero_point", "axis")
"""What torch calls the items of a quantiser (`torch._utils._rebuild_qtensor`)."""
_VALUES = frozenset({"values", "buffer", "_local_tensor"})
"""What holds the values of a tensor made of parts: sparse or jagged, nested, distributed."""


def type_name(node: Any) -> str:
    """Return the type of a value as `list` has it, the class of anything else."""
    if isinstance(node, Opaque):
        return node.plain[0] if node.plain is not None else node.class_name
    if isinstance(node, (TensorRef, StorageRef, DeviceValue, Global)):
        return getattr(node, "class_name", "torch.Tensor")
    for kind, name in ((bytes, "bytes"), (str, "str"), (OrderedMap, "OrderedDict")):
        if isinstance(node, kind):
            return name
    return "torch.Size" if type(node).__name__ == "Size" else type(node).__name__


def _same_plain(a: Any, b: Any) -> bool:
    """Return whether two values of one type are equal; NaN is equal to NaN."""
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    return bool(a == b or (a != a and b != b))


def is_made_of_parts(tensor: TensorRef) -> bool:
    """Return whether it is more than its header and its elements."""
    return tensor.kind not in _NO_PARTS or any(map(_tells, tensor.wrapping))


def raw_elements(tensor: TensorRef | StorageRef) -> TensorRef | None:
    """Return the stored elements of a tensor, or the bytes of a storage, as a plain array.

    Those of a quantised tensor are integers, or bytes where several elements share one.
    None where no run of bytes lies behind it: such a tensor is what its parts are.
    """
    storage = tensor.storage
    if storage is None or storage.data is None:
        return None
    if isinstance(tensor, StorageRef) or tensor.dtype in PACKED:
        return TensorRef("uint8", (storage.nbytes,), (1,), 0, storage, storage.device)
    dtype = CODES.get(tensor.dtype, tensor.dtype)
    if tensor.has_content and dtype == tensor.dtype:
        return tensor
    return replace(tensor, dtype=dtype, kind="strided", parts=None, wrapping=(), hooks=None)


def first_difference(
    a: Any,
    b: Any,
    same: Same | None = None,
    *,
    held: bool = True,
    devices: bool = True,
    listed: Container[int] = frozenset(),
    limits: Limits = DEFAULT_LIMITS,
) -> Unlike | None:
    """Return where two things first differ, and how; None: nowhere.

    Args:
        a: Values, containers, objects, tensors that are made of parts.
        b: The other.
        same: Asked of every two plain arrays met inside; None: all are taken as equal.
        held: Whether what the two objects themselves hold as a list or dict is looked at.
        devices: Whether device tags and requires_grad are.
        listed: Identities of tensors that are compared elsewhere.
        limits: How often containers may be mentioned.

    Raises:
        LimitExceeded: the same containers are mentioned again and again.
    """
    return _Comparison(same, devices, listed, limits).run(a, b, held=held)


Trail = tuple[Any, "Trail"] | None
"""The last key of a place, and the trail to what holds it."""
Step = tuple[Any, Any, Any]
"""A key, and what stands there on either side."""


class _Differ(Exception):
    """Two things differ; the arguments, if any, say in a few words what either is."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """Where two things first differ, as an address below them (`.` for themselves)."""

    place: str
    change: tuple[str, str] | None = None
    """What stands there in either, in a few words; None where that takes figures."""


class _Comparison:
    """One walk over two trees at once. Pairs met before, cycles among them, count as equal."""

    def __init__(
        self, same: Same | None, devices: bool, listed: Container[int], limits: Limits
    ) -> None:
        self._same = same
        self._devices = devices
        self._listed = listed
        self._limits = limits
        self._met: set[tuple[int, int]] = set()
        self._seen: set[int] = set()
        self._again = 0
        self._kept: list[Any] = []

    def run(self, a: Any, b: Any, *, held: bool) -> Unlike | None:
        todo: list[tuple[Any, Any, Trail, bool]] = []
        trail: Trail = None
        exact = False
        try:
            steps = self._inside(a, b, exact, held=held)
            while True:
                exact = exact or isinstance(a, TensorRef)
                for key, one, other in reversed(steps):
                    todo.append((one, other, (key, trail), exact and key not in _VALUES))
                if not todo:
                    break
                a, b, trail, exact = todo.pop()
                steps = self._inside(a, b, exact)
        except _Differ as differ:
            change = differ.args if len(set(differ.args)) > 1 else None
            return Unlike(name_of(_keys(trail)) or ITSELF, change)
        return None

    def _inside(self, a: Any, b: Any, exact: bool, *, held: bool = True) -> list[Step]:
        """Return what is to be compared of two nodes; raises `_Differ` where they do themselves."""
        if a is b or not self._is_new(a, b):
            return []
        if isinstance(a, dict) and isinstance(b, dict):
            return [*_mappings(a, b), *_attributes(a, b)]
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if isinstance(a, list) != isinstance(b, list) or len(a) != len(b):
                raise _Differ
            return [(at, *items) for at, items in enumerate(zip(a, b, strict=True))]
        if isinstance(a, TensorRef) and isinstance(b, TensorRef):
            return self._tensors(a, b, exact)
        if isinstance(a, StorageRef) and isinstance(b, StorageRef):
            return self._storages(a, b)
        if isinstance(a, Opaque) and isinstance(b, Opaque):
            return self._objects(a, b, held)
        if isinstance(a, DeviceValue) and isinstance(b, DeviceValue):
            self._require(not self._devices or a.tag == b.tag, a.tag, b.tag)
        elif isinstance(a, Global) and isinstance(b, Global):
            self._require(a.qualified == b.qualified)
        elif isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
            equal = type_name(a) == type_name(b) and _same_plain(a, b)
            self._require(equal, *(() if equal else (summarise(a), summarise(b))))
        else:
            raise _Differ
        return []

    def _is_new(self, a: Any, b: Any) -> bool:
        if isinstance(a, _PLAIN):
            return True
        pair = id(a), id(b)
        if pair in self._met:
            return False
        self._met.add(pair)
        self._again += pair[0] in self._seen
        self._seen.add(pair[0])
        if self._again > self._limits.max_repeats + len(self._seen):
            raise LimitExceeded("the same containers are mentioned again and again")
        return True

    def _require(self, equal: bool, *change: str) -> None:
        if not equal:
            raise _Differ(*change)

    def _tensors(self, a: TensorRef, b: TensorRef, exact: bool) -> list[Step]:
        if id(a) in self._listed and id(b) in self._listed:
            return []
        self._require((a.kind, a.dtype, a.shape) == (b.kind, b.dtype, b.shape))
        if self._devices:
            self._require((a.device, a.requires_grad) == (b.device, b.requires_grad))
        if a.kind in _NO_PARTS:
            self._elements(a, b, exact)
            return _layers(a, b)
        if a.kind != "quantized":
            self._elements(a, b, exact)
        mine, others = _parts(a), _parts(b)
        counts = _entries(mine), _entries(others)
        self._require(counts[0] == counts[1], *(f"{count} entries" for count in counts))
        self._kept += (mine, others)  # so that no later object gets their identity
        steps = [*_mappings(mine, others), *_layers(a, b)]
        if a.kind == "quantized":  # what its codes mean comes first
            codes = raw_elements(a), raw_elements(b)
            self._kept += codes
            steps.append(("codes", *codes))
        return steps

    def _storages(self, a: StorageRef, b: StorageRef) -> list[Step]:
        self._require((a.class_name, a.storage.nbytes) == (b.class_name, b.storage.nbytes))
        if self._devices:
            self._require(a.storage.device == b.storage.device)
        self._elements(a, b, True)
        return []

    def _elements(self, a: TensorRef | StorageRef, b: TensorRef | StorageRef, exact: bool) -> None:
        mine, others = raw_elements(a), raw_elements(b)
        if mine is not None and others is not None and self._same is not None:
            self._require(mine.shape == others.shape and self._same(mine, others, exact))

    def _objects(self, a: Opaque, b: Opaque, held: bool) -> list[Step]:
        if a.plain is not None and b.plain is not None:
            self._require(a.plain[0] == b.plain[0] and _same_plain(a.plain[1], b.plain[1]))
            return []
        self._require(a.class_name == b.class_name)
        if is_set(a):
            return self._sets(a, b)
        steps = [list(_steps(node, held)) for node in (a, b)]
        self._require([kind for kind, _ in steps[0]] == [kind for kind, _ in steps[1]])
        found: list[Step] = []
        if not (isinstance(a.func, Global) and isinstance(b.func, Global)):
            found.append(("function", a.func, b.func))
        if held or a.class_name != "collections.Counter":
            found.append(("arguments", _arguments(a), _arguments(b)))
        found.append(("options", a.kwargs, b.kwargs))
        pairs = zip(*steps, strict=True)
        for (kind, mine), (_, others) in pairs:
            self._kept += (mine, others)  # so that no later object gets their identity
            found.append(("attributes" if kind == "build" else "items", mine, others))
        return found

    def _sets(self, a: Opaque, b: Opaque) -> list[Step]:
        mine, others = list(set_items(a)), list(set_items(b))
        self._require(len(mine) == len(others))
        if all(map(_is_member, (*mine, *others))):
            self._require(Counter(map(_member, mine)) == Counter(map(_member, others)))
            return []
        self._kept += (mine, others)
        return [("items", mine, others)]  # of what cannot be told apart by value: in their order


def _keys(trail: Trail) -> tuple[Any, ...]:
    keys = []
    while trail is not None:
        key, trail = trail
        keys.append(key)
    return tuple(reversed(keys))


def _mappings(a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[Step]:
    """Return the entries of two mappings by key, whatever their order."""
    mine = {comparable((key,)): (key, value) for key, value in a.items()}
    others = {comparable((key,)): value for key, value in b.items()}
    if len(a) != len(b) or mine.keys() != others.keys():
        raise _Differ
    return ((key, value, others[known]) for known, (key, value) in mine.items())


def _attributes(a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[Step]:
    """Return what `OrderedDict`s hold beside their entries; an ordinary dict holds nothing."""
    if isinstance(a, OrderedMap) and isinstance(b, OrderedMap):
        return _mappings(a.attributes, b.attributes)
    return iter(())


def own_parts(tensor: TensorRef) -> dict[Any, Any]:
    """Return the parts of a tensor that do not only repeat its header."""
    return {key: part for key, part in (tensor.parts or {}).items() if key not in _IN_HEADER}


def _parts(tensor: TensorRef) -> dict[Any, Any]:
    """Return the parts that are compared, with the items of a quantiser by name."""
    parts = own_parts(tensor)
    if isinstance(parts.get("quantizer"), tuple):
        parts["quantizer"] = dict(zip(_QUANTIZER, parts["quantizer"], strict=False))
    return parts


def _entries(parts: dict[Any, Any]) -> int | None:
    """Return how many entries, or blocks, a sparse tensor of these parts has; None for others."""
    values = parts.get("values")
    sparse = {"indices", "plain_indices"} & parts.keys()
    return values.shape[0] if sparse and isinstance(values, TensorRef) and values.shape else None


def _layers(a: TensorRef, b: TensorRef) -> list[Step]:
    """Return what was put around the tensors, where that says more than the header."""
    mine, others = ([layer for layer in ref.wrapping if _tells(layer)] for ref in (a, b))
    if len(mine) != len(others):
        return []  # what a file of another format cannot hold
    return [
        (name, getattr(one, name), getattr(other, name))
        for one, other in zip(mine, others, strict=True)
        for name in ("type", "state")
    ]


def _tells(layer: Wrapping) -> bool:
    return layer.type is not None or layer.state is not None


def portions(node: Opaque) -> Iterator[tuple[str, list[Any]]]:
    """Yield what made an object: its states, and the items that were added in portions as one."""
    for kind, run in groupby(node.steps, lambda step: step[0]):
        values = [value for _, value in run]
        yield kind, values if kind == "build" else list(chain.from_iterable(values))


def _steps(node: Opaque, held: bool) -> Iterator[tuple[str, Any]]:
    """Yield the states of an object one by one, and items that are not empty."""
    for kind, values in portions(node):
        if kind == "build":
            yield from ((kind, state) for state in values)
        elif held and values:
            yield kind, values


def _is_member(item: Any) -> bool:
    """Return whether an item of a set is a plain value, or a tuple of such."""
    return isinstance(item, _PLAIN) or (
        isinstance(item, tuple) and all(isinstance(part, _PLAIN) for part in item)
    )


def _member(item: Any) -> Any:
    """Return an item of a set as what is equal in another file if it means the same."""
    return comparable((item,))


def _arguments(node: Opaque) -> Any:
    """Return what an object was made with; protocols 0 and 1 spell `__new__` by a function."""
    match node:
        case Opaque(func=Global(name="_reconstructor"), args=(_, Global(name="object"), None)):
            return ()
    return node.args


_LENGTH = 16
_CONTAINERS = (dict, list, tuple, Opaque, TensorRef)


class Fingerprints:
    """Digests of nodes: equal where the content is, whatever order sets and dicts have it in.

    Devices of tensors and requires_grad do not count.
    """

    def __init__(self, limits: Limits, listed: Container[int] = frozenset()) -> None:
        """Take tensors whose identities are in `listed` as equal: they have a hash of their own."""
        self._repeated = RepeatedBytes(limits)
        self._listed = listed
        self._path: Path = ()
        self._known: dict[int, bytes] = {}

    def of(self, path: Path, root: Any) -> str:
        """Return the digest of a node, 16 hexadecimal digits; the tree must outlive this object.

        Raises:
            LimitExceeded: the tensor at `path`, or one inside it, repeats too many bytes.
        """
        self._path = path
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

    def _content(self, raw: TensorRef | None) -> str:
        if raw is None or id(raw) in self._listed:
            return ""
        self._repeated.add(self._path, raw)
        return content_hash(raw)

    def _head(self, node: Any) -> str:
        """Return what a node is beside its children."""
        if isinstance(node, (TensorRef, StorageRef)):
            content = self._content(raw_elements(node))
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
