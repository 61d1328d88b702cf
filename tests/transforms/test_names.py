"""Wrapper names taken off and put on throughout a checkpoint, `_metadata` too."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from ckptool.core.model import Global, Opaque, OrderedMap
from ckptool.core.modules import to_module_state
from ckptool.core.names import WRAPPERS
from ckptool.errors import NameCollision, NotFound, UsageError
from ckptool.transforms import Strip, Wrap
from tests.trees import (
    by_name,
    checkpoint,
    module,
    modules_of,
    opened,
    parallel,
    state_dict,
    tensor,
    texts,
)


def strip(root, **options):
    return Strip(**options)(checkpoint(root))


def test_every_state_dict_of_the_file_is_treated_and_order_and_tensors_stay():
    root = {
        "model": state_dict(["module.b.w", "module.a.w"]),
        "epoch": 3,
        "ema": state_dict(["n_averaged", "module.b.w"]),
        "plain": state_dict(["module.b.w", "a.w"]),
    }
    made = strip(root)
    assert list(made.root) == list(root)
    assert list(made.root["model"]) == ["b.w", "a.w"]
    assert list(made.root["ema"]) == ["n_averaged", "b.w"]
    assert list(made.root["plain"]) == ["module.b.w", "a.w"]
    assert [
        a is b for a, b in zip(made.root["model"].values(), root["model"].values(), strict=True)
    ]
    assert texts(made) == [
        ("strip", 'removed "module." from 2 keys in model'),
        ("strip", 'removed "module." from 1 key in ema'),
    ]
    assert [change.count for change in made.changes] == [2, 1]


def test_the_source_is_untouched():
    root = {"model": state_dict(["module.w"], metadata=["", "module"])}
    strip(root)
    assert list(root["model"]) == ["module.w"]
    assert list(root["model"].metadata) == ["", "module"]


def test_nothing_to_change_gives_the_same_checkpoint():
    read = checkpoint({"model": state_dict(["a.w"])})
    assert Strip()(read) is read
    assert read.changes == ()


def test_metadata_and_plain_values_and_extra_state():
    model = state_dict(["module.a.w"], metadata=["", "module", "module.a"])
    model["module.a._extra_state"] = {"scale": 1}
    model["module.a.dtype"] = None  # of a module that `_metadata` has: a quantized layer's
    model["module.note.epoch"] = model["epoch"] = "plain"
    made = strip(model).root
    assert list(made) == ["a.w", "a._extra_state", "a.dtype", "module.note.epoch", "epoch"]
    assert made.metadata == {"": {"version": 11}, "a": {"version": 12}}
    assert type(made) is OrderedMap


def test_metadata_that_is_no_dict_is_left_alone():
    model = state_dict(["module.w"])
    model.attributes.update(_metadata=[1], other=2)
    assert strip(model).root.attributes == {"_metadata": [1], "other": 2}


def test_one_state_dict_under_two_names_stays_one():
    shared = state_dict(["module.w"])
    made = strip({"a": shared, "b": shared})
    assert made.root["a"] is made.root["b"]
    assert len(made.changes) == 1


def test_a_value_in_the_way_is_a_collision():
    model = state_dict(["module.epoch"])
    model["epoch"] = 3
    with pytest.raises(NameCollision, match=r"'module\.epoch' and 'epoch'"):
        strip(model)


def test_options_go_through_and_a_path_that_is_nowhere_is_named():
    model = state_dict(["features.module.0.w", "head.w"])
    assert list(strip(model, at="features").root) == ["features.0.w", "head.w"]
    assert list(strip(state_dict(["module.module.w"]), levels=1).root) == ["module.w"]
    assert list(strip(state_dict(["_orig_mod.module.w"]), only="module").root) == ["_orig_mod.w"]
    with pytest.raises(
        NotFound, match=r"no key starts with 'nowhere'; the submodules are features\.module\.0,"
    ):
        strip(model, at="nowhere")
    with pytest.raises(UsageError):
        strip(model, only="nothing")


def names_of(optimizer):
    group = optimizer["param_groups"][0]
    return list(optimizer["state"]), group["params"], list(group["param_names"])


def test_optimizers_that_hold_names_follow_their_state_dict():
    root = {
        "model": state_dict(["module.a.w", "module._orig_mod.b"]),
        "other": state_dict(["module.a.w", "c"]),
        "opt": by_name("module.a.w", "module._orig_mod.b"),
        "rest": by_name("module.a.w", "c"),
    }
    made = strip(root)
    assert names_of(made.root["opt"]) == (["a.w", "b"],) * 3
    assert names_of(made.root["rest"]) == (["module.a.w", "c"],) * 3
    assert (
        made.root["opt"]["state"]["a.w"]["exp_avg"]
        is (root["opt"]["state"]["module.a.w"]["exp_avg"])
    )
    assert texts(made)[-1] == ("follow", "renamed 2 parameters in the optimizer opt to match")
    assert names_of(root["opt"])[0] == ["module.a.w", "module._orig_mod.b"]


def test_an_optimizer_of_no_state_dict_here_follows_the_rule_itself():
    assert (
        names_of(strip({"opt": by_name("module.a", "module.b")}).root["opt"]) == (["a", "b"],) * 3
    )


def test_an_optimizer_that_numbers_is_untouched_but_for_its_names():
    optimizer = {
        "state": {0: {"exp_avg": tensor()}},
        "param_groups": [{"params": [0], "param_names": ["module.w"]}],
    }
    made = strip({"model": state_dict(["module.w"]), "opt": optimizer}).root["opt"]
    assert list(made["state"]) == [0]
    assert made["param_groups"] == [{"params": [0], "param_names": ["w"]}]


def test_pickled_wrappers_give_way_to_the_module_inside():
    net = module(parameters={"w": tensor()}, children={
        "block": module("torch._dynamo.eval_frame.OptimizedModule", children={
            "_orig_mod": module(parameters={"v": tensor()})}),
    })  # fmt: skip
    made = strip({"model": parallel(parallel(net))})
    assert made.root["model"].class_name == "net.Net"
    assert list(to_module_state(made.root["model"])) == ["w", "block.v"]
    assert texts(made) == [
        ("strip", 'removed "module." and "_orig_mod." from 2 keys in model (3 levels)')
    ]
    kept = strip({"model": parallel(parallel(net))}, levels=1).root["model"]
    assert list(to_module_state(kept)) == ["module.w", "module.block._orig_mod.v"]
    only = strip({"model": parallel(net)}, only="_orig_mod").root["model"]
    assert list(to_module_state(only)) == ["module.w", "module.block.v"]


def test_a_compiled_module_that_pickled_as_a_call():
    net = module(parameters={"w": tensor()})
    compiled = Opaque(Global("torch._dynamo.eval_frame", "OptimizedModule"), (net, None))
    assert list(to_module_state(strip(compiled).root)) == ["w"]
    assert list(to_module_state(strip(parallel(compiled)).root)) == ["w"]


def test_a_submodule_is_unwrapped_where_it_is_asked_for():
    net = module(children={"features": parallel(module(parameters={"w": tensor()})),
                           "head": module(parameters={"v": tensor()})})  # fmt: skip
    assert strip(net).changes == ()
    assert list(to_module_state(strip(net, at="features").root)) == ["features.w", "head.v"]


def test_a_class_that_only_looks_like_a_wrapper_stays_with_a_warning():
    net = module("my.Holder", children={"module": module(parameters={"w": tensor()})})
    made = strip(net)
    assert list(to_module_state(made.root)) == ["module.w"]
    assert [change.kind for change in made.changes] == ["warning"]
    averaged = module("torch.optim.swa_utils.AveragedModel", buffers={"n_averaged": tensor()},
                      children={"module": module(parameters={"w": tensor()})})  # fmt: skip
    assert list(to_module_state(strip(averaged).root)) == ["n_averaged", "module.w"]


def test_a_state_dict_of_a_class_derived_from_dict():
    holder = Opaque(Global("m", "State"), (), steps=[
        ("set", [("module.w", tensor())]), ("build", {"note": 1}),
    ])  # fmt: skip
    made = strip({"model": holder}).root["model"]
    assert [name for name, _ in made.steps[0][1]] == ["w"]
    assert made.steps[1] == ("build", {"note": 1})
    assert holder.steps[0][1][0][0] == "module.w"


def test_adding_to_every_state_dict_and_its_followers():
    root = {"model": state_dict(["a.w"], metadata=["", "a"]), "opt": by_name("a.w"), "epoch": 1}
    made = Wrap()(checkpoint(root))
    assert list(made.root["model"]) == ["module.a.w"]
    assert list(made.root["model"].metadata) == ["", "module", "module.a"]
    assert made.root["model"].metadata[""] == {"version": 1}
    assert names_of(made.root["opt"]) == (["module.a.w"],) * 3
    assert texts(made) == [
        ("add", 'added "module." to 1 key in model'),
        ("follow", "renamed 1 parameter in the optimizer opt to match"),
    ]


def test_adding_with_options():
    root = {"a": state_dict(["f.w", "h.w"]), "b": state_dict(["f.w"])}
    read = checkpoint(root)
    assert list(Wrap(wrapper="_orig_mod")(read).root["a"]) == [
        "_orig_mod.f.w",
        "_orig_mod.h.w",
    ]
    assert list(Wrap(at="f")(read).root["a"]) == ["f.module.w", "h.w"]
    one = Wrap(key="b")(read).root
    assert (list(one["a"]), list(one["b"])) == (["f.w", "h.w"], ["module.f.w"])
    with pytest.raises(UsageError):
        Wrap(wrapper="model")(read)
    with pytest.raises(NotFound):
        Wrap(at="nowhere")(read)
    with pytest.raises(NotFound):
        Wrap(key="c")(read)


def test_adding_once_more_warns_and_a_pickled_module_stays():
    made = Wrap()(checkpoint(state_dict(["module.w"])))
    assert list(made.root) == ["module.module.w"]
    assert [change.kind for change in made.changes] == ["warning", "add"]
    whole = Wrap()(checkpoint(module(parameters={"w": tensor()})))
    assert list(to_module_state(whole.root)) == ["w"]
    assert [change.kind for change in whole.changes] == ["warning"]


COMPONENT = st.sampled_from(["a", "b", "n_averaged", "mlp_module", *WRAPPERS])
NAMES = st.lists(
    st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), unique=True, min_size=1, max_size=5
)


@given(NAMES, st.sampled_from(WRAPPERS))
def test_strip_undoes_add_with_values_order_and_metadata(names, wrapper):
    model = state_dict(names, metadata=modules_of(names))
    added = Wrap(wrapper=wrapper)(checkpoint(model))
    assume(any(name != "n_averaged" for name in names))
    back = Strip(levels=1)(added).root
    assert list(back) == names
    assert all(back[name] is model[name] for name in names)
    assert back.metadata == model.metadata
    assert list(back.metadata) == list(model.metadata)


@given(NAMES)
def test_stripping_is_idempotent_and_keeps_the_tensors(names):
    model = state_dict(names, metadata=modules_of(names))
    try:
        once = Strip()(checkpoint(model))
    except NameCollision:
        assume(False)
    assert [id(value) for value in once.root.values()] == [id(value) for value in model.values()]
    assert Strip()(once).root is once.root


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("torch-2.13.0/dp.pth", "torch-2.13.0/single.pth"),
        ("torch-1.6.0/dp.pth", "torch-1.6.0/single.pth"),
        ("ecosystem/compiled_dp.pth", "torch-2.13.0/single.pth"),
        ("ddp/ddp_compiled.pth", "torch-2.13.0/single.pth"),
    ],
)
def test_real_files_come_out_with_the_names_and_metadata_of_the_plain_model(
    fixtures, wrapped, plain
):
    with opened(fixtures / wrapped) as left, opened(fixtures / plain) as right:
        made = Strip()(left).root
        assert list(made) == list(right.root)
        assert made.metadata == right.root.metadata


def test_a_real_pickled_wrapper_becomes_the_pickled_module(fixtures):
    with opened(fixtures / "torch-2.13.0/whole_dp.pth") as read:
        assert read.root.class_name.endswith("DataParallel")
        made = Strip()(read).root
        assert made.class_name == "net.Net"
        assert list(to_module_state(made))[:2] == ["conv1.weight", "conv1.bias"]


def test_a_module_before_most_names_stays_and_is_told():
    root = {"model": state_dict(["module.b.w", "module.a.w", "queue"])}
    for options in ({}, {"only": "module"}):
        made = strip(root, **options)
        assert [*made.root["model"]] == ["module.b.w", "module.a.w", "queue"]
        assert texts(made) == [
            (
                "warning",
                'kept "module." on 2 keys in model, because queue does not have it; to remove it: '
                "ckptool rename --prefix module.=",
            )
        ]
    for other in ("_orig_mod", "_fsdp_wrapped_module"):
        assert not strip(root, only=other).changes


def test_a_layer_called_module_among_others_is_nothing_to_tell():
    root = state_dict(["module.w", "a.w", "b.w"])
    assert strip(root).root is root
