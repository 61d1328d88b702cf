"""Old and new names of one thing."""

from __future__ import annotations

import itertools

import pytest

from ckptool.matching import Allowance, Slot, match_keys
from ckptool.matching.known_renames import find_respellings
from ckptool.transforms import regex_rule


def today(*names):
    return {name: how.respell(name) for name, how in find_respellings(names).items()}


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
    assert find_respellings(names) == {}


def test_the_name_of_the_only_adapter_and_the_layer_that_it_is_around():
    assert today(
        "l.q.base_layer.weight", "l.q.lora_A.default.weight", "l.q.lora_embedding_A.default"
    ) == {
        "l.q.base_layer.weight": "l.q.weight",
        "l.q.lora_A.default.weight": "l.q.lora_A.weight",
        "l.q.lora_embedding_A.default": "l.q.lora_embedding_A",
    }


def test_a_module_that_was_trained_with_an_adapter_is_the_model_s():
    assert today(
        "m.head.original_module.weight",
        "m.head.modules_to_save.default.weight",
        "cls.modules_to_save.default.0.bias",
        "q.original_module.weight",
    ) == {
        "m.head.modules_to_save.default.weight": "m.head.weight",
        "cls.modules_to_save.default.0.bias": "cls.0.bias",
        "q.original_module.weight": "q.weight",
    }


def test_what_may_be_another_adapters_is_no_spelling():
    for names in (
        ["head.modules_to_save.style.weight", "head.original_module.weight"],
        ["head.modules_to_save.default.weight", "head.weight"],
        ["q.lora_A.default.weight", "q.lora_A.style.weight"],
        ["q.lora_A.style.weight"],
        ["q.lora_A.default.weight", "q.lora_A.weight"],
        ["q.base_layer.weight", "q.weight"],
        ["base_layer.weight", "base_layer.0.weight", "a.base_layer.0.weight"],
        ["a.default.weight", "a.lora_A.defaults.weight"],
    ):
        assert find_respellings(names) == {}, names


def adapted(*ends, layers=2):
    shapes = {"A": (2, 8), "B": (8, 2)}
    return {f"m.{n}.q.lora_{end}": Slot(shapes[end.partition(".")[0]])
            for n in range(layers) for end in ends}  # fmt: skip


def test_an_adapter_fits_under_each_of_its_names():
    files = (("A.weight", "B.weight"), ("A.default.weight", "B.default.weight"))
    for have, want in itertools.product(files, files):
        found = match_keys(adapted(*have), adapted(*want))
        assert found.report.fits, (have, want)
        rules = [regex_rule(one.rule) for one in found.report.renamed]
        for wanted, name in found.pairs.items():
            for rule in rules:
                name = rule.apply(name) or name
            assert name == wanted


def test_a_layer_with_an_adapter_fits_a_model_without_and_the_reverse():
    plain = {f"m.{n}.{x}.weight": Slot((8, 8)) for n in range(3) for x in "qkv"}
    peft = {
        f"base_model.model.{name.replace('q.', 'q.base_layer.')}": slot
        for name, slot in plain.items()
    } | {
        f"base_model.model.m.{n}.q.lora_{end}.default.weight": Slot(shape)
        for n in range(3)
        for end, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    off, on = match_keys(peft, plain).report, match_keys(plain, peft)
    assert (off.missing_keys, off.fitting) == ([], 9)
    assert all("lora" in name for name in off.unexpected_keys)
    assert on.report.unexpected_keys == []
    hint = Allowance().judge(on.report).remedy
    assert str(hint) == "the architectures differ: 6 of the model's 15 tensors are not in the file"


def test_a_name_that_the_other_side_has_too_is_meant_as_it_is():
    scale = {"n.gamma": Slot((3,)), "n.beta": Slot((3,))}
    both = {**scale, "n.weight": Slot((3,)), "n.bias": Slot((3,))}
    assert match_keys(scale, both).pairs == {"n.gamma": "n.gamma", "n.beta": "n.beta"}
    assert match_keys(scale, scale).report.renamed == ()
