"""The opcodes of pickle: a handler for each, and a list of those `weights_only=True` rejects."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptool.core.model import Global, Opaque, OrderedMap, StorageRef, TensorRef
from ckptool.errors import LimitExceeded
from ckptool.limits import Limits
from ckptool.symbolic import calls, rebuild
from ckptool.symbolic.text import decode_python2, parse_text_pid, unescape

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

Handler = Callable[["Machine", int], int]
STOP = ord(".")


def _make_refusing_handler(why: str) -> Handler:
    """Return a handler that refuses the opcode."""

    def refuse(machine: Machine, position: int) -> int:
        """Raise an error instead of reading the opcode."""
        raise ValueError(why)

    return refuse


HANDLERS: list[Handler] = [_make_refusing_handler("no such opcode")] * 256


def opcode(code: bytes, refused: str = "") -> Callable[[Handler], Handler]:
    """Register a handler; `refused` is the name of an opcode that `weights_only=True` rejects."""

    def register(handler: Handler) -> Handler:
        """Enter the handler in the table, and note the use of a rejected opcode."""

        def record_opcode(machine: Machine, position: int) -> int:
            """Note the use of the opcode, and run its handler."""
            machine.opcodes[refused] = None
            return handler(machine, position)

        HANDLERS[code[0]] = record_opcode if refused else handler
        return handler

    return register


def _make_constant_handler(make: Callable[[], Any]) -> Handler:
    """Return a handler that pushes `make()`."""

    def push(machine: Machine, position: int) -> int:
        """Push a new object; the opcode has no argument, so the position stays."""
        machine.stack.append(make())
        return position

    return push


def _make_number_handler(layout: str) -> Handler:
    """Return a handler that pushes a number of fixed size, with a layout of `struct`."""
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def push(machine: Machine, position: int) -> int:
        """Push the number at `position`, and return the position after it."""
        (number,) = unpack(machine.data, position)
        machine.stack.append(number)
        return position + size

    return push


Make = Callable[["Machine", bytes], Any]


def _make_sized_handler(width: int, make: Make) -> Handler:
    """Return a handler that reads a length and as many bytes, and pushes `make(bytes)`."""

    def push(machine: Machine, position: int) -> int:
        """Read a length of `width` bytes and as many bytes, and push the object made of them."""
        start = position + width
        length = int.from_bytes(machine.data[position:start], "little")
        machine.stack.append(make(machine, machine.read_exactly(start, length)))
        return start + length

    return push


def _make_line_handler(make: Make) -> Handler:
    """Return a handler that reads a line and pushes `make(line)`."""

    def push(machine: Machine, position: int) -> int:
        """Read a line, and push the object made of it."""
        text, position = machine.read_line(position)
        machine.stack.append(make(machine, text))
        return position

    return push


def decode_little_endian(raw: bytes, limits: Limits) -> int:
    """Return a little-endian two's complement integer of any size within the limits."""
    if len(raw) > limits.max_integer_bytes:
        raise LimitExceeded(
            f"an integer has {len(raw):,} bytes, more than the limit of "
            f"{limits.max_integer_bytes:,}"
        )
    return int.from_bytes(raw, "little", signed=True)


def decode_decimal(text: bytes, limits: Limits) -> int:
    """Return a decimal integer with digits within the limits."""
    max_digits = limits.max_integer_bytes * 12 // 5  # a byte is log10(256), about 2.4 digits
    if len(text) > max_digits:
        raise LimitExceeded(
            f"an integer has {len(text):,} digits, more than the limit of {max_digits:,}"
        )
    return int(text)


_UINT32 = struct.Struct("<I").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from

opcode(b"]")(_make_constant_handler(list))
opcode(b"}")(_make_constant_handler(dict))
opcode(b")")(_make_constant_handler(tuple))
opcode(b"N")(_make_constant_handler(lambda: None))
opcode(b"\x88")(_make_constant_handler(lambda: True))
opcode(b"\x89")(_make_constant_handler(lambda: False))


# Memo


@opcode(b"q")
def binput(machine: Machine, position: int) -> int:
    """Memoize the top under a one-byte index."""
    machine.memoize(machine.data[position], machine.stack[-1])
    return position + 1


@opcode(b"r")
def long_binput(machine: Machine, position: int) -> int:
    """Memoize the top under a four-byte index."""
    index = _UINT32(machine.data, position)[0]
    if index == len(machine.memo) and not machine.sparse_memo:  # the common case, without a call
        machine.memo.append(machine.stack[-1])
    else:
        machine.memoize(index, machine.stack[-1])
    return position + 4


@opcode(b"h")
def binget(machine: Machine, position: int) -> int:
    """Push the object memoized under a one-byte index."""
    index, memo = machine.data[position], machine.memo
    machine.stack.append(memo[index] if index < len(memo) else machine.sparse_memo[index])
    return position + 1


@opcode(b"j")
def long_binget(machine: Machine, position: int) -> int:
    """Push the object memoized under a four-byte index."""
    index, memo = _UINT32(machine.data, position)[0], machine.memo
    machine.stack.append(memo[index] if index < len(memo) else machine.sparse_memo[index])
    return position + 4


@opcode(b"p", "PUT")
def put(machine: Machine, position: int) -> int:
    """Memoize the top under a decimal index."""
    text, position = machine.read_line(position)
    machine.memoize(decode_decimal(text, machine.limits), machine.stack[-1])
    return position


@opcode(b"g", "GET")
def get(machine: Machine, position: int) -> int:
    """Push the object memoized under a decimal index."""
    text, position = machine.read_line(position)
    machine.stack.append(machine.recall(decode_decimal(text, machine.limits)))
    return position


@opcode(b"\x94", "MEMOIZE")
def memoize(machine: Machine, position: int) -> int:
    """Memoize the top under the next index, which is the size of the memo."""
    if machine.sparse_memo:
        machine.memoize(len(machine.memo) + len(machine.sparse_memo), machine.stack[-1])
    else:  # the common case, without a call
        machine.memo.append(machine.stack[-1])
    return position


# Stack


@opcode(b"(")
def mark(machine: Machine, position: int) -> int:
    """Begin a run of items."""
    machine.marks.append(machine.stack)
    machine.stack = []
    return position


@opcode(b"0", "POP")
def pop(machine: Machine, position: int) -> int:
    """Drop the top, or the mark if nothing is above it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()
    return position


@opcode(b"1", "POP_MARK")
def pop_mark(machine: Machine, position: int) -> int:
    """Drop everything down to the mark."""
    machine.pop_mark()
    return position


@opcode(b"2", "DUP")
def dup(machine: Machine, position: int) -> int:
    """Push the top again."""
    machine.stack.append(machine.stack[-1])
    return position


@opcode(b"\x80")
def proto(machine: Machine, position: int) -> int:
    """Set the protocol of the pickle."""
    machine.protocol = machine.data[position]
    if machine.protocol > 5:
        raise ValueError(f"pickle protocol {machine.protocol} does not exist")
    return position + 1


@opcode(b"\x95", "FRAME")
def frame(machine: Machine, position: int) -> int:
    """Skip a frame, which is only a hint for buffered reads."""
    _UINT64(machine.data, position)
    machine.protocol = max(machine.protocol, 4)
    return position + 8


# Containers


@opcode(b"t")
def tuple_(machine: Machine, position: int) -> int:
    """Push a tuple of the items above the mark."""
    items = tuple(machine.stack)
    machine.stack = machine.marks.pop()
    machine.stack.append(items)
    return position


@opcode(b"\x85")
def tuple1(machine: Machine, position: int) -> int:
    """Push a tuple of the top."""
    machine.stack[-1] = (machine.stack[-1],)
    return position


@opcode(b"\x86")
def tuple2(machine: Machine, position: int) -> int:
    """Push a tuple of the top two."""
    stack = machine.stack
    second = stack.pop()
    stack[-1] = (stack[-1], second)
    return position


@opcode(b"\x87")
def tuple3(machine: Machine, position: int) -> int:
    """Push a tuple of the top three."""
    stack = machine.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)
    return position


@opcode(b"l", "LIST")
def list_(machine: Machine, position: int) -> int:
    """Push a list of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(items)
    return position


@opcode(b"d", "DICT")
def dict_(machine: Machine, position: int) -> int:
    """Push a dict of the keys and values above the mark."""
    items = machine.pop_mark()
    mapping: dict[Any, Any] = {}
    machine.stack.append(mapping)
    _set_items(machine, mapping, items)
    return position


@opcode(b"\x8f")
def empty_set(machine: Machine, position: int) -> int:
    """Push an empty set, represented as the call `set([...])`."""
    machine.stack.append(Opaque(machine.find_global("builtins", "set"), ([],)))
    return position


@opcode(b"\x91", "FROZENSET")
def frozenset_(machine: Machine, position: int) -> int:
    """Push a frozenset of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(Opaque(machine.find_global("builtins", "frozenset"), (items,)))
    return position


@opcode(b"\x90", "ADDITEMS")
def additems(machine: Machine, position: int) -> int:
    """Add the items above the mark to the set below it: to the list in its call `set([...])`."""
    items = machine.pop_mark()
    target = machine.stack[-1]
    match target:
        case Opaque(func=Global(module="builtins", name="set"), args=([*_] as members,)):
            members.extend(items)
        case _:
            machine.record_change("add", target, items)
    return position


@opcode(b"s")
def setitem(machine: Machine, position: int) -> int:
    """Set one item of the dict below key and value."""
    value = machine.stack.pop()
    key = machine.stack.pop()
    _set_items(machine, machine.stack[-1], [key, value])
    return position


@opcode(b"u")
def setitems(machine: Machine, position: int) -> int:
    """Set the items above the mark in the dict below it."""
    items = machine.pop_mark()
    _set_items(machine, machine.stack[-1], items)
    return position


def _set_items(machine: Machine, target: Any, items: list[Any]) -> None:
    """Set alternating keys and values in a dict, or record them for an object."""
    if len(items) % 2:
        raise ValueError("a key without a value")
    keys = items[::2]
    for key in keys:  # also of an object: its class may be derived from dict
        if type(key) is not str:
            machine.check_key(key)
    if isinstance(target, dict):
        target.update(zip(keys, items[1::2], strict=True))
    else:
        machine.record_change("set", target, list(zip(keys, items[1::2], strict=True)))


@opcode(b"a")
def append(machine: Machine, position: int) -> int:
    """Append the top to the list below it."""
    item = machine.stack.pop()
    _extend(machine, machine.stack[-1], [item])
    return position


@opcode(b"e")
def appends(machine: Machine, position: int) -> int:
    """Append the items above the mark to the list below it."""
    items = machine.pop_mark()
    _extend(machine, machine.stack[-1], items)
    return position


def _extend(machine: Machine, target: Any, items: list[Any]) -> None:
    """Append items to a list, or record them for an object."""
    if isinstance(target, list):
        target.extend(items)
    else:
        machine.record_change("append", target, items)


# Numbers


@opcode(b"K")
def binint1(machine: Machine, position: int) -> int:
    """Push an unsigned byte."""
    machine.stack.append(machine.data[position])
    return position + 1


opcode(b"M")(_make_number_handler("<H"))
opcode(b"J")(_make_number_handler("<i"))
opcode(b"G")(_make_number_handler(">d"))


def _decode_integer(machine: Machine, raw: bytes) -> int:
    return decode_little_endian(raw, machine.limits)


def _decode_int(machine: Machine, text: bytes) -> int:
    """Return a decimal integer, or a bool as `00` or `01`."""
    booleans = {b"00": False, b"01": True}
    return booleans[text] if text in booleans else decode_decimal(text, machine.limits)


def _decode_long(machine: Machine, text: bytes) -> int:
    return decode_decimal(text.removesuffix(b"L"), machine.limits)


opcode(b"\x8a")(_make_sized_handler(1, _decode_integer))
opcode(b"\x8b", "LONG4")(_make_sized_handler(4, _decode_integer))
opcode(b"I", "INT")(_make_line_handler(_decode_int))
opcode(b"L", "LONG")(_make_line_handler(_decode_long))
opcode(b"F", "FLOAT")(_make_line_handler(lambda _, text: float(text)))


# Text and bytes


@opcode(b"X")
def binunicode(machine: Machine, position: int) -> int:
    """Push text with a four-byte length."""
    start = position + 4
    end = start + _UINT32(machine.data, position)[0]
    if end > len(machine.data):
        raise EOFError
    machine.stack.append(str(machine.data[start:end], "utf-8", "surrogatepass"))
    return int(end)


@opcode(b"\x8c", "SHORT_BINUNICODE")
def short_binunicode(machine: Machine, position: int) -> int:
    """Push text with a one-byte length."""
    end = position + 1 + machine.data[position]
    if end > len(machine.data):
        raise EOFError
    machine.stack.append(str(machine.data[position + 1 : end], "utf-8", "surrogatepass"))
    return end


def _decode_text(machine: Machine, raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _decode_python2_text(machine: Machine, raw: bytes) -> str:
    return decode_python2(raw)


def _keep_bytes(machine: Machine, raw: bytes) -> bytes:
    return raw


def _make_bytearray(machine: Machine, raw: bytes) -> Opaque:
    return Opaque(machine.find_global("builtins", "bytearray"), (raw,))


opcode(b"\x8d", "BINUNICODE8")(_make_sized_handler(8, _decode_text))
opcode(b"V", "UNICODE")(_make_line_handler(lambda _, text: str(text, "raw-unicode-escape")))
opcode(b"U")(_make_sized_handler(1, _decode_python2_text))
opcode(b"T", "BINSTRING")(_make_sized_handler(4, _decode_python2_text))
opcode(b"S", "STRING")(_make_line_handler(lambda _, text: decode_python2(unescape(text))))
opcode(b"C", "SHORT_BINBYTES")(_make_sized_handler(1, _keep_bytes))
opcode(b"B", "BINBYTES")(_make_sized_handler(4, _keep_bytes))
opcode(b"\x8e", "BINBYTES8")(_make_sized_handler(8, _keep_bytes))
opcode(b"\x96", "BYTEARRAY8")(_make_sized_handler(8, _make_bytearray))


# Classes, calls and objects


@opcode(b"c")
def global_(machine: Machine, position: int) -> int:
    """Push a class or function by name."""
    module, position = machine.read_line(position)
    name, position = machine.read_line(position)
    machine.stack.append(machine.find_global(str(module, "utf-8"), str(name, "utf-8")))
    return position


@opcode(b"\x93", "STACK_GLOBAL")
def stack_global(machine: Machine, position: int) -> int:
    """Push a class or function by the two names on the stack."""
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("the name of a global is not text")
    machine.stack.append(machine.find_global(module, name))
    return position


@opcode(b"R")
def reduce_(machine: Machine, position: int) -> int:
    """Call the callable below the arguments, as data."""
    stack = machine.stack
    args = stack.pop()
    stack[-1] = machine.call(stack[-1], args)
    return position


@opcode(b"\x81")
def newobj(machine: Machine, position: int) -> int:
    """Push an object of the class below the arguments."""
    args = machine.stack.pop()
    machine.stack[-1] = calls.make_new_object(machine, machine.stack[-1], args)
    return position


@opcode(b"\x92", "NEWOBJ_EX")
def newobj_ex(machine: Machine, position: int) -> int:
    """Push an object of the class below the arguments and keyword arguments."""
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    machine.stack[-1] = Opaque(machine.stack[-1], args, kwargs, maker="newobj")
    return position


@opcode(b"i", "INST")
def inst(machine: Machine, position: int) -> int:
    """Push an object of the class named by the opcode, made from the items above the mark."""
    module, position = machine.read_line(position)
    name, position = machine.read_line(position)
    args = tuple(machine.pop_mark())
    cls = machine.find_global(str(module, "utf-8"), str(name, "utf-8"))
    machine.stack.append(machine.call(cls, args))
    return position


@opcode(b"o", "OBJ")
def obj(machine: Machine, position: int) -> int:
    """Push an object of the first class above the mark, made from the other items."""
    items = machine.pop_mark()
    machine.stack.append(machine.call(items[0], tuple(items[1:])))
    return position


@opcode(b"b")
def build(machine: Machine, position: int) -> int:
    """Set the state of the object below."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, OrderedMap) and isinstance(state, dict):
        target.attributes.update(state)
    elif isinstance(target, Opaque):
        target.steps.append(("build", state))
        # The state of a numpy array has its elements: it is a tensor from now on.
        machine.replace_top(target, calls.finish_array(target, machine.file))
    elif isinstance(target, TensorRef):  # a Parameter of torch < 0.4
        machine.replace_top(target, rebuild.set_old_state(target, state))
    else:
        raise TypeError(f"state is set on a {type(target).__name__}")
    return position


# Persistent ids, extensions, buffers


@opcode(b"Q")
def binpersid(machine: Machine, position: int) -> int:
    """Push the object that the container of the pickle has for the id on the stack."""
    machine.stack[-1] = _load_persistent(machine, machine.stack[-1])
    return position


@opcode(b"P", "PERSID")
def persid(machine: Machine, position: int) -> int:
    """Push the object that the container of the pickle has for an id given as text."""
    text, position = machine.read_line(position)
    pid = parse_text_pid(str(text, "ascii"), machine.find_global)
    machine.stack.append(_load_persistent(machine, pid))
    return position


def _load_persistent(machine: Machine, pid: Any) -> Any:
    """Return the object that the container of the pickle has for a persistent id."""
    if machine.persistent_load is None:
        return Opaque(None, (pid,), maker="persid")
    node = machine.persistent_load(pid)
    if not isinstance(node, (StorageRef, TensorRef, Global, Opaque)):
        raise TypeError("a persistent id has an unknown form")
    return node


HANDLERS[0x82:0x85] = [
    _make_refusing_handler("it uses a class by its number in the copyreg extension registry")
] * 3
opcode(b"\x97")(_make_refusing_handler("it uses an out-of-band buffer, which is not in the file"))


@opcode(b"\x98", "READONLY_BUFFER")
def readonly_buffer(machine: Machine, position: int) -> int:
    """Mark the buffer on the stack as read-only, which changes nothing here."""
    return position
