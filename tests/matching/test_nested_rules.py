"""Modules that one side has one module deeper, or under another name."""

import pytest

from ckptool.matching import Allowance, Slot, matched
from ckptool.matching.nested_rules import nested_rules, twin_rules


def module(path, size=3):
    return {f"{path}.weight": Slot((size, 8)), f"{path}.bias": Slot((size,))}


@pytest.mark.parametrize(
    ("own", "wanted", "rule"),
    [
        ("head", "head.fc", r"^head\.=>head.fc."),
        ("head.fc", "head", r"^head\.fc\.=>head."),
        ("module.head", "head.fc", r"^module\.head\.=>module.head.fc."),
        ("head", "model.head.fc", r"^head\.=>head.fc."),
    ],
)
def test_a_module_one_deeper_has_a_rule(own, wanted, rule):
    assert nested_rules(module(own), module(wanted)) == (rule,)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (module("head"), module("body.fc")),
        (module("head"), module("head.fc", 4)),
        (module("head"), module("head.fc") | module("head.fc2")),
        (module("head") | module("a.head"), module("a.head.fc")),
        ({"weight": Slot((3,))}, {"fc.weight": Slot((3,))}),
    ],
)
def test_nothing_is_told_of_what_is_elsewhere_or_could_be_another(own, wanted):
    assert nested_rules(own, wanted) == ()


@pytest.mark.parametrize("wrap", ["", "module."])
def test_a_head_that_is_there_under_another_name_is_not_left_at_random(wrap):
    body = module("body", 8)
    have = {f"{wrap}{name}": slot for name, slot in (body | module("head")).items()}
    have[f"{wrap}index"] = Slot((5, 5))
    want = body | module("head.fc")
    match = matched(have, want)
    given = dict(Allowance().refusal(match.report, match.again).remedy.arguments)
    assert given == {
        "rules": (rf"^{wrap}head\.=>{wrap}head.fc.".replace("module.h", r"module\.h", 1),),
        "allow_unexpected": (f"{wrap}index",),
    }


def test_a_module_that_alone_has_the_same_is_a_question_with_its_rule():
    file, model = module("norm"), module("ln_f")
    assert twin_rules(file, model) == (r"^norm\.=>ln_f.",)
    assert twin_rules(file | module("x"), model) == ()
    assert twin_rules({f"l.1.{name}": slot for name, slot in file.items()}, model) == ()
    more = (
        {"extra.weight": Slot((7, 7)), "body.weight": Slot((5, 5))},
        {"other.weight": Slot((8, 8)), "body.weight": Slot((5, 5))},
    )
    match = matched(file | more[0], model | more[1])
    first, second = Allowance().judged(match.report, match.again).remedy.instead
    assert first.note.endswith(" where that is the same layer")
    assert dict(first.arguments)["rules"] == (r"^norm\.=>ln_f.",)
    assert "rules" not in dict(second.arguments)
