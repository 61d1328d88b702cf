"""Models whose parameters are spread over ranks by `fully_shard`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptool.loading.load_into import load_into
from ckptool.loading.ranks import is_spread, spread_like


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def sharded(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_loaded(model, source):
    wanted = source.state_dict()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if is_spread(tensor) else tensor
        assert torch.equal(whole, wanted[name]), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_rank_takes_its_part_of_a_whole_file(tmp_path, device):
    source = net()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "f.pth")
    with torch.device(device):
        model = net()
    model = sharded(model)
    assert load_into(model, tmp_path / "f.pth").coverage == 1.0
    assert all(map(is_spread, model.parameters()))
    assert_loaded(model, source)


def test_parts_are_put_back(tmp_path):
    model = sharded(net())
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]

    def fail(*_):
        raise ZeroDivisionError

    model[2].register_load_state_dict_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        load_into(model, net().state_dict())
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))


def test_what_is_not_spread_stays_as_it_is():
    value = torch.ones(2)
    assert spread_like(torch.zeros(2), value) is value
    spread = sharded(net())[0].bias
    assert not is_spread(value)
    assert spread_like(spread, spread) is spread
