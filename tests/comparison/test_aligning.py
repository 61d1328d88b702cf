"""Which entry of one checkpoint stands for which of the other."""

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

import ckptool
from ckptool.comparison.aligning import align
from ckptool.core.model import Global, Opaque, OrderedMap
from ckptool.core.names import WRAPPERS
from ckptool.errors import AmbiguousName, NameCollision, NotFound
from ckptool.transforms.name_rules import regex_rule
from tests.inspection.handmade import checkpoint, floats, tensor

WEIGHTS = ("conv.weight", "conv.bias", "fc.weight")


def state(*names, wrapper="", **more):
    named = ((f"{wrapper}{name}", tensor(floats(1.0, 2.0), [2])) for name in names)
    return OrderedMap([*named, *more.items()])


def aligned(a, b, **options):
    return align(checkpoint(a), checkpoint(b), **options)


def names(found):
    """What both have, what only A has, what only B has."""
    return (
        [pair.name for pair in found.pairs],
        [entry.name for entry in found.only_a],
        [entry.name for entry in found.only_b],
    )


def test_one_state_dict_is_held_against_another_name_by_name():
    found = aligned(state(*WEIGHTS, "gone"), state("new", *reversed(WEIGHTS)))
    assert names(found) == (list(WEIGHTS), ["gone"], ["new"])
    assert all(pair.a.leaf is not pair.b.leaf for pair in found.pairs)
    assert not found.notes


@pytest.mark.parametrize(
    "wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_wrappers_are_off(wrapper):
    a, b = {"state_dict": state(*WEIGHTS, wrapper=wrapper)}, {"state_dict": state(*WEIGHTS)}
    assert names(aligned(a, b)) == ([f"state_dict/{name}" for name in WEIGHTS], [], [])
    assert names(aligned(b, a)) == names(aligned(a, b))
    found = aligned(a, b, strict_names=True)
    assert not found.pairs
    assert names(found)[1] == [f"state_dict/{wrapper}{name}" for name in WEIGHTS]


def test_a_wrapper_in_the_middle_is_off_and_the_path_is_that_of_the_file():
    (pair,) = aligned(state("net._orig_mod.weight"), state("net.weight")).pairs
    assert (pair.name, pair.a.path, pair.b.path) == (
        "net.weight",
        ("net._orig_mod.weight",),
        ("net.weight",),
    )


@given(
    st.lists(st.sampled_from(WRAPPERS), max_size=3),
    st.lists(st.sampled_from(WRAPPERS), max_size=3),
    st.lists(
        st.from_regex(r"[a-d]{1,2}(\.[a-d]{1,2}){0,2}", fullmatch=True), unique=True, min_size=1
    ),
)
def test_wrappers_in_any_nesting_leave_the_same_names(outer, inner, own):
    a, b = (state(*own, wrapper="".join(f"{word}." for word in words)) for words in (outer, inner))
    assert names(aligned(a, b)) == (own, [], [])


def test_a_prefix_of_one_file_is_off_as_load_into_takes_it_off():
    a = {"state_dict": state(*WEIGHTS, wrapper="net."), "epoch": 3}  # a Lightning file
    b = state("conv.weight", "conv.bias", "fc.weight", "new")
    found = aligned(a, b)
    assert names(found)[1:] == (["epoch"], ["new"])
    assert [(pair.a.path[-1], pair.b.path[-1]) for pair in found.pairs] == [
        (f"net.{name}", name) for name in WEIGHTS
    ]
    assert "keys are compared without a prefix: A has 'net.' before its keys" in found.notes
    back = aligned(b, a)
    assert [(pair.a.path, pair.b.path) for pair in back.pairs] == [
        (pair.b.path, pair.a.path) for pair in found.pairs
    ]
    assert "keys are compared without a prefix: B has 'net.' before its keys" in back.notes
    for options in ({"strict_names": True}, {"rules": [regex_rule("zzz=>y")]}):
        assert not aligned(a, b, **options).pairs


def test_a_prefix_stays_where_it_is_doubtful_or_two_keys_would_become_one():
    other = state("x.conv.weight", "y.conv.bias", "z.fc.weight")
    assert not aligned(state(*WEIGHTS), other).pairs
    colliding = state(*WEIGHTS, "up.weight", wrapper="net.")
    colliding["conv.weight"] = 3
    found = aligned(colliding, state(*WEIGHTS, "up.weight"))
    assert [pair.name for pair in found.pairs] == ["conv.weight"]


def test_a_layer_that_is_called_module_stays_where_only_one_file_seems_wrapped():
    a = state("module.a", "module.b", "head")
    b = state("module.a", "module.b")
    assert names(aligned(a, b)) == (["module.a", "module.b"], ["head"], [])
    assert names(aligned(b, a)) == (["module.a", "module.b"], [], ["head"])


def test_two_names_that_would_become_one_are_an_error():
    a = state("net._orig_mod.weight", "net.weight")
    with pytest.raises(NameCollision, match="both") as caught:
        aligned(a, state("net.weight"))
    assert "--strict-names" in caught.value.hint
    assert len(aligned(a, a, strict_names=True).pairs) == 2


def test_rules_make_names_of_a_those_of_b():
    rules = [regex_rule(r"^backbone\.=>encoder."), regex_rule("nowhere=>x")]
    found = aligned(
        state("backbone.weight", "head", wrapper="module."),
        state("encoder.weight", "head"),
        rules=rules,
    )
    assert names(found) == (["backbone.weight", "head"], [], [])
    assert found.notes == ("rule nowhere=>x matches no key",)


def test_rules_that_make_two_names_one_are_an_error():
    with pytest.raises(NameCollision, match="would both become 'x'"):
        aligned(state("a", "b"), state("x"), rules=[regex_rule("a|b=>x")])


class TestSections:
    def test_a_state_dict_below_is_held_against_a_flat_file(self):
        found = aligned({"state_dict": state(*WEIGHTS), "epoch": 3}, state(*WEIGHTS))
        assert names(found) == (list(WEIGHTS), ["epoch"], [])
        assert "--model-only" in found.notes[0]

    def test_the_weights_only(self):
        a = {"state_dict": state(*WEIGHTS), "epoch": 3}
        for b in (state(*WEIGHTS), {"model": state(*WEIGHTS), "lr": 1}):
            assert names(aligned(a, b, model_only=True)) == (list(WEIGHTS), [], [])
        several = {**a, "ema": state("x")}
        with pytest.raises(AmbiguousName):
            aligned(several, state("x"), model_only=True)
        chosen = aligned(several, state("x"), model_only=True, key="ema")
        assert names(chosen) == (["x"], [], [])

    def test_what_stands_alone_names_the_outermost_container_around_it(self):
        a = {
            "state_dict": state("w"),
            "optimizer": {"state": {0: {"exp_avg": tensor(floats(1.0), [1])}}, "param_groups": []},
            "args": {"steps": [1, 2], "lr": 3},
            "epoch": 3,
        }
        found = aligned(a, {"state_dict": state("w", "more"), "args": {"lr": 3}})
        assert {entry.name: entry.container for entry in found.only_a} == {
            "optimizer/state/0/exp_avg": "optimizer",
            "optimizer/param_groups": "optimizer",
            "args/steps/0": "args/steps",
            "args/steps/1": "args/steps",
            "epoch": None,
        }
        assert [(entry.name, entry.container) for entry in found.only_b] == [
            ("state_dict/more", None)
        ]

    def test_state_dicts_of_one_path_come_first_then_the_ones_left(self):
        a = {"model": state("w"), "ema": state("w")}
        b = {"net": state("w"), "ema": state("w")}
        assert names(aligned(a, b)) == (["ema/w", "w"], [], [])

    def test_several_are_never_guessed_among(self):
        a = {"generator": state("w"), "discriminator": state("w")}
        found = aligned(a, state("w"))
        assert names(found) == ([], ["generator/w", "discriminator/w"], ["w"])
        assert "--key" in found.notes[0]
        assert "generator" in found.notes[0]

    def test_a_key_chooses(self):
        a = {"generator": state("w"), "discriminator": state("v")}
        assert names(aligned(a, state("w"), key="generator")) == (["w"], [], [])
        assert names(aligned(a, state("w"), key="discriminator")) == ([], ["v"], ["w"])
        assert names(aligned(a, a, key="generator")) == (["generator/w"], [], [])

    def test_one_dict_under_two_names_is_one(self):
        shared = state("w")
        found = aligned({"model": shared, "state_dict": shared}, state("w"))
        assert names(found) == (["w"], ["state_dict/w"], [])

    def test_a_module_stands_for_a_state_dict(self, tmp_path):
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        torch.save({"model": torch.nn.DataParallel(net)}, tmp_path / "a.pth")
        save_file(net.state_dict(), tmp_path / "b.safetensors")
        with (
            ckptool.open(tmp_path / "a.pth") as a,
            ckptool.open(tmp_path / "b.safetensors") as b,
        ):
            assert names(align(a, b)) == (list(net.state_dict()), [], [])

    def test_two_modules_are_an_entry_too(self, tmp_path):
        net = torch.nn.Linear(2, 3)
        torch.save(net, tmp_path / "a.pth")
        torch.save(torch.nn.DataParallel(net), tmp_path / "b.pth")
        with ckptool.open(tmp_path / "a.pth") as a, ckptool.open(tmp_path / "b.pth") as b:
            *tensors, module = align(a, b).pairs
        assert [pair.name for pair in tensors] == ["weight", "bias"]
        assert {module.a.leaf.class_name, module.b.leaf.class_name} == {
            "torch.nn.modules.linear.Linear"
        }

    def test_a_part_that_is_a_state_dict_in_one_file_alone_is_held_against_its_path(self):
        a = {"it": state("w", "v")}
        b = {"it": {"w": tensor(floats(1.0, 2.0), [2]), "v": [tensor(floats(1.0), [])]}}
        found = aligned(a, b)
        assert names(found) == (["it/w", "it/v"], [], ["it/v/0"])


def adam(*names):
    """An optimizer's state dict, keyed by name."""
    return {
        "state": {name: {"step": 1, "exp_avg": tensor(floats(1.0), [1])} for name in names},
        "param_groups": [{"lr": 0.1, "params": list(names), "param_names": list(names)}],
    }


def test_names_of_an_optimizer_follow():
    a = {"model": state("a", "b", wrapper="module."), "optim": adam("module.a", "module.b")}
    b = {"model": state("x", "b"), "optimizer": adam("x", "b")}
    found = aligned(a, b, rules=[regex_rule("^a$=>x")])
    assert not found.only_a
    assert not found.only_b
    by_name = {pair.name: pair for pair in found.pairs}
    assert by_name["state/a/exp_avg"].b.path == ("optimizer", "state", "x", "exp_avg")
    assert by_name["param_groups/0/param_names/0"].a.leaf == "x"


def test_names_of_an_optimizer_alone_are_stripped():
    found = aligned(adam("module.a", "module.b"), adam("a", "b"))
    assert "state/a/step" in names(found)[0]
    assert names(found)[1:] == ([], [])
    assert aligned(adam("module.a"), adam("a"), strict_names=True).only_a


def test_values_are_held_against_each_other_by_path():
    a = {"epoch": 1, "args": {"lr": 0.1, "steps": [1, 2]}, "x": 1}
    b = {"epoch": 2, "args": {"lr": 0.1, "steps": [1, 2, 3]}}
    found = aligned(a, b)
    both = ["epoch", "args/lr", "args/steps/0", "args/steps/1"]
    assert names(found) == (both, ["x"], ["args/steps/2"])


def test_containers_are_entries_where_they_tell_something():
    a = {"same": {}, "kinds": [1], "empty": {}, "leaf": 1}
    b = {"same": OrderedMap(), "kinds": (1,), "alone": [], "leaf": {"x": 1}}
    found = aligned(a, b)
    assert names(found) == (["kinds/0", "leaf", "kinds"], ["empty"], ["leaf/x", "alone"])


def test_keys_that_no_file_shares_lose_nothing():
    key = Opaque(Global("lib", "Key"))
    other = Opaque(Global("lib", "Key"))
    a = {key: 1, other: 2, True: 3, 1.5: 4, ("a", 1): 5}
    found = aligned(a, {Opaque(Global("lib", "Key")): 1, 1: 3, 1.5: 4, ("a", 1): 5})
    assert len(found.pairs) + len(found.only_a) == 5
    assert {pair.a.leaf for pair in found.pairs} == {1, 4, 5}
    assert [entry.leaf for entry in found.only_b] == [3]


def test_a_set_is_one_entry():
    def made(*items):
        return Opaque(Global("builtins", "set"), ([],), steps=[("add", list(items))])

    (pair,) = aligned({"it": made("a", "b")}, {"it": made("b", "a")}).pairs
    assert pair.name == "it"


def test_versions_in_metadata_are_noted():
    def versioned(number):
        made = state("w")
        made.attributes["_metadata"] = OrderedMap({"": {"version": number}})
        return made

    assert aligned(versioned(1), versioned(1)).notes == ()
    assert "_metadata" in aligned(versioned(1), versioned(2)).notes[0]
    assert aligned(versioned(1), state("w")).notes == ()
    foreign = state("w")
    foreign.attributes["_metadata"] = Opaque(Global("lib", "Thing"))
    assert aligned(versioned(1), foreign).notes == ()


TRAINED = {"state_dict": state(*WEIGHTS, wrapper="module."), "args": {"lr": 0.1}, "epoch": 3}


class TestKey:
    def test_a_container(self):
        assert names(aligned(TRAINED, TRAINED, key="args")) == (["args/lr"], [], [])
        assert names(aligned(TRAINED, {"x": {"args": {"lr": 1}}}, key="args")) == (["lr"], [], [])

    def test_a_section_against_a_flat_file(self):
        found = aligned(TRAINED, state(*WEIGHTS), key="state_dict")
        assert names(found) == (list(WEIGHTS), [], [])
        assert found.notes == ()

    @pytest.mark.parametrize(
        "key", ["state_dict/module.conv.bias", "module.conv.bias", "conv.bias"]
    )
    def test_a_tensor(self, key):
        for b in (state(*WEIGHTS), TRAINED):
            found = aligned(TRAINED, b, key=key)
            assert [pair.a.path for pair in found.pairs] == [("state_dict", "module.conv.bias")]
            assert not found.only_a
            assert not found.only_b

    def test_a_tensor_that_one_lacks(self):
        found = aligned(TRAINED, state("conv.weight"), key="module.conv.bias")
        assert names(found) == ([], ["conv.bias"], [])

    def test_a_tensor_of_the_section_that_the_key_names(self):
        a = {"generator": state("w"), "discriminator": state("w")}
        (pair,) = aligned(a, state("w"), key="generator/w").pairs
        assert pair.a.path == ("generator", "w")

    def test_a_value(self):
        (pair,) = aligned(TRAINED, TRAINED, key="epoch").pairs
        assert pair.name == "epoch"

    def test_a_value_elsewhere(self):
        (pair,) = aligned(TRAINED, {"meta": {"epoch": 4}}, key="epoch").pairs
        assert (pair.a.path, pair.b.path) == (("epoch",), ("meta", "epoch"))

    def test_a_path(self):
        (pair,) = aligned(TRAINED, TRAINED, key=("args", "lr")).pairs
        assert pair.name == "args/lr"

    def test_what_is_nowhere(self):
        with pytest.raises(
            NotFound, match="no entry is named 'nix'; the file has epoch, state_dict, args"
        ):
            aligned(TRAINED, state("w"), key="nix")
        with pytest.raises(NotFound, match="args"):
            aligned(TRAINED, {"epoch": 3}, key="args")

    def test_what_could_be_several(self):
        a = {"one": {"lr": 1}, "two": {"lr": 2}}
        with pytest.raises(AmbiguousName):
            aligned(a, {"lr": 1}, key="lr")


def test_ten_thousand_names():
    own = [f"layers.{index // 10}.block.{index % 10}.weight" for index in range(10_000)]
    weight = tensor(floats(1.0), [1])
    a = OrderedMap((f"module.{name}", weight) for name in own)
    b = OrderedMap((name, weight) for name in reversed(own))
    assert names(aligned({"state_dict": a}, b)) == (own, [], [])
