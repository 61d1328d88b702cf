"""Heads of names that are replaced by others."""

import pytest

from ckptool.matching.slots import Slot
from ckptool.matching.swaps import Names, Swap, swap_between


@pytest.mark.parametrize(
    ("old", "new", "swap"),
    [
        ("a.x.w", "x.w", Swap(("a",), ())),
        ("x.w", "a.b.x.w", Swap((), ("a", "b"))),
        ("a.x.w", "b.x.w", Swap(("a",), ("b",))),
        ("l.3.a.w", "h.3.b.w", Swap(("l", None, "a"), ("h", None, "b"))),
        ("l.3.0.w", "l.3.c.w", Swap(("l", None, "0"), ("l", None, "c"))),
        ("0.w", "4.w", Swap(("0",), ("4",))),
        ("a.a.w", "a.w", Swap(("a",), ())),
    ],
)
def test_what_turns_one_name_into_another_goes_both_ways(old, new, swap):
    assert swap_between(old, new) == swap
    assert (swap.image(old), swap.source(new)) == (new, old)


def test_numbers_may_be_kept_as_they_are():
    assert swap_between("l.3.a.w", "l.3.b.w", is_open=False) == Swap(
        ("l", "3", "a"), ("l", "3", "b")
    )


def test_a_rule_that_gives_a_layer_another_number_is_told():
    assert swap_between("l.0.w", "h.1.w").renumbers
    assert not swap_between("l.0.w", "h.0.w").renumbers
    assert not swap_between("l.0.w", "first.w").renumbers


def test_the_names_under_a_head_are_found():
    side = Names(dict.fromkeys(["a.b.c", "a.b", "a.1.b", "a.2.b", "a-b.c", "ab.c", "a"], Slot()))
    assert side.under(("a",)) == ["a.1.b", "a.2.b", "a.b", "a.b.c"]
    assert side.under(("a", None)) == ["a.1.b", "a.2.b"]
    assert len(side.under(())) == 7
