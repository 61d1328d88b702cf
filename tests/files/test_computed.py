"""Bytes that are computed when they are read."""

import pytest

from ckptool.errors import TruncatedFile
from ckptool.files import ByteRange
from ckptool.files.computed import ComputedSource


def counting(size):
    def fill(offset, buffer):
        buffer[:] = bytes(range(offset, offset + len(buffer)))

    return ComputedSource("model.pth", size, fill)


def test_a_range_of_it_reads_as_any_other():
    data = ByteRange(counting(100), 10, 50)
    assert data.read(5, 3) == bytes([15, 16, 17])
    assert b"".join(data.blocks(7)) == bytes(range(10, 60))


def test_a_buffer_is_filled():
    buffer = bytearray(4)
    counting(100).read_into(96, memoryview(buffer))
    assert buffer == bytes([96, 97, 98, 99])


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, -1), (99, 2), (101, 0)])
def test_what_lies_outside_is_refused(offset, length):
    with pytest.raises(TruncatedFile, match=r"model\.pth"):
        counting(100).read(offset, length)
