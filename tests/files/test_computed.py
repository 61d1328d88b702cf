"""Bytes that are computed when they are read."""

import threading

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


def patterned(size, calls):
    """A long source that notes what is computed, and where."""

    def fill(offset, buffer):
        calls.append((threading.current_thread() is threading.main_thread(), offset, len(buffer)))
        buffer[:] = bytes(at % 251 for at in range(offset, offset + len(buffer)))

    return ComputedSource("model.pth", size, fill)


def test_the_next_block_is_computed_by_a_second_thread():
    calls, block, size = [], 1 << 18, (1 << 20) + 7
    data = ByteRange(patterned(size, calls), 0, size)
    assert b"".join(data.blocks(block)) == bytes(at % 251 for at in range(size))
    assert [(offset, length) for _, offset, length in calls] == [
        *((at * block, block) for at in range(4)),
        (4 * block, 7),
    ]
    assert [main for main, _, _ in calls] == [True, False, False, False, True]


def test_what_was_computed_ahead_in_vain_does_no_harm():
    calls, block = [], 1 << 18
    source = patterned(1 << 20, calls)
    source.read(0, block)
    assert source.read(3 * block, 5) == bytes(at % 251 for at in range(3 * block, 3 * block + 5))
    assert source.read(block, 3) == bytes(at % 251 for at in range(block, block + 3))


def test_an_error_ahead_is_raised_where_its_block_is_read():
    def fill(offset, buffer):
        if offset:
            raise ValueError("beyond the first block")

    source = ComputedSource("model.pth", 1 << 20, fill)
    source.read(0, 1 << 18)
    with pytest.raises(ValueError, match="beyond"):
        source.read(1 << 18, 1 << 18)
