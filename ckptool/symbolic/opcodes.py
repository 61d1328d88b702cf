"""The opcodes of pickle: what each one does, and which `weights_only=True` refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptool.errors import LimitExceeded
from ckptool.limits import Limits
from ckptool.model import Global, Opaque, OrderedMap, StorageRef, TensorRef
from ckptool.symbolic import calls
from ckptool.symbolic.text import decode_python2, parse_text_pid, unescape

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["HANDLERS", "STOP", "Handler", "constant", "decimal", "little_endian", "opcode"]

Handler = Callable[["Machine", int], int]
STOP = ord(".")


def _unknown(machine: Machine, position: int) -> int:
    raise ValueError("there is no such opcode")


HANDLERS: list[Handler] = [_unknown] * 256


def opcode(
    code: bytes, *, refused: bool = False, table: list[Handler] = HANDLERS
) -> Callable[[Handler], Handler]:
    """Register a handler; `refused` opcodes are those that `weights_only=True` does not take."""

    def register(handler: Handler) -> Handler:
        if not refused:
            table[code[0]] = handler
            return handler

        name = handler.__name__.upper().rstrip("_")

        def noted(machine: Machine, position: int) -> int:
            machine.opcodes[name] = None
            return handler(machine, position)

        HANDLERS[code[0]] = noted
        return handler

    return register


def constant(code: bytes, make: Callable[[], Any]) -> None:
    """Register an opcode that pushes what `make` gives."""

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(make())
        return position

    HANDLERS[code[0]] = push


def little_endian(raw: bytes, limits: Limits) -> int:
    """Return a little-endian two's complement integer of any size that the limits allow."""
    if len(raw) > limits.max_integer_bytes:
        raise LimitExceeded(
            f"an integer of {len(raw):,} bytes is beyond the limit of {limits.max_integer_bytes:,}"
        )
    return int.from_bytes(raw, "little", signed=True)


def decimal(text: bytes, limits: Limits) -> int:
    """Return a decimal integer of no more digits than the limits allow."""
    most = limits.max_integer_bytes * 12 // 5  # digits of a number of so many bytes
    if len(text) > most:
        raise LimitExceeded(f"an integer of {len(text):,} digits is beyond the limit of {most:,}")
    return int(text)


_UINT32 = struct.Struct("<I").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from

constant(b"]", list)
constant(b"}", dict)
constant(b")", tuple)


# Memo


@opcode(b"q")
def binput(machine: Machine, position: int) -> int:
    """Memoize the top under a one-byte index."""
    machine.remember(machine.data[position], machine.stack[-1])
    return position + 1


@opcode(b"r")
def long_binput(machine: Machine, position: int) -> int:
    """Memoize the top under a four-byte index."""
    index = _UINT32(machine.data, position)[0]
    if index == len(machine.memo) and not machine.far_memo:  # the common case, without a call
        machine.memo.append(machine.stack[-1])
    else:
        machine.remember(index, machine.stack[-1])
    return position + 4


@opcode(b"h")
def binget(machine: Machine, position: int) -> int:
    """Push what is memoized under a one-byte index."""
    index, memo = machine.data[position], machine.memo
    machine.stack.append(memo[index] if index < len(memo) else machine.far_memo[index])
    return position + 1


@opcode(b"j")
def long_binget(machine: Machine, position: int) -> int:
    """Push what is memoized under a four-byte index."""
    index, memo = _UINT32(machine.data, position)[0], machine.memo
    machine.stack.append(memo[index] if index < len(memo) else machine.far_memo[index])
    return position + 4


@opcode(b"p", refused=True)
def put(machine: Machine, position: int) -> int:
    """Memoize the top under a decimal index."""
    text, position = machine.line(position)
    machine.remember(decimal(text, machine.limits), machine.stack[-1])
    return position


@opcode(b"g", refused=True)
def get(machine: Machine, position: int) -> int:
    """Push what is memoized under a decimal index."""
    text, position = machine.line(position)
    machine.stack.append(machine.recall(decimal(text, machine.limits)))
    return position


@opcode(b"\x94", refused=True)
def memoize(machine: Machine, position: int) -> int:
    """Memoize the top under the next index: as many as there are already."""
    if machine.far_memo:
        machine.remember(len(machine.memo) + len(machine.far_memo), machine.stack[-1])
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


@opcode(b"0", refused=True)
def pop(machine: Machine, position: int) -> int:
    """Drop the top, or the mark if nothing is above it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()
    return position


@opcode(b"1", refused=True)
def pop_mark(machine: Machine, position: int) -> int:
    """Drop everything down to the mark."""
    machine.pop_mark()
    return position


@opcode(b"2", refused=True)
def dup(machine: Machine, position: int) -> int:
    """Push the top again."""
    machine.stack.append(machine.stack[-1])
    return position


@opcode(b"\x80")
def proto(machine: Machine, position: int) -> int:
    """Return the protocol's number."""
    machine.protocol = machine.data[position]
    if machine.protocol > 5:
        raise ValueError(f"pickle protocol {machine.protocol} does not exist")
    return position + 1


@opcode(b"\x95", refused=True)
def frame(machine: Machine, position: int) -> int:
    """Only a hint for buffered reads: skipped."""
    _UINT64(machine.data, position)
    machine.protocol = max(machine.protocol, 4)
    return position + 8


# Containers


@opcode(b"t")
def tuple_(machine: Machine, position: int) -> int:
    """Return a tuple of the items above the mark."""
    items = tuple(machine.stack)
    machine.stack = machine.marks.pop()
    machine.stack.append(items)
    return position


@opcode(b"\x85")
def tuple1(machine: Machine, position: int) -> int:
    """Return a tuple of the top."""
    machine.stack[-1] = (machine.stack[-1],)
    return position


@opcode(b"\x86")
def tuple2(machine: Machine, position: int) -> int:
    """Return a tuple of the top two."""
    stack = machine.stack
    second = stack.pop()
    stack[-1] = (stack[-1], second)
    return position


@opcode(b"\x87")
def tuple3(machine: Machine, position: int) -> int:
    """Return a tuple of the top three."""
    stack = machine.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)
    return position


@opcode(b"l", refused=True)
def list_(machine: Machine, position: int) -> int:
    """Return a list of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(items)
    return position


@opcode(b"d", refused=True)
def dict_(machine: Machine, position: int) -> int:
    """Return a dict of the keys and values above the mark."""
    items = machine.pop_mark()
    made: dict[Any, Any] = {}
    machine.stack.append(made)
    _set_items(machine, made, items)
    return position


@opcode(b"\x8f")
def empty_set(machine: Machine, position: int) -> int:
    """Return an empty set: kept as the call `set([...])`."""
    machine.stack.append(Opaque(machine.find("builtins", "set"), ([],)))
    return position


@opcode(b"\x91", refused=True)
def frozenset_(machine: Machine, position: int) -> int:
    """Return a frozenset of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(Opaque(machine.find("builtins", "frozenset"), (items,)))
    return position


@opcode(b"\x90", refused=True)
def additems(machine: Machine, position: int) -> int:
    """Add the items above the mark to the set below it."""
    items = machine.pop_mark()
    target = machine.stack[-1]
    match target:
        case Opaque(func=Global(module="builtins", name="set"), args=([*_] as members,)):
            members.extend(items)
        case _:
            machine.change("add", target, items)
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
    if len(items) % 2:
        raise ValueError("a key has no value")
    keys = items[::2]
    for key in keys:  # of an object too: it may be of a class derived from dict
        if type(key) is not str:
            machine.check_key(key)
    if isinstance(target, dict):
        target.update(zip(keys, items[1::2], strict=True))
    else:
        machine.change("set", target, list(zip(keys, items[1::2], strict=True)))


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
    if isinstance(target, list):
        target.extend(items)
    else:
        machine.change("append", target, items)


_INT32 = struct.Struct("<i").unpack_from
_UINT16 = struct.Struct("<H").unpack_from


_DOUBLE = struct.Struct(">d").unpack_from

constant(b"N", lambda: None)
constant(b"\x88", lambda: True)
constant(b"\x89", lambda: False)


# Numbers


@opcode(b"K")
def binint1(machine: Machine, position: int) -> int:
    """One unsigned byte."""
    machine.stack.append(machine.data[position])
    return position + 1


@opcode(b"M")
def binint2(machine: Machine, position: int) -> int:
    """Two unsigned bytes."""
    machine.stack.append(_UINT16(machine.data, position)[0])
    return position + 2


@opcode(b"J")
def binint(machine: Machine, position: int) -> int:
    """Four signed bytes."""
    machine.stack.append(_INT32(machine.data, position)[0])
    return position + 4


@opcode(b"\x8a")
def long1(machine: Machine, position: int) -> int:
    """Return an integer of up to 255 bytes."""
    length = machine.data[position]
    machine.stack.append(little_endian(machine.counted(position + 1, length), machine.limits))
    return position + 1 + length


@opcode(b"\x8b", refused=True)
def long4(machine: Machine, position: int) -> int:
    """Return an integer with a four-byte length."""
    length = _INT32(machine.data, position)[0]
    machine.stack.append(little_endian(machine.counted(position + 4, length), machine.limits))
    return position + 4 + int(length)


@opcode(b"I", refused=True)
def int_(machine: Machine, position: int) -> int:
    """Return a decimal integer, or a bool as `00` or `01`."""
    text, position = machine.line(position)
    booleans = {b"00": False, b"01": True}
    machine.stack.append(booleans[text] if text in booleans else decimal(text, machine.limits))
    return position


@opcode(b"L", refused=True)
def long_(machine: Machine, position: int) -> int:
    """Return a decimal integer with an `L` behind it."""
    text, position = machine.line(position)
    machine.stack.append(decimal(text.removesuffix(b"L"), machine.limits))
    return position


@opcode(b"G")
def binfloat(machine: Machine, position: int) -> int:
    """Return a big-endian double."""
    machine.stack.append(_DOUBLE(machine.data, position)[0])
    return position + 8


@opcode(b"F", refused=True)
def float_(machine: Machine, position: int) -> int:
    """Return a float as text."""
    text, position = machine.line(position)
    machine.stack.append(float(text))
    return position


# Text and bytes


@opcode(b"X")
def binunicode(machine: Machine, position: int) -> int:
    """Text with a four-byte length."""
    start = position + 4
    end = start + _UINT32(machine.data, position)[0]
    if end > len(machine.data):
        raise EOFError
    machine.stack.append(str(machine.data[start:end], "utf-8", "surrogatepass"))
    return int(end)


@opcode(b"\x8c", refused=True)
def short_binunicode(machine: Machine, position: int) -> int:
    """Text with a one-byte length."""
    end = position + 1 + machine.data[position]
    if end > len(machine.data):
        raise EOFError
    machine.stack.append(str(machine.data[position + 1 : end], "utf-8", "surrogatepass"))
    return end


@opcode(b"\x8d", refused=True)
def binunicode8(machine: Machine, position: int) -> int:
    """Text with an eight-byte length."""
    length = _UINT64(machine.data, position)[0]
    text = machine.counted(position + 8, length)
    machine.stack.append(str(text, "utf-8", "surrogatepass"))
    return position + 8 + int(length)


@opcode(b"V", refused=True)
def unicode_(machine: Machine, position: int) -> int:
    """Text in raw-unicode-escape, to the end of the line."""
    text, position = machine.line(position)
    machine.stack.append(str(text, "raw-unicode-escape"))
    return position


@opcode(b"U")
def short_binstring(machine: Machine, position: int) -> int:
    """Return a Python 2 string with a one-byte length."""
    length = machine.data[position]
    machine.stack.append(decode_python2(machine.counted(position + 1, length)))
    return position + 1 + length


@opcode(b"T", refused=True)
def binstring(machine: Machine, position: int) -> int:
    """Return a Python 2 string with a four-byte length."""
    length = _INT32(machine.data, position)[0]
    machine.stack.append(decode_python2(machine.counted(position + 4, length)))
    return position + 4 + int(length)


@opcode(b"S", refused=True)
def string(machine: Machine, position: int) -> int:
    """Return a Python 2 string as its repr."""
    text, position = machine.line(position)
    machine.stack.append(decode_python2(unescape(text)))
    return position


@opcode(b"C", refused=True)
def short_binbytes(machine: Machine, position: int) -> int:
    """Bytes with a one-byte length."""
    length = machine.data[position]
    machine.stack.append(machine.counted(position + 1, length))
    return position + 1 + length


@opcode(b"B", refused=True)
def binbytes(machine: Machine, position: int) -> int:
    """Bytes with a four-byte length."""
    length = _UINT32(machine.data, position)[0]
    machine.stack.append(machine.counted(position + 4, length))
    return position + 4 + int(length)


@opcode(b"\x8e", refused=True)
def binbytes8(machine: Machine, position: int) -> int:
    """Bytes with an eight-byte length."""
    length = _UINT64(machine.data, position)[0]
    machine.stack.append(machine.counted(position + 8, length))
    return position + 8 + int(length)


@opcode(b"\x96", refused=True)
def bytearray8(machine: Machine, position: int) -> int:
    """Return a bytearray with an eight-byte length."""
    length = _UINT64(machine.data, position)[0]
    content = machine.counted(position + 8, length)
    machine.stack.append(Opaque(machine.find("builtins", "bytearray"), (content,)))
    return position + 8 + int(length)


# Classes, calls and objects


@opcode(b"c")
def global_(machine: Machine, position: int) -> int:
    """Return a class or function by name."""
    module, position = machine.line(position)
    name, position = machine.line(position)
    machine.stack.append(machine.find(str(module, "utf-8"), str(name, "utf-8")))
    return position


@opcode(b"\x93", refused=True)
def stack_global(machine: Machine, position: int) -> int:
    """Return a class or function by the two names on the stack."""
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a global is named by something that is not text")
    machine.stack.append(machine.find(module, name))
    return position


@opcode(b"R")
def reduce_(machine: Machine, position: int) -> int:
    """Call the callable below the arguments: as data."""
    stack = machine.stack
    args = stack.pop()
    stack[-1] = machine.call(stack[-1], args)
    return position


@opcode(b"\x81")
def newobj(machine: Machine, position: int) -> int:
    """Return an object of the class below the arguments."""
    args = machine.stack.pop()
    machine.stack[-1] = calls.new_object(machine, machine.stack[-1], args)
    return position


@opcode(b"\x92", refused=True)
def newobj_ex(machine: Machine, position: int) -> int:
    """Return an object of the class below the arguments, keywords among them."""
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    machine.stack[-1] = Opaque(machine.stack[-1], args, kwargs, maker="newobj")
    return position


@opcode(b"i", refused=True)
def inst(machine: Machine, position: int) -> int:
    """Return an object of a class named here, made from the items above the mark."""
    module, position = machine.line(position)
    name, position = machine.line(position)
    args = tuple(machine.pop_mark())
    found = machine.find(str(module, "utf-8"), str(name, "utf-8"))
    machine.stack.append(machine.call(found, args))
    return position


@opcode(b"o", refused=True)
def obj(machine: Machine, position: int) -> int:
    """Return an object of the class that lies first above the mark, made from the rest."""
    items = machine.pop_mark()
    machine.stack.append(machine.call(items[0], tuple(items[1:])))
    return position


@opcode(b"b")
def build(machine: Machine, position: int) -> int:
    """Give the object below its state."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, OrderedMap) and isinstance(state, dict):
        target.attributes.update(state)
    elif isinstance(target, Opaque):
        target.steps.append(("build", state))
        new = calls.built(machine, target)
        if new is not target:
            machine.stack[-1] = new
            machine.replace_in_memo(target, new)
    elif isinstance(target, TensorRef):
        new = calls.built_tensor(machine, target, state)
        machine.stack[-1] = new
        machine.replace_in_memo(target, new)
    else:
        raise TypeError(f"state is given to a {type(target).__name__}")
    return position


# Persistent ids, extensions, buffers


@opcode(b"Q")
def binpersid(machine: Machine, position: int) -> int:
    """Return what the container of the pickle knows under the id on the stack."""
    machine.stack[-1] = _load_persistent(machine, machine.stack[-1])
    return position


@opcode(b"P", refused=True)
def persid(machine: Machine, position: int) -> int:
    """Return what the container of the pickle knows under an id given as text."""
    text, position = machine.line(position)
    pid = parse_text_pid(str(text, "ascii"), machine.find)
    machine.stack.append(_load_persistent(machine, pid))
    return position


def _load_persistent(machine: Machine, pid: Any) -> Any:
    if machine.persistent_load is None:
        return Opaque(None, (pid,), maker="persid")
    found = machine.persistent_load(pid)
    if not isinstance(found, (StorageRef, TensorRef, Global, Opaque)):
        raise TypeError("a persistent id has an unknown meaning")
    return found


@opcode(b"\x82", refused=True)
def ext1(machine: Machine, position: int) -> int:
    """Return a class by its number in a registry that only the writer had."""
    raise ValueError("it names a class by a number of the copyreg extension registry")


@opcode(b"\x97", refused=True)
def next_buffer(machine: Machine, position: int) -> int:
    """Return a buffer that was sent beside the pickle, and is not in the file."""
    raise ValueError("it refers to an out-of-band buffer, which is not in the file")


HANDLERS[0x83] = HANDLERS[0x84] = HANDLERS[0x82]


@opcode(b"\x98", refused=True)
def readonly_buffer(machine: Machine, position: int) -> int:
    """Return a mark on the buffer on the stack: nothing to do for us."""
    return position
