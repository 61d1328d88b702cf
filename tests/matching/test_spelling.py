"""Old and new names of one thing."""

from __future__ import annotations

import pytest

from ckptool.matching.spelling import respellings, spelled, weight_norms


def today(*names):
    return {name: how.of(name) for name, how in respellings(names).items()}


def test_weight_norm():
    assert today("a.weight_g", "a.weight_v", "a.bias") == {
        "a.weight_g": "a.parametrizations.weight.original0",
        "a.weight_v": "a.parametrizations.weight.original1",
    }
    assert today("weight_ih_l0_g", "weight_ih_l0_v") == {
        "weight_ih_l0_g": "parametrizations.weight_ih_l0.original0",
        "weight_ih_l0_v": "parametrizations.weight_ih_l0.original1",
    }


def test_spectral_norm():
    assert today("a.weight_orig", "a.weight_u", "a.weight_v") == {
        "a.weight_orig": "a.parametrizations.weight.original",
        "a.weight_u": "a.parametrizations.weight.0._u",
        "a.weight_v": "a.parametrizations.weight.0._v",
    }


def test_gamma_and_beta():
    assert today("a.gamma", "a.beta", "gamma") == {
        "a.gamma": "a.weight", "a.beta": "a.bias", "gamma": "weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight_g"],
        ["a.weight_v"],
        ["a.weight_orig", "a.weight_u"],
        ["a._g", "a._v"],
        ["a.weight_g", "a.weight_v", "a.parametrizations.weight.original0"],
        ["a.gamma", "a.weight"],
        ["a.gamma", "a.beta", "a.bias"],
        ["a.mygamma", "a.gamma.w"],
        ["a.parametrizations.weight.original0", "a.parametrizations.weight.original1"],
    ],
)
def test_what_is_not_whole_or_would_collide_is_no_spelling(names):
    assert respellings(names) == {}


def test_a_name_that_the_other_side_has_too_is_meant_as_it_is():
    assert set(spelled(respellings(["a.gamma", "b.gamma"]), ["a.gamma", "b.weight"])) == {"b.gamma"}


def test_both_names_of_weight_norm_have_a_new_one():
    assert dict(weight_norms(["a.weight_g", "a.weight_v", "b_g", "x"])) == {
        "a.weight_g": "a.parametrizations.weight.original0",
        "a.weight_v": "a.parametrizations.weight.original1",
    }
