"""Which tensors no hook of torch's looks at while they are loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptool.loading.filling.watching import overrides_loading, unwatched


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1))


def names(model):
    found = unwatched(model)
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in every if id(tensor) in found}


def names_below(model, prefix):
    return {name for name in names(net()) if not name.startswith(prefix)}


def test_a_plain_model_is_not_watched():
    assert len(names(net())) == 9
    assert len(names(nn.DataParallel(net()))) == 9
    assert len(names(torch.compile(net()))) == 9


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_watches_its_module_and_what_is_inside(when):
    model = net()
    getattr(model[0], f"register_load_state_dict_{when}_hook")(lambda *_: None)
    assert names(model) == {"1.weight", "1.bias"}
    getattr(model, f"register_load_state_dict_{when}_hook")(lambda *_: None)
    assert names(model) == set()


def test_a_loading_of_its_own_and_an_extra_state_watch():
    class Own(nn.Linear):
        def _load_from_state_dict(self, *rest):
            super()._load_from_state_dict(*rest)

    class Extra(nn.Linear):
        def set_extra_state(self, state):
            pass

    plain = nn.Linear(1, 1)
    model = nn.Sequential(Own(1, 1), Extra(1, 1), nn.LazyLinear(1), plain)
    assert names(model) == {"3.weight", "3.bias"}
    plain._load_from_state_dict = plain._load_from_state_dict
    assert names(model) == set()


def test_a_module_in_two_places_is_watched_where_one_of_them_is():
    model = net()
    watching = nn.Sequential(model[1])
    watching.register_load_state_dict_pre_hook(lambda *_: None)
    model.append(watching)
    assert names(model) == {name for name in names(net()) if name.startswith("0.")}


def test_the_hooks_of_activation_checkpointing_change_names_alone():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert len(unwatched(model)) == 2


def test_models_that_load_in_their_own_way():
    class Own(nn.Linear):
        def load_state_dict(self, *rest, **options):
            return super().load_state_dict(*rest, **options)

    assert overrides_loading(Own(1, 1))
    assert unwatched(Own(1, 1)) == frozenset()
    patched = nn.Linear(1, 1)
    assert not overrides_loading(patched)
    patched.load_state_dict = patched.load_state_dict
    assert overrides_loading(patched)
