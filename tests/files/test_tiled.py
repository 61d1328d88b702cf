"""Tiles of one tensor in many ranges, read as the whole.

Torch is imported where it makes them: the tests beside these fork a process that must be small.
"""

from math import prod
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import CorruptFile, TruncatedFile
from ckptool.files import ByteRange, MemorySource
from ckptool.files.tiled import Tile, join_tiles, make_late_range


def held(tensor):
    import torch

    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    return ByteRange(MemorySource(raw, "part"), 0, len(raw))


@st.composite
def cuts(draw):
    """A tensor, and boxes that partition it: cut at one place along one axis, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        low, high = boxes[at][axis]
        if high - low > 1:
            middle = draw(st.integers(low + 1, high - 1))
            box = boxes.pop(at)
            parts = ((low, middle), (middle, high))
            boxes.extend((*box[:axis], part, *box[axis + 1 :]) for part in parts)
    return shape, draw(st.permutations(boxes))


def made(shape, boxes):
    import torch

    whole = torch.arange(prod(shape), dtype=torch.int16).view(shape)
    tiles = [
        Tile(
            tuple(low for low, _ in box),
            tuple(high - low for low, high in box),
            held(whole[tuple(slice(*axis) for axis in box)]),
        )
        for box in boxes
    ]
    return whole, tiles


@given(cuts(), st.data())
def test_tiles_read_as_the_whole_from_any_byte(case, data):
    whole, tiles = made(*case)
    found = join_tiles("whole", case[0], 2, tiles)
    raw = held(whole).read()
    assert found.read() == raw
    start = data.draw(st.integers(0, len(raw)))
    length = data.draw(st.integers(0, len(raw) - start))
    assert found.read(start, length) == raw[start : start + length]


@given(cuts(), st.data())
def test_tiles_that_do_not_partition_the_shape_are_refused(case, data):
    _, tiles = made(*case)
    if len(tiles) > 1:
        gone = data.draw(st.integers(0, len(tiles) - 1))
        with pytest.raises(CorruptFile, match="in no chunk"):
            join_tiles("whole", case[0], 2, [*tiles[:gone], *tiles[gone + 1 :]])
    with pytest.raises(CorruptFile, match="overlap"):
        join_tiles("whole", case[0], 2, [*tiles, data.draw(st.sampled_from(tiles))])
    moved = tiles[0]._replace(offsets=tuple(at + 1 for at in tiles[0].offsets))
    with pytest.raises(CorruptFile, match=r"is outside shape|overlap|in no chunk"):
        join_tiles("whole", case[0], 2, [moved, *tiles[1:]])


def test_a_number_and_no_elements():
    _, tiles = made((), [()])
    assert join_tiles("n", (), 2, tiles).read() == b"\0\0"
    empty = Tile((0, 0), (0, 3), ByteRange(MemorySource(b"", "e"), 0, 0))
    assert join_tiles("e", (0, 3), 2, [empty]).read() == b""
    assert join_tiles("e", (0, 3), 2, []).read() == b""


def test_a_late_range_is_found_when_it_is_read_and_held_until_its_end():
    calls = []

    def find():
        calls.append(1)
        return ByteRange(MemorySource(b"xabcd", "f"), 1, 4), crc32(b"abcd")

    data = make_late_range("f", 4, find)
    assert calls == []
    assert (data.read(1, 2), data.read(0, 3)) == (b"bc", b"abc")
    assert calls == [1]
    assert data.read(3, 1) == b"d"  # all has been read: what was found is not held any longer
    assert data.read(0, 1) == b"a"
    assert calls == [1, 1]


def test_a_late_range_of_another_length_is_damaged():
    with pytest.raises(CorruptFile, match="f: has 3 bytes, expected 4"):
        make_late_range("f", 4, lambda: (ByteRange(MemorySource(b"abc", "f"), 0, 3), None)).read()
    with pytest.raises(TruncatedFile):
        make_late_range("f", 4, lambda: (ByteRange(MemorySource(b"abcd", "f"), 0, 4), None)).read(
            2, 3
        )


def test_a_late_range_that_is_read_to_its_end_is_compared_with_its_checksum():
    data = make_late_range("f", 4, lambda: (ByteRange(MemorySource(b"abcd", "f"), 0, 4), 7))
    assert data.read(1, 3) == b"bcd"
    assert data.read(0, 2) == b"ab"
    with pytest.raises(
        CorruptFile, match="f: a chunk is damaged: CRC-32 is ed82cd11, expected 00000007"
    ):
        data.read(2, 2)
