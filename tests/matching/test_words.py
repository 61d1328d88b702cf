"""What the words in two names have in common."""

import itertools

import pytest

from ckptool.matching.words import are_alike, are_opposite, words_of


def test_words_are_what_is_between_numbers_and_marks():
    assert words_of("layer2.self_attn.QKVProj3") == ["layer", "self", "attn", "qkvproj"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("enc", "encoder"),
        ("attn", "self_attention"),
        ("q", "q_proj"),
        ("norm1", "norm_2"),
        ("", "a"),
    ],
)
def test_short_for_one_another_is_alike(one, other):
    assert are_alike(one, other)
    assert are_alike(other, one)
    assert not are_opposite(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cross_attn", "self_attn"),
        ("encoder_q", "encoder_k"),
        ("encoder", "decoder"),
        ("actor", "critic"),
        ("query", "key"),
        ("left_arm", "right_hand"),
    ],
)
def test_words_that_are_made_to_be_told_apart_are_opposite(one, other):
    assert are_opposite(one, other)
    assert are_opposite(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("momentum_encoder", "encoder"),
        ("target_net", "net"),
        ("ema_unet", "unet"),
        ("unet_ema", "unet"),
        ("netEMA", "net"),
        ("model_ema", "model"),
        ("model_ema", "model_best"),
        ("ema", "unet"),
        ("swa_model", "model"),
        ("old_policy", "policy"),
        ("online_net", "net"),
    ],
)
def test_a_word_that_says_which_copy_it_is_makes_another_part(one, other):
    for mine, theirs in ((one, other), (other, one)):
        assert not are_alike(mine, theirs)
        assert are_opposite(mine, theirs)


@pytest.mark.parametrize(
    ("one", "other"), [("avg_net", "averaged_net"), ("ema_enc", "ema_encoder"), ("ema", "0")]
)
def test_the_same_copy_is_alike(one, other):
    assert are_alike(one, other)
    assert not are_opposite(one, other)


@pytest.mark.parametrize(
    "wholes",
    [
        "encoder enc | decoder dec",
        "actor pi policy | critic vf value",
        "generator gen G netG | discriminator disc D netD",
        "student | ema",
        "prior | posterior",
        "mu | logvar",
        "start | end",
        "q query wq | k key wk | v value wv",
        "up | gate | down",
        "shift | scale",
    ],
)
def test_no_spelling_of_one_part_of_a_whole_is_like_one_of_another_part(wholes):
    parts = [part.split() for part in wholes.split("|")]
    for mine, theirs in itertools.permutations(parts, 2):
        for one, other in itertools.product(mine, theirs):
            assert are_opposite(one, other), (one, other)
            assert not are_alike(one, other), (one, other)


@pytest.mark.parametrize(("one", "other"), [("backbone", "encoder"), ("fc", "head")])
def test_other_words_are_neither(one, other):
    assert not are_alike(one, other)
    assert not are_opposite(one, other)
