"""A checkpoint walked, things found in it, and trees made from trees."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import reduce
from operator import getitem

import pytest
from hypothesis import given, strategies as st

from ckptool.core.addressing import resolve
from ckptool.core.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
    Wrapping,
)
from ckptool.core.tree import list_items, name_of, rebuild, walk, walk_everything
from ckptool.errors import AmbiguousName, LimitExceeded, NameCollision, NotFound
from ckptool.limits import Limits
from tests.trees import checkpoint, module, parallel, scalar, state_dict, storage, tensor


def names(root, **options):
    return [name_of(path) for path, _ in walk(root, **options)]


def test_leaves_come_in_the_order_of_the_file_with_their_paths():
    a, b = tensor(), tensor()
    device, ref = DeviceValue("cpu"), StorageRef(storage(), "float32")
    root = OrderedMap(
        model={"w": a}, list=[1, b], pair=(True, None), size=Size((2, 3)), raw=b"x",
        device=device, dtype=Global("torch", "float32"), storage=ref,
    )  # fmt: skip
    assert list(walk(root)) == [
        (("model", "w"), a), (("list", 0), 1), (("list", 1), b), (("pair", 0), True),
        (("pair", 1), None), (("size", 0), 2), (("size", 1), 3), (("raw",), b"x"),
        (("device",), device), (("dtype",), Global("torch", "float32")), (("storage",), ref),
    ]  # fmt: skip


def test_a_lone_leaf_has_the_empty_path():
    assert list(walk(7)) == [((), 7)]
    assert list(walk({})) == []


def test_a_pickled_module_gives_its_tensors_under_full_names_wherever_it_is():
    net = parallel(module(parameters={"weight": tensor()}, training=True))
    assert [path for path, _ in walk({"epoch": 1, "nets": [net]})] == [
        ("epoch",), ("nets", 0, "module.weight"),
    ]  # fmt: skip


def test_an_object_is_listed_then_its_items_then_the_tensors_in_its_attributes():
    thing = Opaque(
        Global("m", "Thing"), (tensor(), "argument"), {"keyword": tensor()},
        steps=[
            ("build", {"a": tensor(), "n": 1, "deep": {"b": tensor(), "n": 2}}),
            ("set", [("key", tensor()), ("n", 3)]),
        ],
    )  # fmt: skip
    assert names({"thing": thing}) == [
        "thing", "thing/key", "thing/n", "thing/a", "thing/deep/b", "thing/2", "thing/keyword",
    ]  # fmt: skip


def test_an_object_among_attributes_is_searched_for_tensors_and_not_listed():
    inner = Opaque(Global("m", "Inner"), (), steps=[("build", {"w": tensor(), "n": 1})])
    outer = Opaque(Global("m", "Outer"), (), steps=[("build", {"inner": inner})])
    assert names([outer]) == ["0", "0/inner/w"]


def test_slots_and_states_that_are_no_dict_are_searched_too():
    slots = Opaque(Global("m", "S"), (), steps=[("build", (None, {"w": tensor()}))])
    other = Opaque(Global("m", "T"), (), steps=[("build", [tensor()])])
    assert names([slots, other]) == ["0", "0/w", "1", "1/state/0"]


def test_what_default_dicts_counters_and_deques_hold():
    factory = Global("builtins", "float")
    default = Opaque(Global("collections", "defaultdict"), (factory,), steps=[("set", [("a", 1)])])
    counter = Opaque(Global("collections", "Counter"), ({"w": tensor()},))
    deque = Opaque(Global("collections", "deque"), ((), 4), steps=[("append", [1, tensor()])])
    assert names({"d": default, "c": counter, "q": deque}) == ["d", "d/a", "c", "c/w",
                                                              "q", "q/0", "q/1"]  # fmt: skip
    assert list_items(default) == [("a", 1)]
    assert list_items(Opaque(Global("m", "L"), (), steps=[("append", [5]), ("append", [6])])) == [
        (0, 5), (1, 6),
    ]  # fmt: skip


def test_cycles_end_and_sharing_is_listed_under_each_name():
    root = {"w": tensor()}
    root["self"] = root
    looped = [root]
    looped.append(looped)
    root["list"] = looped
    assert names(root) == ["w"]
    shared = state_dict(["w"])
    assert names({"a": shared, "b": shared}) == ["a/w", "b/w"]
    thing = Opaque(Global("m", "T"), ())
    thing.steps.append(("build", {"me": thing, "w": tensor()}))
    assert names([thing]) == ["0", "0/w"]


def test_sharing_that_multiplies_is_refused_before_it_costs_anything():
    node = ["x"] * 5
    for _ in range(200):
        node = [node] * 5
    with pytest.raises(
        LimitExceeded, match="the same containers occur repeatedly, with more than 350,000 entries"
    ):
        for _ in walk(node):
            pass
    repeated = [["x"]] * 30
    assert len(names(repeated, limits=Limits(max_repeats=60))) == 30
    with pytest.raises(LimitExceeded):
        names(repeated, limits=Limits(max_repeats=20))


@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth_is_limited_and_counts_an_object_once(kind):
    node = tensor()
    for _ in range(10):
        node = (
            [node]
            if kind == "list"
            else Opaque(Global("m", "T"), (), steps=[("build", {"x": node})])
        )
    assert names(node, limits=Limits(max_depth=9))
    with pytest.raises(LimitExceeded, match="deeper than 8"):
        names(node, limits=Limits(max_depth=8))


def test_enter_is_asked_before_each_container_and_what_it_refuses_is_left_out():
    asked = []

    def enter(path, node):
        asked.append(name_of(path))
        return path != ("b",)

    thing = Opaque(Global("m", "T"), ())
    assert names({"a": {"x": 1}, "b": {"y": [2]}, "c": thing}, enter=enter) == ["a/x", "c"]
    assert asked == ["", "a", "b", "c"]


def test_a_walk_of_many_tensors_takes_one_step_each():
    root = state_dict(f"layers.{at}.weight" for at in range(20_000))
    assert sum(1 for _ in walk(root)) == 20_000


def test_keys_of_any_kind_have_a_short_text():
    thing = Opaque(Global("m", "T"), ())
    thing.args = ([thing] * 9,)
    path = (1, "a", b"b", 1.5, True, None, (1, "x"), thing, tensor(), DeviceValue("cuda:1"),
            Global("m", "f"))  # fmt: skip
    device = "device(type='cuda', index=1)"
    assert name_of(path) == (f"1/a/b'b'/1.5/True/None/(1, x)/<m.T>/<torch.Tensor>/{device}/m.f")


ROOT = {
    "model": state_dict(["fc.weight", "fc.bias"]),
    "ema": state_dict(["fc.weight"]),
    "epoch": 3,
    "groups": [{"lr": 0.1}, {"lr": 0.2}],
    0: {"zero": 1},
    "net": module(parameters={"w": tensor()}),
    "args": Opaque(Global("m", "A"), (), steps=[("build", {"t": scalar()})]),
}


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("epoch", ("epoch",)),
        ("model/fc.weight", ("model", "fc.weight")),
        ("fc.bias", ("model", "fc.bias")),
        ("model", ("model",)),
        ("groups/1/lr", ("groups", 1, "lr")),
        ("1/lr", ("groups", 1, "lr")),
        ("0/zero", (0, "zero")),
        (("groups", 0, "lr"), ("groups", 0, "lr")),
        (["groups", "1", "lr"], ("groups", 1, "lr")),
        ("net", ("net",)),
        ("net/w", ("net", "w")),
        (("net", "w"), ("net", "w")),
        (("args", "t"), ("args", "t")),
        ("args", ("args",)),
        ("", ()),
        ((), ()),
    ],
)
def test_an_address_is_an_exact_name_else_a_unique_suffix_after_a_slash(address, path):
    found, node = resolve(checkpoint(ROOT), address)
    assert found == path
    if path == ("net", "w"):
        assert node is ROOT["net"].attributes["_parameters"]["w"]
    elif path == ("args", "t"):
        assert node is ROOT["args"].attributes["t"]
    else:
        assert node is reduce(getitem, path, ROOT)


def test_an_exact_name_beats_a_suffix():
    root = {"w": 1, "model": {"w": 2}, "0": [{"w": 3}]}
    assert resolve(checkpoint(root), "w") == (("w",), 1)


def test_accept_narrows_to_what_is_wanted():
    root = {"run": {"model": {"w": 1}}, "config": {"model": "resnet"}}
    with pytest.raises(AmbiguousName):
        resolve(checkpoint(root), "model")
    found, _ = resolve(checkpoint(root), "model", accept=lambda node: isinstance(node, dict))
    assert found == ("run", "model")
    with pytest.raises(NotFound):
        resolve(checkpoint(root), ("config", "model"), accept=lambda node: isinstance(node, list))


def test_a_name_of_several_lists_them():
    with pytest.raises(
        AmbiguousName, match=r"is ambiguous: it could be model/fc.weight, ema/fc.weight"
    ):
        resolve(checkpoint(ROOT), "fc.weight")
    with pytest.raises(AmbiguousName, match=r"\['a/b'\], \['a', 'b'\]"):
        resolve(checkpoint({"a/b": 1, "a": {"b": 2}}), "a/b")


@pytest.mark.parametrize(
    ("address", "near"),
    [
        ("WEIGHT", "model/fc.weight, ema/fc.weight"),
        ("nowhere", "epoch, args, model, ema, groups, 0, net"),
        (("model", "no"), "model"),
        (("groups", 7), "groups/1, groups/0"),
        (("groups", -1), "groups/1, groups/0"),
        (("epoch", "x"), "epoch"),
        (("net", "x"), "net/w"),
    ],
)
def test_a_name_of_nothing_says_what_is_near(address, near):
    with pytest.raises(NotFound, match="no entry is named") as caught:
        resolve(checkpoint(ROOT), address)
    assert f"the file has {near}" in str(caught.value)
    assert caught.value.hint == "ckptool list file.pth"


def test_messages_escape_what_a_terminal_would_obey():
    with pytest.raises(NotFound) as caught:
        resolve(checkpoint({"evil\x1b[2J": 1}), "no\x07thing")
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)


@given(
    st.recursive(
        st.integers(0, 3),
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_every_leaf_is_found_again_by_its_path(root):
    for path, leaf in walk(root):
        assert resolve(checkpoint(root), path) == (path, leaf)


def retag(node):
    return replace(node, device="new") if isinstance(node, TensorRef) else node


def test_without_changes_the_copy_is_equal_and_its_leaves_are_the_same():
    root = state_dict(["a", "b"], metadata=["", "x"])
    copy = rebuild(root)
    assert copy is not root
    assert list(copy.items()) == list(root.items())
    assert copy.metadata == root.metadata
    assert copy.metadata is not root.metadata
    assert type(rebuild({"size": Size((1, 2))})["size"]) is Size


def test_what_was_shared_stays_shared_and_cycles_stay_cycles():
    w, part = tensor(), {"x": 1}
    root = {"a": [w, part], "b": [w, part], "pair": (part, [w])}
    root["self"] = root
    copy = rebuild(root, leaf=retag)
    assert copy["a"][0] is copy["b"][0] is copy["pair"][1][0]
    assert copy["a"][0].device == "new"
    assert copy["a"][1] is copy["b"][1] is copy["pair"][0]
    assert copy["a"][1] is not part
    assert copy["self"] is copy
    assert w.device == "cpu"


def test_a_tuple_in_a_cycle_is_one_tuple():
    inner = []
    pair = (inner, tensor())
    inner.append(pair)
    copy = rebuild([pair], leaf=retag)
    assert copy[0][0][0] is copy[0]
    assert copy[0][1].device == "new"


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "object", "tensor"])
def test_no_depth_is_too_deep(kind):
    wraps = {
        "list": lambda node: [node],
        "tuple": lambda node: (node,),
        "dict": lambda node: {"x": node},
        "object": lambda node: Opaque(Global("m", "T"), (node,)),
        "tensor": lambda node: tensor(parts={"inner": node}),
    }
    node = tensor()
    for _ in range(5_000):
        node = wraps[kind](node)
    depths = []

    def leaf(node):
        depths.append(len(inspect.stack(0)))
        return retag(node)

    rebuild(node, leaf=retag)
    rebuild(wraps[kind](tensor()), leaf=leaf)
    assert sum(1 for found in walk_everything(node) if isinstance(found, TensorRef)) >= 1


def test_leaf_gets_each_leaf_once_and_no_plain_value():
    w, ref, device = tensor(), StorageRef(storage(), "float32"), DeviceValue("cpu")
    named = Global("m", "g")
    seen = []
    rebuild([w, w, ref, device, 1, "x", None, b"", named, {"w": w}, named],
            leaf=lambda node: seen.append(node) or node)  # fmt: skip
    assert [id(node) for node in seen] == [id(w), id(ref), id(device), id(named)]


def test_a_tensor_comes_with_its_parts_and_wrapping_treated():
    values, state = tensor(), {"device": DeviceValue("old")}
    sparse = replace(tensor(), kind="sparse_coo", storage=None, parts={"values": values, "n": 1})
    parameter = replace(tensor(), wrapping=(Wrapping("parameter_state", state=state),))
    hooked = replace(tensor(), hooks=OrderedMap(h=DeviceValue("old")))

    def leaf(node):
        return DeviceValue("new") if isinstance(node, DeviceValue) else retag(node)

    made = rebuild([sparse, parameter, hooked, values], leaf=leaf)
    assert made[0].parts["values"] is made[3]
    assert made[0].parts["n"] == 1
    assert made[1].wrapping[0].state == {"device": DeviceValue("new")}
    assert made[2].hooks["h"] == DeviceValue("new")
    assert state == {"device": DeviceValue("old")}


def test_a_tensor_whose_parts_lead_back_to_it():
    state = {}
    looped = replace(tensor(), parts={"state": state})
    state["me"] = looped
    made = rebuild([looped], leaf=retag)[0]
    assert made.parts["state"]["me"] is made


def test_the_array_that_carries_a_tensor_is_left_to_leaf():
    data = tensor()
    carried = replace(tensor(), device="xla:0", parts={"carrier": "cpu_tensor", "data": data})
    made = rebuild(carried, leaf=retag)
    assert made.parts["data"] is data
    assert made.device == "new"
    assert data not in list(walk_everything(carried))


def test_objects_are_copied_with_their_content_and_can_be_replaced():
    inner = Opaque(
        Global("m", "Inner"), (tensor(),), {"k": tensor()}, steps=[("set", [("a", tensor())])]
    )
    outer = Opaque(Global("m", "Outer"), (inner,))

    def leaf(node):
        return inner if node is outer else retag(node)

    made = rebuild({"outer": outer, "inner": inner}, leaf=leaf)
    assert made["outer"] is made["inner"]
    assert made["outer"] is not inner
    assert made["inner"].args[0].device == made["inner"].kwargs["k"].device == "new"
    assert made["inner"].steps[0][1][0][1].device == "new"
    assert inner.args[0].device == "cpu"


def test_a_replaced_object_that_leads_back_to_itself():
    outer = Opaque(Global("m", "Outer"), ())
    inner = Opaque(Global("m", "Inner"), (outer,))
    outer.args = (inner,)
    made = rebuild([outer], leaf=lambda node: inner if node is outer else node)
    assert made[0].class_name == "m.Inner"
    assert made[0].args[0] is made[0]


def test_mapping_gives_the_dict_to_go_on_with_and_its_values_are_treated():
    root = {"old": {"w": tensor()}, "other": OrderedMap(x=1)}
    made = rebuild(
        root, leaf=retag, mapping=lambda node: {"new": node["old"]} if node is root else node
    )
    assert list(made) == ["new"]
    assert made["new"]["w"].device == "new"


def test_keys_are_treated_and_may_not_become_one():
    a, b = DeviceValue("cuda:0"), DeviceValue("cuda:1")
    assert rebuild({a: 1}, leaf=lambda node: b) == {b: 1}
    assert rebuild({(a, 1): 1}, leaf=lambda node: b) == {(b, 1): 1}
    with pytest.raises(NameCollision, match="only 1 of 2 keys of a dict remain distinct"):
        rebuild({a: 1, b: 2}, leaf=lambda node: b)


def test_everything_looks_into_objects_keys_and_parts_once():
    values = tensor()
    sparse = replace(tensor(), kind="sparse_coo", storage=None, parts={"values": values})
    device = DeviceValue("cpu")
    root = [sparse, {device: 1}, Opaque(Global("m", "T"), (sparse, "x"))]
    found = list(walk_everything(root))
    assert [node for node in found if isinstance(node, TensorRef)] == [sparse, values]
    assert device in found
    assert len({id(node) for node in found}) == len(found)
    node = [1]
    for _ in range(60):
        node = [node, node]
    assert len(list(walk_everything(node))) == 61


def test_a_name_that_several_nodes_have_is_listed_once():
    state = {tensor(): {"step": scalar()} for _ in range(3)}
    with pytest.raises(NotFound) as caught:
        resolve(checkpoint({"state": state}), "tep")
    assert caught.value.message.count("/step") == 1


def test_the_tensors_by_name_are_those_of_the_tree():
    a, b = tensor(), tensor()
    made = checkpoint({"model": {"fc.w": a}, "ema": [b, 3], "epoch": 1})
    assert made.by_name == {"model/fc.w": a, "ema/0": b}
    assert made.by_name is made.by_name
    assert made.by_name["ema/0"] is b
    tied = checkpoint({"a": a, "b": a})
    assert [tied.by_name["a"], tied.by_name["b"]] == [a, a]


def test_two_tensors_of_one_name_are_not_had_by_name():
    made = checkpoint({"a": {"b": tensor()}, "a/b": tensor()})
    with pytest.raises(AmbiguousName, match=r"\['a', 'b'\].*\['a/b'\]"):
        list(made.by_name)


def test_what_numpy_repeats_in_every_number_is_a_leaf():
    """A run keeps its losses as numpy's scalars, each of which mentions the one dtype."""
    dtype = Opaque(Global("numpy", "dtype"), ("f8", False, True), steps=[("build", (3, "<"))])
    make = Global("numpy.core.multiarray", "scalar")
    numbers = [Opaque(make, (dtype, bytes(8)), plain=("float64", 0.0)) for _ in range(100)]
    texts = [Opaque(make, (dtype, b"text")) for _ in range(100)]
    leaves = [*numbers, *texts, *[dtype] * 100]
    few = Limits(max_repeats=99)
    assert [node for _, node in walk(leaves, few)] == leaves
    hidden = tensor()
    odd = Opaque(Global("numpy", "dtype"), (hidden,))
    assert [node for _, node in walk([odd])] == [odd, hidden]
