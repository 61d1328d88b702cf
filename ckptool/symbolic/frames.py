"""Frames of protocol 4 and 5: runs of whole opcodes, each behind the length that it states.

Where frames lie is settled (PEP 3154, Lib/pickle.py `_Framer`): one begins behind PROTO, the next
where one ends, the last ends with STOP. Between two stand only opcodes whose argument is as long as
a frame grows, and a few bytes for which none is begun. What reads a pickle from a stream believes
the length: too long a one makes it read into what follows, or ask for all memory.
"""

from __future__ import annotations

__all__ = ["frames_fit"]

_FRAME = 0x95
_PROTO_BYTES, _FRAME_BYTES = 2, 9
_TARGET = 64 << 10
"""A frame is closed that has as many bytes; an opcode that is longer stands outside of frames."""
_LEAST = 4
"""Fewer bytes get no frame."""
_LONG_ARGUMENTS = {ord("B"): 4, ord("X"): 4, 0x8B: 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
"""Opcodes of bytes, text, integers and bytearrays, and how many bytes their length takes."""


def frames_fit(pickle: bytes, end: int) -> bool:
    """Whether the frames of a pickle of `end` bytes are where a pickler puts them."""
    position, few = _PROTO_BYTES, True
    while position < end:
        if pickle[position] == _FRAME:
            length = int.from_bytes(pickle[position + 1 : position + _FRAME_BYTES], "little")
            position += _FRAME_BYTES + length
            few = length >= _TARGET
            continue
        found = _behind_long_argument(pickle, position, end, few)
        if found is None:
            return few and end - position < _LEAST
        position, few = found, True
    return position == end


def _behind_long_argument(pickle: bytes, position: int, end: int, few: bool) -> int | None:
    """Where an opcode with a long argument ends; `few`: some bytes may stand before it."""
    for start in range(position, min(position + (_LEAST if few else 1), end)):
        digits = _LONG_ARGUMENTS.get(pickle[start])
        if digits is None:
            continue
        length = int.from_bytes(pickle[start + 1 : start + 1 + digits], "little")
        stop = start + 1 + digits + length
        if stop - start > _TARGET and stop <= end:
            return stop
    return None
