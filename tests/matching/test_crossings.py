"""Rules that would give one part of a model the name of another."""

import pytest

from ckptool.matching.accounts import Ledger
from ckptool.matching.allowance import Allowance
from ckptool.matching.crossings import Crossings
from ckptool.matching.matched import matched
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import swap_between

BLOCK = {"fc1.w": (8, 4), "fc2.w": (4, 8), "norm.w": (4,)}


def blocks(front, numbers=range(3)):
    return {f"{front}.{n}.{m}": Slot(s, "float32") for n in numbers for m, s in BLOCK.items()}


def is_one(have, want, own, wanted):
    sides = ({f"{name}.w": Slot((4, 4)) for name in side} for side in (have, want))
    return Crossings(Ledger(*sides, {})).is_one(swap_between(f"{own}.x.w", f"{wanted}.x.w"))


@pytest.mark.parametrize(
    ("have", "want", "own", "wanted"),
    [
        (["up.x", "mid.y"], ["up.y", "mid.x"], "up", "mid"),
        (["enc", "dec"], ["encoder", "decoder"], "dec", "encoder"),
        (["a.0.cross", "a.0.attn"], ["a.0.cross", "a.0.attn"], "a.0.cross", "a.0.attn"),
        (["up.x"], ["up.y"], "up.0", "0"),
    ],
)
def test_what_has_its_own_name_on_the_other_side_is_given_no_others(have, want, own, wanted):
    assert is_one(have, want, own, wanted)


@pytest.mark.parametrize(
    ("have", "want", "own", "wanted"),
    [
        (["enc", "dec"], ["encoder", "decoder"], "dec", "decoder"),
        (["backbone", "head"], ["encoder", "head"], "backbone", "encoder"),
        (["encoder_q", "encoder_k"], ["net"], "encoder_q", "net"),
        (["model.a"], ["a"], "model", ""),
    ],
)
def test_a_name_that_one_side_alone_has_may_be_anything(have, want, own, wanted):
    assert not is_one(have, want, own, wanted)


def test_names_that_are_alike_are_asked_about_first_and_crossed_ones_never():
    have = blocks("dec.layers") | blocks("enc.layers")
    want = blocks("encoder.layers") | blocks("decoder.layers")
    found = matched(have, want)
    rules = [rule for one in found.report.ambiguous for rule in one.rules]
    assert not any("dec" in rule.split("=>")[0] and "enc" in rule.split("=>")[1] for rule in rules)
    assert not any("enc" in rule.split("=>")[0] and "dec" in rule.split("=>")[1] for rule in rules)


def test_the_first_rule_that_is_told_never_loads_one_part_into_another():
    have = {**blocks("text.blocks"), **blocks("visual", [0, 1, 2])}
    want = {**blocks("text"), **blocks("visual.layers")}
    found = matched(have, want)
    given = dict(Allowance().judged(found.report, found.again).remedy.arguments)
    assert not any(
        rule.startswith("^visual") and "=>text" in rule for rule in given.get("rules", ())
    )


def test_no_rule_takes_one_layer_out_of_its_list():
    have = {**blocks("mid.blocks", [0]), **blocks("up.blocks", [0])}
    want = {f"{m}": Slot(s, "float32") for m, s in BLOCK.items()}
    rules = [rule for one in matched(have, want).report.ambiguous for rule in one.rules]
    assert rules == []
