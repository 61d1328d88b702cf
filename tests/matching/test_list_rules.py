"""Rules for lists of modules that have another name."""

from __future__ import annotations

import re

import pytest

from ckptool.matching import Allowance, MatchReport, Slot, matched
from ckptool.matching.again import Again
from ckptool.matching.list_rules import list_rules
from ckptool.transforms import regex_rule


def blocks(*heads, numbers=range(4), width=4, beside=()):
    shapes = {"fc1.weight": (8, width), "fc2.weight": (width, 8), "norm.weight": (width,)}
    names = [f"{head}{n}.{end}" for head in heads for n in numbers for end in shapes]
    slots = {name: Slot(shapes[".".join(name.split(".")[-2:])]) for name in names}
    return {**slots, **{name: Slot((9, width)) for name in beside}}


@pytest.mark.parametrize(
    ("have", "want", "rules"),
    [
        (["layer_"], ["layers."], [r"^layer_(\d+)\.=>layers.\1."]),
        (["layer"], ["h."], [r"^layer(\d+)\.=>h.\1."]),
        (["m.h."], ["block"], [r"^m\.h\.(\d+)\.=>block\1."]),
        (["student.", "teacher."], ["student", "teacher"],
         [r"^student\.(\d+)\.=>student\1.", r"^teacher\.(\d+)\.=>teacher\1."]),
        (["text.layer_", "visual.layer_"], ["visual.layers.", "text.layers."],
         [r"^text\.layer_(\d+)\.=>text.layers.\1.", r"^visual\.layer_(\d+)\.=>visual.layers.\1."]),
        (["enc.layer_", "dec.layer_"], ["encoder.layers.", "decoder.layers."], []),
        (["enc."], ["encoder.", "decoder."], []),
    ],
)  # fmt: skip
def test_one_rule_for_a_list(have, want, rules):
    assert list(list_rules(blocks(*have), blocks(*want))) == rules


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (blocks("layer_", numbers=range(1, 5)), blocks("layers.")),
        (blocks("layer_", numbers=range(3)), blocks("layers.")),
        (blocks("layer_", width=5), blocks("layers.")),
        (blocks("layer_", numbers=[0]), blocks("layers.", numbers=[0])),
        ({"a.w1": Slot((4,)), "a.w2": Slot((4,))}, {"b.w1": Slot((4,)), "b.w2": Slot((4,))}),
    ],
)
def test_where_numbers_or_shapes_differ_there_is_none(have, want):
    assert list_rules(have, want) == ()


def test_of_lists_in_lists_the_outer_one_is_renamed():
    have = blocks(*(f"stage{n}.blocks." for n in range(3)))
    want = blocks(*(f"levels.{n}.blocks." for n in range(3)))
    assert list_rules(have, want) == (r"^stage(\d+)\.=>levels.\1.",)


@pytest.mark.parametrize("number", [2, 32])
def test_what_is_told_of_a_list_loads_all_of_it(number):
    have = blocks("layer_", numbers=range(number), beside=["embed.w", "old.w"])
    want = blocks("layers.", numbers=range(number), beside=["embed.w"])
    unmet = MatchReport(
        missing_keys=[name for name in want if name not in have],
        unexpected_keys=[name for name in have if name not in want],
        fitting=1,
        names=len(want),
        parameters=1,
        loaded=1,
    )

    def again(rules):
        ruled = map(regex_rule, rules)
        return matched(have, want, rules=ruled).report if rules else unmet

    judgement = Allowance().judged(unmet, Again(again, have, want))
    assert str(judgement.remedy).startswith(
        r"`rules=[r'^layer_(\d+)\.=>layers.\1.'], allow_unexpected=['old.w']` (passes over old.w)"
    )
    given = dict(judgement.remedy.arguments)
    after = again(given["rules"])
    assert after.missing_keys == []
    assert Allowance(unexpected=given["allow_unexpected"]).judged(after).accepted


def densenet(between, count=3):
    return {
        f"block.layer{n}.{kind}{between}{m}.{leaf}": Slot((8 * n, m))
        for n in range(1, count + 1)
        for kind in ("norm", "conv")
        for m in (1, 2)
        for leaf in ("weight", "bias")
    }


def test_lists_in_repeated_layers_are_one_rule_and_a_counter_makes_no_difference():
    counters = {f"block.layer{n}.norm.1.num_batches_tracked": Slot(()) for n in (1, 2, 3)}
    have, want = densenet(".") | counters, densenet("")
    assert list_rules(have, want, fold=True) == (
        r"^block\.layer(\d+)\.conv\.(\d+)\.=>block.layer\1.conv\2.",
        r"^block\.layer(\d+)\.norm\.(\d+)\.=>block.layer\1.norm\2.",
    )
    assert len(list_rules(have, want)) == 6
    assert list_rules(densenet(".", 1), densenet("", 1), fold=True) == (
        r"^block\.layer1\.conv\.(\d+)\.=>block.layer1.conv\1.",
        r"^block\.layer1\.norm\.(\d+)\.=>block.layer1.norm\1.",
    )


def numbered(*heads, layers=(0, 1)):
    """Lists whose layers have nothing but numbers below them."""
    return {f"{head}{n}.{m}.w": Slot((4, 4)) for head in heads for n in layers for m in (0, 1)}


@pytest.mark.parametrize("front", ["", "net.", "module."])
@pytest.mark.parametrize(
    ("heads", "before", "after", "rules"),
    [
        (["f."], (0, 1), (1, 2), ["1=>2", "0=>1"]),
        (["f."], (1, 2, 3), (0, 1, 2), ["1=>0", "2=>1", "3=>2"]),
        (["f."], (0, 1, 2), (0, 2, 3), ["2=>3", "1=>2"]),
        (["b.", "f."], (0, 1), (1, 2), ["1=>2", "0=>1"]),
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_a_single_layer_of_a_list_that_has_moved_has_no_rule(
    front, heads, before, after, rules, left
):
    have, want = (
        numbered(*(f"{front}{head}" for head in heads), layers=layers) for layers in (before, after)
    )
    if left:
        have |= {f"{front}x.w": Slot((3, 4))}
        want |= {f"{front}y.w": Slot((3, 5)), f"{front}z.w": Slot((4, 4))}
    assert list_rules(have, want) == ()
    match = matched(have, want)
    remedy = Allowance().refusal(match.report, match.again).remedy
    assert remedy.arguments == ()
    (way,) = remedy.instead
    assert way.note.endswith(" where they are the same layers, in this order")
    every = [rule.split("=>") for rule in rules]
    assert dict(way.arguments)["rules"] == tuple(
        f"^{re.escape(f'{front}{head}{old}.')}=>{front}{head}{new}."
        for head in heads
        for old, new in every
    )


def test_a_list_may_be_put_below_a_number_or_taken_out():
    have, want = blocks("net.0."), blocks("h.")
    assert list_rules(have, want) == (r"^net\.0\.(\d+)\.=>h.\1.",)
    assert list_rules(want, have) == (r"^h\.(\d+)\.=>net.0.\1.",)
    assert list_rules(have, blocks("h.2.")) == ()
