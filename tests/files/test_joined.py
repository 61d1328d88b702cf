"""Several runs read as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import TruncatedFile
from ckptool.files import ByteRange, MemorySource
from ckptool.files.computed import joined

CONTENT = bytes(range(200))
SOURCE = MemorySource(CONTENT, "model.pth")


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 50)), min_size=1),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_any_run_of_it_is_that_of_the_parts_put_together(parts, start, length):
    whole = b"".join(CONTENT[offset : offset + size] for offset, size in parts)
    data = joined([ByteRange(SOURCE, *part) for part in parts])
    start = min(start, len(whole))
    length = min(length, len(whole) - start)
    assert data.length == len(whole)
    assert data.read(start, length) == whole[start : start + length]
    assert b"".join(data.blocks(7)) == whole


def test_parts_that_follow_each_other_are_one_run_of_their_source():
    data = joined([ByteRange(SOURCE, 10, 5), ByteRange(SOURCE, 15, 20), ByteRange(SOURCE, 35, 1)])
    assert data == ByteRange(SOURCE, 10, 26)


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, -1), (9, 2)])
def test_reading_outside_is_an_error(offset, length):
    data = joined([ByteRange(SOURCE, 0, 4), ByteRange(SOURCE, 100, 6)])
    with pytest.raises(TruncatedFile, match=r"of 10\b"):
        data.source.read(offset, length)


def test_its_name_is_that_of_the_file():
    data = joined([ByteRange(SOURCE, 0, 4), ByteRange(SOURCE, 100, 6)])
    assert data.source.name == "model.pth"
