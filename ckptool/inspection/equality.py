"""Structural comparison of plain values and objects, without their classes.

Two values are equal if a program that loads them could not distinguish them. The order of mappings
and sets does not matter, and NaN equals NaN. `1`, `1.0` and `True` are not equal, because their
types differ.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from ckptool.core.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Path,
    StorageRef,
    TensorRef,
    Wrapping,
)
from ckptool.core.reading import RepeatedBytes, hash_content
from ckptool.core.tree import Link, name_of, to_path
from ckptool.core.values import is_set, set_items, summarize, to_comparable
from ckptool.dtypes import CODES, PACKED
from ckptool.errors import LimitExceeded
from ckptool.limits import DEFAULT_LIMITS, Limits

Same = Callable[[TensorRef, TensorRef, bool], bool]
"""Whether two plain arrays of one dtype and shape have equal elements.

The third says that they are no values: positions, sizes, scales, codes and bytes are equal or not,
whatever tolerance the values have.
"""

ITSELF = "."
"""The place of a difference that is not inside the two values."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_PARTS = frozenset({"strided", "numpy", "meta"})
"""Kinds that are all said by their header and their elements."""
_IN_HEADER = frozenset({"args", "layout", "size"})
"""Parts that only repeat the header."""
_QUANTIZER = ("scheme", "scale", "zero_point", "axis")
"""The torch names of the items of a quantizer (`torch._utils._rebuild_qtensor`)."""
_VALUES = frozenset({"values", "buffer", "_local_tensor"})
"""What holds the values of a tensor made of parts: sparse or jagged, nested, distributed."""


def type_name(node: Any) -> str:
    """Return the type of a value as in `list`, or the class of another entry."""
    if isinstance(node, Opaque):
        return node.plain[0] if node.plain is not None else node.class_name
    if isinstance(node, (TensorRef, StorageRef, DeviceValue, Global)):
        return getattr(node, "class_name", "torch.Tensor")
    for kind, name in ((bytes, "bytes"), (str, "str"), (OrderedMap, "OrderedDict")):
        if isinstance(node, kind):
            return name
    return "torch.Size" if type(node).__name__ == "Size" else type(node).__name__


def is_made_of_parts(tensor: TensorRef) -> bool:
    """Return True if a tensor has parts other than its header and elements."""
    return tensor.kind not in _NO_PARTS or any(map(_tells, tensor.wrapping))


def raw_elements(tensor: TensorRef | StorageRef) -> TensorRef | None:
    """Return the stored elements of a tensor, or the bytes of a storage, as a plain array.

    Those of a quantized tensor are integers, or bytes where several elements share one.
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
    """Return where and how two values first differ; None if they are equal.

    Args:
        a: Values, containers, objects, tensors that are made of parts.
        b: The other.
        same: Compares each pair of plain arrays inside; None: all count as equal.
        held: Whether what the two objects themselves hold as a list or dict is looked at.
        devices: Whether device tags and requires_grad are.
        listed: Identities of tensors that are compared separately.
        limits: Limit how often containers may be referenced.

    Raises:
        LimitExceeded: the same containers are referenced too many times.
    """
    return _Comparison(same, devices, listed, limits).run(a, b, held=held)


Part = tuple[Any, Any]
"""A key, and what stands there."""
Step = tuple[Any, Any, Any]
"""A key, and what stands there on either side."""


class _Differ(Exception):
    """Two values differ; the arguments, if any, describe both."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """The path of the first difference below two values (`.` for themselves)."""

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
        """What was made for the comparison, so that no later object gets its identity."""

    def run(self, a: Any, b: Any, *, held: bool) -> Unlike | None:
        todo: list[tuple[Any, Any, Link, bool]] = []
        trail: Link = None
        exact = False
        try:
            steps = self._inside(a, b, exact, held=held)
            while True:
                exact = exact or isinstance(a, TensorRef)
                for key, one, other in reversed(steps):
                    todo.append((one, other, (trail, key), exact and key not in _VALUES))
                if not todo:
                    break
                a, b, trail, exact = todo.pop()
                steps = self._inside(a, b, exact)
        except _Differ as differ:
            change = differ.args if len(set(differ.args)) > 1 else None
            return Unlike(name_of(to_path(trail)) or ITSELF, change)
        return None

    def _inside(self, a: Any, b: Any, exact: bool, *, held: bool = True) -> list[Step]:
        """Return what is to be compared of two nodes; raises `_Differ` where they do themselves."""
        if a is b or not self._is_new(a, b):
            return []
        if isinstance(a, DeviceValue) and isinstance(b, DeviceValue) and not self._devices:
            return []
        if id(a) in self._listed and id(b) in self._listed:
            return []
        (one, mine), (other, others) = _made_of(a, held), _made_of(b, held)
        if one != other:
            in_words = all(isinstance(node, (*_PLAIN, DeviceValue)) for node in (a, b))
            raise _Differ(*(map(summarize, (a, b)) if in_words else ()))
        if isinstance(a, dict):
            steps = _by_key(mine, others)
            if isinstance(a, OrderedMap) and isinstance(b, OrderedMap):
                steps += _by_key(_around(a), _around(b))
            return steps
        if isinstance(a, (Opaque, TensorRef)):
            self._kept += (mine, others)
        if isinstance(a, TensorRef):
            return self._tensors(a, b, exact, _by_key(mine, others))
        if isinstance(a, StorageRef):
            self._require(not self._devices or a.storage.device == b.storage.device)
            self._elements(a, b, True)
        return _in_order(mine, others)

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
            raise LimitExceeded("the same containers are referenced too many times")
        return True

    def _require(self, equal: bool, *change: str) -> None:
        if not equal:
            raise _Differ(*change)

    def _tensors(self, a: TensorRef, b: TensorRef, exact: bool, steps: list[Step]) -> list[Step]:
        if self._devices:
            self._require((a.device, a.requires_grad) == (b.device, b.requires_grad))
        layers = _around(a), _around(b)
        if len(layers[0]) == len(layers[1]):  # else a file of another format cannot hold them
            steps += _in_order(*layers)
        if a.kind == "quantized":  # what its codes mean comes first
            codes = raw_elements(a), raw_elements(b)
            self._kept += codes
            return [*steps, ("codes", *codes)]
        self._elements(a, b, exact)
        counts = _entries(a), _entries(b)
        self._require(counts[0] == counts[1], *(f"{count} entries" for count in counts))
        return steps

    def _elements(self, a: TensorRef | StorageRef, b: TensorRef | StorageRef, exact: bool) -> None:
        mine, others = raw_elements(a), raw_elements(b)
        if mine is not None and others is not None and self._same is not None:
            self._require(mine.shape == others.shape and self._same(mine, others, exact))


def _by_key(a: Iterable[Part], b: Iterable[Part]) -> list[Step]:
    """Return the parts of two nodes by key, in any order."""
    mine = {to_comparable((key,)): (key, value) for key, value in a}
    others = {to_comparable((key,)): value for key, value in b}
    if mine.keys() != others.keys():
        raise _Differ
    return [(key, value, others[known]) for known, (key, value) in mine.items()]


def _in_order(a: Iterable[Part], b: Iterable[Part]) -> list[Step]:
    return [(key, one, other) for (key, one), (_, other) in zip(a, b, strict=True)]


def _made_of(node: Any, held: bool = True) -> tuple[tuple[Any, ...], list[Part]]:
    """Return what equal nodes have alike, their kind first, and the parts to compare.

    `held`: also what an object itself holds as a list or dict. Parts of a dict and of a tensor
    have their keys in any order.
    """
    if isinstance(node, dict):
        return ("dict", len(node)), list(node.items())
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return (kind, len(node)), list(enumerate(node))
    if isinstance(node, TensorRef):
        return ("tensor", node.kind, node.dtype, node.shape), _parts(node)
    if isinstance(node, StorageRef):
        return ("storage", node.class_name, node.storage.nbytes), []
    if isinstance(node, DeviceValue):
        return ("device", node.tag), []
    if isinstance(node, Global):
        return ("global", node.qualified), []
    if isinstance(node, Opaque):
        return _object(node, held)
    return ("value", type_name(node), _value(node)), []


def _value(value: Any) -> Any:
    """Return a plain value in a form in which NaN equals NaN."""
    if isinstance(value, complex):
        return _value(value.real), _value(value.imag)
    return value if value == value else "nan"


def _parts(tensor: TensorRef) -> list[Part]:
    """Return parts that do not only repeat the header, the items of a quantizer by name."""
    if tensor.kind in _NO_PARTS:
        return []
    parts = {key: part for key, part in (tensor.parts or {}).items() if key not in _IN_HEADER}
    if isinstance(parts.get("quantizer"), tuple):
        parts["quantizer"] = dict(zip(_QUANTIZER, parts["quantizer"], strict=False))
    return list(parts.items())


def _entries(tensor: TensorRef) -> int | None:
    """Return the number of entries or blocks of a sparse tensor; None for others."""
    parts = tensor.parts or {}
    values = parts.get("values")
    sparse = {"indices", "plain_indices"} & parts.keys()
    return values.shape[0] if sparse and isinstance(values, TensorRef) and values.shape else None


def _around(node: Any) -> list[Part]:
    """Return what an `OrderedDict` has beside its entries, and what was put around a tensor."""
    if isinstance(node, OrderedMap):
        return list(node.attributes.items())
    if isinstance(node, TensorRef):
        layers = filter(_tells, node.wrapping)
        return [(key, getattr(layer, key)) for layer in layers for key in ("type", "state")]
    return []


def _tells(layer: Wrapping) -> bool:
    """Return whether a layer says more than the header."""
    return layer.type is not None or layer.state is not None


def _object(node: Opaque, held: bool) -> tuple[tuple[Any, ...], list[Part]]:
    if node.plain is not None:
        return ("value", node.plain[0], _value(node.plain[1])), []
    if is_set(node):
        items = list(set_items(node))
        if all(map(_is_member, items)):
            members = sorted(repr(to_comparable((item,))) for item in items)
            return ("members", node.class_name, *members), []
        return ("set", node.class_name, len(items)), [("items", item) for item in items]
    parts: list[Part] = []
    head: list[Any] = ["object", node.class_name, isinstance(node.func, Global)]
    if not isinstance(node.func, Global):
        parts.append(("function", node.func))
    if held or node.class_name != "collections.Counter":
        parts.append(("arguments", _arguments(node)))
    parts.append(("options", node.kwargs))
    for kind, run in groupby(node.steps, lambda step: step[0]):
        values = [value for _, value in run]
        if kind == "build":
            parts += [("attributes", state) for state in values]
            head += [kind] * len(values)
        elif held and (items := list(chain.from_iterable(values))):  # added in portions
            parts.append(("items", items))
            head.append(kind)
    return tuple(head), parts


def _is_member(item: Any) -> bool:
    """Return whether an item of a set is a plain value, or a tuple of such."""
    return isinstance(item, _PLAIN) or (
        isinstance(item, tuple) and all(isinstance(part, _PLAIN) for part in item)
    )


def _arguments(node: Opaque) -> Any:
    """Return what an object was made with; protocols 0 and 1 spell `__new__` by a function."""
    match node:
        case Opaque(func=Global(name="_reconstructor"), args=(_, Global(name="object"), None)):
            return ()
    return node.args


_LENGTH = 16
_CONTAINERS = (dict, list, tuple, Opaque, TensorRef)


class Fingerprints:
    """Digests of nodes: equal for equal content, with sets and dicts in any order.

    Devices of tensors and requires_grad do not count.
    """

    def __init__(self, limits: Limits, listed: Container[int] = frozenset()) -> None:
        """Take tensors whose identities are in `listed` as equal: they have a hash of their own."""
        self._repeated = RepeatedBytes(limits)
        self._listed = listed
        self._path: Path = ()
        self._known: dict[int, bytes] = {}
        self._made: dict[int, tuple[tuple[Any, ...], list[Part]]] = {}

    def of(self, path: Path, root: Any) -> str:
        """Return the digest of a node, 16 hexadecimal digits; the tree must outlive this object.

        Raises:
            LimitExceeded: the tensor at `path`, or one inside it, repeats too many bytes.
        """
        self._path = path
        stack: list[Any] = [root]
        while stack:
            node = stack[-1]
            if id(node) not in self._made:
                head, parts = _made_of(node)
                parts = [*parts, *_around(node)]
                self._made[id(node)] = head, parts
                within = (part for _, part in parts if isinstance(part, _CONTAINERS))
                stack += [part for part in within if id(part) not in self._made]
            elif id(stack.pop()) not in self._known:
                self._known[id(node)] = self._digest(node, *self._made[id(node)])
        return self._known[id(root)].hex()[:_LENGTH]

    def _digest(self, node: Any, head: tuple[Any, ...], parts: list[Part]) -> bytes:
        found = [
            _hash(repr(to_comparable((key,)))) + self._known_or_plain(part) for key, part in parts
        ]
        if isinstance(node, (dict, TensorRef)) or is_set(node):
            found.sort()
        return _hash(f"{head!r} {self._content(node)}", *found)

    def _known_or_plain(self, node: Any) -> bytes:
        if isinstance(node, _CONTAINERS):
            return self._known.get(id(node), b"itself")
        return self._digest(node, *_made_of(node))

    def _content(self, node: Any) -> str:
        raw = raw_elements(node) if isinstance(node, (TensorRef, StorageRef)) else None
        if raw is None or id(raw) in self._listed:
            return ""
        self._repeated.add(self._path, raw)
        return hash_content(raw)


def _hash(head: str, *parts: bytes) -> bytes:
    import hashlib  # OpenSSL: a list without hashes has no use for it

    raw = head.encode("utf-8", "backslashreplace")
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    for part in parts:
        digest.update(part)
    return digest.digest()
