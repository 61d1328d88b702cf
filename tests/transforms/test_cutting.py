"""Views that share elements without what none of them sees: an enumeration is the judge."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptool.transforms.compacting import cut
from ckptool.transforms.places import Place


def elements(offset, shape, stride):
    """Positions in row-major order."""
    indices = product(*map(range, shape))
    return [offset + sum(map(int.__mul__, index, stride)) for index in indices]


@st.composite
def places(draw):
    """Views such as slices of a matrix give, and any others."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    steps = st.sampled_from([0, 1, 1, 2, 5, 10, 10, 20])
    stride = tuple(draw(steps) for _ in range(rank))
    return Place("float32", draw(st.integers(0, 12)), shape, stride)


@given(st.lists(places(), min_size=1, max_size=4, unique=True))
def test_the_same_elements_in_their_order_and_no_others(found):
    made = cut(found)
    if made is None:
        return
    kept = [element for start, end in made.runs for element in range(start, end)]
    assert kept == sorted({one for place in found for one in elements(*place[1:])})
    assert made.size == len(kept)
    for place in found:
        offset, stride = made.placed[place]
        assert [kept[at] for at in elements(offset, place.shape, stride)] == elements(*place[1:])


def test_slices_of_one_matrix_lie_close():
    one, two = (Place("float32", at, (100, size), (1000, 1)) for at, size in ((3, 1), (3, 2)))
    made = cut([one, two])
    assert made.size == 200
    assert made.placed[one] == (0, (2, 1))


def test_what_cannot_be_regular_or_is_of_other_types_or_too_much_stays():
    column = Place("float32", 3, (100,), (1000,))
    assert cut([column, Place("float32", 7000, (1000,), (1,))]) is None
    assert cut([column, Place("int32", 3, (100,), (1000,))]) is None
    assert cut([Place("float32", 3, (2,), (-1,)), column]) is None
    assert cut([column, Place("float32", 3, (1 << 17,), (1000,))]) is None
