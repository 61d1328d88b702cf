"""Renamings of a report, and files under new names."""

from __future__ import annotations

import pytest

from ckptool.matching import Slot, matched
from ckptool.matching.renamings import rewritten
from ckptool.transforms.name_rules import prefix_rule, regex_rule


def renamed(have, want, **options):
    sides = ({name: Slot((2,), "float32") for name in names} for names in (have, want))
    return [
        (r.kind, r.text, r.rule, len(r.names)) for r in matched(*sides, **options).report.renamed
    ]


def test_wrappers_go_before_fronts_and_come_after_them():
    assert renamed(["module.net.a.w", "module.net.b.w"], ["_orig_mod.a.w", "_orig_mod.b.w"]) == [
        ("wrapper", "module. taken off", r"^module\.=>", 2),
        ("prefix", "net. taken off", r"^net\.=>", 2),
        ("wrapper", "_orig_mod. put before", "^=>_orig_mod.", 2),
    ]


def test_wrappers_that_both_sides_begin_with_are_not_mentioned():
    assert renamed(["module.a.w", "module.b"], ["module._orig_mod.a.w", "module._orig_mod.b"]) == [
        ("wrapper", "_orig_mod. put in", r"^module\.=>module._orig_mod.", 2)
    ]


def test_wrappers_inside_and_outside_are_told_apart():
    have = ["a.w", "b.0.w", "b.1.w"]
    want = ["module.a.w", "module.b.0._orig_mod.w", "module.b.1._orig_mod.w"]
    assert renamed(have, want) == [
        ("wrapper", "_orig_mod. put in", r"^b\.(\d+)\.=>b.\g<1>._orig_mod.", 2),
        ("wrapper", "module. put before", "^=>module.", 3),
    ]


def test_a_place_for_which_there_is_no_single_rule_has_none():
    have, want = ["a.w", "b.w"], ["a._orig_mod.w", "b._orig_mod.w"]
    assert renamed(have, want) == [("wrapper", "_orig_mod. put in", "", 2)]


def test_a_rule_of_the_user_by_prefix_is_told_as_one_by_expression():
    assert renamed(["a.w"], ["b.w"], rules=[regex_rule("^a=>b")]) == [("rule", "^a=>b", "^a=>b", 1)]


@pytest.mark.parametrize(
    ("have", "want", "rule"),
    [
        (["w", "weight"], ["v", "weight"], r"(^|\.)w$=>\1v"),
        (["w", "weight", "a.w"], ["v", "weight", "a.w"], "^w$=>v"),
        (["w.a", "weight"], ["v.a", "weight"], r"^w\.=>v."),
        (["w", "w.a", "weight"], ["v", "v.a", "weight"], ""),
        (["w", "weight"], ["v", "left"], r"(^|\.)w$=>\1v"),
    ],
)
def test_what_a_prefix_is_told_as_does_no_more_than_the_prefix(have, want, rule):
    shapes = {name: Slot((number,)) for number, name in enumerate((*have, "left"))}
    sides = (
        {name: shapes[name] for name in have},
        {name: shapes[have[at] if name != "left" else "left"] for at, name in enumerate(want)},
    )
    (found,) = matched(*sides, rules=[prefix_rule("w=v")]).report.renamed
    assert (found.kind, found.text, found.rule) == ("rule", "w=v", rule)
    for name in have if rule else ():
        told, its = regex_rule(rule).apply(name), prefix_rule("w=v").apply(name)
        assert (told or name) == (its or name)


def test_a_prefix_with_an_arrow_in_it_is_no_expression():
    sides = {"a.w": Slot((2,)), "b.a.w": Slot((3,))}, {">b.w": Slot((2,)), "b.a.w": Slot((3,))}
    (found,) = matched(*sides, rules=[prefix_rule("a=>b")]).report.renamed
    assert regex_rule(found.rule).apply("a.w") == ">b.w"
    assert regex_rule(found.rule).apply("b.a.w") is None


def test_what_is_left_over_follows_the_rules_and_takes_nobodys_name():
    found = matched(
        {name: Slot((2,)) for name in ("module.a", "module.b", "module.c")},
        {"a": Slot((2,)), "b": Slot((3,))},
    )
    assert found.renamed == {"module.a": "a", "module.b": "b", "module.c": "c"}
    assert rewritten(["a", "b"], {"a": "b"}, (), []) == {"a": "b", "b": "b"}
    assert rewritten(["x", "y"], {"x": "z"}, (), [regex_rule("y=>z")]) == {"x": "z", "y": "y"}
