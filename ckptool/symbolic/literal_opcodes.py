"""Opcodes that push a literal: constants, numbers, text and bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ckptool.model import Opaque
from ckptool.symbolic.handlers import constant, opcode
from ckptool.symbolic.numbers import decimal, little_endian
from ckptool.symbolic.text import decode_python2, unescape

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__: list[str] = []

_INT32 = struct.Struct("<i").unpack_from
_UINT16 = struct.Struct("<H").unpack_from
_UINT32 = struct.Struct("<I").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from
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
    """An integer of up to 255 bytes."""
    length = machine.data[position]
    machine.stack.append(little_endian(machine.counted(position + 1, length), machine.limits))
    return position + 1 + length


@opcode(b"\x8b", refused=True)
def long4(machine: Machine, position: int) -> int:
    """An integer with a four-byte length."""
    length = _INT32(machine.data, position)[0]
    machine.stack.append(little_endian(machine.counted(position + 4, length), machine.limits))
    return position + 4 + int(length)


@opcode(b"I", refused=True)
def int_(machine: Machine, position: int) -> int:
    """A decimal integer, or a bool as `00` or `01`."""
    text, position = machine.line(position)
    booleans = {b"00": False, b"01": True}
    machine.stack.append(booleans[text] if text in booleans else decimal(text, machine.limits))
    return position


@opcode(b"L", refused=True)
def long_(machine: Machine, position: int) -> int:
    """A decimal integer with an `L` behind it."""
    text, position = machine.line(position)
    machine.stack.append(decimal(text.removesuffix(b"L"), machine.limits))
    return position


@opcode(b"G")
def binfloat(machine: Machine, position: int) -> int:
    """A big-endian double."""
    machine.stack.append(_DOUBLE(machine.data, position)[0])
    return position + 8


@opcode(b"F", refused=True)
def float_(machine: Machine, position: int) -> int:
    """A float as text."""
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
    """A Python 2 string with a one-byte length."""
    length = machine.data[position]
    machine.stack.append(decode_python2(machine.counted(position + 1, length)))
    return position + 1 + length


@opcode(b"T", refused=True)
def binstring(machine: Machine, position: int) -> int:
    """A Python 2 string with a four-byte length."""
    length = _INT32(machine.data, position)[0]
    machine.stack.append(decode_python2(machine.counted(position + 4, length)))
    return position + 4 + int(length)


@opcode(b"S", refused=True)
def string(machine: Machine, position: int) -> int:
    """A Python 2 string as its repr."""
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
    """A bytearray with an eight-byte length."""
    length = _UINT64(machine.data, position)[0]
    content = machine.counted(position + 8, length)
    machine.stack.append(Opaque(machine.find("builtins", "bytearray"), (content,)))
    return position + 8 + int(length)
