"""What comes off the names of both sides before they are held against each other."""

from __future__ import annotations

import pytest

from ckptool.matching import Slot
from ckptool.matching.ways import Side, chosen_way


def slots(*names, shape=(2,)):
    return {name: Slot(shape, "float32") for name in names}


def bare(have, want):
    way = chosen_way(slots(*have), slots(*want))
    return list(way.have.names), list(way.want.names)


def test_names_that_meet_stay_as_they_are():
    names = ["module.a.w", "module.b.w"]
    assert bare(names, names) == (names, names)


def test_of_equal_ways_the_one_that_changes_less_is_taken():
    have, want = ["module.a"], ["module.a", "head.w"]
    assert bare(have, want) == (have, want)


def test_wrappers_come_off_where_nothing_meets():
    assert bare(["module.x.w"], ["a._orig_mod.w"]) == (["x.w"], ["a.w"])


@pytest.mark.parametrize(
    ("have", "want", "front", "other"),
    [
        (["a.b.x", "a.b.y"], ["b.x", "b.y"], "a.", ""),
        (["b.x", "b.y"], ["a.b.x", "a.b.y"], "", "a."),
        (["a.b.x", "a.b.y"], ["x", "y"], "a.b.", ""),
        (["a.x", "a.y"], ["c.x", "c.y"], "", ""),
        (["a.b.0.x", "a.b.1.x", "a.n.x"], ["c.0.x", "c.1.x", "n.x"], "", ""),
        (["a.0.x", "a.1.x", "a.2.x"], ["c.0.x", "c.1.x", "c.2.x", "0.x"], "", ""),
        (
            ["a.p.x", "a.q.x", "a.b.x", "a.c.x", "a.d.x"],
            ["p.x", "q.x", "e.x", "f.x", "g.x"],
            "a.",
            "",
        ),
    ],
)
def test_a_front_comes_off_one_side_and_is_never_replaced(have, want, front, other):
    way = chosen_way(slots(*have), slots(*want))
    assert (way.have.front, way.want.front) == (front, other)


def test_shapes_decide_between_ways():
    have = {"module.w": Slot((3,)), "module.module.w": Slot((2,))}
    want = {"w": Slot((3,)), "module.w": Slot((2,))}
    assert list(chosen_way(have, want).have.names) == ["w", "module.w"]
    assert chosen_way(have, want).is_complete


def test_the_front_of_an_average_is_that_of_its_model():
    side = Side(slots("n_averaged", "a.b.w", "a.b.x"), {})
    assert side.common_front() == ["a", "b"]
    assert Side(slots("a." * 50 + "w"), {}).common_front() == ["a"] * 16


def test_what_was_in_front_of_every_name():
    side = Side(
        slots("module.a", "module.b._orig_mod.c"), {"module.a": "a", "module.b._orig_mod.c": "b.c"}
    )
    assert side.outer_front == "module."
    assert Side(slots("module.a", "b"), {"module.a": "a"}).outer_front == ""
