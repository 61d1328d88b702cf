"""Where tensors lie, and the blocks that they are gone through in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.loading.memory import cuts, extent, memory_of, repeats


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40), st.randoms())
def test_cuts_take_every_element_once_and_in_order(shape, most, random):
    axes = list(range(len(shape)))
    random.shuffle(axes)
    whole = torch.arange(torch.Size(shape).numel()).view(shape).permute(axes)
    blocks = [whole[at].reshape(-1) for at in cuts(whole.shape, most)]
    assert all(0 < len(block) <= most for block in blocks)
    assert [number for block in blocks for number in block.tolist()] == whole.reshape(-1).tolist()


BASE = torch.zeros(6, 8)
VIEWS = {
    "all": (BASE, (0, 192)),
    "a row": (BASE[2], (64, 96)),
    "a column": (BASE[:, 1], (4, 168)),
    "a part, turned": (BASE[1:3, 4:6].t(), (48, 88)),
    "a number": (BASE[1, 1], (36, 40)),
    "nothing": (BASE[3, 2:2], (104, 104)),
    "one of them, repeated": (BASE[1, 1].expand(5), (36, 40)),
    "of another type": (BASE.view(torch.int16)[1], (32, 64)),
}


@pytest.mark.parametrize("what", VIEWS)
def test_the_span_of_a_view_is_what_it_looks_at(what):
    view, span = VIEWS[what]
    assert memory_of(view).span == span


def test_an_expanded_tensor_has_a_smaller_extent_than_elements_and_repeats_them():
    row = torch.zeros(3)
    for view, elements in ((row.expand(4, 3), 3), (row[:1].expand(5), 1), (row[:, None], 3)):
        assert extent(view.shape, view.stride()) == elements
        assert repeats(view.shape, view.stride()) == (view.numel() > elements)
