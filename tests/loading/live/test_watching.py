"""Who looks at which tensors while torch loads them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptool.loading.live.watching import Watch, overrides_loading, runs_code, watched


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1))


def watches(model, by_all=False):
    found = watched(model, by_all=by_all)
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
def test_a_hook_may_look_at_anything(when):
    model = net()
    assert not runs_code(model)
    getattr(model[0], f"register_load_state_dict_{when}_hook")(lambda *_: None)
    assert runs_code(model)
    assert watches(model, by_all=True)["1.weight"] is Watch.AFTER


def test_a_loading_of_its_own_and_an_extra_state_are_code():
    class Own(nn.Linear):
        def _load_from_state_dict(self, *rest):
            super()._load_from_state_dict(*rest)

    class Extra(nn.Linear):
        def set_extra_state(self, state):
            pass

    class Setting(nn.Linear):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)

    assert runs_code(nn.Sequential(Own(1, 1)))
    assert runs_code(nn.Sequential(Extra(1, 1)))
    assert watches(nn.Sequential(Own(1, 1)))["0.bias"] is Watch.BEFORE
    assert not runs_code(Setting(1, 1))
    assert runs_code(Setting(1, 1), assigns=True)
    plain = nn.Linear(1, 1)
    plain._load_from_state_dict = plain._load_from_state_dict
    assert runs_code(plain)
    assert watches(plain)["bias"] is Watch.BEFORE


def test_a_class_of_tensors_may_be_code():
    class Plain(nn.Parameter):
        pass

    class Asked(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    for kind, runs in ((Plain, False), (Asked, True)):
        model = nn.Linear(1, 1)
        model.weight = kind(torch.ones(1, 1))
        assert runs_code(model) is runs


def test_code_of_torchs_own_looks_at_its_module_alone():
    lazy = nn.Sequential(nn.LazyLinear(1), nn.Linear(1, 1))
    assert not runs_code(lazy)
    assert watches(lazy)["0.weight"] is Watch.BEFORE
    assert watches(lazy)["1.weight"] is Watch.NONE
    normed = nn.Sequential(nn.utils.spectral_norm(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert not runs_code(normed)
    assert names(normed) == {"1.weight", "1.bias"}
    named = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)))
    assert not runs_code(named)
    assert len(names(named)) == 3
    other = nn.Linear(1, 1)
    named.register_load_state_dict_post_hook(other.register_forward_hook)  # torch's, of another
    assert runs_code(named)


def test_an_optimizer_with_hooks_may_look_at_the_model():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    assert not runs_code(model, optimizers=[optimizer])
    optimizer.register_load_state_dict_post_hook(lambda *_: None)
    assert runs_code(model, optimizers=[optimizer])


def test_a_module_in_two_places_is_watched_where_one_of_them_is():
    model = net()
    watching = nn.Sequential(model[1])
    watching.register_load_state_dict_pre_hook(lambda *_: None)
    model.append(watching)
    assert names(model) == {name for name in names(net()) if name.startswith("0.")}


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
