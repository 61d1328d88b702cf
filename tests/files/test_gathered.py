"""The bytes of a view, read from any byte on."""

from hypothesis import given
from hypothesis import strategies as st

from ckptool.files import ByteRange, MemorySource
from ckptool.files.computed import gathered
from ckptool.files.strided import row_major

CONTENT = bytes(range(256)) * 16
DATA = ByteRange(MemorySource(CONTENT, "model.pth"), 0, len(CONTENT))


@st.composite
def views(draw):
    itemsize = draw(st.sampled_from([1, 2, 4, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    stride = tuple(draw(st.integers(0, 20)) for _ in shape)
    return {
        "itemsize": itemsize,
        "shape": shape,
        "stride": stride,
        "offset": draw(st.integers(0, 9)),
    }


@given(views(), st.lists(st.tuples(st.integers(0, 1024), st.integers(0, 1024))))
def test_any_run_is_that_of_the_elements_in_order(view, reads):
    whole = b"".join(row_major(DATA, **view))
    found = gathered(DATA, **view)
    assert found.length == len(whole)
    for start, length in reads:
        start = min(start, len(whole))
        length = min(length, len(whole) - start)
        assert found.read(start, length) == whole[start : start + length]
    assert b"".join(found.blocks(3)) == whole
