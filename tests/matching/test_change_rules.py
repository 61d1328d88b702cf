"""Rules found for changes of names."""

from __future__ import annotations

import pytest

from ckptool.matching.change_rules import Others, below, moved_head, regex_of
from ckptool.transforms.name_rules import regex_rule


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ([("a.w", "b.w"), ("a.x.w", "b.x.w")], r"^a\.=>b."),
        ([("module.w", "w"), ("module.x.w", "x.w")], r"^module\.=>"),
        ([("w", "module.w")], "^=>module."),
        ([("a.gamma", "a.weight"), ("b.c.gamma", "b.c.weight")], r"(^|\.)gamma$=>\1weight"),
        ([("a.m.w", "a.w"), ("b.m.w", "b.w")], r"(^|\.)m\.=>\1"),
        ([("l.0.w", "l.0.m.w"), ("l.1.w", "l.1.m.w")], r"^l\.(\d+)\.=>l.\g<1>.m."),
        ([("a.w", "a.m.w"), ("a.x.w", "a.m.x.w")], r"^a\.=>a.m."),
        ([("a.w", "b.w"), ("c.w", "d.w")], ""),
        ([], ""),
    ],
)
def test_one_rule_for_all_changes(changes, rule):
    assert regex_of(changes) == rule
    if rule:
        assert all(regex_rule(rule).apply(old) == new for old, new in changes)


def test_a_rule_touches_no_other_name():
    assert regex_of([("a.m.w", "a.w")], ["b.m.w"]) == r"^a\.m\.=>a."
    assert regex_of([("w", "module.w")], ["x"]) == ""


@pytest.mark.parametrize(
    ("regex", "near"),
    [
        (r"^a\.", ["a.b", "a.b.c"]),
        (r"^a\.b\.(\d+)", ["a.b.c"]),
        (r"^a\.b+", ["a.b", "a.b.c"]),
        (r"^a\.bx*", ["a.b", "a.b.c"]),
        (r"^a\.b=[>]", ["a.b", "a.b.c"]),
        ("^", ["a", "a.b", "a.b.c", "ab", "c"]),
        (r"^a\.|^c", ["a", "a.b", "a.b.c", "ab", "c"]),
        (r"a\.", ["a", "a.b", "a.b.c", "ab", "c"]),
        ("^d", []),
        (r"^\d", ["a", "a.b", "a.b.c", "ab", "c"]),
    ],
)
def test_what_a_rule_may_touch_is_found_by_its_beginning(regex, near):
    assert [*Others(["a.b", "c", "ab", "a.b.c", "a"]).near(regex)] == near


def test_others_may_have_what_is_changed_among_them():
    others = Others(["a.m.w", "b.m.w", "a.w"])
    assert regex_of([("a.m.w", "a.x")], others) == r"^a\.m\.w=>a.x"
    assert regex_of([("a.m.w", "a.w")], others) == r"^a\.m\.=>a."


def test_names_that_look_like_regular_expressions():
    changes = [(r"a+(b\g<1>.w", r"=>\1.w"), (r"a+(b\g<1>.x", r"=>\1.x")]
    (rule,) = [regex_rule(regex_of(changes))]
    assert [rule.apply(old) for old, _ in changes] == [new for _, new in changes]
    arrow = regex_of([("a=>b.w", "c.w")])
    assert regex_rule(arrow).apply("a=>b.w") == "c.w"


def test_a_rule_for_names_that_have_more_in_front():
    assert below("module.", r"^a\.=>b.") == r"^module\.a\.=>module.b."
    assert below("", r"^a\.=>b.") == r"^a\.=>b."
    assert below("module.", r"\.a\.=>.b.") == r"\.a\.=>.b."


def test_a_head_that_moves_leaves_the_wrappers_further_inside():
    assert moved_head("s.a._orig_mod.w", "s.a.w", "t.a.w") == "t.a._orig_mod.w"
    assert moved_head("a._orig_mod.w", "a.w", "b.w") == "b.w"
    assert moved_head("a.a.module.module", "a.a.module", "module") == "module"
