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
"""Returns True if two plain arrays of one dtype and shape have equal elements.

The third argument is True if no tolerance applies: for positions, sizes, scales, codes and bytes.
"""

ITSELF = "."
"""The place of a difference that is not inside the two values."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PLAIN_KINDS = frozenset({"strided", "numpy", "meta"})
"""Kinds that header and elements describe completely."""
_HEADER_PARTS = frozenset({"args", "layout", "size"})
"""Parts that only repeat the header."""
_QUANTIZER_ITEMS = ("scheme", "scale", "zero_point", "axis")
"""The torch names of the items of a quantizer (`torch._utils._rebuild_qtensor`)."""
_VALUE_PARTS = frozenset({"values", "buffer", "_local_tensor"})
"""The part with the values of a tensor: sparse or jagged, nested, distributed."""


def type_name(node: Any) -> str:
    """Return the type that `ckptool list` shows for a value, or the class of a tensor or object."""
    if isinstance(node, Opaque):  # `plain` is the type and the text of a value in a class
        return node.plain[0] if node.plain is not None else node.class_name
    if isinstance(node, (TensorRef, StorageRef, DeviceValue, Global)):
        return node.class_name
    for kind, name in ((bytes, "bytes"), (str, "str"), (OrderedMap, "OrderedDict")):
        if isinstance(node, kind):
            return name
    return "torch.Size" if type(node).__name__ == "Size" else type(node).__name__


def is_made_of_parts(tensor: TensorRef) -> bool:
    """Return True if a tensor has parts other than its header and elements."""
    return tensor.kind not in _PLAIN_KINDS or any(map(_has_type_or_state, tensor.wrapping))


def raw_elements(tensor: TensorRef | StorageRef) -> TensorRef | None:
    """Return the stored elements of a tensor, or the bytes of a storage, as a plain array.

    Elements of a quantized tensor are integers, or bytes if several elements share one. None for
    a tensor without a range of bytes: it is compared by its parts.
    """
    storage = tensor.storage
    if storage is None or storage.data is None:
        return None
    if isinstance(tensor, StorageRef) or tensor.dtype in PACKED:  # `quint4x2`: two in a byte
        return TensorRef("uint8", (storage.nbytes,), (1,), 0, storage, storage.device)
    stored_dtype = CODES.get(tensor.dtype, tensor.dtype)  # `qint8` is stored as `int8`
    if tensor.has_content and stored_dtype == tensor.dtype:
        return tensor
    return replace(tensor, dtype=stored_dtype, kind="strided", parts=None, wrapping=(), hooks=None)


def find_first_difference(
    a: Any,
    b: Any,
    same: Same | None = None,
    *,
    items: bool = True,
    devices: bool = True,
    listed: Container[int] = frozenset(),
    limits: Limits = DEFAULT_LIMITS,
) -> Unlike | None:
    """Return where and how two values first differ; None if they are equal.

    Args:
        a: A value, container, object, or tensor that is made of parts.
        b: The other.
        same: Compares each pair of plain arrays inside; None: all count as equal.
        items: Compare also the items that the two objects have as a list or dict.
        devices: Compare also device tags and requires_grad.
        listed: Identities of tensors that are compared separately.
        limits: Limit how often containers may be referenced.

    Raises:
        LimitExceeded: the same containers are referenced too many times.
    """
    return _NodeComparison(same, devices, listed, limits).run(a, b, items=items)


Part = tuple[Any, Any]
"""A key and its value."""
Step = tuple[Any, Any, Any]
"""A key, and its value on either side."""


class _Differ(Exception):
    """Two values differ; the arguments, if any, describe both."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """The path of the first difference below two values (`.` for themselves)."""

    place: str
    change: tuple[str, str] | None = None
    """Both values in a few words; None if that takes figures."""


class _NodeComparison:
    """A walk over two trees at once. Pairs seen before, for example cycles, count as equal."""

    def __init__(
        self, same: Same | None, devices: bool, listed: Container[int], limits: Limits
    ) -> None:
        """Take the arguments of `find_first_difference`."""
        self._has_equal_elements = same
        self._compares_devices = devices
        """True to compare device tags and `requires_grad` too."""
        self._listed_ids = listed
        """The identities of tensors that are compared separately."""
        self._limits = limits
        self._compared_pairs: set[tuple[int, int]] = set()
        """The identities of the pairs so far."""
        self._seen_ids: set[int] = set()
        """The identities of the nodes of the first tree so far."""
        self._repeats = 0
        """How often a node of the first tree was in another pair than before."""
        self._keep_alive: list[Any] = []
        """Objects made for the comparison, so that no later object gets their identity."""

    def run(self, a: Any, b: Any, *, items: bool) -> Unlike | None:
        """Return the first difference in a walk over both trees; None if they are equal.

        Inside a tensor, only its values have a tolerance; all other parts are compared exactly.
        `items` is about the two roots only.
        """
        trail: Link = None
        pending: list[tuple[Any, Any, Link, bool]] = [(a, b, trail, False)]
        """Pairs of nodes to compare, with their path, and True if no tolerance applies."""
        try:
            while pending:
                a, b, trail, exact = pending.pop()
                is_root = trail is None
                steps = self._compare_nodes(a, b, exact, items=items or not is_root)
                exact = exact or isinstance(a, TensorRef)
                for key, part_a, part_b in reversed(steps):
                    is_exact = exact and key not in _VALUE_PARTS
                    pending.append((part_a, part_b, (trail, key), is_exact))
        except _Differ as differ:
            has_change = len(set(differ.args)) > 1  # short texts of two values may be equal
            change = differ.args if has_change else None
            return Unlike(name_of(to_path(trail)) or ITSELF, change)
        return None

    def _compare_nodes(self, a: Any, b: Any, exact: bool, *, items: bool = True) -> list[Step]:
        """Compare two nodes, and return their parts to compare.

        There are none if the nodes are one object, were compared before, are listed tensors, or are
        devices that do not count.

        Raises:
            _Differ: the nodes themselves differ.
        """
        if a is b or not self._is_new(a, b):
            return []
        if isinstance(a, DeviceValue) and isinstance(b, DeviceValue) and not self._compares_devices:
            return []
        if id(a) in self._listed_ids and id(b) in self._listed_ids:
            return []
        properties_a, parts_a = _describe_node(a, items)
        properties_b, parts_b = _describe_node(b, items)
        if properties_a != properties_b:
            are_plain = all(isinstance(node, (*_PLAIN, DeviceValue)) for node in (a, b))
            raise _Differ(*(map(summarize, (a, b)) if are_plain else ()))
        if isinstance(a, dict):
            steps = _pair_by_key(parts_a, parts_b)
            if isinstance(a, OrderedMap) and isinstance(b, OrderedMap):
                steps += _pair_by_key(_list_attached_parts(a), _list_attached_parts(b))
            return steps
        if isinstance(a, (Opaque, TensorRef)):  # their parts may have been made just now
            self._keep_alive += (parts_a, parts_b)
        if isinstance(a, TensorRef):
            return self._compare_tensor_parts(a, b, exact, _pair_by_key(parts_a, parts_b))
        if isinstance(a, StorageRef):
            self._require(not self._compares_devices or a.storage.device == b.storage.device)
            self._require_equal_elements(a, b, exact=True)
        return _pair_in_order(parts_a, parts_b)

    def _is_new(self, a: Any, b: Any) -> bool:
        """Return True for plain values, and for a pair of nodes that was not compared before.

        Records the pair. Nodes of the first tree that are in many pairs exceed a limit, because the
        number of pairs may be the square of the number of nodes.
        """
        if isinstance(a, _PLAIN):
            return True
        pair = id(a), id(b)
        if pair in self._compared_pairs:
            return False
        self._compared_pairs.add(pair)
        self._repeats += id(a) in self._seen_ids
        self._seen_ids.add(id(a))
        if self._repeats > self._limits.max_repeats + len(self._seen_ids):
            raise LimitExceeded("the same containers are referenced too many times")
        return True

    def _require(self, equal: bool, *values: str) -> None:
        """Raise `_Differ`, with both values in words if they are given, unless `equal`."""
        if not equal:
            raise _Differ(*values)

    def _compare_tensor_parts(
        self, a: TensorRef, b: TensorRef, exact: bool, steps: list[Step]
    ) -> list[Step]:
        """Compare devices, elements and counts of two tensors, and return all parts to compare.

        `steps` are the parts that both have; wrapping layers and codes are added.
        """
        if self._compares_devices:
            self._require((a.device, a.requires_grad) == (b.device, b.requires_grad))
        layers_a, layers_b = _list_attached_parts(a), _list_attached_parts(b)
        # Layers are the Parameter, subclass or attributes around the elements. Some formats cannot
        # store them, so their absence on one side is not a difference.
        if len(layers_a) == len(layers_b):
            steps += _pair_in_order(layers_a, layers_b)
        if a.kind == "quantized":  # scales come first, because they give the codes their meaning
            codes = raw_elements(a), raw_elements(b)
            self._keep_alive += codes  # pairs seen before are remembered by `id`
            return [*steps, ("codes", *codes)]
        self._require_equal_elements(a, b, exact)
        count_a, count_b = _count_entries(a), _count_entries(b)
        self._require(count_a == count_b, f"{count_a} entries", f"{count_b} entries")
        return steps

    def _require_equal_elements(
        self, a: TensorRef | StorageRef, b: TensorRef | StorageRef, exact: bool
    ) -> None:
        """Raise `_Differ` if the stored elements of two tensors or storages differ.

        With `exact`, no tolerance applies. Tensors without stored elements count as equal here; so
        do all tensors if the caller gave no function to compare elements.
        """
        elements_a, elements_b = raw_elements(a), raw_elements(b)
        if elements_a is None or elements_b is None or self._has_equal_elements is None:
            return
        self._require(
            elements_a.shape == elements_b.shape
            and self._has_equal_elements(elements_a, elements_b, exact)
        )


def _pair_by_key(a: Iterable[Part], b: Iterable[Part]) -> list[Step]:
    """Return the parts of two nodes by key, in any order; raises `_Differ` for other keys."""
    parts_a = {to_comparable((key,)): (key, value) for key, value in a}
    parts_b = {to_comparable((key,)): value for key, value in b}
    if parts_a.keys() != parts_b.keys():
        raise _Differ
    return [(key, value, parts_b[known]) for known, (key, value) in parts_a.items()]


def _pair_in_order(a: Iterable[Part], b: Iterable[Part]) -> list[Step]:
    """Return the parts of two nodes that have the same keys in the same order."""
    return [(key, value_a, value_b) for (key, value_a), (_, value_b) in zip(a, b, strict=True)]


def _describe_node(node: Any, items: bool = True) -> tuple[tuple[Any, ...], list[Part]]:
    """Return the properties in which equal nodes agree, kind first, and their parts to compare.

    With `items`, also the items that an object has as a list or dict. Keys of a dict and of a
    tensor's parts are in any order.
    """
    if isinstance(node, dict):
        return ("dict", len(node)), list(node.items())
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return (kind, len(node)), list(enumerate(node))
    if isinstance(node, TensorRef):
        return ("tensor", node.kind, node.dtype, node.shape), _list_tensor_parts(node)
    if isinstance(node, StorageRef):
        return ("storage", node.class_name, node.storage.nbytes), []
    if isinstance(node, DeviceValue):
        return ("device", node.tag), []
    if isinstance(node, Global):
        return ("global", node.qualified), []
    if isinstance(node, Opaque):
        return _describe_object(node, items)
    return ("value", type_name(node), _normalize_value(node)), []


def _normalize_value(value: Any) -> Any:
    """Return a plain value in a form in which NaN equals NaN."""
    if isinstance(value, complex):
        return _normalize_value(value.real), _normalize_value(value.imag)
    return value if value == value else "nan"


def _list_tensor_parts(tensor: TensorRef) -> list[Part]:
    """Return the parts that do not repeat the header, the items of a quantizer by name."""
    if tensor.kind in _PLAIN_KINDS:
        return []
    parts = {key: part for key, part in (tensor.parts or {}).items() if key not in _HEADER_PARTS}
    if isinstance(parts.get("quantizer"), tuple):  # a per-tensor quantizer has no axis
        parts["quantizer"] = dict(zip(_QUANTIZER_ITEMS, parts["quantizer"], strict=False))
    return list(parts.items())


def _count_entries(tensor: TensorRef) -> int | None:
    """Return the number of entries or blocks of a sparse tensor; None for others."""
    parts = tensor.parts or {}
    values = parts.get("values")
    is_sparse = "indices" in parts or "plain_indices" in parts  # of COO; of CSR, CSC and blocks
    return values.shape[0] if is_sparse and isinstance(values, TensorRef) and values.shape else None


def _list_attached_parts(node: Any) -> list[Part]:
    """Return the attributes of an `OrderedDict`, or the wrapping layers of a tensor."""
    if isinstance(node, OrderedMap):
        return list(node.attributes.items())
    if isinstance(node, TensorRef):
        layers = filter(_has_type_or_state, node.wrapping)
        return [(key, getattr(layer, key)) for layer in layers for key in ("type", "state")]
    return []


def _has_type_or_state(layer: Wrapping) -> bool:
    """Return True if a layer has a type or state of its own."""
    return layer.type is not None or layer.state is not None


def _describe_object(node: Opaque, items: bool) -> tuple[tuple[Any, ...], list[Part]]:
    """Return the properties and parts of an object, as `_describe_node`.

    The steps of an object are the states (`build`) and items that pickle gave to it after its
    creation. Without `items`, the items of a dict or list class are left out.
    """
    if node.plain is not None:
        type_of_value, value = node.plain
        return ("value", type_of_value, _normalize_value(value)), []
    if is_set(node):
        elements = list(set_items(node))
        if all(map(_is_member, elements)):  # plain: equal in any order
            # With the type: 1 is not "1" or True. It is defined for paths, so for tuples.
            members = sorted(repr(to_comparable((item,))) for item in elements)
            return ("members", node.class_name, *members), []
        return ("set", node.class_name, len(elements)), [("items", item) for item in elements]
    parts: list[Part] = []
    has_named_function = isinstance(node.func, Global)  # its name is in `class_name`
    properties: list[Any] = ["object", node.class_name, has_named_function]
    if not has_named_function:
        parts.append(("function", node.func))
    if items or node.class_name != "collections.Counter":  # whose argument is its items
        parts.append(("arguments", _constructor_arguments(node)))
    parts.append(("options", node.kwargs))
    for kind, steps in groupby(node.steps, lambda step: step[0]):
        values = [value for _, value in steps]
        if kind == "build":
            parts += [("attributes", state) for state in values]
            properties += [kind] * len(values)
        # Pickle adds items in portions of 1,000, whose number does not matter.
        elif items and (elements := list(chain.from_iterable(values))):
            parts.append(("items", elements))
            properties.append(kind)
    return tuple(properties), parts


def _is_member(item: Any) -> bool:
    """Return True if an item of a set is a plain value, or a tuple of plain values."""
    return isinstance(item, _PLAIN) or (
        isinstance(item, tuple) and all(isinstance(part, _PLAIN) for part in item)
    )


def _constructor_arguments(node: Opaque) -> Any:
    """Return the constructor arguments of an object; () if it is created without any."""
    match node:
        case Opaque(func=Global(name="_reconstructor"), args=(_, Global(name="object"), None)):
            return ()  # protocols 0 and 1 call `object.__new__(cls)` through this function
    return node.args


_DIGEST_LENGTH = 16
_CONTAINERS = (dict, list, tuple, Opaque, TensorRef)


class Fingerprints:
    """Digests of nodes: equal for equal content, with sets and dicts in any order.

    Devices of tensors and requires_grad do not count.
    """

    def __init__(self, limits: Limits, listed: Container[int] = frozenset()) -> None:
        """Treat tensors with identities in `listed` as equal: the caller hashes these itself."""
        self._repeated = RepeatedBytes(limits)  # by the strides of all tensors so far
        self._listed_ids = listed
        self._path: Path = ()
        """The path of the node that `compute` was called with, for errors."""
        self._digests: dict[int, bytes] = {}
        """The digests of the containers so far, by `id`."""
        self._described_by_id: dict[int, tuple[tuple[Any, ...], list[Part]]] = {}
        """By `id` of a node, its properties and parts, which stay alive."""

    def compute(self, path: Path, root: Any) -> str:
        """Return the digest of a node, 16 hexadecimal digits; the tree must outlive this object.

        A container is digested after the containers inside it.

        Raises:
            LimitExceeded: the tensor at `path`, or one inside it, repeats too many bytes.
        """
        self._path = path
        stack: list[Any] = [root]
        while stack:
            node = stack[-1]
            if id(node) not in self._described_by_id:
                properties, parts = _describe_node(node)
                parts = [*parts, *_list_attached_parts(node)]
                self._described_by_id[id(node)] = properties, parts
                containers = (part for _, part in parts if isinstance(part, _CONTAINERS))
                stack += [part for part in containers if id(part) not in self._described_by_id]
                continue
            # The node is on top again, so the containers inside it have their digests.
            stack.pop()
            if id(node) not in self._digests:
                self._digests[id(node)] = self._digest(node, *self._described_by_id[id(node)])
        return self._digests[id(root)].hex()[:_DIGEST_LENGTH]

    def _digest(self, node: Any, properties: tuple[Any, ...], parts: list[Part]) -> bytes:
        """Return the digest of a node from its properties and the digests of its parts."""
        digests = []
        for key, part in parts:
            key_text = repr(to_comparable((key,)))  # with the type: 1 is not "1" or True
            digests.append(_hash_bytes(key_text) + self._digest_part(part))
        if isinstance(node, (dict, TensorRef)) or is_set(node):  # their order does not matter
            digests.sort()
        return _hash_bytes(f"{properties!r} {self._hash_elements(node)}", *digests)

    def _digest_part(self, node: Any) -> bytes:
        """Return the digest of a container computed before, or of a plain value."""
        if isinstance(node, _CONTAINERS):
            # Only a container that encloses this one, in a cycle, has no digest yet.
            return self._digests.get(id(node), b"itself")
        return self._digest(node, *_describe_node(node))

    def _hash_elements(self, node: Any) -> str:
        """Return the content hash of a tensor's elements.

        "" for a listed tensor, for one without stored elements, and for any other node.
        """
        raw = raw_elements(node) if isinstance(node, (TensorRef, StorageRef)) else None
        if raw is None or id(raw) in self._listed_ids:
            return ""
        self._repeated.add(self._path, raw)  # a limit: strides can repeat a few bytes endlessly
        return hash_content(raw)


def _hash_bytes(head: str, *parts: bytes) -> bytes:
    """Return the SHA-256 of a text and of the bytes after it."""
    import hashlib  # here, because it loads OpenSSL, which a list without hashes does not need

    raw = head.encode("utf-8", "backslashreplace")
    # The length shows where the text ends and the parts begin.
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    for part in parts:
        digest.update(part)
    return digest.digest()
