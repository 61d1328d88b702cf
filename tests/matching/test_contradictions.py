"""Rules that were concluded, held against what is known when all has been tried."""

import pytest

from ckptool.matching.matched import matched
from ckptool.matching.slots import Slot

BLOCK = {"norm.w": (4,), "attn.q.w": (4, 4), "attn.k.w": (4, 4), "up.w": (8, 4), "down.w": (4, 8)}


def block(*fronts, below=None):
    names = below or BLOCK
    return {f"{front}.{name}": Slot(s, "float32") for front in fronts for name, s in names.items()}


def lone(*names):
    return {f"{name}.w": Slot((7, 4), "float32") for name in names}


def layers(front, count=3, below=None):
    return block(*(f"{front}.{n}" for n in range(count)), below=below)


def changed(have, want):
    """The pairs of other names, and whether something is asked."""
    found = matched(have, want)
    return {w: h for w, h in found.pairs.items() if w != h}, bool(found.report.ambiguous)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("layer2", "layer1"),
        ("layers.2", "layers.1"),
        ("backbone1", "encoder.0"),
        ("branch1", "branch2"),
        ("mlp.w1", "mlp.w3"),
        ("encoder_q", "encoder_k"),
        ("cross_attn", "self_attn"),
        ("encoder", "decoder"),
        ("actor", "critic"),
        ("student", "teacher"),
        ("decoder.layer", "encoder.blocks"),
    ],
)
def test_a_number_or_an_opposite_in_a_word_decides(own, wanted):
    rest = lone("stem")
    pairs, _ = changed(rest | block(own), rest | block(wanted))
    assert pairs == {}


@pytest.mark.parametrize(
    ("own", "wanted"),
    [("backbone", "encoder"), ("enc", "encoder"), ("attn", "self_attn"), ("layer_1", "layers.1")],
)
def test_another_word_that_nothing_speaks_against_is_concluded(own, wanted):
    rest = lone("stem")
    pairs, _ = changed(rest | layers(own), rest | layers(wanted))
    assert len(pairs) == 3 * len(BLOCK)


def without_a_leaf():
    return {name.replace("attn.k", "attn.wk"): shape for name, shape in BLOCK.items()}


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (block("layers.1"), block("layers0") | block("layers1", below=without_a_leaf())),
        (layers("decoder.layers"), layers("encoder.layers") | layers("generator.h")),
        (layers("visual.x"), layers("text.x") | layers("image.x", below=without_a_leaf())),
    ],
)
def test_where_a_second_part_is_as_good_it_is_a_question(have, want):
    assert changed(have, want) == ({}, True)
    pairs, _ = changed(want, have)
    assert pairs == {}


def test_a_word_that_both_sides_use_is_not_given_to_another_part():
    have = lone("up.head", "mid.norm", "down.norm") | layers("mid.blocks")
    want = lone("up.head", "mid.norm", "down.norm") | layers("down.blocks")
    assert changed(have, want) == ({}, True)


def test_parts_that_both_lack_something_are_not_taken_for_each_other():
    have = layers("teacher.layers") | {"teacher.stem.w": Slot((9, 3)), "other.w": Slot((2, 2))}
    want = layers("student.layers") | {"student.pos.w": Slot((5, 4)), "other.w": Slot((2, 2))}
    assert changed(have, want) == ({}, True)


def test_a_part_that_stays_in_another_does_not_give_a_block_away():
    have = layers("encoder.net") | lone("encoder.head") | {"dec.w": Slot((3, 3))}
    want = layers("predictor") | lone("encoder.classifier") | {"out.w": Slot((2, 2))}
    assert changed(have, want) == ({}, True)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ({"old.w": Slot((3, 3))}, {"new.w": Slot((2, 2))}),
        (lone("visual.head"), {}),
        ({}, lone("image.pos")),
    ],
)
def test_where_another_part_is_made_alike_and_something_is_left_it_is_a_question(have, want):
    have, want = block("text") | have, block("text") | want
    assert changed(have | layers("visual"), want | layers("image")) == ({}, True)


def test_of_parts_made_alike_one_has_another_word_where_nothing_is_left():
    pairs, _ = changed(block("text") | layers("visual"), block("text") | layers("image"))
    assert len(pairs) == 3 * len(BLOCK)


@pytest.mark.parametrize(("mine", "theirs"), [("head", "boxes"), ("backbone.head", "boxes")])
def test_a_part_of_another_word_beside_a_new_head_is_concluded(mine, theirs):
    have = layers("backbone") | lone(mine)
    want = layers("encoder") | {f"{theirs}.w": Slot((9, 4))}
    pairs, _ = changed(have, want)
    assert len(pairs) == 3 * len(BLOCK)


def test_what_is_called_the_same_then_and_has_another_shape_does_not_speak_against_it():
    rest = lone("stem")
    have = rest | layers("backbone") | {"backbone.fc.w": Slot((9, 4))}
    want = rest | layers("encoder") | {"encoder.fc.w": Slot((5, 4))}
    found = matched(have, want)
    assert len(found.pairs) == 1 + 3 * len(BLOCK)
    assert [one.name for one in found.report.mismatched] == ["encoder.fc.w"]


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("momentum_encoder", "encoder"),
        ("target_net", "net"),
        ("ema_unet", "unet"),
        ("unet_ema", "unet"),
        ("model_ema", "model"),
        ("x.ema_unet", "x.unet"),
    ],
)
def test_one_copy_of_a_part_is_not_taken_for_another(own, wanted):
    for part in (block, layers):
        have, want = lone("head") | part(own), lone("head") | part(wanted)
        for one, other in ((have, want), (want, have)):
            assert changed(one, other) == ({}, True)


def test_a_front_that_says_which_copy_it_is_comes_off():
    pairs, is_asked = changed(layers("model_ema.x"), layers("x"))
    assert (len(pairs), is_asked) == (3 * len(BLOCK), False)
