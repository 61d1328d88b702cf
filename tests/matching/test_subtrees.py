"""Parts of one side that are the other side."""

from __future__ import annotations

import pytest

from ckptool.matching import Slot
from ckptool.matching.subtrees import has_twin, moved


def find(longer, shorter):
    sides = ({name: Slot((2,)) for name in names} for names in (longer, shorter))
    return moved(*sides, lambda one, other: one.shape == other.shape)


def test_a_front_moves_the_names_that_are_equal():
    found = find(["m.w", "m.m.w", "x"], ["w", "m.w"])
    assert found is not None
    assert (found.front, found.score, found.contested, found.rivals) == ("m.", 2, {"m.w"}, ())


def test_a_front_that_contests_no_equal_name_is_none():
    assert find(["m.w", "m.v", "x"], ["w", "v", "x"]) is None


def test_an_equal_name_that_is_not_below_the_front_stays():
    assert find(["a.w", "m.a.w", "m.b"], ["a.w", "b"]) is None


def test_another_front_with_all_its_names_is_a_rival():
    found = find(["m.w", "m.m.w", "t.w", "t.m.w"], ["w", "m.w"])
    assert found is not None
    assert {found.front, *found.rivals} == {"m.", "t."}
    part = find(["m.w", "m.m.w", "t.w", "t.x"], ["w", "m.w"])
    assert part is not None
    assert part.rivals == ()


@pytest.mark.parametrize(
    ("met", "bare", "other", "expected"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], ["a.w", "b.w", "t.a.w", "t.b.w"], True),
        (["a.w", "b.w"], ["a.w", "b.w"], ["a.w", "b.w", "s.t.a.w", "s.t.b.w", "x"], True),
        (["a.w", "b.w"], ["a.w", "b.w"], ["a.w", "b.w", "t.a.w"], False),
        (["a.w", "b.w"], ["a.w", "b.w", "t.a.w"], ["a.w", "b.w", "t.a.w", "t.b.w"], False),
        (["a.w"], ["a.w"], ["a.w", "ta.w"], False),
        ([], ["a.w"], ["t.a.w"], False),
    ],
)
def test_a_twin_has_all_that_is_met_and_is_not_met_itself(met, bare, other, expected):
    sides = ({name: Slot((2,)) for name in names} for names in (bare, other))
    assert has_twin(met, *sides, lambda one, another: one.shape == another.shape) is expected


def test_a_twin_of_other_shapes_is_none():
    bare, other = {"a.w": Slot((2,))}, {"a.w": Slot((2,)), "t.a.w": Slot((3,))}
    assert not has_twin(["a.w"], bare, other, lambda one, another: one.shape == another.shape)
