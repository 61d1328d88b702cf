"""CRC-32C, the checksum of TensorFlow's files, without a compiled library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from ckptool.files.source import ByteRange

__all__ = ["crc32c", "crc32cs", "masked", "unmasked"]

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""
_COLUMNS = 256
_BLOCK = 4096 * _COLUMNS
"""Bytes that are summed up at a time: in lanes of `_COLUMNS` bytes, all lanes together."""
_WORTH = 8 << 10
"""Bytes from which lanes are worth their start."""


@cache
def _table() -> tuple[int, ...]:
    rows: list[int] = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        rows.append(number)
    return tuple(rows)


@cache
def _planes() -> tuple[bytes, ...]:
    """Return the four bytes of all rows of the table, as tables of `bytes.translate`."""
    return tuple(bytes(row >> shift & 0xFF for row in _table()) for shift in (0, 8, 16, 24))


@cache
def _shifts() -> tuple[tuple[int, ...], ...]:
    """Return for each byte of a CRC what it becomes where `_COLUMNS` zero bytes follow."""
    return tuple(
        tuple(_short(bytes(_COLUMNS), value << shift) for value in range(256))
        for shift in (0, 8, 16, 24)
    )


def _short(data: bytes, state: int) -> int:
    table = _table()
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def _block(data: bytes, state: int) -> int:
    """Return the state after whole lanes of bytes, from those of the lanes, which advance together.

    A state is four bytes; those of all lanes are four integers, and a step of all lanes is a few
    operations of C on them.
    """
    lanes = len(data) // _COLUMNS
    first = second = third = fourth = 0
    one, two, three, four = _planes()
    number = int.from_bytes
    for column in range(_COLUMNS):
        row = (first ^ number(data[column::_COLUMNS], "little")).to_bytes(lanes, "little")
        first = second ^ number(row.translate(one), "little")
        second = third ^ number(row.translate(two), "little")
        third = fourth ^ number(row.translate(three), "little")
        fourth = number(row.translate(four), "little")
    states = [part.to_bytes(lanes, "little") for part in (first, second, third, fourth)]
    low, middle, high, top = _shifts()
    for a, b, c, d in zip(*states, strict=True):
        state = (
            low[state & 0xFF]
            ^ middle[state >> 8 & 0xFF]
            ^ high[state >> 16 & 0xFF]
            ^ top[state >> 24]
            ^ (a | b << 8 | c << 16 | d << 24)
        )
    return state


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, which follows bytes of the CRC-32C `crc`."""
    state = crc ^ 0xFFFFFFFF
    start = 0
    while len(data) - start >= _WORTH:
        end = start + min(_BLOCK, (len(data) - start) // _COLUMNS * _COLUMNS)
        state, start = _block(data[start:end], state), end
    return _short(data[start:], state) ^ 0xFFFFFFFF


def crc32cs(runs: Sequence[ByteRange], told: Callable[[int], None]) -> Iterator[int]:
    """Yield the CRC-32C of each run; `told` is called with bytes done, now and then."""
    for run in runs:
        crc = 0
        for block in run.blocks(_BLOCK):
            crc = crc32c(block, crc)
            told(len(block))
        yield crc


def masked(crc: int) -> int:
    """Return a CRC-32C as TensorFlow stores it: turned, and with a constant added."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def unmasked(stored: int) -> int:
    """Return the CRC-32C that TensorFlow stores as `stored`."""
    turned = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF
