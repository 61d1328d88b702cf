"""`load` and `load_state_dict`: real files, given what torch reads from each; nothing runs."""

import argparse
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch

import ckptool
from ckptool.core.model import (
    ByteString,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
)
from ckptool.errors import (
    AmbiguousName,
    CheckpointWarning,
    CorruptFile,
    LimitExceeded,
    NameCollision,
    NotFound,
    UnsupportedFormat,
    UsageError,
)
from ckptool.formats import open_checkpoint
from ckptool.loading.inert import InertObject, node_of
from ckptool.loading.load import make_tree
from tests.loading.bits import saved
from tests.loading.wrappings import WRAPPINGS
from tests.tensors.judge import Judge, assert_same
from tests.tensors.refs import floats, storage, tensor

FOLDERS = ["torch-1.4.0", "torch-1.6.0", "torch-1.13.1", "torch-2.13.0", "ddp", "ecosystem"]
BY_TORCH = [
    "ddp/ddp.pth", "ddp/ddp_compiled.pth", "ddp/ddp_full.pth", "ecosystem/compiled.pth",
    "ecosystem/compiled_dp.pth", "ecosystem/dp_compiled.pth", "ecosystem/ema.pth",
    "ecosystem/newdtypes.pth", "ecosystem/special_conj.pth", "ecosystem/special_coo.pth",
    "ecosystem/special_meta.pth", "foreign/xla_2.6.pth", "tensors/views.pth",
    "tensors/views_legacy.pth", "tensors/sparse.pth", "tensors/sparse_legacy.pth",
    "tensors/bits.pth", "tensors/quantized.pth", "tensors/quantized_legacy.pth",
    "tensors/meta.pth", "tensors/ties.pth", "tensors/ties_legacy.pth", "tensors/dtypes.pth",
    "tensors/nested.pth", "tensors/jagged.pth",
] + [
    f"{folder}/{name}"
    for folder in FOLDERS[:4]
    for name in (
        "single.pth", "single_full.tar", "dp.pth", "dp_cuda0.pth", "dp_cuda3.pth", "dp_full.pth",
        "dp_full_cuda0.pth", "dp_unwrapped.pth", "odd.pth",
    )
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_TORCH)
def test_real_files_are_what_torch_reads(fixtures, name):
    theirs = torch.load(fixtures / name, map_location="cpu", weights_only=False)
    for mmap in (False, True):
        assert_same(ckptool.load(fixtures / name, mmap=mmap), theirs)


def test_an_open_checkpoint_stays_open(fixtures):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp.pth") as checkpoint:
        first = ckptool.load(checkpoint)
        assert_same(ckptool.load(checkpoint), first)


@pytest.mark.parametrize("load", [ckptool.load, ckptool.load_state_dict])
def test_map_location_may_be_given_by_position_as_to_torch(tmp_path, load):
    path = saved(tmp_path / "state.pth", {"weight": torch.ones(2)})
    assert torch.load(path, "meta")["weight"].is_meta
    assert load(path, "meta")["weight"].is_meta
    assert load(path, lambda storage, tag: storage)["weight"].tolist() == [1, 1]


def test_objects_stay_inert_and_their_tensors_are_made(fixtures):
    whole = ckptool.load(fixtures / "torch-2.13.0" / "whole_single.pth")
    assert isinstance(whole, InertObject)
    assert node_of(whole).class_name.startswith("net.")
    tensors = [value for value in walk(whole) if isinstance(value, torch.Tensor)]
    assert tensors
    assert not [value for value in walk(whole) if isinstance(value, TensorRef)]


def walk(node):
    yield node
    if isinstance(node, dict):
        inside = list(node.values())
    elif isinstance(node, (list, tuple)):
        inside = list(node)
    else:
        node = node_of(node) if isinstance(node, InertObject) else node
        inside = [node.args, node.steps] if isinstance(node, Opaque) else []
    for value in inside:
        yield from walk(value)


def test_miscellaneous_values(fixtures):
    file = fixtures / "torch-2.13.0" / "misc.pth"
    theirs = torch.load(file, weights_only=False)
    ours = ckptool.load(file)
    assert list(ours) == list(theirs)
    judge = Judge()
    for key, value in theirs.items():
        if isinstance(value, numpy.generic):
            assert ours[key] == value.item()
            assert type(ours[key]) is type(value.item())
        elif isinstance(ours[key], InertObject):
            assert type(value).__qualname__ in node_of(ours[key]).class_name
        else:
            judge.same(ours[key], value, key)


def test_numpy_arrays_become_tensors(tmp_path):
    tree = {
        "a": numpy.arange(6.0).reshape(2, 3), "f": numpy.asfortranarray(numpy.eye(3, 2)),
        "big": numpy.arange(3, dtype=">i4"), "b": numpy.array([True, False]),
        "zero": numpy.array(2.5), "scalar": numpy.float32(0.5), "none": numpy.zeros((0, 3)),
        "text": numpy.array(["a"]),
    }  # fmt: skip
    ours = ckptool.load(saved(tmp_path / "f.pt", tree))
    for key in ("a", "f", "big", "b", "zero", "none"):
        native = tree[key].astype(tree[key].dtype.newbyteorder("="))
        assert torch.equal(ours[key], torch.from_numpy(native))
    assert ours["scalar"] == 0.5
    assert type(ours["scalar"]) is float
    assert isinstance(ours["text"], InertObject)


def test_a_bare_pickle_of_arrays_is_made(tmp_path):
    file = tmp_path / "f.pkl"
    file.write_bytes(pickle.dumps({"model": {"w": numpy.arange(3.0)}, "author": "a"}))
    ours = ckptool.load(file)
    assert ours["author"] == "a"
    assert torch.equal(ours["model"]["w"], torch.arange(3.0, dtype=torch.float64))


def test_what_is_let_go_of_is_freed_at_once(tmp_path):
    """No reference circle of ours keeps gigabytes until the next collection."""
    file = saved(tmp_path / "f.pt", {"w": torch.nn.Parameter(torch.zeros(3))})
    gc.disable()
    try:
        made = ckptool.load(file)
        watch = weakref.ref(made["w"])
        del made
        assert watch() is None
    finally:
        gc.enable()


def test_a_wrapper_of_many_ranks_stays_a_reference_whose_part_can_be_read(fixtures):
    file = fixtures / "distributed" / "dtensor_0_of_2.pth"
    with open_checkpoint(file) as checkpoint:
        tree = ckptool.load(checkpoint)
        ref = next(value for value in walk(tree) if isinstance(value, TensorRef))
        assert ref.kind == "subclass"
        assert isinstance(ref.local.torch(), torch.Tensor)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


def test_nothing_of_the_file_is_run(tmp_path):
    target = tmp_path / "EXECUTED"
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.evil = Evil(f"touch {target}")
    tree = {
        "w": torch.zeros(2), "evil": Evil(f"touch {target}"), "p": parameter,
        "set": {Evil(f"touch {target}")},
    }  # fmt: skip
    for legacy in (False, True):
        file = tmp_path / f"{legacy}.pt"
        torch.save(tree, file, _use_new_zipfile_serialization=not legacy)
        made = ckptool.load(file)
        assert isinstance(made["evil"], InertObject)
        assert isinstance(made["p"].evil, InertObject)
        assert len(made["set"]) == 1
        with pytest.warns(
            ckptool.CheckpointWarning, match="left out of the state dict: 'evil', 'set'"
        ):
            assert torch.equal(ckptool.load_state_dict(file)["w"], torch.zeros(2))
    assert not target.exists()


def test_modules_that_a_file_names_are_not_imported(tmp_path):
    """A class, a torch submodule that is imported on demand, a device of another back end."""
    raw = b"\x80\x02}(X\x01\x00\x00\x00acantigravity\nfly\nX\x01\x00\x00\x00bctorch\nonnx\n"
    raw += b"X\x01\x00\x00\x00cctorch\ndevice\nX\x05\x00\x00\x00npu:0\x85Ru."
    file = tmp_path / "f.pkl"
    file.write_bytes(raw)
    code = (
        "import sys, torch, ckptool; before = {m for m in sys.modules if m.startswith('torch')}; "
        f"tree = ckptool.load({str(file)!r}); "
        "assert 'antigravity' not in sys.modules; "
        "assert {m for m in sys.modules if m.startswith('torch')} == before; "
        "print(sorted(type(v).__name__ for v in tree.values()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "['DeviceValue', 'Global', 'Global']", run.stderr


def builtin(name, *args, **more):
    return Opaque(Global("builtins", name), args, **more)


def test_plain_values_are_what_they_were():
    tree = {"a": 1, 2: [None, True, 1.5, "x", b"y", 1j], ("k", 1): (1, (2,))}
    made = make_tree(tree)
    assert made == tree
    assert made is not tree


def test_what_is_shared_stays_shared():
    inner, ref = [1], floats(1, 2)
    made = make_tree({"a": inner, "b": inner, "t": ref, "u": ref})
    assert made["a"] is made["b"]
    assert made["t"] is made["u"]


def test_circles_stay_circles():
    loop, held = [], {}
    loop.append((loop, held))
    held["loop"] = loop
    made = make_tree(loop)
    assert made[0][0] is made
    assert made[0][1]["loop"] is made


def test_a_circle_through_a_tuple_has_one_tuple():
    inner = []
    outer = (inner,)
    inner.append(outer)
    made = make_tree(outer)
    assert made[0][0] is made


def test_ordered_dicts_keep_order_and_attributes_but_no_methods_of_the_file():
    tree = OrderedMap(b=1, a=2)
    tree.attributes = {"_metadata": OrderedMap(x={"version": 1}), "keys": 1, "__class__": 2}
    with pytest.warns(
        CheckpointWarning, match="left out attributes of the root .*: keys, __class__"
    ):
        made = make_tree(tree)
    assert type(made) is OrderedDict
    assert list(made) == ["b", "a"]
    assert vars(made) == {"_metadata": {"x": {"version": 1}}}
    assert type(made._metadata) is OrderedDict


def test_leaves_of_torch():
    made = make_tree(
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
    made = make_tree(
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
        (made,) = make_tree([node])
        assert isinstance(made, Opaque), node
        assert made.class_name == node.class_name


def test_a_numpy_scalar_is_a_number():
    node = Opaque(Global("numpy", "scalar"), (), plain=("float64", 0.5))
    assert make_tree(node) == 0.5


def test_objects_are_copied_with_their_tensors_made():
    ref = floats(1, 2)
    node = Opaque(Global("net", "Net"), (), steps=[("build", {"w": ref})])
    node.steps[0][1]["self"] = node
    made = make_tree(node)
    assert made is not node
    assert made.attributes["self"] is made
    assert torch.equal(made.attributes["w"], torch.tensor([1.0, 2.0]))
    assert node.attributes["w"] is ref


def test_a_set_where_a_key_should_be_stays_what_it_was():
    key, listing = builtin("set", [1]), (builtin("set", [2]),)
    made = make_tree({key: 1, listing: 2, builtin("frozenset", [1]): 3})
    assert list(made) == [key, listing, frozenset([1])]


def test_storages_by_themselves():
    held = storage(bytes([1, 0, 2, 0]))
    made = make_tree({"typed": StorageRef(held, "int16"), "raw": StorageRef(held, "uint8", True)})
    assert made["typed"].tolist() == [1, 2]
    assert list(made["raw"]) == [1, 0, 2, 0]
    assert made["typed"].data_ptr() == made["raw"].data_ptr()


def test_an_error_names_the_place():
    bad = tensor(bytes(4), "int32", (1,), requires_grad=True)
    with pytest.raises(CorruptFile, match=r"'model/layers/1/w'"):
        make_tree({"model": {"layers": [1, {"w": bad}]}})


def deep(levels):
    tree = leaf = []
    for _ in range(levels):
        leaf.append([])
        leaf = leaf[0]
    return tree


def test_deep_trees_are_made():
    assert make_tree(deep(200)) == deep(200)


def test_too_deep_a_tree_is_an_error_of_ours():
    with pytest.raises(LimitExceeded, match="nested"):
        make_tree(deep(100_000))


def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )


@pytest.mark.parametrize("wrapper", ["plain", "DP", "compile", "compile of DP"])
def test_a_wrapped_model_goes_into_a_bare_one(tmp_path, wrapper):
    model = net()
    state = WRAPPINGS[wrapper](model).state_dict()
    file = saved(tmp_path / "f.pt", {"epoch": 1, "state_dict": state})
    wanted = torch.load(saved(tmp_path / "bare.pt", model.state_dict()))
    for mmap in (False, True):
        loaded = ckptool.load_state_dict(file, mmap=mmap)
        assert_same(loaded, wanted)
        fresh = net()
        assert fresh.load_state_dict(loaded).missing_keys == []
        assert torch.equal(fresh[3].weight, model[3].weight)


FILES = [
    "ddp/ddp.pth", "ddp/ddp_compiled.pth", "ddp/ddp_full.pth", "ecosystem/compiled.pth",
    "ecosystem/compiled_dp.pth", "ecosystem/dp_compiled.pth",
]  # fmt: skip


def test_files_of_real_wrappers(fixtures):
    single = ckptool.load_state_dict(fixtures / "torch-2.13.0" / "single.pth")
    for name in FILES:
        loaded = ckptool.load_state_dict(fixtures / name)
        assert list(loaded) == list(single), name
        assert [t.shape for t in loaded.values()] == [t.shape for t in single.values()], name
        assert list(loaded._metadata) == list(single._metadata), name


@pytest.mark.parametrize("folder", ["torch-1.4.0", "torch-1.6.0", "torch-1.13.1", "torch-2.13.0"])
def test_modules_and_torchscript_give_their_state_dict(fixtures, folder):
    plain = ckptool.load_state_dict(fixtures / folder / "single.pth")
    for name in ("whole_single.pth", "whole_dp.pth", "scripted.pt"):
        assert set(ckptool.load_state_dict(fixtures / folder / name)) == set(plain), name


def test_names_can_be_kept(tmp_path):
    state = torch.nn.DataParallel(net()).state_dict()
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", state), wrappers="keep")
    assert_same(loaded, torch.load(tmp_path / "f.pt"))


def test_a_key_chooses(fixtures):
    file = fixtures / "ecosystem" / "ema.pth"
    with pytest.raises(AmbiguousName):
        ckptool.load_state_dict(file)
    theirs = torch.load(file)
    loaded = ckptool.load_state_dict(file, key="model_ema", wrappers="keep")
    assert_same(loaded, theirs["model_ema"])
    with pytest.raises(NotFound):
        ckptool.load_state_dict(file, key="nothing")


def test_an_open_checkpoint_will_do(fixtures):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp_full.pth") as checkpoint:
        first = ckptool.load_state_dict(checkpoint)
        assert_same(ckptool.load_state_dict(checkpoint), first)


def test_parameters_stay_parameters_and_ties_stay_ties(tmp_path):
    weight = torch.nn.Parameter(torch.randn(2))
    tree = {"a": weight, "b": weight, "c": torch.randn(4)[1:]}
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))
    assert type(loaded["a"]) is torch.nn.Parameter
    assert loaded["a"] is loaded["b"]


class Marked(torch.nn.Module):
    """Parameters of several kinds: frozen, with attributes, tied; a `Buffer` has attributes too."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.fc.bias.requires_grad_(False)
        self.tied = self.fc
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.scale.note = "mine"
        self.mark = torch.nn.Buffer(torch.zeros(1)) if hasattr(torch.nn, "Buffer") else None


@pytest.mark.parametrize("wrap", [lambda net: net, torch.nn.DataParallel, torch.compile])
def test_a_pickled_module_gives_plain_tensors_as_state_dict_does(tmp_path, wrap):
    model = wrap(Marked())
    expected = model.state_dict()
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", model), wrappers="keep")
    assert_same(loaded, expected)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert not any(tensor.requires_grad or vars(tensor) for tensor in loaded.values())


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_an_exported_program_gives_plain_tensors(fixtures, name):
    loaded = ckptool.load_state_dict(fixtures / name)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_floating_tensors_are_cast_and_counters_are_not(tmp_path):
    file = saved(tmp_path / "f.pt", net().state_dict())
    loaded = ckptool.load_state_dict(file, dtype=torch.float16)
    theirs = torch.load(file)
    for name, made in loaded.items():
        expected = torch.float16 if theirs[name].is_floating_point() else theirs[name].dtype
        assert made.dtype is expected
    net().half().load_state_dict(loaded)


def test_meta_gives_the_shapes_of_a_state_dict(tmp_path):
    with torch.device("meta"):
        model = net()
    file = saved(tmp_path / "f.pt", net().state_dict())
    loaded = ckptool.load_state_dict(file, map_location="meta")
    model.load_state_dict(loaded, assign=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_extra_state_comes_along(tmp_path):
    tree = {"w": torch.zeros(1), "w2": torch.zeros(1), "_extra_state": {"scale": torch.ones(2)}}
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))
    assert_same(dict(loaded), tree)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize(
    "wrap",
    [
        averaged,
        lambda model: torch.nn.DataParallel(averaged(model)),
        lambda model: torch.compile(averaged(model)),
        lambda model: averaged(torch.compile(model)),
    ],
)
def test_the_counter_of_an_averaged_model_is_left_out_with_its_wrapper(tmp_path, wrap):
    wrapped = wrap(net())
    for content in (wrapped, wrapped.state_dict()):
        file = saved(tmp_path / "f.pt", {"swa": content})
        with pytest.warns(CheckpointWarning, match="'n_averaged'"):
            loaded = ckptool.load_state_dict(file)
        net().load_state_dict(loaded)
        kept = ckptool.load_state_dict(file, wrappers="keep")
        wrap(net()).load_state_dict(kept)


def test_a_buffer_of_that_name_is_the_models_own(tmp_path):
    model = net()
    model.register_buffer("n_averaged", torch.tensor(3))
    for wrapped in (model, torch.nn.DataParallel(model)):
        loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", wrapped.state_dict()))
        assert loaded["n_averaged"] == 3


@pytest.mark.parametrize("wrappers", ["strip", "keep"])
def test_plain_values_beside_the_tensors_are_left_out(tmp_path, wrappers):
    state = net().state_dict()
    state.update({"epoch": 3, "args": {"lr": 0.1}, "run.name": "x\x1b[2J"})
    file = saved(tmp_path / "f.pt", state)
    with pytest.warns(CheckpointWarning, match="'epoch', 'args', 'run.name'") as caught:
        loaded = ckptool.load_state_dict(file, wrappers=wrappers)
    assert net().load_state_dict(loaded).unexpected_keys == []
    assert list(loaded._metadata) == list(net().state_dict()._metadata)
    assert [warning.filename for warning in caught] == [__file__]


def test_what_a_module_itself_keeps_beside_its_tensors_stays(tmp_path):
    state = net().state_dict()
    state["0._extra_state"], state["0.bias"], state["0.dtype"] = "any", None, torch.qint8
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", state))
    assert_same(loaded, state)


def test_names_that_would_collide_are_refused(tmp_path):
    tree = {"module._orig_mod.w": torch.zeros(1), "module.w": torch.ones(1)}
    with pytest.raises(NameCollision):
        ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))


@pytest.mark.parametrize("name", ["dtensor", "fsdp2", "sharded_tensor", "fsdp1_sharded"])
def test_one_part_of_a_distributed_tensor_is_no_state_dict(fixtures, name):
    file = fixtures / "distributed" / f"{name}_0_of_2.pth"
    with open_checkpoint(file) as checkpoint:
        wrapped = [path[-1] for path, ref in checkpoint.tensors() if isinstance(ref, TensorRef)]
    with pytest.raises(UnsupportedFormat, match="this file has only one part") as caught:
        ckptool.load_state_dict(file)
    assert any(str(name) in str(caught.value) for name in wrapped)
    assert "local" in caught.value.hint


def test_no_state_dict_at_all(tmp_path):
    with pytest.raises(NotFound):
        ckptool.load_state_dict(saved(tmp_path / "f.pt", {"epoch": 1}))


def test_options_that_are_none(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(1)})
    with pytest.raises(UsageError, match="wrappers='remove' is not 'strip' or 'keep'"):
        ckptool.load_state_dict(file, wrappers="remove")
    with pytest.raises(UsageError, match="int8"):
        ckptool.load_state_dict(file, dtype="int8")


def test_what_was_loaded_can_be_saved_and_loaded_safely(tmp_path):
    """Nothing of ours is left inside that a reader would have to import."""
    model = torch.nn.DataParallel(net())
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", model.state_dict()))
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=True), loaded)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_model_in_a_wrapper_loads_into_the_bare_one(tmp_path):
    """Its layers keep a dtype among their entries, whose names must follow the tensors'."""
    from torch.ao.quantization import quantize_dynamic

    bare = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(3, 4)), {torch.nn.Linear})
    torch.save(torch.nn.DataParallel(bare).state_dict(), tmp_path / "quantized.pth")
    found = ckptool.load_state_dict(tmp_path / "quantized.pth")
    assert str(bare.load_state_dict(found)) == "<All keys matched successfully>"


@pytest.mark.parametrize("function", [ckptool.load, ckptool.load_state_dict])
def test_arguments_of_other_loaders_are_refused_with_what_is_meant(function):
    with pytest.raises(UsageError, match="has no argument device") as caught:
        function("m.pth", device="cpu")
    assert "map_location" in caught.value.hint
    with pytest.raises(UsageError, match="has no argument weights_only") as caught:
        function("m.pth", weights_only=True)
    assert "leave it out" in caught.value.hint


def test_inert_objects_show_their_state_as_attributes_and_nothing_else(tmp_path):
    held = argparse.Namespace(lr=0.5, args="x", node=3, weight=torch.ones(2))
    hostile = argparse.Namespace(__array_interface__={"data": (0, True), "shape": (9,)})
    torch.save({"args": held, "queue": deque([4, 5]), "evil": hostile}, tmp_path / "f.pth")
    made = ckptool.load(tmp_path / "f.pth")
    args = made["args"]
    assert (args.lr, args.args, args.node) == (0.5, "x", 3)
    assert torch.equal(args.weight, torch.ones(2))
    assert vars(args).keys() == {"lr", "args", "node", "weight"}
    assert [name for name in dir(args) if not name.startswith("_")] == sorted(vars(args))
    with pytest.raises(AttributeError, match=r"Namespace has no attribute 'func'; it has lr"):
        args.func  # noqa: B018
    with pytest.raises(AttributeError, match=r"cannot set 'lr': an inert object is read-only"):
        args.lr = 1
    assert "argparse.Namespace" in repr(args)
    assert [made["queue"][at] for at in made["queue"]] == [4, 5]
    assert not hasattr(made["evil"], "__array_interface__")
    again = copy.deepcopy(args)
    assert again is not args
    assert again.lr == 0.5
    assert pickle.loads(pickle.dumps(args)).args == "x"
