"""Who looks at which tensors while torch loads them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptool.loading.live.watching import Watch, overrides_loading, watched


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1))


def watches(model):
    found = watched(model)
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: found[id(tensor)] for name, tensor in every}


def names(model):
    return {name for name, watch in watches(model).items() if watch is Watch.NONE}


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
    assert watches(model)["0.bias"] is watches(model)["2.weight"] is Watch.BEFORE
    assert watches(model)["1.bias"] is Watch.AFTER
    plain._load_from_state_dict = plain._load_from_state_dict
    assert names(model) == set()


def test_a_module_in_two_places_is_watched_where_one_of_them_is():
    model = net()
    watching = nn.Sequential(model[1])
    watching.register_load_state_dict_pre_hook(lambda *_: None)
    model.append(watching)
    assert names(model) == {name for name in names(net()) if name.startswith("0.")}


class Extra(nn.Sequential):
    def set_extra_state(self, state):
        pass


def test_a_hook_after_loading_sees_less_than_one_before():
    model = net()
    model.register_load_state_dict_post_hook(lambda *_: None)
    model[0].register_load_state_dict_pre_hook(lambda *_: None)
    found = watches(model)
    assert {name for name in found if found[name] is Watch.BEFORE} == {
        name for name in found if name.startswith("0.")
    }
    assert found["1.weight"] is found["1.bias"] is Watch.AFTER


def test_an_extra_state_has_to_do_with_its_own_module_alone():
    model = Extra(net(), Extra(nn.Linear(1, 1)))
    model.register_buffer("own", torch.ones(1))
    found = watches(model)
    assert found.pop("own") is Watch.AFTER
    assert set(found.values()) == {Watch.ABOVE}
    model[1].register_load_state_dict_post_hook(lambda *_: None)
    assert watches(model)["1.0.weight"] is Watch.AFTER


def test_the_hooks_of_activation_checkpointing_change_names_alone():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert len(names(model)) == 2


def test_models_that_load_in_their_own_way():
    class Own(nn.Linear):
        def load_state_dict(self, *rest, **options):
            return super().load_state_dict(*rest, **options)

    assert overrides_loading(Own(1, 1))
    assert set(watches(Own(1, 1)).values()) == {Watch.ALWAYS}
    patched = nn.Linear(1, 1)
    assert not overrides_loading(patched)
    patched.load_state_dict = patched.load_state_dict
    assert overrides_loading(patched)
