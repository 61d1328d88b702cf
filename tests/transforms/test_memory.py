"""The transforms on dicts of torch tensors."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ckptool import add_module, remap, rename, strip_module
from ckptool.errors import CheckpointWarning, DeviceError, NameCollision
from ckptool.transforms import table_rule
from ckptool.transforms.memory import _Relocation

Pair = namedtuple("Pair", "a b")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())


def same(left, right):
    return list(left) == list(right) and all(left[name] is right[name] for name in left)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.DataParallel,
        torch.compile,
        lambda net: torch.nn.DataParallel(torch.compile(net)),
        lambda net: torch.compile(torch.nn.DataParallel(net)),
    ],
)
def test_a_wrapped_models_dict_becomes_that_of_the_model_inside(wrap):
    net = network()
    plain, wrapped = net.state_dict(), wrap(net).state_dict()
    names, metadata = list(wrapped), dict(wrapped._metadata)
    made = strip_module(wrapped)
    assert type(made) is OrderedDict
    assert list(made) == list(plain)
    assert all(made[new] is wrapped[old] for old, new in zip(names, made, strict=True))
    assert made._metadata == plain._metadata
    assert type(made._metadata) is OrderedDict
    assert network().load_state_dict(made).missing_keys == []
    assert (list(wrapped), dict(wrapped._metadata)) == (names, metadata)


def test_adding_gives_what_data_parallel_takes():
    plain = network().state_dict()
    made = add_module(plain)
    wrapped = torch.nn.DataParallel(network()).state_dict()
    assert list(made) == list(wrapped)
    assert made._metadata == wrapped._metadata
    torch.nn.DataParallel(network()).load_state_dict(made)
    assert same(strip_module(made), plain)


def test_a_checkpoint_in_memory_is_treated_alike():
    model = torch.nn.DataParallel(network())
    optimizer = torch.optim.Adam(model.named_parameters())
    args, array = SimpleNamespace(lr=0.1), np.zeros(3)
    saved = {
        "epoch": 3,
        "args": args,
        "array": array,
        "pair": Pair(1, torch.zeros(1)),
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": defaultdict(None, {"module.w": torch.zeros(2)}),
    }
    made = strip_module(saved)
    assert list(made) == list(saved)
    assert list(made["state_dict"]) == list(network().state_dict())
    assert made["optimizer"]["param_groups"][0]["param_names"] == [
        name for name, _ in network().named_parameters()
    ]
    assert saved["optimizer"]["param_groups"][0]["param_names"][0].startswith("module.")
    assert made["args"] is args
    assert made["array"] is array
    assert made["pair"] is saved["pair"]
    assert type(made["ema"]) is defaultdict
    assert list(made["ema"]) == ["w"]
    assert list(saved["ema"]) == ["module.w"]


def test_what_is_shared_and_what_leads_back_to_itself():
    shared = {"module.w": torch.zeros(2)}
    saved = {"a": shared, "b": shared, "list": [1]}
    saved["self"] = saved
    made = strip_module(saved)
    assert made["a"] is made["b"]
    assert made["self"] is made


def test_options_and_errors_are_those_of_files():
    saved = {"module.module.w": torch.zeros(2)}
    assert list(strip_module(saved, levels=1)) == ["module.w"]
    assert list(add_module(saved, wrapper="_orig_mod")) == ["_orig_mod.module.module.w"]
    with pytest.raises(NameCollision):
        strip_module({"a._orig_mod.w": torch.zeros(1), "a.w": torch.zeros(1)})


def test_numpy_arrays_are_weights_too():
    assert list(strip_module({"module.w": np.zeros((2, 2))})) == ["w"]


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*nested:UserWarning")
def test_other_dtypes_and_layouts_do_not_stand_in_the_way():
    saved = {
        "module.sparse": torch.eye(2).to_sparse(),
        "module.half": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "module.nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "module.quantized": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    }
    assert list(strip_module(saved)) == ["sparse", "half", "nested", "quantized"]


def test_tensors_that_stay_are_the_same_objects():
    saved = {"w": torch.zeros(2), "device": torch.device("cuda:1"), "n": 1}
    made = remap(saved, {"cuda:1": "cpu", "cuda:2": "cpu"})
    assert made["w"] is saved["w"]
    assert made["device"] == torch.device("cpu")
    assert saved["device"] == torch.device("cuda:1")
    assert made["n"] == 1


def test_a_device_that_torch_does_not_have_here_is_one_sentence():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="torch cannot use cuda:0 here"):
        remap({"w": torch.zeros(2)}, {"cpu": "cuda:0"})
    with pytest.raises(DeviceError, match="is not a device"):
        remap({}, {"*": "gpu"})


def test_what_shared_a_storage_shares_the_new_one():
    weight = torch.arange(6.0)
    every = [weight[1:3], weight[4:], torch.nn.Parameter(weight), torch.zeros(2)]
    # `meta` stands in for a GPU: users cannot ask for it, and torch has it everywhere.
    relocation = _Relocation(lambda tag: "meta", every)
    first, second, parameter, alone = map(relocation.move, every)
    assert {value.device.type for value in (first, second, parameter, alone)} == {"meta"}
    storages = [value.untyped_storage()._cdata for value in (first, second, parameter, alone)]
    assert storages[0] == storages[1] == storages[2] != storages[3]
    assert (first.storage_offset(), second.storage_offset(), first.shape) == (1, 4, (2,))
    assert isinstance(parameter, torch.nn.Parameter)
    assert relocation.move("cpu") == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moving_keeps_ties_parameters_and_metadata():
    state = network().cuda().state_dict(keep_vars=True)
    weight = torch.arange(6.0, device="cuda:0")
    state["tied"], state["view"] = weight, weight[2:4]
    made = remap(state, {"cuda:*": "cpu"})
    assert {str(value.device) for value in made.values()} == {"cpu"}
    assert made["tied"].untyped_storage().data_ptr() == made["view"].untyped_storage().data_ptr()
    assert made["view"].tolist() == [2.0, 3.0]
    assert isinstance(made["0.weight"], torch.nn.Parameter)
    assert made["0.weight"].requires_grad
    assert made._metadata == state._metadata
    for name in made:
        assert torch.equal(made[name], state[name].cpu())


def test_transforms_are_planned_without_torch(tmp_path):
    torch.save({"w": torch.ones(3), "n": torch.ones(3).int()}, tmp_path / "m.pth")
    code = """if True:
        import sys
        import ckptool.transforms
        assert "torch" not in sys.modules, "names"
        with ckptool.open(sys.argv[1]) as checkpoint:
            made = ckptool.transforms.Cast("bf16")(checkpoint)
        assert made.root["w"].dtype == "bfloat16"
        assert "torch" not in sys.modules, "cast"
        ckptool.average([sys.argv[1]] * 2, sys.argv[1] + ".mean", dry_run=True)
        assert "torch" not in sys.modules, "average"
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "m.pth"], check=True)


def test_renaming_in_memory():
    plain = network().state_dict()
    made = rename(plain, [r"^0\.=>first."], prefixes=["1=norm"])
    assert list(made)[:3] == ["first.weight", "first.bias", "norm.weight"]
    assert all(made[new] is plain[old] for old, new in zip(plain, made, strict=True))
    assert list(made._metadata) == ["", "first", "norm", "2"]
    assert list(plain._metadata) == ["", "0", "1", "2"]
    swapped = rename({"a": torch.ones(1), "b": torch.zeros(1)}, [table_rule({"a": "b", "b": "a"})])
    assert swapped["b"].item() == 1


def test_a_rule_that_matches_nothing_in_memory_is_a_warning():
    with pytest.warns(CheckpointWarning, match=r"conv=>x matches no key") as caught:
        rename(network().state_dict(), ["conv=>x"])
    assert caught[0].filename == __file__
    with pytest.raises(NameCollision, match=r"'a' and 'b' would both become 'b'"):
        rename({"a": torch.ones(1), "b": torch.ones(1)}, ["a=>b"])
