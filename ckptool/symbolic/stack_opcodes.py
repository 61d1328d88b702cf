"""Opcodes of the stack, the memo and the containers."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckptool.model import Global, Opaque
from ckptool.symbolic.handlers import constant, opcode
from ckptool.symbolic.numbers import decimal

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__: list[str] = []

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
    machine.stack.append(machine.recall(machine.data[position]))
    return position + 1


@opcode(b"j")
def long_binget(machine: Machine, position: int) -> int:
    """Push what is memoized under a four-byte index."""
    machine.stack.append(machine.recall(_UINT32(machine.data, position)[0]))
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
    machine.remember(len(machine.memo) + len(machine.far_memo), machine.stack[-1])
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
    """The protocol's number."""
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
    """A tuple of the items above the mark."""
    items = tuple(machine.stack)
    machine.stack = machine.marks.pop()
    machine.stack.append(items)
    return position


@opcode(b"\x85")
def tuple1(machine: Machine, position: int) -> int:
    """A tuple of the top."""
    machine.stack[-1] = (machine.stack[-1],)
    return position


@opcode(b"\x86")
def tuple2(machine: Machine, position: int) -> int:
    """A tuple of the top two."""
    stack = machine.stack
    second = stack.pop()
    stack[-1] = (stack[-1], second)
    return position


@opcode(b"\x87")
def tuple3(machine: Machine, position: int) -> int:
    """A tuple of the top three."""
    stack = machine.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)
    return position


@opcode(b"l", refused=True)
def list_(machine: Machine, position: int) -> int:
    """A list of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(items)
    return position


@opcode(b"d", refused=True)
def dict_(machine: Machine, position: int) -> int:
    """A dict of the keys and values above the mark."""
    items = machine.pop_mark()
    made: dict[Any, Any] = {}
    machine.stack.append(made)
    _set_items(machine, made, items)
    return position


@opcode(b"\x8f")
def empty_set(machine: Machine, position: int) -> int:
    """An empty set: kept as the call `set([...])`."""
    machine.stack.append(Opaque(machine.find("builtins", "set"), ([],)))
    return position


@opcode(b"\x91", refused=True)
def frozenset_(machine: Machine, position: int) -> int:
    """A frozenset of the items above the mark."""
    items = machine.pop_mark()
    machine.stack.append(Opaque(machine.find("builtins", "frozenset"), (items,)))
    return position


@opcode(b"\x90", refused=True)
def additems(machine: Machine, position: int) -> int:
    """Add the items above the mark to the set below it."""
    items = machine.pop_mark()
    target = machine.stack[-1]
    if not isinstance(target, Opaque):
        raise TypeError(f"items are added to a {type(target).__name__}")
    match (target.func, target.args):
        case (Global(module="builtins", name="set"), ([*_] as members,)):
            members.extend(items)
        case _:
            target.steps.append(("add", items))
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
        machine.check_key(key)
    if isinstance(target, dict):
        target.update(zip(keys, items[1::2], strict=True))
    elif isinstance(target, Opaque):
        target.steps.append(("set", list(zip(keys, items[1::2], strict=True))))
    else:
        raise TypeError(f"items are set in a {type(target).__name__}")


@opcode(b"a")
def append(machine: Machine, position: int) -> int:
    """Append the top to the list below it."""
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])
    return position


@opcode(b"e")
def appends(machine: Machine, position: int) -> int:
    """Append the items above the mark to the list below it."""
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)
    return position


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Opaque):
        target.steps.append(("append", items))
    else:
        raise TypeError(f"items are appended to a {type(target).__name__}")
