"""Where tensors lie in a storage: against the elements counted one by one."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptool.transforms.places import Place


def elements(place):
    indices = product(*map(range, place.shape))
    return [
        place.offset + sum(at * step for at, step in zip(index, place.stride, strict=True))
        for index in indices
    ]


@st.composite
def places(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(draw(st.integers(-12, 40)) for _ in shape)
    return Place("int16", draw(st.integers(40, 60)), shape, stride)


@given(places())
def test_the_extent_is_from_the_first_element_to_the_last(place):
    found = elements(place)
    assert place.extent == ((2 * min(found), 2 * max(found) + 2) if found else (0, 0))


@given(places())
def test_packed_it_has_no_holes_and_repeats_what_was_repeated(place):
    found = elements(place)
    if not found or not place.distinct:
        return
    packed = Place(place.dtype, 0, place.shape, place.packed_stride())
    assert place.packed_bytes == 2 * len(set(found))
    assert set(elements(packed)) == set(range(len(set(found))))
    pairs = set(zip(elements(place), elements(packed), strict=True))
    assert len(pairs) == len(set(found))  # one new position for each old one
