"""What models want: names, shapes, kinds and ties, asked without moving an element."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from ckptool.loading.load_into import load_into
from ckptool.loading.target import describe_target, on_meta
from ckptool.matching import Slot


class Net(nn.Module):
    """What state dicts have of every kind."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.first = nn.Linear(3, 4)
        self.body = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU())
        self.last = nn.Linear(4, 4)
        self.last.weight = self.body[1].weight
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        pass


def test_a_part_of_a_parameter_is_a_buffer_and_all_of_it_a_parameter():
    model = nn.Linear(2, 4)
    model.register_buffer("part", model.bias.data[:1])
    model.register_buffer("all", model.bias.data)
    slots = describe_target(model).slots
    assert (slots["part"].kind, slots["all"].kind) == ("buffer", "parameter")


def test_kinds_shapes_and_types_are_told():
    slots = describe_target(Net().half()).slots
    assert slots["scale"] == Slot((4,), "float16", "parameter")
    assert slots["body.0.running_mean"] == Slot((4,), "float16", "buffer")
    assert slots["body.0.num_batches_tracked"] == Slot((), "int64", "buffer")
    assert slots["_extra_state"] == Slot(kind="extra")
    assert "passing" not in slots


def test_the_live_tensors_come_along():
    model = Net()
    entries = describe_target(model).entries
    assert entries["first.weight"] is model.first.weight
    assert entries["body.0.running_var"] is model.body[0].running_var
    assert "_extra_state" not in entries


@pytest.mark.parametrize("meta", [False, True])
def test_ties_are_told_by_identity_or_memory(meta):
    model = Net()
    if meta:
        with torch.device("meta"):
            model = Net()
    model.view = nn.Parameter(model.first.weight.data)
    ties = {name: slot.tie for name, slot in describe_target(model).slots.items() if slot.tie}
    groups = {tie: [name for name in ties if ties[name] == tie] for tie in ties.values()}
    assert sorted(groups.values()) == [["body.1.weight", "last.weight"], ["view", "first.weight"]]


def test_parameters_without_elements_are_no_ties():
    model = nn.ParameterList([torch.empty(2, 0), torch.empty(2, 0)])
    assert {slot.tie for slot in describe_target(model).slots.values()} == {None}


def test_a_lazy_model_has_no_shapes_yet():
    target = describe_target(nn.LazyLinear(2))
    assert target.slots == {
        "weight": Slot(None, "float32", "parameter"),
        "bias": Slot(None, "float32", "parameter"),
    }


class Detaching(nn.Module):
    """Has a `state_dict` of its own, as some frameworks' models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.BatchNorm1d(2)

    def state_dict(self):
        return {f"own.{name}": tensor for name, tensor in self.net.state_dict().items()}


def test_an_overridden_state_dict_is_asked():
    slots = describe_target(Detaching()).slots
    kinds = {name: slot.kind for name, slot in slots.items()}
    assert kinds["own.weight"] == "parameter"
    assert kinds["own.running_mean"] == "buffer"


def test_parametrizations_and_hooks_have_the_names_that_torch_gives():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
    assert list(describe_target(model).slots) == list(model.state_dict())


WRAPPERS = [
    lambda net: net, nn.DataParallel, torch.compile, AveragedModel,
    lambda net: torch.compile(nn.DataParallel(net)),
]  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_label_is_that_of_the_model_inside(wrap):
    assert describe_target(wrap(Net())).label == "Net"
    target = describe_target(wrap(Net()))
    assert target.label == "Net"
    assert dict(target.metadata) == dict(wrap(Net()).state_dict()._metadata)


def test_a_model_with_a_real_child_called_module_keeps_its_name():
    assert describe_target(nn.Sequential(Net())).label == "Sequential"
    model = nn.Sequential()
    model.module, model.other = Net(), nn.ReLU()
    assert describe_target(model).label == "Sequential"


@pytest.fixture
def group():
    """A group of this one process, which FSDP asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model, **how):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **how)


def twice(model, **how):
    model.body = sharded(model.body, **how)
    model.last = nn.Linear(4, 4)
    return sharded(model, **how)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [sharded, twice, lambda model, **how: torch.compile(sharded(model, **how))],
    ids=["once", "twice", "compiled"],
)
def test_a_sharded_model_is_asked_without_gathering(wrap, original, monkeypatch):
    model = wrap(Net(), use_orig_params=original)
    whole = model.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", None)
        patch.setattr(dist, "_all_gather_base", None, raising=False)
        target = describe_target(model)
    assert target.slots.keys() == whole.keys()
    for name, slot in target.slots.items():
        if slot.kind != "extra":
            assert (slot.shape, slot.dtype) == (
                tuple(whole[name].shape),
                "float32" if whole[name].is_floating_point() else "int64",
            )
    assert dict(target.metadata) == dict(whole._metadata)
    ties = [name for name, slot in target.slots.items() if slot.tie]
    assert sorted(name.removeprefix("_orig_mod.") for name in ties) == (
        [] if wrap is twice else ["body.1.weight", "last.weight"]
    )


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_module_that_hides_nothing_may_be_called_as_those_that_do(name):
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(2, 2))
    assert [*describe_target(model).slots] == [f"{name}.weight", f"{name}.bias"]
    assert load_into(model, model.state_dict()).fits


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


def test_nothing_is_allocated():
    assert {value.is_meta for value in on_meta(Tied).state_dict().values()} == {True}


def test_what_wants_numbers_is_not_built():
    assert on_meta(lambda: nn.Linear(torch.ones(1).int().item(), 1)) is None


def test_a_state_dict_is_as_it_is_made():
    assert list(on_meta(lambda: {"a": torch.ones(2)})) == ["a"]
