"""Opcodes of classes, calls, objects and persistent ids: all of it kept as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.model import Global, Opaque, OrderedMap, StorageRef, TensorRef
from ckptool.symbolic import calls
from ckptool.symbolic.handlers import HANDLERS, opcode
from ckptool.symbolic.text import parse_text_pid

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__: list[str] = []

# Classes, calls and objects


@opcode(b"c")
def global_(machine: Machine, position: int) -> int:
    """A class or function by name."""
    module, position = machine.line(position)
    name, position = machine.line(position)
    machine.stack.append(machine.find(str(module, "utf-8"), str(name, "utf-8")))
    return position


@opcode(b"\x93", refused=True)
def stack_global(machine: Machine, position: int) -> int:
    """A class or function by the two names on the stack."""
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
    """An object of the class below the arguments."""
    args = machine.stack.pop()
    machine.stack[-1] = calls.new_object(machine, machine.stack[-1], args)
    return position


@opcode(b"\x92", refused=True)
def newobj_ex(machine: Machine, position: int) -> int:
    """An object of the class below the arguments, keywords among them."""
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    machine.stack[-1] = Opaque(machine.stack[-1], args, kwargs, maker="newobj")
    return position


@opcode(b"i", refused=True)
def inst(machine: Machine, position: int) -> int:
    """An object of a class named here, made from the items above the mark."""
    module, position = machine.line(position)
    name, position = machine.line(position)
    args = tuple(machine.pop_mark())
    found = machine.find(str(module, "utf-8"), str(name, "utf-8"))
    machine.stack.append(machine.call(found, args))
    return position


@opcode(b"o", refused=True)
def obj(machine: Machine, position: int) -> int:
    """An object of the class that lies first above the mark, made from the rest."""
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
    """What the container of the pickle knows under the id on the stack."""
    machine.stack[-1] = _load_persistent(machine, machine.stack[-1])
    return position


@opcode(b"P", refused=True)
def persid(machine: Machine, position: int) -> int:
    """What the container of the pickle knows under an id given as text."""
    text, position = machine.line(position)
    pid = parse_text_pid(str(text, "ascii"), machine.find)
    machine.stack.append(_load_persistent(machine, pid))
    return position


def _load_persistent(machine: Machine, pid: Any) -> Any:
    if machine.persistent_load is None:
        return Opaque(None, (pid,), maker="persid")
    found = machine.persistent_load(pid)
    if not isinstance(found, (StorageRef, TensorRef, Global, Opaque)):
        raise TypeError("a persistent id stands for nothing known")
    return found


@opcode(b"\x82", refused=True)
def ext1(machine: Machine, position: int) -> int:
    """A class by its number in a registry that only the writer had."""
    raise ValueError("it names a class by a number of the copyreg extension registry")


@opcode(b"\x97", refused=True)
def next_buffer(machine: Machine, position: int) -> int:
    """A buffer that was sent beside the pickle, and is not in the file."""
    raise ValueError("it refers to an out-of-band buffer, which is not in the file")


HANDLERS[0x83] = HANDLERS[0x84] = HANDLERS[0x82]


@opcode(b"\x98", refused=True)
def readonly_buffer(machine: Machine, position: int) -> int:
    """A mark on the buffer on the stack: nothing to do for us."""
    return position
