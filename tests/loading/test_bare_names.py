"""Names of live models without their wrappers, by what the modules are."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckptool.errors import NameCollision
from ckptool.loading.save import _counters, _renamed_state, bare_names


def net():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))


def around(outer, inner):
    return lambda model: outer(inner(model))


def inside(wrapper, times=1):
    def wrapped(model):
        for _ in range(times):
            model[1] = wrapper(model[1])
        return model

    return wrapped


class ModelEmaV2(torch.nn.Module):
    """As timm has it."""

    def __init__(self, model):
        super().__init__()
        self.module = model


class _LightningModuleWrapperBase(torch.nn.Module):
    """As Lightning has it."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = model


WRAPPINGS = {
    "parallel": torch.nn.DataParallel,
    "compiled": torch.compile,
    "average": AveragedModel,
    "average of parallel": around(AveragedModel, torch.nn.DataParallel),
    "compiled average": around(torch.compile, AveragedModel),
    "checkpointed": checkpoint_wrapper,
    "lightning": around(_LightningModuleWrapperBase, torch.nn.DataParallel),
    "timm": ModelEmaV2,
    "parallel inside": inside(torch.nn.DataParallel, times=2),
    "compiled inside": inside(torch.compile),
    "checkpointed inside": inside(checkpoint_wrapper, times=2),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_wrappers_go_from_tensors_parameters_and_modules(wrapping):
    plain, model = net(), WRAPPINGS[wrapping](net())
    bare = bare_names(model)
    state = _renamed_state(model.state_dict(), bare)
    state.pop("n_averaged", None)
    assert list(state) == list(plain.state_dict())
    assert state._metadata == plain.state_dict()._metadata
    names = [name for name, _ in plain.named_parameters()]
    assert [bare(name) for name, _ in model.named_parameters()] == names


class Holder(torch.nn.Module):
    """A model whose author calls a layer `module`."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel, torch.compile])
def test_a_real_layer_called_module_stays(wrap):
    state = wrap(Holder()).state_dict()
    model = wrap(Holder())
    assert list(_renamed_state(state, bare_names(model))) == ["module.weight", "module.bias"]


def test_an_average_may_count_as_a_model_of_its_own():
    model = AveragedModel(torch.nn.DataParallel(net()))
    bare = bare_names(model, averages=False)
    assert bare("module.module.0.weight") == "module.0.weight"
    assert bare("n_averaged") == "n_averaged"


def test_two_names_that_become_one_are_refused():
    model = torch.nn.Module()
    model.net = torch.nn.Linear(2, 2)
    model.add_module("_orig_mod", torch.nn.Module())
    model._orig_mod.net = torch.nn.Linear(2, 2)
    with pytest.raises(NameCollision, match=r"'net.weight' and '_orig_mod.net.weight'"):
        _renamed_state(model.state_dict(), bare_names(model))


@pytest.mark.parametrize("made", [torch.jit.script, lambda one: torch.jit.trace(one, ones())])
def test_modules_of_torchscript_have_their_names(made):
    model = made(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    bare = bare_names(model)
    assert bare("0.weight") == "0.weight"
    assert _counters(model, bare) == []


def ones():
    return torch.ones(1, 2)
