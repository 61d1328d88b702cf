"""Trees: identity, circles, keys, attributes; what a hostile tree may hold."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from ckptool.errors import CheckpointWarning, CorruptFile, LimitExceeded
from ckptool.loading.load import made_tree
from ckptool.model import (
    ByteString,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
)
from tests.tensors.refs import floats, storage, tensor


def builtin(name, *args, **more):
    return Opaque(Global("builtins", name), args, **more)


def test_plain_values_are_what_they_were():
    tree = {"a": 1, 2: [None, True, 1.5, "x", b"y", 1j], ("k", 1): (1, (2,))}
    made = made_tree(tree)
    assert made == tree
    assert made is not tree


def test_what_is_shared_stays_shared():
    inner, ref = [1], floats(1, 2)
    made = made_tree({"a": inner, "b": inner, "t": ref, "u": ref})
    assert made["a"] is made["b"]
    assert made["t"] is made["u"]


def test_circles_stay_circles():
    loop, held = [], {}
    loop.append((loop, held))
    held["loop"] = loop
    made = made_tree(loop)
    assert made[0][0] is made
    assert made[0][1]["loop"] is made


def test_a_circle_through_a_tuple_has_one_tuple():
    inner = []
    outer = (inner,)
    inner.append(outer)
    made = made_tree(outer)
    assert made[0][0] is made


def test_ordered_dicts_keep_order_and_attributes_but_no_methods_of_the_file():
    tree = OrderedMap(b=1, a=2)
    tree.attributes = {"_metadata": OrderedMap(x={"version": 1}), "keys": 1, "__class__": 2}
    with pytest.warns(CheckpointWarning, match="the root is returned without .* keys, __class__"):
        made = made_tree(tree)
    assert type(made) is OrderedDict
    assert list(made) == ["b", "a"]
    assert vars(made) == {"_metadata": {"x": {"version": 1}}}
    assert type(made._metadata) is OrderedDict


def test_leaves_of_torch():
    made = made_tree(
        [
            Size((2, 3)), Size(("odd",)), DeviceValue("cuda:1"), DeviceValue("moon:1"),
            Global("torch", "bfloat16"), Global("torch", "per_tensor_affine"),
            Global("torch", "save"), Global("os", "system"), Global("net", "float32"),
            ByteString("é"),
        ]
    )  # fmt: skip
    assert made[:3] == [torch.Size([2, 3]), ("odd",), torch.device("cuda:1")]
    assert [type(made[0]), type(made[1])] == [torch.Size, tuple]
    assert made[3] == DeviceValue("moon:1")
    assert made[4:6] == [torch.bfloat16, torch.per_tensor_affine]
    assert made[6:9] == [Global("torch", "save"), Global("os", "system"), Global("net", "float32")]
    assert (made[9], type(made[9])) == ("é", str)


def test_collections_are_made():
    factory = Opaque(Global("collections", "defaultdict"), (Global("builtins", "list"),))
    factory.steps.append(("set", [("k", [1])]))
    made = made_tree(
        {
            "set": builtin("set", [1, (2, 3)]), "empty": builtin("set"),
            "frozen": builtin("frozenset", [1]), "raw": builtin("bytearray", b"ab"),
            "text": builtin("bytearray", "a\xff", "latin-1"),
            "counter": Opaque(Global("collections", "Counter"), ({5: 2},)), "default": factory,
            "layout": Opaque(Global("torch.serialization", "_get_layout"), ("torch.sparse_coo",)),
        }
    )  # fmt: skip
    assert made["set"] == {1, (2, 3)}
    assert made["empty"] == set()
    assert made["frozen"] == frozenset([1])
    assert made["raw"] == bytearray(b"ab")
    assert made["text"] == bytearray(b"a\xff")
    assert (type(made["counter"]), made["counter"]) == (Counter, Counter({5: 2}))
    assert (type(made["default"]), made["default"]) == (defaultdict, {"k": [1]})
    assert made["default"]["new"] == []
    assert made["layout"] is torch.sparse_coo


INERT = [
    builtin("set", [[1]]), builtin("set", 10**12), builtin("set", [1], [2]),
    builtin("set", [1], steps=[("build", {"a": 1})]), builtin("set", [1], kwargs={"a": 1}),
    builtin("bytearray", 10**12), builtin("bytearray", "a", "rot13"), builtin("range", 3),
    builtin("eval", "1"), Opaque(Global("collections", "defaultdict"), (Global("os", "system"),)),
    Opaque(Global("collections", "defaultdict"), (Global("builtins", "list"), 1)),
    Opaque(Global("collections", "defaultdict"), (), steps=[("append", [1])]),
    Opaque(Global("torch.serialization", "_get_layout"), ("torch.save",)),
    Opaque(Global("torch.serialization", "_get_layout"), (1,)),
    Opaque(Global("argparse", "Namespace"), ()), Opaque(builtin("getattr"), ()),
]  # fmt: skip


def test_everything_else_stays_inert():
    for node in INERT:
        (made,) = made_tree([node])
        assert isinstance(made, Opaque), node
        assert made.class_name == node.class_name


def test_a_numpy_scalar_is_a_number():
    node = Opaque(Global("numpy", "scalar"), (), plain=("float64", 0.5))
    assert made_tree(node) == 0.5


def test_objects_are_copied_with_their_tensors_made():
    ref = floats(1, 2)
    node = Opaque(Global("net", "Net"), (), steps=[("build", {"w": ref})])
    node.steps[0][1]["self"] = node
    made = made_tree(node)
    assert made is not node
    assert made.attributes["self"] is made
    assert torch.equal(made.attributes["w"], torch.tensor([1.0, 2.0]))
    assert node.attributes["w"] is ref


def test_a_set_where_a_key_should_be_stays_what_it_was():
    key, listing = builtin("set", [1]), (builtin("set", [2]),)
    made = made_tree({key: 1, listing: 2, builtin("frozenset", [1]): 3})
    assert list(made) == [key, listing, frozenset([1])]


def test_storages_by_themselves():
    held = storage(bytes([1, 0, 2, 0]))
    made = made_tree({"typed": StorageRef(held, "int16"), "raw": StorageRef(held, "uint8", True)})
    assert made["typed"].tolist() == [1, 2]
    assert list(made["raw"]) == [1, 0, 2, 0]
    assert made["typed"].data_ptr() == made["raw"].data_ptr()


def test_an_error_names_the_place():
    bad = tensor(bytes(4), "int32", (1,), requires_grad=True)
    with pytest.raises(CorruptFile, match=r"'model/layers/1/w'"):
        made_tree({"model": {"layers": [1, {"w": bad}]}})


def deep(levels):
    tree = leaf = []
    for _ in range(levels):
        leaf.append([])
        leaf = leaf[0]
    return tree


def test_deep_trees_are_made():
    assert made_tree(deep(200)) == deep(200)


def test_too_deep_a_tree_is_an_error_of_ours():
    with pytest.raises(LimitExceeded, match="nested"):
        made_tree(deep(100_000))
