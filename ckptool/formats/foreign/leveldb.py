"""LevelDB tables and protocol buffer messages, as in the index of TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import Source
from ckptool.files.checksums import crc32c
from ckptool.formats.base import check_limit
from ckptool.limits import Limits

MAGIC = bytes.fromhex("57fb808b247547db")
"""The end of a table."""
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""Bytes after a block: its compression, and its CRC-32C."""
_PLAIN, _SNAPPY = 0, 1
_MEMORY_FACTOR, _ENTRY_COST = 4, 16
"""The cost of a table byte relative to a JSON byte, and bytes counted per entry."""
_MAX_FIELDS = 1 << 16
_WIDTH_BY_WIRE_TYPE = {1: 8, 5: 4}
"""The size of fixed-size numbers by wire type."""


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as LevelDB stores it: rotated, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def unmask_crc(stored: int) -> int:
    """Return the CRC-32C for the stored form."""
    rotated = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at offset `at`, with seven bits per byte, and its end.

    The lowest bits come first. The highest bit of a byte is set if another one follows.

    Raises:
        CorruptFile: if the number has no end, or more than 64 bits.
    """
    value = 0
    for shift, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise CorruptFile("a number in the index does not end")


class Message(dict[int, list[int | bytes]]):
    """The fields of a message by number, each with all its values."""

    def __init__(self, raw: bytes) -> None:
        """Read the fields; each begins with its number and its wire type, the lowest three bits.

        The wire type is 0 for a varint, 2 for bytes after their length, 1 or 5 for a fixed size.

        Raises:
            CorruptFile: if a field is truncated, or of an unused kind.
            LimitExceeded: if there are more fields than an index needs.
        """
        super().__init__()
        at = 0
        while at < len(raw):
            tag, at = read_varint(raw, at)
            field_number, wire_type = tag >> 3, tag & 7
            value: int | bytes
            if wire_type == 0:
                value, at = read_varint(raw, at)
            elif wire_type == 2:
                size, at = read_varint(raw, at)
                value, at = raw[at : at + size], at + size
            elif width := _WIDTH_BY_WIRE_TYPE.get(wire_type):
                value, at = int.from_bytes(raw[at : at + width], "little"), at + width
            else:
                raise CorruptFile(f"a message in the index has a field of wire type {wire_type}")
            if at > len(raw):
                raise CorruptFile("a message in the index ends within a field")
            values = self.setdefault(field_number, [])
            values.append(value)
            field_count = max(len(self), len(values))
            check_limit("a message in the index has", field_count, "fields", _MAX_FIELDS)

    def get_number(self, field: int, default: int = 0) -> int:
        """Return the last value of a field as a signed number of 64 bits.

        Raises:
            CorruptFile: if the field contains a text.
        """
        value = self.get(field, [default])[-1]
        if isinstance(value, bytes):
            raise CorruptFile(f"field {field} of a message in the index is not a number")
        return value - (1 << 64) if value >= 1 << 63 else value

    def get_messages(self, field: int) -> list[Message]:
        """Return the messages in a field.

        Raises:
            CorruptFile: if the field contains a number, or no messages.
        """
        values = self.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise CorruptFile(f"field {field} of a message in the index is not a message")
        return [Message(value) for value in values if isinstance(value, bytes)]


def read_table(source: Source, limits: Limits) -> dict[bytes, bytes]:
    """Return the entries of a table, in order.

    The footer, at the end, has two handles: of a block that is not used, and of the block that
    lists the handles of all data blocks. A handle is the offset and the size of a block.

    Raises:
        CorruptFile: if a block is outside the file or has another CRC-32C, keys are not in order,
            or a number has no end.
        LimitExceeded: if its blocks or keys need more memory than `limits` allow.
    """
    max_bytes = limits.max_header_bytes // _MEMORY_FACTOR
    check_limit("the index has", source.size, "bytes", max_bytes)
    raw = source.read(0, source.size)
    if len(raw) < _FOOTER_BYTES or not raw.endswith(MAGIC):
        raise CorruptFile("the end of the index is missing")
    footer = raw[-_FOOTER_BYTES:]
    _, at = read_varint(footer, 0)
    _, at = read_varint(footer, at)
    entries: dict[bytes, bytes] = {}
    last_key, end = b"", 0
    handles_block, _ = _read_block(raw, footer[at:], 0, max_bytes)
    for _, handle in _parse_entries(handles_block):
        # A block begins at the end of the one before it, or later.
        block, end = _read_block(raw, handle, end, max_bytes)
        for key, value in _parse_entries(block):
            if entries and key <= last_key:
                raise CorruptFile("the keys of the index are out of order")
            max_bytes -= len(key) + len(value) + _ENTRY_COST
            if max_bytes < 0:
                raise LimitExceeded("the names in the index need more memory than allowed")
            entries[key] = value
            last_key = key
    return entries


def _read_block(raw: bytes, handle: bytes, min_offset: int, max_bytes: int) -> tuple[bytes, int]:
    """Return the block of a handle, decompressed, and the end of its trailer.

    A handle is the offset, at least `min_offset`, and the size of the block. The trailer after the
    block is its compression (a byte) and a masked CRC-32C of block and compression.
    """
    offset, at = read_varint(handle, 0)
    size, _ = read_varint(handle, at)
    end = offset + size + _TRAILER_BYTES
    if offset < min_offset or end > len(raw) - _FOOTER_BYTES:
        raise CorruptFile(
            f"a block of {size:,} bytes at {offset:,} is outside the index of {len(raw):,} bytes"
        )
    stated_crc = int.from_bytes(raw[end - 4 : end], "little")
    if mask_crc(crc32c(raw[offset : end - 4])) != stated_crc:
        raise CorruptFile(f"the block at {offset:,} of the index is damaged (checksum mismatch)")
    block, compression = raw[offset : offset + size], raw[offset + size]
    if compression not in (_PLAIN, _SNAPPY):
        raise CorruptFile(
            f"the block at {offset:,} of the index has unknown compression {compression}"
        )
    return (block if compression == _PLAIN else _decompress_snappy(block, max_bytes)), end


def _parse_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and value of each entry; a key shares its start with the previous key.

    An entry is three lengths (shared bytes of the key, its own bytes, the value), then the own
    bytes and the value. After the entries, restart offsets and their number have four bytes each.
    """
    restart_count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restart_count
    if len(block) < 4 or end < 0:
        raise CorruptFile("a block of the index has no restart list")
    key, at = b"", 0
    while at < end:
        shared_length, at = read_varint(block, at)
        own_length, at = read_varint(block, at)
        value_length, at = read_varint(block, at)
        value_start = at + own_length
        if shared_length > len(key) or value_start + value_length > end:
            raise CorruptFile("an entry of the index reaches past its block")
        key = key[:shared_length] + block[at:value_start]
        at = value_start + value_length
        yield key, block[value_start:at]


def _decompress_snappy(raw: bytes, max_bytes: int) -> bytes:
    """Return the decompressed content of a snappy block.

    It is a size, then literal bytes and copies of earlier output, each after a tag. The two low
    bits of a tag are the kind: 0 for literal bytes, 1 to 3 for a copy whose distance has 1, 2 or 4
    bytes. The six high bits are the length minus 1, with the exceptions below
    (https://github.com/google/snappy/blob/main/format_description.txt).
    """
    size, at = read_varint(raw, 0)
    check_limit("a block of the index inflates to", size, "bytes", max_bytes)
    out = bytearray()
    while at < len(raw) and len(out) <= size:
        tag = raw[at]
        kind, length = tag & 3, (tag >> 2) + 1
        at += 1
        if kind == 0:  # literal bytes
            if length > 60:  # their length minus 1 follows the tag, in 1 to 4 bytes
                width = length - 60
                length = int.from_bytes(raw[at : at + width], "little") + 1
                at += width
            out += raw[at : at + length]
            at += length
            continue
        width = (1, 2, 4)[kind - 1]
        distance = int.from_bytes(raw[at : at + width], "little")
        if kind == 1:  # three bits of the tag belong to the distance, and the length is 4 to 11
            distance |= tag >> 5 << 8
            length = (tag >> 2 & 7) + 4
        at += width
        if not 0 < distance <= len(out):
            break
        run = out[-distance:][:length]  # repeated if the copy is longer than the distance
        out += (run * (length // len(run) + 1))[:length]
    if at != len(raw) or len(out) != size:
        raise CorruptFile("a block of the index is not a snappy stream")
    return bytes(out)
