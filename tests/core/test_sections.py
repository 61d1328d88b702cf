"""Which parts a checkpoint has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptool.core.model import Global, Opaque, OrderedMap, Wrapping
from ckptool.core.sections import (
    find_likely_models,
    find_model_state_dict,
    find_sections,
    list_optimizer_names,
    list_wrappable_keys,
    restore_integer_keys,
)
from ckptool.errors import AmbiguousName, NotFound
from tests.trees import checkpoint, module, opened, parallel, scalar, state_dict, storage, tensor


def kinds(root):
    return {section.name: section.kind for section in find_sections(root)}


def adam(*names):
    return {
        "state": {name: {"step": scalar(), "exp_avg": tensor()} for name in names},
        "param_groups": [{"lr": 0.1, "params": list(names)}],
    }


def rng(nbytes=16):
    return tensor(nbytes, dtype="uint8")


def array():
    return replace(tensor(), kind="numpy")


def test_a_training_checkpoint():
    root = {
        "epoch": 3,
        "state_dict": state_dict(["fc.w"]),
        "optimizer": adam(0, 1),
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "rng": rng(),
        "args": Opaque(Global("argparse", "Namespace"), ()),
    }
    assert kinds(root) == {
        "state_dict": "state_dict", "optimizer": "optimizer", "scheduler": "scheduler",
        "": "values",
    }  # fmt: skip
    values = find_sections(root)[-1]
    assert list(values.node) == [("epoch",), ("rng",), ("args",)]
    assert [path for path, _ in values.tensors()] == [("rng",)]
    assert [path for path, _ in find_sections(root)[1].tensors()] == [
        ("optimizer", "state", 0, "step"), ("optimizer", "state", 0, "exp_avg"),
        ("optimizer", "state", 1, "step"), ("optimizer", "state", 1, "exp_avg"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "root", "expected"),
    [
        ("plain", state_dict(["a"]), {"": "state_dict"}),
        ("empty", {}, {}),
        ("one number", 3, {"": "values"}),
        ("values beside", {"w": tensor(), "v": tensor(), "epoch": 1, "lr": 0.1},
         {"": "state_dict"}),
        ("too few tensors", {"w": tensor(), "epoch": 1, "lr": 0.1}, {"": "values"}),
        ("keys that are no strings", {0: tensor(), 1: tensor()}, {"": "values"}),
        ("tensors deeper", {"w": tensor(), "more": [tensor()]}, {"": "values"}),
        ("extra state", {"w": tensor(), "fc._extra_state": {"scale": [tensor()]}},
         {"": "state_dict"}),
        ("random states", {"cpu": rng(), "cuda": rng()}, {"": "values"}),
        ("random states below", {"r": {"cpu": rng()}}, {"": "values"}),
        ("numpy's below", {"m": state_dict(["a"]), "history": {"loss": array(), "val": array()}},
         {"m": "state_dict", "": "values"}),
        ("numpy's at the root", {"w": array(), "b": array()}, {"": "state_dict"}),
        ("numpy's with dotted names", {"model": {"fc.w": array()}}, {"model": "state_dict"}),
        ("a uint8 weight among others", {"w": tensor(), "packed": rng()}, {"": "state_dict"}),
        ("metrics", {"best": {"epoch=1.ckpt": scalar()}}, {"": "values"}),
        ("a few weights among many values",
         {"module.fc.weight": tensor(), "epoch": 3, "cfg": "x", "lr": 0.1}, {"": "state_dict"}),
        ("numbers at the root", {"module.scale": scalar()}, {"": "state_dict"}),
        ("numbers with metadata", {"net": state_dict(["s"], metadata=[""])},
         {"net": "state_dict"}),
        ("shadow list", {"decay": 0.9, "shadow_params": [tensor(), tensor()]}, {"": "values"}),
        ("shadow dict", {"decay": 0.9, "shadow": {"fc.w": tensor()}},
         {"shadow": "state_dict", "": "values"}),
        ("timm", {"state_dict": state_dict(["a"]), "state_dict_ema": state_dict(["a"])},
         {"state_dict": "state_dict", "state_dict_ema": "state_dict"}),
        ("GAN", {"netG": state_dict(["a"]), "netD": state_dict(["a"])},
         {"netG": "state_dict", "netD": "state_dict"}),
        ("YOLO", {"epoch": -1, "model": module(parameters={"w": tensor()}), "ema": None},
         {"model": "module", "": "values"}),
        ("DeepSpeed", {"module": state_dict(["a"]), "param_shapes": [OrderedMap(a=1)]},
         {"module": "state_dict", "": "values"}),
        ("detectron2", {"model": {"w": tensor(kind="numpy")}, "__author__": "x"},
         {"model": "state_dict", "": "values"}),
        ("Lightning", {"optimizer_states": [adam(0)], "lr_schedulers": [{"_step_count": 2}],
                       "state_dict": state_dict(["a"])},
         {"optimizer_states/0": "optimizer", "lr_schedulers/0": "scheduler",
          "state_dict": "state_dict"}),
        ("an epoch does not make a scheduler", {"last_epoch": 3, "net": state_dict(["a"])},
         {"net": "state_dict", "": "values"}),
        ("nested twice", {"state_dict": {"state_dict": state_dict(["a"])}},
         {"state_dict/state_dict": "state_dict"}),
        ("param_groups alone", {"param_groups": [{}], "w": [tensor()]}, {"": "values"}),
        ("an optimizer that never stepped", {"state": {}, "param_groups": []}, {"": "optimizer"}),
        ("inside an object", Opaque(Global("m", "Learner"), (), steps=[
            ("build", {"model": module(parameters={"w": tensor()}), "lr": 0.1})]),
         {"model": "module", "": "values"}),
        ("a class derived from dict", Opaque(Global("m", "State"), (), steps=[
            ("set", [("module.w", tensor())])]), {"": "values"}),
    ],
)  # fmt: skip
def test_what_is_what(name, root, expected):
    found = kinds(root)
    if name == "a class derived from dict":
        assert [section.kind for section in find_sections(root)] == ["state_dict", "values"]
        assert find_sections(root)[0].wrappers == ("module",)
    else:
        assert found == expected


def table():
    return {"a": tensor(dtype="int64"), "b": tensor(dtype="int8")}


def loss(weight=False):
    buffers = {"weight": tensor()} if weight else {}
    return module("torch.nn.modules.loss.CrossEntropyLoss", buffers=buffers)


def learned(name="w"):
    return module(parameters={name: tensor(wrapping=(Wrapping("parameter"),))})


@pytest.mark.parametrize(
    ("root", "models"),
    [
        ({"model": state_dict(["fc.w"]), "loss": loss()}, ["model"]),
        ({"model": state_dict(["fc.w"]), "loss": loss(weight=True)}, ["model"]),
        ({"best": learned(), "loss": loss(weight=True)}, ["best"]),
        (Opaque(Global("m", "Learner"), (), steps=[
            ("build", {"model": learned(), "loss_func": [loss()]})]), ["model"]),
        ({"model_state_dict": state_dict(["w"]), "vocab": table()}, ["model_state_dict"]),
        ({"model_state_dict": state_dict(["w"]), "model_vocab": table()}, ["model_state_dict"]),
        (({"x": tensor(), "e": tensor(dtype="int64")}, table()), []),
        ({"model": {"w": tensor()}, "stats": {"mean": tensor()}}, ["model"]),
        ({"net": state_dict(["fc.w"]), "fisher": state_dict(["fc.w"])}, ["net"]),
        ({"optimizer_weights": {"adam/m:0": tensor()}, "layers": {"d/k": tensor()}}, ["layers"]),
        (table(), [""]),
        ({"model": table(), "epoch": 1}, ["model"]),
        ({"codes": {"fc.weight": tensor(dtype="int8")}, "epoch": 1}, ["codes"]),
        ({"vocab": table(), "epoch": 1}, []),
        ({"generator": state_dict(["a.w"]), "netD": state_dict(["a.w"])}, ["generator", "netD"]),
        ({"model": {"w": tensor()}, "ema": {"w": tensor()}}, ["model", "ema"]),
        ({"a": {"w": tensor()}, "ema": {"w": tensor()}}, ["a", "ema"]),
        ({"a": learned(), "b": learned()}, ["a", "b"]),
    ],
)  # fmt: skip
def test_what_may_be_the_model_and_one_of_several_is_never_guessed(root, models):
    read = checkpoint(root)
    assert [part.name for part in find_likely_models(read)] == models
    if len(models) == 1:
        assert find_model_state_dict(read).name == models[0]
    else:
        with pytest.raises(AmbiguousName if models else NotFound):
            find_model_state_dict(read)


def test_what_no_one_calls_weights_is_there_for_who_asks():
    root = {"model": state_dict(["fc.w"]), "vocab": table(), "loss": loss(),
            "optimizer": {"m": tensor()}}  # fmt: skip
    assert kinds(root) == {"model": "state_dict", "optimizer": "optimizer", "": "values"}
    assert list(find_sections(root)[-1].node) == [("vocab", "a"), ("vocab", "b"), ("loss",)]
    assert list(find_model_state_dict(checkpoint(root), "vocab").node) == ["a", "b"]
    assert list(find_model_state_dict(checkpoint(root), "optimizer").node) == ["m"]
    with pytest.raises(
        NotFound, match="'loss' has no state dict of a model; it has the state_dict model, the"
    ):
        find_model_state_dict(checkpoint(root), "loss")


def test_every_leaf_belongs_to_exactly_one_section():
    root = {"a": state_dict(["w", "v"]), "o": adam("w"), "x": [1, {"y": tensor()}],
            "m": parallel(module(parameters={"w": tensor()}))}  # fmt: skip
    from ckptool.core.tree import walk

    every = [path for path, _ in walk(root) if _.__class__.__name__ == "TensorRef"]
    held = [path for section in find_sections(root) for path, _ in section.tensors()]
    assert sorted(map(str, held)) == sorted(map(str, every))


def test_sections_say_which_wrappers_their_names_carry():
    root = {
        "model": state_dict(["module._orig_mod.a.w", "module._orig_mod.a.b"]),
        "plain": state_dict(["a.w"]),
        "whole": parallel(module(parameters={"w": tensor()})),
        "opt": adam("module.a.w"),
        "numbered": adam(0),
    }
    assert [section.wrappers for section in find_sections(root)] == [
        ("module", "_orig_mod"), (), ("module",), ("module",), (),
    ]  # fmt: skip


def test_names_that_count():
    named = {"w": tensor(), "epoch": 1, "a._extra_state": 5, "_extra_state": None, 3: tensor()}
    assert list_wrappable_keys(named) == ["w", "a._extra_state", "_extra_state"]
    optimizer = {"state": {"a": {}}, "param_groups": [
        {"params": ["a", "b"], "param_names": ["c"]}, {"params": [3]}, {"params": "odd"},
    ]}  # fmt: skip
    assert list_optimizer_names(optimizer) == ["a", "b", "c"]


def test_the_only_state_dict_is_found_and_a_module_is_one():
    root = {"epoch": 1, "net": state_dict(["w"]), "opt": adam(0)}
    section = find_model_state_dict(checkpoint(root))
    assert (section.path, section.kind) == (("net",), "state_dict")
    assert section.node is root["net"]
    whole = find_model_state_dict(checkpoint(module(parameters={"w": tensor()})))
    assert (whole.path, whole.kind, list(whole.node)) == ((), "module", ["w"])


def test_several_are_listed_with_their_tensors_and_never_guessed_between():
    root = {"model": state_dict(["a", "b"]), "model_ema": state_dict(["a"])}
    with pytest.raises(AmbiguousName) as caught:
        find_model_state_dict(checkpoint(root))
    assert "model (2 tensors), model_ema (1 tensor)" in str(caught.value)
    assert caught.value.hint == "choose one with `key='model'` or `key='model_ema'`"
    assert find_model_state_dict(checkpoint(root), "model_ema").node is root["model_ema"]


def test_one_dict_under_two_names_is_one():
    shared = state_dict(["a"])
    assert find_model_state_dict(checkpoint({"model": shared, "best": shared})).path == ("model",)


def test_none_lists_what_there_is():
    with pytest.raises(NotFound) as caught:
        find_model_state_dict(checkpoint({"opt": adam(0), "epoch": 1, "loops": {"a": 1, "b": 2}}))
    assert "the optimizer opt, epoch, loops" in str(caught.value)
    assert caught.value.hint == "ckptool info file.pth"


def test_a_key_may_name_the_level_above_a_loose_dict_or_a_suffix():
    inner = state_dict(["w"])
    root = {"state_dict": {"state_dict": inner, "n": 1}, "run": {"model": state_dict(["v"])},
            "opt": adam(0), "two": {"a": state_dict(["x"]), "b": state_dict(["y"])},
            "few": {"w": tensor(), "a": 1, "b": 2, "c": 3}}  # fmt: skip
    opened_root = checkpoint(root)
    assert find_model_state_dict(opened_root, "state_dict").path == ("state_dict", "state_dict")
    assert find_model_state_dict(opened_root, "model").path == ("run", "model")
    assert find_model_state_dict(opened_root, "opt/state/0").path == ("opt", "state", 0)
    assert list(find_model_state_dict(opened_root, "few").node) == ["w", "a", "b", "c"]
    assert find_model_state_dict(opened_root, ("run",)).path == ("run", "model")
    with pytest.raises(AmbiguousName, match="two/a"):
        find_model_state_dict(opened_root, "two")
    for key in ("opt", "nothing"):
        with pytest.raises(NotFound):
            find_model_state_dict(opened_root, key)


def test_a_key_is_a_container_and_not_the_word_beside_it():
    root = {"run": {"model": state_dict(["v"])}, "args": {"model": "resnet"}}
    assert find_model_state_dict(checkpoint(root), "model").path == ("run", "model")
    with pytest.raises(NotFound):
        find_model_state_dict(checkpoint({"model": 3}), "model")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("torch-2.13.0/dp_full.pth", {"state_dict": ("state_dict", ("module",)),
                                      "optim_dict": ("optimizer", ()), "": ("values", ())}),
        ("torch-2.13.0/misc.pth", {"state_dict": ("state_dict", ("module",)), "": ("values", ())}),
        ("torch-2.13.0/whole_dp.pth", {"": ("module", ("module",))}),
        ("torch-1.4.0/whole_single.pth", {"": ("module", ())}),
        ("torch-2.13.0/odd.pth", {"": ("state_dict", ())}),
        ("ddp/ddp_compiled.pth", {"": ("state_dict", ("module", "_orig_mod"))}),
        ("ecosystem/compiled_dp.pth", {"": ("state_dict", ("_orig_mod", "module"))}),
        ("ecosystem/ema.pth", {"model": ("state_dict", ("module",)),
                               "model_ema": ("state_dict", ("module",)), "": ("values", ())}),
        ("ecosystem/lightning.ckpt", {"state_dict": ("state_dict", ()),
                                      "optimizer_states/0": ("optimizer", ()),
                                      "lr_schedulers/0": ("scheduler", ()), "": ("values", ())}),
    ],
)  # fmt: skip
def test_real_files(fixtures, file, expected):
    with opened(fixtures / file) as read:
        assert {part.name: (part.kind, part.wrappers) for part in read.sections} == expected


def test_ties_are_counted_under_each_name():
    shared = storage()
    root = {"a": tensor(over=shared), "b": tensor(over=shared)}
    assert len(find_sections(root)[0].tensors()) == 2


def test_what_an_optimizer_keeps_of_one_parameter_is_no_state_dict():
    kept = {"step": scalar(), "exp_avg": tensor(), "exp_avg_sq": tensor()}
    root = {"state_dict": {"fc.weight": tensor()}, "optimizer": {"fc.weight": kept}}
    found = [part.name for part in find_sections(root) if part.kind == "state_dict"]
    assert found == ["state_dict"]


def test_text_becomes_the_number_of_the_groups_unless_the_number_is_there_too():
    """DCP makes text of numbers; an entry whose number has state of its own stays."""
    first, second, both = object(), object(), object()
    groups = [{"params": [0, 1, 2]}]
    root = {"optim": {"state": {"0": first, 1: second, "1": both, "x": 3}, "param_groups": groups}}
    assert restore_integer_keys(root)["optim"]["state"] == {0: first, 1: second, "1": both, "x": 3}
    plain = {"optim": {"state": {0: first}, "param_groups": groups}}
    assert restore_integer_keys(plain) is plain
