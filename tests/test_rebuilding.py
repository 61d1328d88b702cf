"""Trees made from trees keep their identities."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from ckptool.errors import NameCollision
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
    Wrapping,
)
from ckptool.tree import everything, rebuild
from tests.trees import state_dict, storage, tensor


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
    assert sum(1 for found in everything(node) if isinstance(found, TensorRef)) >= 1


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
    assert data not in list(everything(carried))


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
    with pytest.raises(NameCollision, match="of 2 keys of a dict only 1"):
        rebuild({a: 1, b: 2}, leaf=lambda node: b)


def test_everything_looks_into_objects_keys_and_parts_once():
    values = tensor()
    sparse = replace(tensor(), kind="sparse_coo", storage=None, parts={"values": values})
    device = DeviceValue("cpu")
    root = [sparse, {device: 1}, Opaque(Global("m", "T"), (sparse, "x"))]
    found = list(everything(root))
    assert [node for node in found if isinstance(node, TensorRef)] == [sparse, values]
    assert device in found
    assert len({id(node) for node in found}) == len(found)
    node = [1]
    for _ in range(60):
        node = [node, node]
    assert len(list(everything(node))) == 61
