"""The moving average of the weights, beside torch's."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptool.trainer.tuning import Average
from tests.trainer.runs import held, net, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_that_of_torch(dtype):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)
    ours = Average(model, 0.9)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(model)  # torch's begins with its first update
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        ours.update()
        reference.update_parameters(model)
    wanted = reference.module.state_dict()
    assert list(ours.state()) == list(wanted)
    assert all(torch.equal(one, wanted[name]) for name, one in ours.state().items())


def test_its_checkpoint_loads_into_the_bare_model(tmp_path):
    run(tmp_path, ema=0.5, epochs=1)
    average = held(tmp_path / "last.pth")["ema"]
    model = net(seed=1)
    model.load_state_dict(average)
    assert not torch.equal(
        average["0.weight"], held(tmp_path / "last.pth")["state_dict"]["0.weight"]
    )


def test_an_average_of_another_model_is_none():
    average = Average(net(), 0.9)
    before = {name: one.clone() for name, one in average.state().items()}
    assert not average.restore({"other.weight": torch.zeros(1)})
    assert not average.restore({})
    assert all(torch.equal(one, before[name]) for name, one in average.state().items())


def test_tied_weights_are_averaged_under_both_names():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    average = Average(model, 0.5)
    first = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update()
    for one in average.state().values():
        torch.testing.assert_close(one, first + 0.5)
