"""Write a tree as a pickle, and list what keeps `weights_only=True` from loading it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.core.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    Storage,
    StorageRef,
    TensorRef,
)
from ckptool.dtypes import BY_NAME, NOT_IN_TORCH
from ckptool.errors import NotRepresentable
from ckptool.symbolic.rebuild import make_rebuild_call

_QSCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_ALLOWED_FUNCTIONS = (
    "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor", "_rebuild_tensor_v2",
    "_rebuild_tensor_v3", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage", "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_device_tensor_from_numpy", "_rebuild_wrapper_subclass",
)  # fmt: skip
_SMALL_TYPES = (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_OTHER_ALLOWED = (
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device",
    "torch.nn.parameter.Parameter", "torch._tensor._rebuild_from_type_v2",
    "torch.tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
)  # fmt: skip
_ALLOWED = frozenset(
    (
        *_OTHER_ALLOWED,
        *(f"torch._utils.{name}" for name in _ALLOWED_FUNCTIONS),
        *(f"torch.{name}" for name in (*BY_NAME, *_QSCHEMES, *_SMALL_TYPES)),
    )
)


def find_blocked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the qualified names that the safe unpickler rejects, in order, once each."""
    return tuple(dict.fromkeys(name for name in names if not _is_allowed(name)))


def _is_allowed(name: str) -> bool:
    """Return True if `weights_only=True` accepts a class or function, by its current name."""
    owner, _, last = name.rpartition(".")
    is_storage = owner in ("torch", "torch.storage", "torch.cuda") and last.endswith("Storage")
    is_tensor = owner in ("torch", "torch.cuda", "torch.sparse") and last.endswith("Tensor")
    return name in _ALLOWED or is_storage or is_tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """A pickle and the storages that it refers to, in order of first use.

    `dtypes` and `untyped` are, for each storage, the dtype of its first use, and whether that was
    an `UntypedStorage` (so that its size counts bytes).
    """

    data: bytes
    storages: tuple[Storage, ...]
    dtypes: tuple[str, ...]
    untyped: tuple[bool, ...]
    globals: tuple[str, ...] = ()
    """The classes and functions that the pickle uses."""

    @property
    def blockers(self) -> tuple[str, ...]:
        """The names that keep `torch.load(weights_only=True)` from loading the pickle."""
        return find_blocked_names(self.globals)


def encode(
    root: Any, *, legacy: bool = False, key_of: Callable[[Storage], str] | None = None
) -> Encoded:
    """Return the pickle of `root`; `legacy` adds the sixth item of storage ids in old streams.

    `key_of` returns the key of a storage (None: its position in the order of first use).

    Raises:
        NotRepresentable: an object contains itself in its arguments, a name cannot be written, or a
            tensor has a dtype that torch does not have.
    """
    return _Encoder(legacy, key_of).run(root)


def find_blockers(root: Any) -> tuple[str, ...]:
    """Return the names that would keep `weights_only=True` from loading a file of this tree.

    For a tree that cannot be written, the result has only the reason.
    """
    try:
        return encode(root).blockers
    except NotRepresentable as error:
        return (error.message,)


class _Raw(bytes):
    """Opcodes to write unchanged, on a work list where plain bytes are values."""

    __slots__ = ()


class _Put(NamedTuple):
    """Memoize the object on top of the stack as `node`."""

    node: Any


class _EndTuple(NamedTuple):
    """The items of `node` are on the stack: make the tuple."""

    node: tuple[Any, ...]


_MARK, _TUPLE, _REDUCE, _BUILD, _NEW = map(_Raw, (b"(", b"t", b"R", b"b", b"\x81"))
_STEP_OPCODES = {"append": _Raw(b"e"), "set": _Raw(b"u"), "add": _Raw(b"\x90")}
_ORDERED_DICT = Global("collections", "OrderedDict")
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_UINT = struct.Struct("<I").pack
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


class _Encoder:
    """Writes a tree as a pickle, from a work list of nodes and opcodes."""

    def __init__(self, legacy: bool, key_of: Callable[[Storage], str] | None) -> None:
        """Start an empty pickle; for the arguments see `encode`."""
        self.legacy = legacy
        self.key_of = key_of
        self.out = bytearray(b"\x80\x02")
        """The pickle so far; it begins with PROTO 2."""
        self.memo: dict[Any, int] = {}
        """The memo index of an object by id, or of a text or global by value."""
        self.keep_alive: list[Any] = []  # memoized by identity, so must not be collected
        self.unfinished: set[int] = set()
        """The ids of objects and tuples whose content is being written."""
        self.storage_indexes: dict[int, int] = {}
        """The index in `storage_uses` by id of a storage."""
        self.storage_uses: list[tuple[Storage, str, bool]] = []
        """Each storage with the dtype of its first use, and whether that was untyped."""
        self.todo: list[Any] = []
        """The nodes and opcodes to write, the next one last."""
        self.global_names: list[str] = []
        """The qualified names of the globals so far, which may repeat."""

    def run(self, root: Any) -> Encoded:
        """Write the tree, and return the pickle with its storages."""
        self.todo.append(root)
        todo, writers = self.todo, _WRITERS
        while todo:
            node = todo.pop()
            writer = writers.get(type(node)) or _find_writer(node)
            writer(self, node)
        self.out += b"."
        uses = self.storage_uses
        return Encoded(
            bytes(self.out),
            storages=tuple(storage for storage, _, _ in uses),
            dtypes=tuple(dtype for _, dtype, _ in uses),
            untyped=tuple(untyped for _, _, untyped in uses),
            globals=tuple(dict.fromkeys(self.global_names)),
        )

    # Memo

    def write_reference(self, key: Any) -> bool:
        """Refer to the object memoized under `key`; False if there is none."""
        index = self.memo.get(key)
        if index is None:
            return False
        # BINGET with one byte, or LONG_BINGET with four.
        self.out += b"h%c" % index if index < 256 else b"j" + _UINT(index)
        return True

    def memoize(self, key: Any) -> None:
        """Memoize the top of the stack under `key`."""
        index = self.memo[key] = len(self.memo)
        self.out += b"q%c" % index if index < 256 else b"r" + _UINT(index)

    # Leaves

    def write_raw(self, node: _Raw) -> None:
        self.out += node

    def write_put(self, node: _Put) -> None:
        """Memoize a finished object, so that later references find it."""
        self.memoize(id(node.node))
        self.unfinished.discard(id(node.node))

    def write_none(self, node: None) -> None:
        self.out += b"N"

    def write_boolean(self, node: bool) -> None:
        self.out += b"\x88" if node else b"\x89"

    def write_integer(self, node: int) -> None:
        """Write an integer with the shortest opcode of protocol 2."""
        if 0 <= node < 256:
            self.out += b"K%c" % node
        elif 0 <= node < 65536:
            self.out += b"M" + struct.pack("<H", node)
        elif -0x80000000 <= node < 0x80000000:
            self.out += b"J" + struct.pack("<i", node)
        else:
            raw = node.to_bytes((node.bit_length() >> 3) + 1, "little", signed=True)
            short = len(raw) < 256
            self.out += b"\x8a%c" % len(raw) if short else b"\x8b" + struct.pack("<i", len(raw))
            self.out += raw

    def write_float(self, node: float) -> None:
        self.out += b"G" + struct.pack(">d", node)

    def write_text(self, node: str) -> None:
        """Write text, or a reference to equal text."""
        key = str(node)  # the memo has texts by value, also that of a subclass
        if not self.write_reference(key):
            raw = node.encode("utf-8", "surrogatepass")
            self.out += b"X" + _UINT(len(raw)) + raw
            self.memoize(key)

    def write_complex(self, node: complex) -> None:
        self.write_call(Global("builtins", "complex"), (node.real, node.imag))

    def write_bytes(self, node: bytes) -> None:
        """Write bytes as `_codecs.encode(text, 'latin1')`, since protocol 2 has no bytes."""
        if not self.write_reference(id(node)):
            self.write_call(Global("_codecs", "encode"), (str(node, "latin-1"), "latin1"), node)

    def write_device(self, node: DeviceValue) -> None:
        """Write `torch.device(type, index)`."""
        word, _, index = node.tag.partition(":")
        args = (word, int(index)) if index.isdecimal() else (node.tag,)
        self.write_call(Global("torch", "device"), args)

    def write_global(self, node: Global) -> None:
        """Write a class or function by its name, or by `getattr` if it is inside a class."""
        key = ("global", node.module, node.name)
        if self.write_reference(key):
            return
        owner, dot, attribute = node.name.rpartition(".")
        if dot:  # protocol 2 cannot name an inner class: getattr, as Lib/pickle.py does
            self.write_call(Global("builtins", "getattr"), (Global(node.module, owner), attribute))
            return
        try:
            encoded = f"c{node.module}\n{node.name}\n".encode()
        except UnicodeEncodeError:
            encoded = b""
        if encoded.count(b"\n") != 2:  # not UTF-8, or with a newline in a name
            raise NotRepresentable(f"the name {node.qualified!r} cannot be written to a pickle")
        self.out += encoded
        self.global_names.append(node.qualified)
        self.memoize(key)

    # Containers

    def write_list(self, node: list[Any]) -> None:
        """Write an empty list, then the work that appends its items."""
        if self.write_reference(id(node)):
            return
        self.out += b"]"
        self.memoize(id(node))
        if node:
            self.push(_MARK, *node, _STEP_OPCODES["append"])

    def write_dict(self, node: dict[Any, Any]) -> None:
        """Write an empty dict, then the work that sets its items."""
        if self.write_reference(id(node)):
            return
        self.out += b"}"
        self.memoize(id(node))
        self.push(*self.list_items(node))

    def write_ordered(self, node: OrderedMap) -> None:
        """Write an OrderedDict, its items, and its attributes as state."""
        if self.write_reference(id(node)):
            return
        self.write_global(_ORDERED_DICT)
        self.out += b")R"  # call it without arguments
        self.memoize(id(node))
        attributes = (node.attributes, _BUILD) if node.attributes else ()
        self.keep_alive.append(node)  # so that no other object gets its memoized id
        self.push(*self.list_items(node), *attributes)

    def list_items(self, node: Any) -> list[Any]:
        """Return the nodes and opcodes that set the items of the dict on the stack."""
        if not node:
            return []
        work: list[Any] = [_MARK]
        for pair in node.items():
            work.extend(pair)
        work.append(_STEP_OPCODES["set"])
        return work

    def write_tuple(self, node: tuple[Any, ...]) -> None:
        """Write the items of a tuple, and then the tuple."""
        if not node:
            self.out += b")"
        elif not self.write_reference(id(node)):
            if len(node) > 3:  # shorter ones have opcodes that need no mark
                self.out += b"("
            self.push(*node, _EndTuple(node))

    def write_tuple_end(self, end: _EndTuple) -> None:
        """Write the opcode that makes a tuple of the items on the stack."""
        node = end.node
        if id(node) in self.memo:  # it contains itself, and was made while it was written
            # Its items on the stack are dropped: with a POP for each, or one POP_MARK.
            self.out += b"0" * len(node) if len(node) <= 3 else b"1"
            self.write_reference(id(node))
            return
        self.out += b"t" if len(node) > 3 else _SHORT_TUPLES[len(node)]
        self.memoize(id(node))

    def write_size(self, node: Size) -> None:
        """Write a `torch.Size` as a call."""
        if not self.write_reference(id(node)):
            self.write_call(Global("torch", "Size"), (tuple(node),), node)

    # Calls and objects

    def write_call(self, func: Any, args: tuple[Any, ...], node: Any = None) -> None:
        """Put `func(*args)` on the work list, memoized as `node` if that is given.

        The tuple `args` itself is not memoized.
        """
        self.keep_alive.append(args)  # its items are memoized by identity
        put = () if node is None else (_Put(node),)
        self.push(func, _MARK, *args, _TUPLE, _REDUCE, *put)

    def push(self, *work: Any) -> None:
        """Process these items next, in this order."""
        self.todo.extend(reversed(work))

    def write_opaque(self, node: Opaque) -> None:
        """Write an object: the call that makes it, and the steps that change it.

        The object is memoized between the two, so that a step may refer to it.

        Raises:
            NotRepresentable: it contains itself in its arguments.
        """
        if self.write_reference(id(node)):
            return
        if id(node) in self.unfinished:
            raise NotRepresentable(
                f"an object of class {node.class_name} contains itself in its arguments"
            )
        self.unfinished.add(id(node))
        steps: list[Any] = []
        for kind, value in node.steps:
            if kind == "build":
                steps += (value, _BUILD)
            elif kind == "set":
                steps += (_MARK, *(part for pair in value for part in pair), _STEP_OPCODES[kind])
            else:
                steps += (_MARK, *value, _STEP_OPCODES[kind])
        creation: tuple[Any, ...]
        if node.maker == "persid":
            creation = (node.args[0], _Raw(b"Q"))  # BINPERSID
        elif node.kwargs is not None:
            creation = (
                Global("copyreg", "__newobj_ex__"), _MARK, node.func, node.args, node.kwargs,
                _TUPLE, _REDUCE,
            )  # fmt: skip
        else:
            creation = (node.func, node.args, _REDUCE if node.maker == "reduce" else _NEW)
        self.push(*creation, _Put(node), *steps)

    # Tensors

    def write_storage(self, node: StorageRef) -> None:
        """Write the persistent id: class, key, location, and size in elements of that class."""
        storage = node.storage
        index = self.storage_indexes.setdefault(id(storage), len(self.storage_uses))
        if index == len(self.storage_uses):
            self.storage_uses.append((storage, node.dtype, node.untyped))
        self.out += b"("
        self.write_text("storage")
        typed = None if node.untyped else BY_NAME[node.dtype].storage
        self.write_global(Global("torch", typed) if typed else _UNTYPED)
        self.write_text(str(index) if self.key_of is None else self.key_of(storage))
        self.write_text(storage.device)
        size = 1 if node.untyped else BY_NAME[node.dtype].itemsize
        self.write_integer(storage.nbytes // size)
        self.out += b"NtQ" if self.legacy else b"tQ"  # [NONE,] TUPLE, BINPERSID

    def write_tensor(self, node: TensorRef) -> None:
        """Write a tensor as the call that rebuilds it; a numpy array as its original object."""
        if self.write_reference(id(node)):
            return
        if node.dtype in NOT_IN_TORCH:
            raise NotRepresentable(
                f"torch has no dtype {node.dtype}, so no pickle can contain a tensor of it"
            )
        if node.kind == "numpy" and node.parts:
            self.push(node.parts["array"])
        elif (
            node.wrapping
            or node.parts
            or node.flags
            or node.hooks
            or not self.write_plain_tensor(node)  # usually this writes the tensor
        ):
            func, args = make_rebuild_call(node)
            self.write_call(func, args, node)

    def write_plain_tensor(self, node: TensorRef) -> bool:
        """Write an ordinary tensor directly, because most are; False if it is not ordinary."""
        storage = node.storage
        if storage is None or BY_NAME[node.dtype].storage is None:  # no typed one, as for uint16
            return False
        self.write_global(_REBUILD_V2)
        self.out += b"("
        self.write_storage(StorageRef(storage, node.dtype))
        self.write_integer(node.offset)
        self.write_integers(node.shape)
        self.write_integers(node.stride)
        self.write_boolean(node.requires_grad)
        self.write_global(_ORDERED_DICT)
        self.out += b")RtR"  # call OrderedDict (no hooks); end the arguments; call the function
        self.memoize(id(node))
        return True

    def write_integers(self, values: tuple[int | None, ...]) -> None:
        """Write a tuple of integers; None (a ragged dimension) becomes 0."""
        if len(values) > 3:
            self.out += b"("
        for value in values:
            self.write_integer(value or 0)
        self.out += b"t" if len(values) > 3 else _SHORT_TUPLES[len(values)]


_WRITERS: dict[type, Any] = {
    _Raw: _Encoder.write_raw,
    _Put: _Encoder.write_put,
    _EndTuple: _Encoder.write_tuple_end,
    type(None): _Encoder.write_none,
    bool: _Encoder.write_boolean,
    int: _Encoder.write_integer,
    float: _Encoder.write_float,
    str: _Encoder.write_text,
    complex: _Encoder.write_complex,
    bytes: _Encoder.write_bytes,
    list: _Encoder.write_list,
    dict: _Encoder.write_dict,
    OrderedMap: _Encoder.write_ordered,
    tuple: _Encoder.write_tuple,
    Size: _Encoder.write_size,
    Global: _Encoder.write_global,
    DeviceValue: _Encoder.write_device,
    Opaque: _Encoder.write_opaque,
    StorageRef: _Encoder.write_storage,
    TensorRef: _Encoder.write_tensor,
}


def _find_writer(node: Any) -> Any:
    """Return the writer for a subclass of a known type (a Python 2 string)."""
    for node_type, writer in _WRITERS.items():
        if isinstance(node, node_type):
            return writer
    raise NotRepresentable(f"a {type(node).__name__} cannot be written to a pickle")
