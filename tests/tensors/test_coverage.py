"""Who owns which element of a storage."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.model import TensorRef
from ckptool.tensors.casting import Owners, Spans
from tests.trees import storage

COUNT = 60
OVER = storage(COUNT * 4)


def view(shape, stride, offset=0):
    return TensorRef("float32", tuple(shape), tuple(stride), offset, OVER, "cpu")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
def test_what_is_added_twice_is_new_once(runs):
    spans, met = Spans(), set()
    for start, stop in runs:
        fresh = spans.add(start, stop)
        new = [at for low, high in fresh for at in range(low, high)]
        assert new == [at for at in range(start, stop) if at not in met]
        met.update(new)


def test_a_run_that_grows_stays_one():
    spans = Spans()
    assert [spans.add(at, at + 10) for at in range(0, 1000, 10)][-1] == [(990, 1000)]
    assert spans.add(0, 1000) == []
    assert len(spans._starts) == 1


def owned(views, start=0, stop=COUNT):
    """Element -> name, as the pieces tell."""
    from ckptool.tensors.casting import own_elements

    found = {}
    for piece in Owners(views).pieces(start, stop):
        elements = torch.arange(piece.start, piece.stop)
        if piece.grid is not None:
            elements = elements[own_elements(piece)]
        for at in elements.tolist():
            assert at not in found
            found[at] = piece.name
    return found


def elements(one):
    """Which elements of its storage torch's view of that shape looks at."""
    flat = torch.arange(COUNT)
    return set(flat.as_strided(one.shape, one.stride, one.offset).flatten().tolist())


def nested_views():
    """Views as transposing, slicing, expanding and narrowing make them."""

    def made(draw):
        step, axes = 1, []
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(1, 4))
            step += draw(st.integers(0, 2))
            axes.append((size, step))
            step *= size
        axes = draw(st.permutations([*axes, (2, 0)] if draw(st.booleans()) else axes))
        last = sum((size - 1) * step for size, step in axes)
        if last >= COUNT:
            axes, last = [], 0
        offset = draw(st.integers(0, COUNT - 1 - last))
        return view([size for size, _ in axes], [step for _, step in axes], offset)

    return st.composite(made)()


@given(st.lists(nested_views(), max_size=4), st.integers(0, COUNT), st.integers(0, COUNT))
def test_every_element_of_a_view_has_one_owner_and_no_other_has(views, start, stop):
    named = [(str(at), one) for at, one in enumerate(views)]
    found = owned(named, min(start, stop), max(start, stop))
    wanted = set().union(*map(elements, views)) & set(range(min(start, stop), max(start, stop)))
    assert set(found) == wanted
    assert all(at in elements(views[int(name)]) for at, name in found.items())


def test_the_first_of_several_has_what_they_share():
    whole, part = view((20,), (1,), 10), view((5,), (1,), 12)
    assert set(owned([("whole", whole), ("part", part)]).values()) == {"whole"}
    found = owned([("part", part), ("whole", whole), ("tie", part)])
    assert [at for at, name in found.items() if name == "part"] == [12, 13, 14, 15, 16]
    assert len(found) == 20


def test_steps_that_overlap_have_all_between():
    assert set(owned([("windows", view((5, 3), (1, 1), 4))])) == set(range(4, 11))


def test_the_extent_of_a_tensor_is_that_of_what_it_owns():
    owners = Owners([("a", view((5,), (1,), 3)), ("b", view((3, 2), (10, 3)))])
    assert owners.extent("a") == (3, 8)
    assert owners.extent("b") == (0, 24)


def test_a_tensor_without_elements_owns_none():
    assert owned([("none", view((0, 3), (3, 1)))]) == {}
