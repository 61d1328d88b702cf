"""The walk that takes the place of `load_state_dict` where names are many: the same steps."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from ckptool.loading.live import torch_loading
from ckptool.loading.live.torch_loading import torch_load


class Told(nn.Linear):
    """Remembers what it is called with."""

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        self.told = (sorted(state), prefix, dict(metadata), strict)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(Told(2, 2), Told(2, 2))
        self.ab = Told(2, 2)
        self.none = None
        self.again = self.ab
        self.seen = []
        self.register_load_state_dict_post_hook(
            lambda module, keys: module.seen.append(
                (sorted(keys.missing_keys), sorted(keys.unexpected_keys))
            )
        )


def state_of(net):
    state = net.state_dict()
    state["a.1.more"] = state["else"] = torch.ones(1)
    del state["ab.bias"], state["again.bias"]
    return OrderedDict(state), {"a.1": {"version": 7}}


@pytest.mark.parametrize("many", [1, 1000])
def test_the_walk_does_as_torch_does(monkeypatch, many):
    monkeypatch.setattr(torch_loading, "_MANY", many)
    source, model = Net(), Net()
    state, metadata = state_of(source)
    missing, unexpected = torch_load(model, state, metadata)
    assert missing == ["ab.bias", "again.bias"]
    assert sorted(unexpected) == ["a.1.more", "else"]
    assert model.a[1].told == (["a.1.bias", "a.1.more", "a.1.weight"], "a.1.", {"version": 7}, True)
    assert model.ab.told == (["again.weight"], "again.", {}, True)
    assert model.seen == [(["ab.bias", "again.bias"], ["a.1.more", "else"])]
    assert torch.equal(model.a[0].weight, source.a[0].weight)


@pytest.mark.parametrize("many", [1, 1000])
def test_errors_are_those_of_torch(monkeypatch, many):
    monkeypatch.setattr(torch_loading, "_MANY", many)
    state = OrderedDict(nn.Linear(3, 2).state_dict())
    with pytest.raises(RuntimeError) as caught:
        torch_load(nn.Linear(2, 2), state, None)
    assert str(caught.value) == (
        "Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight: copying a param "
        "with shape torch.Size([2, 3]) from checkpoint, the shape in current model is "
        "torch.Size([2, 2])."
    )


def test_a_loading_that_answers_nothing_is_no_error():
    class Silent(nn.Linear):
        def load_state_dict(self, *rest, **options):
            super().load_state_dict(*rest, **options)

    assert torch_load(Silent(1, 1), OrderedDict(), None) == ([], [])
