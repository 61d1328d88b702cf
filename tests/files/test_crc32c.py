"""CRC-32C, by the examples of RFC 3720 and by the one table that defines it."""

import random

import pytest

from ckptool.files import ByteRange, MemorySource
from ckptool.files.crc32c import _short, crc32c, crc32cs, masked, unmasked

KNOWN = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, b"": 0}


@pytest.mark.parametrize("data", KNOWN)
def test_known_sums(data):
    assert crc32c(data) == KNOWN[data]


@pytest.mark.parametrize("size", [8191, 8192, 8193, 70_000, (1 << 20) + 9000])
def test_lanes_give_what_one_byte_after_the_other_gives(size):
    data = random.Random(size).randbytes(size)
    expected = _short(data, 0xFFFFFFFF) ^ 0xFFFFFFFF
    assert crc32c(data) == expected == crc32c(data[777:], crc32c(data[:777]))
    source, told = MemorySource(data, "a"), []
    assert list(crc32cs([ByteRange(source, 0, size)], told.append)) == [expected]
    assert sum(told) == size


def test_masks():
    assert masked(crc32c(b"foo")) != crc32c(b"foo")
    assert all(unmasked(masked(crc)) == crc for crc in (0, 1, 0xE3069283, 0xFFFFFFFF))
