"""The text of a rule, for just some names."""

import pytest

from ckptool.matching.rule_text import rule_text, segment_text, swap_text
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import Names, swap_between
from ckptool.transforms.name_rules import regex_rule


def side(*names):
    return Names(dict.fromkeys(names, Slot()))


def text(pairs, *others):
    """The rule for names, old to new, among others; it is tried."""
    swap = swap_between(*next(iter(pairs.items())))
    rule = rule_text(swap, pairs, side(*pairs, *others))
    apply = regex_rule(rule).apply
    assert {name: apply(name) for name in (*pairs, *others)} == {
        **dict.fromkeys(others),
        **pairs,
    }
    return rule


def test_a_rule_for_all_names_under_a_head_names_the_head_alone():
    assert text({"a.x": "b.x", "a.y": "b.y"}, "c.x", "ab.x") == r"^a\.=>b."


def test_numbers_stay():
    rule = text({"l.0.a.w": "h.0.b.w", "l.1.a.w": "h.1.b.w"}, "l.0.c.w", "l.x.a.w")
    assert rule == r"^l\.(\d+)\.a\.=>h.\1.b."


@pytest.mark.parametrize(
    ("pairs", "others", "rule"),
    [
        ({"a.x.w": "x.w", "a.y.w": "y.w"}, ["a.z.w"], r"^a\.(?!z\.)=>"),
        ({"a.x.w": "x.w"}, ["a.y.w", "a.z.w"], r"^a\.(?=x\.)=>"),
        ({"a.0.w": "0.w", "a.1.w": "1.w"}, ["a.0.v", "a.1.v"], r"^a\.(?=\d+\.w$)=>"),
        ({"a.w": "w"}, ["a.w.x", "a.v"], r"^a\.(?=w$)=>"),
        ({"l.3.a.w": "l.3.b.w"}, ["l.4.a.w"], r"^(?=l\.3\.)l\.(\d+)\.a\.=>l.\1.b."),
        ({"x.w": "a.x.w"}, ["y.w"], r"^(?=x\.)=>a."),
    ],
)
def test_other_names_under_the_head_are_spared(pairs, others, rule):
    assert text(pairs, *others) == rule


def test_where_no_readable_rule_does_it_there_is_none():
    pairs = {f"a.x{n}.w": f"b.x{n}.w" for n in range(0, 400, 2)}
    others = [f"a.x{n}.w" for n in range(1, 400, 2)]
    assert rule_text(swap_between("a.x0.w", "b.x0.w"), pairs, side(*pairs, *others)) == ""


def test_components_are_replaced_wherever_they_stand_below_others():
    pairs = {"a.q.w": "a.p.w", "b.c.q.w": "b.c.p.w"}
    swap = swap_between("a.q.w", "a.p.w")
    assert segment_text(swap, pairs, side(*pairs, "q.w")) == r"\.q\.=>.p."
    assert segment_text(swap, pairs, side(*pairs, "d.q.w")) == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model.w", "w", "model. taken off"),
        ("w", "model.w", "model. put before"),
        ("a.w", "b.w", "a. -> b."),
        ("l.0.a.w", "l.0.b.w", "l.*.a. -> l.*.b."),
    ],
)
def test_people_read_what_becomes_of_a_head(old, new, said):
    assert swap_text(swap_between(old, new)) == said
