"""State dicts as matching sees them, from files and from memory."""

import gc
import weakref
from collections import OrderedDict
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import AmbiguousName, CheckpointWarning, NotFound, UnsupportedFormat, UsageError
from ckptool.loading.source import open_state_dict
from ckptool.matching import Slot
from tests.loading.bits import saved


def net():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    return model


TIED = ("0.weight", "2.weight")


def test_what_facts_of_modules_share_is_made_once(tmp_path):
    state = OrderedDict(a=torch.ones(1))
    fact = [1.0]
    state._metadata = {"": {"version": fact}, "a": {"version": fact}}
    with open_state_dict(saved(tmp_path / "f.pt", {"model": state})) as file:
        assert file.metadata["a"] == {"version": [1.0]}
        assert file.metadata["a"]["version"] is file.metadata[""]["version"]


def test_memory_and_file_say_the_same(tmp_path):
    whole = {"model": net().state_dict(), "epoch": 3}
    with open_state_dict(whole) as memory, open_state_dict(saved(tmp_path / "f.pt", whole)) as file:
        assert list(memory.slots) == list(file.slots) == list(whole["model"])
        for name, slot in memory.slots.items():
            other = file.slots[name]
            assert (slot.shape, slot.dtype, slot.kind) == (other.shape, other.dtype, other.kind)
            assert (slot.tie is not None, other.tie is not None) == 2 * (name in TIED,)
        assert memory.metadata == file.metadata == whole["model"]._metadata
        assert (memory.file, file.file) == ("", str(tmp_path / "f.pt"))


def test_names_of_one_tensor_are_tied_in_memory():
    model = net()
    with open_state_dict(model.state_dict()) as state:
        ties = {name: slot.tie for name, slot in state.slots.items() if slot.tie is not None}
        assert list(ties) == ["0.weight", "2.weight"]
        assert len(set(ties.values())) == 1


def test_views_of_one_storage_are_no_ties():
    whole = torch.zeros(4)
    with open_state_dict({"a": whole[:2], "b": whole[2:], "c": whole[:2]}) as state:
        a, b, c = (slot.tie for slot in state.slots.values())
        assert a == c != b is None


def test_values_in_memory_are_the_objects_themselves():
    extra = {"deep": [1, 2]}
    state_dict = OrderedDict(weight=torch.ones(2), **{"fc._extra_state": extra})
    with open_state_dict(state_dict) as state:
        assert state.value("weight") is state_dict["weight"]
        assert state.value("fc._extra_state") is extra
        assert state.slots["fc._extra_state"] == Slot(kind="extra")
        assert (state.ref("weight"), state.ref("fc._extra_state")) == (None, None)


def test_values_of_a_file_are_made_once_and_share_what_they_shared(tmp_path):
    with open_state_dict(saved(tmp_path / "f.pt", net().state_dict())) as state:
        one, other = state.value("0.weight"), state.value("2.weight")
        assert state.value("0.weight") is one
        assert one.data_ptr() == other.data_ptr()
        assert state.ref("0.weight").shape == (4, 3)


def test_what_was_made_is_let_go(tmp_path):
    with open_state_dict(saved(tmp_path / "f.pt", net().state_dict())) as state:
        gone = weakref.ref(state.value("0.weight"))
        state.close()
        gc.collect()
        assert gone() is None
        assert state.value("0.weight").shape == (4, 3)


def test_any_node_of_the_tree_can_be_made(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": object()}
    with open_state_dict(whole) as state:
        assert state.slots.keys() == whole["model"].keys()
        made = state.make_node(state.tree.root["optimizer"])
        assert made["state"][0]["exp_avg"] is whole["optimizer"]["state"][0]["exp_avg"]
        assert made["param_groups"] == whole["optimizer"]["param_groups"]
        assert made["param_groups"][0] is not whole["optimizer"]["param_groups"][0]
        assert state.make_node(state.tree.root["odd"]) is whole["odd"]
    del whole["odd"]
    with open_state_dict(saved(tmp_path / "f.pt", whole)) as state:
        made = state.make_node(state.tree.root["optimizer"])
        assert torch.equal(made["state"][0]["exp_avg"], whole["optimizer"]["state"][0]["exp_avg"])


def test_plain_values_beside_the_tensors_are_no_entries():
    with open_state_dict({"weight": torch.ones(2), "epoch": 3}) as state:
        assert list(state.slots) == ["weight"]
        assert state.plain_values == ("epoch",)


def test_an_open_checkpoint_or_a_part_of_it_will_do(tmp_path):
    model = net()
    with ckptool.open(saved(tmp_path / "f.pt", {"a": model.state_dict()})) as checkpoint:
        for source in (checkpoint, checkpoint["a"], dict(checkpoint["a"])):
            with open_state_dict(source) as state:
                assert torch.equal(state.value("1.running_var"), model[1].running_var)


def test_other_mappings_and_arrays_and_modules_will_do():
    array = numpy.ones(3, numpy.float32)
    with open_state_dict(MappingProxyType({"a.b": array})) as state:
        assert state.slots["a.b"] == Slot((3,), "float32")
        assert torch.equal(state.value("a.b"), torch.ones(3))
    model = net()
    with open_state_dict(model) as state:
        assert list(state.slots) == list(model.state_dict())
    with open_state_dict({"net": model, "epoch": 1}) as state:
        assert list(state.slots) == list(model.state_dict())


@pytest.mark.parametrize("empty", [{}, nn.ReLU().state_dict(), nn.ReLU()])
def test_a_state_dict_without_tensors_is_one(empty):
    with open_state_dict(empty) as state:
        assert state.slots == {}


def test_a_lazy_parameter_has_no_shape_yet():
    with open_state_dict(nn.LazyLinear(3).state_dict()) as state:
        assert state.slots["weight"].shape is None
    with open_state_dict({"scalar": torch.tensor(1.0)}) as state:
        assert state.slots["scalar"].shape == ()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_tensors_that_are_not_plain_have_a_slot():
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, 3, device="meta"),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    }
    with open_state_dict(odd) as state:
        assert {name: slot.shape for name, slot in state.slots.items()} == {
            "sparse": (3, 3), "quantized": (2,), "meta": (2, 3), "conjugate": (2,)
        }  # fmt: skip
        assert all(state.value(name) is tensor for name, tensor in odd.items())


def test_a_freed_storage_is_no_corrupt_one():
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with open_state_dict({"a.b": freed}) as state:
        assert state.slots["a.b"].shape == (5,)


def test_a_key_chooses_and_several_are_not_guessed_between():
    both = {"model": net().state_dict(), "ema": net().state_dict()}
    with pytest.raises(AmbiguousName), open_state_dict(both):
        pass
    with open_state_dict(both, key="ema") as state:
        assert state.value("1.bias") is both["ema"]["1.bias"]


def test_what_has_no_state_dict_is_said_to_have_none():
    with pytest.raises(NotFound), open_state_dict({"epoch": 3}):
        pass
    with pytest.raises(UsageError, match="SimpleNamespace"), open_state_dict(SimpleNamespace()):
        pass


def test_a_module_that_only_its_class_can_read_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), SlottedModule())
    with (
        pytest.warns(CheckpointWarning, match="submodule 1"),
        open_state_dict(saved(tmp_path / "f.pt", model)) as state,
    ):
        assert list(state.slots) == ["0.weight", "0.bias"]


class SlottedModule(nn.Module):
    """Pickles as its class wants."""

    def __getstate__(self):
        return (1, 2)

    def __setstate__(self, state):
        super().__init__()


def test_a_part_of_a_tensor_is_refused_when_it_is_wanted(fixtures):
    with open_state_dict(fixtures / "distributed" / "dtensor_0_of_2.pth") as state:
        name = next(iter(state.slots))
        with pytest.raises(UnsupportedFormat, match="DTensor"):
            state.value(name)


def test_where_tensors_go_and_whether_they_are_mapped(tmp_path):
    file = saved(tmp_path / "f.pt", net().state_dict())
    with open_state_dict(file, map_location="meta") as state:
        assert state.value("0.weight").is_meta
    with open_state_dict(file, mmap=True) as state:
        mapped = state.value("0.weight")
    assert torch.equal(mapped, torch.load(file)["0.weight"])


def test_tensors_alone_are_a_state_dict_whatever_they_hold(tmp_path):
    codes = {"codes": torch.zeros(4, dtype=torch.uint8), "more": torch.ones(2, dtype=torch.uint8)}
    with open_state_dict(saved(tmp_path / "f.pt", codes)) as state:
        assert list(state.slots) == ["codes", "more"]
    with open_state_dict(saved(tmp_path / "g.pt", {"rng": codes}), key="rng") as state:
        assert list(state.slots) == ["codes", "more"]
    with pytest.raises(NotFound), open_state_dict(saved(tmp_path / "g.pt", {"rng": codes})):
        pass


def test_a_tensor_under_what_is_no_text_is_refused(tmp_path):
    state_dict = net().state_dict()
    state_dict[5] = torch.ones(1)
    for source in (state_dict, {**state_dict}, saved(tmp_path / "f.pt", state_dict)):
        with pytest.raises(NotFound), open_state_dict(source):
            pass
    with pytest.raises(NotFound, match="a tensor has the key 5, which is not a string"):
        ckptool.match(state_dict, net())


def test_metadata_that_holds_tensors_is_made(tmp_path):
    state = torch.nn.Linear(2, 1).state_dict()
    state._metadata[""]["scale"] = torch.tensor([3.0])
    torch.save(state, tmp_path / "model.pth")
    seen = {}

    class Net(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.update(local_metadata)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    ckptool.load_into(Net(2, 1), tmp_path / "model.pth")
    assert torch.equal(seen["scale"], torch.tensor([3.0]))
