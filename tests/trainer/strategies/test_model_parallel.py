"""Layers over several devices: here over the CPU, several times."""

import itertools
import random

import pytest
import torch
from torch import nn

from ckptool.errors import TrainingError
from ckptool.trainer.strategies.base import find_blocks
from ckptool.trainer.strategies.model_parallel import partition_stages
from tests.trainer.runs import BytesDone, Crash, crash_at, differences, held, losses_of, net, run
from tests.trainer.strategies.fsdp_scenes import AGREEING, tied

TWO = {"strategy": "model-parallel", "devices": ("cpu", "cpu")}


@pytest.mark.parametrize("kind", AGREEING)
def test_losses_are_those_of_one_device_to_the_bit(tmp_path, kind):
    for name, spread in (("one", {}), ("two", TWO)):
        found = losses_of(tmp_path / name, model=net(), **AGREEING[kind], **spread)
        assert len(found) == 27
    one, two = (held(tmp_path / name / "last.pth") for name in ("one", "two"))
    for section in ("state_dict", "optimizer", "ema", "scaler"):
        assert not differences(one.get(section), two.get(section))


def test_a_run_goes_on_over_other_devices(tmp_path):
    run(tmp_path / "one", model=tied())
    with pytest.raises(Crash):
        run(tmp_path / "two", crash_at(5), model=tied(), save_every=1, **TWO)
    run(tmp_path / "two", model=tied(), resume="auto", save_every=1)
    one, two = (torch.load(tmp_path / name / "last.pth")["state_dict"] for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_every_stage_tells_what_it_is_given_and_gives(tmp_path):
    told = BytesDone()
    run(tmp_path, told, max_steps=1, trace_batches=True, **TWO)
    inside = [event for event in told.of("Traced") if not event.outside]
    assert [(event.inputs, event.outputs) for event in inside[:2]] == [
        ((4, 3), (4, 8)),
        ((4, 8), (4, 1)),
    ]


@pytest.mark.parametrize("save", ["wrapped", "unwrapped", "module"])
def test_other_kinds_of_checkpoints_are_written(tmp_path, save):
    run(tmp_path, epochs=1, save=save, **TWO)
    tree = torch.load(tmp_path / "last.pth", weights_only=save != "module")
    if save == "module":
        assert tree(torch.ones(2, 3)).shape == (2, 1)
    else:
        net().load_state_dict(tree["state_dict" if save == "wrapped" else "state_dict_model"])


@pytest.mark.parametrize(
    ("model", "count", "told"),
    [
        (nn.Linear(3, 1), 2, "1 layers with parameters, too few for 2"),
        (net(), 3, "2 layers with parameters, too few for 3"),
    ],
)
def test_a_model_of_too_few_layers_is_refused(tmp_path, model, count, told):
    with pytest.raises(TrainingError, match=told):
        run(tmp_path, model=model, strategy="model-parallel", devices=("cpu",) * count)


@pytest.mark.parametrize("devices", [(), ("cpu",)])
def test_less_than_two_devices_are_refused(tmp_path, devices):
    if torch.cuda.device_count() > 1 and not devices:
        pytest.skip("there are two GPUs")
    with pytest.raises(TrainingError, match="several devices") as caught:
        run(tmp_path, strategy="model-parallel", devices=devices)
    assert "--devices cpu,cpu" in caught.value.hint


def test_a_device_without_memory_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="cannot train on 'meta', which has no memory"):
        run(tmp_path, strategy="model-parallel", devices=("cpu", "meta"))


class Shared(nn.Module):
    """A head with the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Linear(3, 3), nn.Linear(3, 30)
        self.back, self.head = nn.Linear(30, 3), nn.Linear(3, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.back(self.middle(self.embedding(x)))).sum(1, keepdim=True)


def test_layers_that_share_a_parameter_are_on_one_device(tmp_path):
    told = BytesDone()
    run(tmp_path, told, model=Shared(), max_steps=1, trace_batches=True, **TWO)
    inside = [event for event in told.of("Traced") if not event.outside]
    assert [event.inputs[1] for event in inside[:3]] == [3, 30, 3]


def test_the_largest_stage_is_as_small_as_can_be():
    draw = random.Random(3)
    for _ in range(200):
        sizes = [draw.choice((0, 1, 2, 5, 9)) for _ in range(draw.randint(2, 6))]
        heavy = [at for at, size in enumerate(sizes) if size]
        if len(heavy) < 2:
            continue
        count = draw.randint(2, min(4, len(heavy)))
        found = partition_stages(sizes, count)
        assert found == sorted(found)
        assert {found[at] for at in heavy} == set(range(count))
        others = itertools.combinations_with_replacement(range(count), len(sizes))
        allowed = [one for one in others if {one[at] for at in heavy} == set(range(count))]
        assert largest(sizes, found) == min(largest(sizes, one) for one in allowed)


def largest(sizes, places):
    stages_here = set(places)
    return max(
        sum(size for size, place in zip(sizes, places, strict=True) if place == one)
        for one in stages_here
    )


def test_blocks_are_what_is_called_one_after_the_other():
    layers = [nn.Linear(2, 2) for _ in range(4)]
    body = nn.Sequential(layers[0], nn.Sequential(layers[1], nn.ReLU()), nn.ModuleList(layers[2:]))
    assert [one for one in find_blocks(body) if isinstance(one, nn.Linear)] == layers
    assert find_blocks(nn.ModuleDict({"model": body})) == find_blocks(body)
    assert find_blocks(layers[0]) == [layers[0]]
