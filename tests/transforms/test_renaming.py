"""Names rewritten by rules throughout a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import ckptool
from ckptool.core.model import Global, Opaque, OrderedMap
from ckptool.core.modules import to_module_state
from ckptool.errors import NameCollision, NotFound, UsageError
from ckptool.transforms import (
    Rename,
    Strip,
    Wrap,
    prefix_rule,
    regex_rule,
    table_rule,
)
from tests.trees import by_name, checkpoint, module, modules_of, opened, state_dict, tensor, texts


def renamed(root, *rules, **options):
    return Rename(rules, **options)(checkpoint(root))


def versions(model):
    return {path: entry["version"] for path, entry in model.metadata.items()}


def test_every_state_dict_and_nothing_else():
    root = {
        "model": state_dict(["a.w", "b.w"]),
        "a.w": 3,
        "ema": state_dict(["a.w"]),
        "optimizer": {"state": {0: {"a.w": tensor()}}, "param_groups": [{"params": [0]}]},
    }
    made = renamed(root, r"^a\.=>c.")
    assert list(made.root) == list(root)
    assert list(made.root["model"]) == ["c.w", "b.w"]
    assert list(made.root["ema"]) == ["c.w"]
    assert list(made.root["optimizer"]["state"][0]) == ["a.w"]
    assert made.root["model"]["c.w"] is root["model"]["a.w"]
    assert list(root["model"]) == ["a.w", "b.w"]
    assert texts(made) == [("rename", r"renamed 2 keys with ^a\.=>c. (a.w -> c.w)")]
    assert made.changes[0].count == 2


def test_rules_are_applied_in_order_each_to_the_result_of_the_one_before():
    rules = [
        prefix_rule("backbone=encoder"), regex_rule(r"^encoder=>body"),
        table_rule({"body.w": "body.weight"}, "names.json"), prefix_rule("=net"),
    ]  # fmt: skip
    made = renamed(state_dict(["backbone.w", "backbone.v"]), *rules)
    assert list(made.root) == ["net.body.weight", "net.body.v"]
    assert texts(made) == [
        ("rename", "renamed 2 keys with backbone=encoder (backbone.w -> encoder.w)"),
        ("rename", "renamed 2 keys with ^encoder=>body (encoder.w -> body.w)"),
        ("rename", "renamed 1 key with names.json (body.w -> body.weight)"),
        ("rename", "renamed 2 keys with =net (body.weight -> net.body.weight)"),
    ]
    backwards = renamed(state_dict(["backbone.w", "backbone.v"]), *rules[1::-1])
    assert list(backwards.root) == ["encoder.w", "encoder.v"]


def test_prefixes_come_after_the_rules():
    made = renamed(state_dict(["a.w"]), "a=>b", prefixes=["b=c"])
    assert list(made.root) == ["c.w"]


def test_a_swap_by_a_table():
    model = state_dict(["a.w", "b.w"], metadata=["", "a", "b"])
    made = renamed(model, table_rule({"a.w": "b.w", "b.w": "a.w"})).root
    assert list(made) == ["b.w", "a.w"]
    assert made["b.w"] is model["a.w"]
    assert versions(made) == {"": 10, "b": 11, "a": 12}


def test_extra_states_follow_and_values_beside_do_not():
    model = state_dict(["a.w"], metadata=["", "a"])
    model["a._extra_state"] = {"scale": 1}
    model["a.dtype"] = None  # of a module that `_metadata` has: a quantized layer's
    model["a.x.epoch"] = model["aside"] = "plain"
    made = renamed(model, "^a=>b").root
    assert list(made) == ["b.w", "b._extra_state", "b.dtype", "a.x.epoch", "aside"]


def test_metadata_follows_the_tensors_and_modules_without_any_follow_the_rules():
    model = state_dict(
        ["backbone.conv.w", "fc.w"],
        metadata=["", "backbone", "backbone.conv", "backbone.act", "fc"],
    )
    made = renamed(model, r"^backbone\.=>encoder.", r"\.conv\.=>.cnn.").root
    assert list(versions(made).items()) == [
        ("", 10), ("encoder", 11), ("encoder.cnn", 12), ("encoder.act", 13), ("fc", 14),
    ]  # fmt: skip


def test_metadata_of_a_module_that_a_rule_of_other_names_concerns_stays():
    model = state_dict(["a.w"], metadata=["", "a", "act"])
    assert list(renamed(model, r"\.w$=>.weight").root.metadata) == ["", "a", "act"]
    assert list(renamed(model, r"\.=>_").root.metadata) == ["", "act"]


def test_optimizers_that_hold_names_follow():
    root = {"model": state_dict(["a.w", "a.v"]), "opt": by_name("a.w", "a.v"), "b": by_name("a.x")}
    made = renamed(root, "a=>c")
    assert list(made.root["opt"]["state"]) == ["c.w", "c.v"]
    assert made.root["opt"]["param_groups"][0]["params"] == ["c.w", "c.v"]
    assert made.root["opt"]["param_groups"][0]["param_names"] == ("c.w", "c.v")
    assert list(made.root["b"]["state"]) == ["c.x"]
    assert texts(made) == [
        ("rename", "renamed 3 keys with a=>c (a.w -> c.w)"),
        ("follow", "renamed 2 parameters in the optimizer opt to match"),
        ("follow", "renamed 1 parameter in the optimizer b to match"),
    ]


def test_only_the_state_dict_under_a_key_and_its_optimizer():
    root = {"a": state_dict(["x.w"]), "b": state_dict(["y.w"]), "opt": by_name("x.w")}
    made = renamed(root, r"\.w=>.v", key="b").root
    assert (list(made["a"]), list(made["b"])) == (["x.w"], ["y.v"])
    assert list(made["opt"]["state"]) == ["x.w"]
    followed = renamed(root, r"\.w=>.v", key="a").root
    assert list(followed["opt"]["state"]) == ["x.v"]
    with pytest.raises(NotFound):
        renamed(root, "a=>b", key="c")


def test_two_names_that_would_become_one_are_refused():
    model = state_dict(["a.w", "b.w"])
    with pytest.raises(NameCollision) as caught:
        renamed({"model": model}, "a=>b")
    assert str(caught.value) == ("file.pth: 'a.w' and 'b.w' would both become 'b.w' in model")
    assert "rules" in caught.value.hint
    model["epoch"] = 3
    with pytest.raises(NameCollision, match=r"'a\.w' and 'epoch'"):
        renamed(model, r"^a\.w$=>epoch")


def test_nothing_left_of_a_name_is_refused_and_more_than_nothing_on_the_way_is_not():
    with pytest.raises(UsageError, match=r"the rules would leave nothing of the key 'a\.w'"):
        renamed(state_dict(["a.w"]), ".*=>")
    assert list(renamed(state_dict(["", "a"]), "a=>b").root) == ["", "b"]
    made = renamed(state_dict(["a.w"]), r"^.*$=>", "^$=>b")
    assert list(made.root) == ["b"]


def test_a_rule_that_matched_nothing_is_a_warning_with_names_like_it():
    model = state_dict(["encoder.layer.weight", "fc.bias"])
    made = renamed(model, r"^encodr\.=>x.", "nothing=>like", prefixes=["fcc=x"])
    assert made.root is model
    assert texts(made) == [
        ("warning", r"rule ^encodr\.=>x. matches no key; did you mean encoder.layer.weight?"),
        ("warning", "rule nothing=>like matches no key"),
        ("warning", "rule fcc=x matches no key; did you mean fc.bias?"),
    ]


def test_similar_names_are_those_that_came_to_the_rule():
    table = table_rule({"a.w": "x", "encoder.ww": "y"}, "names.txt")
    half = renamed(state_dict(["a.w", "b.w"]), "b=>encoder", table)
    assert texts(half)[2] == (
        "warning", "1 of 2 keys in names.txt not found: encoder.ww; did you mean encoder.w?",
    )  # fmt: skip


def test_a_rule_that_changes_nothing_that_it_matches_has_matched():
    read = checkpoint(state_dict(["a.w"]))
    assert Rename(["a=>a"])(read) is read
    assert Rename([])(read) is read


def test_a_lone_text_is_no_list_of_rules():
    with pytest.raises(UsageError, match="expected a list of rules, not"):
        renamed(state_dict(["a"]), prefixes="a=b")
    with pytest.raises(UsageError, match="expected a list of rules, not"):
        Rename("a=>b")(checkpoint(state_dict(["a"])))


def test_a_pickled_module_stays_with_a_warning():
    net = module(parameters={"w": tensor()})
    made = renamed({"net": net, "model": state_dict(["w"])}, "w=>v")
    assert list(to_module_state(made.root["net"])) == ["w"]
    assert list(made.root["model"]) == ["v"]
    assert [change.kind for change in made.changes] == ["rename", "warning"]
    alone = renamed(net, "w=>v")
    assert texts(alone) == [
        ("warning", "the pickled module at the root is unchanged: its class defines its keys")
    ]


def test_a_state_dict_of_a_class_derived_from_dict_and_one_under_two_names():
    holder = Opaque(Global("m", "State"), (), steps=[("set", [("a.w", tensor())])])
    made = renamed({"x": holder, "y": holder}, "a=>b")
    assert [name for name, _ in made.root["x"].steps[0][1]] == ["b.w"]
    assert made.root["x"] is made.root["y"]
    assert made.changes[0].count == 1


def test_rules_give_what_strip_module_and_add_module_give():
    names = ["module.conv.w", "module.bn.w", "module.bn.v"]
    model = state_dict(names, metadata=["", "module", "module.conv", "module.bn", "module.act"])
    stripped = Strip()(checkpoint(model)).root
    for rules in ({"rules": [r"^module\.=>"]}, {"prefixes": ["module="]}):
        made = Rename(**rules)(checkpoint(model)).root
        assert (list(made), made.metadata) == (list(stripped), stripped.metadata)
        assert list(made.metadata) == list(stripped.metadata)
    added = Wrap()(checkpoint(stripped)).root
    again = Rename(["^=>module."])(checkpoint(stripped)).root
    assert (list(again), again.metadata) == (list(added), added.metadata)


COMPONENTS = ["a", "b", "0", "1", "conv"]
NAMES = st.lists(
    st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=4).map(".".join),
    unique=True, min_size=1, max_size=6,
)  # fmt: skip


def with_metadata(names):
    aside = [f"{name.partition('.')[0]}.act" for name in names]  # modules without tensors
    return state_dict(names, metadata=dict.fromkeys([*modules_of(names), *aside]))


def component_rules(there):
    """Each component to its new one, by way of marks, so that none is renamed twice."""
    out = [rf"(^|\.){old}(?=\.|$)=>\1<{new}>" for old, new in there.items()]
    return [*out, r"[<>]=>"]


@given(NAMES, st.permutations(COMPONENTS))
def test_a_bijection_and_back_is_the_identity(names, others):
    there = dict(zip(COMPONENTS, others, strict=True))
    back = {new: old for old, new in there.items()}
    model = with_metadata(names)
    once = Rename(component_rules(there))(checkpoint(model)).root
    twice = Rename(component_rules(back))(checkpoint(once)).root
    assert list(twice) == names
    assert all(twice[name] is model[name] for name in names)
    assert list(twice.metadata.items()) == list(model.metadata.items())


@given(NAMES, st.sampled_from(["net", "a", "x.y"]))
def test_a_prefix_comes_off_again_with_metadata(names, prefix):
    model = with_metadata(names)
    once = Rename(prefixes=[f"={prefix}"])(checkpoint(model)).root
    assert [name.removeprefix(f"{prefix}.") for name in once] == names
    twice = Rename(prefixes=[f"{prefix}="])(checkpoint(once)).root
    assert list(twice) == names
    assert {path: twice.metadata[path] for path in model.metadata} == model.metadata


@given(NAMES, st.data())
def test_a_table_of_all_names_and_back_gives_the_names(names, data):
    there = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    once = Rename([table_rule(there)])(checkpoint(with_metadata(names))).root
    assert list(once) == list(there.values())
    back = {new: old for old, new in there.items()}
    assert list(Rename([table_rule(back)])(checkpoint(once)).root) == names


def test_lightning_weights_become_those_of_the_network(fixtures):
    with opened(fixtures / "ecosystem/lightning.ckpt") as read:
        before = read.root["state_dict"]
        made = Rename(prefixes=["model="])(read).root["state_dict"]
        assert list(made) == [name.removeprefix("model.") for name in before]
        assert type(made) is OrderedMap


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_a_program_is_treated_as_its_state_dict(fixtures, name):
    with opened(fixtures / name) as read:
        names = [str(path[-1]) for path, _ in read.tensors()]
        made = Rename(["^=>net."])(read)
        assert [path[-1] for path, _ in made.tensors()] == [f"net.{name}" for name in names]


def test_the_public_names():
    read = checkpoint({"model": state_dict(["a.w", "b.w"]), "epoch": 3})
    for made in (ckptool.rename(read, ["^a=>c"]), read.rename(["^a=>c"])):
        assert list(made.root["model"]) == ["c.w", "b.w"]
    with pytest.warns(ckptool.CheckpointWarning, match="matches no key"):
        assert list(ckptool.rename({"a.w": 1, "b.w": 2}, ["^a=>c"])) == ["a.w", "b.w"]
    chained = read.rename(prefixes=["=net"]).then(
        ckptool.Take(model_only=True, include=["net.a.*"])
    )
    assert list(chained.root) == ["net.a.w"]
    with pytest.raises(
        UsageError, match="expected a path, a state dict or an open checkpoint, not a list"
    ):
        ckptool.rename(["model.pth"], ["a=>b"])
