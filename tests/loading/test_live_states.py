"""State dicts of live modules, optimizers and schedulers, as `save` takes them."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import ckptool
from ckptool import save
from ckptool.errors import CheckpointWarning, NameCollision
from ckptool.loading.save import _find_counters, _rename_state, make_wrapper_remover
from tests.loading.test_save import loaded, loaded_again, net, trained
from tests.tensors.judge import assert_same

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"amsgrad": True},
    "AdamW": {"capturable": False, "lr": torch.tensor(0.01)}, "Adamax": {}, "NAdam": {},
    "RAdam": {}, "ASGD": {}, "Adadelta": {}, "Adagrad": {},
    "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "Adafactor": {},
}  # fmt: skip


def test_every_optimizer_of_torch_takes_its_state_back(tmp_path):
    for name, options in OPTIMIZERS.items():
        kind, model = getattr(torch.optim, name), net()
        optimizer = trained(model, kind, **options)
        save(tmp_path / "f.pth", model=model, optimizer=optimizer)
        state = loaded(tmp_path / "f.pth")["optimizer"]
        fresh = kind(net(1).parameters(), **options)
        fresh.load_state_dict(state)
        for group in state["param_groups"]:
            del group["param_names"]
        assert_same(state, loaded_again(tmp_path, optimizer.state_dict()))


def test_an_optimizer_with_one_flat_state_too(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    state = loaded(tmp_path / "f.pth")["optimizer"]
    assert state["param_groups"][0].pop("param_names") == ["weight", "bias"]
    assert_same(state, loaded_again(tmp_path, optimizer.state_dict()))


SCHEDULERS = {
    "StepLR": {"step_size": 1}, "MultiStepLR": {"milestones": [1, 1, 3]}, "ConstantLR": {},
    "LinearLR": {}, "ExponentialLR": {"gamma": 0.9}, "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 3}, "PolynomialLR": {},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.5**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9}, "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "ReduceLROnPlateau": {},
}  # fmt: skip


def test_every_scheduler_of_torch_is_plain_data(tmp_path):
    model = net()
    for name, options in SCHEDULERS.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
        optimizer.step()
        scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
        save(tmp_path / "f.pth", scheduler=scheduler)
        assert loaded(tmp_path / "f.pth")["scheduler"] == scheduler.state_dict(), name


def test_average_and_model_are_saved_side_by_side_and_each_takes_its_own_back(tmp_path):
    model = net()
    average = torch.optim.swa_utils.AveragedModel(torch.nn.DataParallel(model))
    average.update_parameters(model)
    save(tmp_path / "f.pth", model=model, ema=average)
    tree = loaded(tmp_path / "f.pth")
    again = torch.optim.swa_utils.AveragedModel(net(1))
    again.load_state_dict(tree["ema"])
    assert again.n_averaged == 1
    net(1).load_state_dict(tree["state_dict"])


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel, torch.compile])
def test_an_average_as_the_model_has_the_models_names_and_its_counter_beside(tmp_path, wrap):
    model = net()
    average = torch.optim.swa_utils.AveragedModel(wrap(model))
    average.update_parameters(wrap(model))
    save(tmp_path / "f.pth", model=wrap(average))
    tree = loaded(tmp_path / "f.pth")
    assert list(tree) == ["state_dict", "n_averaged"]
    assert tree["n_averaged"] == 1
    net(1).load_state_dict(tree["state_dict"])
    assert list(tree["state_dict"]._metadata) == list(model.state_dict()._metadata)


def test_the_counter_of_an_average_is_left_out_where_nothing_stands_beside_a_model(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(net())
    receipt = save(tmp_path / "f.safetensors", model=average)
    assert receipt.left_out == ("n_averaged (counter of an AveragedModel)",)
    assert ckptool.load_into(net(1), tmp_path / "f.safetensors").fits


def test_a_buffer_of_the_models_own_that_is_called_as_the_counter_stays(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("n_averaged", torch.tensor(7))
    save(tmp_path / "f.pth", model=torch.optim.swa_utils.AveragedModel(model))
    tree = loaded(tmp_path / "f.pth")
    assert (tree["state_dict"]["n_averaged"], tree["n_averaged"]) == (7, 0)
    again = torch.nn.Linear(2, 2)
    again.register_buffer("n_averaged", torch.tensor(0))
    assert ckptool.load_into(again, tmp_path / "f.pth").fits
    assert again.n_averaged == 7


def test_modules_and_optimizers_at_any_depth_become_their_state_dicts(tmp_path):
    one, other = net(), net(1)
    optimizers = [trained(one), trained(other)]
    parts = {"generators": [torch.nn.DataParallel(one)]}
    save(tmp_path / "f.pth", parts=parts, critic=other, optimizers=optimizers)
    tree = loaded(tmp_path / "f.pth")
    assert_same(tree["parts"]["generators"][0], loaded_again(tmp_path, one.state_dict()))
    names = [name for name, _ in other.named_parameters()]
    assert tree["optimizers"][1]["param_groups"][0]["param_names"] == names


def test_a_layer_that_is_called_module_keeps_its_name(tmp_path):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    save(tmp_path / "f.pth", model=Holder())
    assert list(loaded(tmp_path / "f.pth")["state_dict"]) == ["module.weight", "module.bias"]


def test_an_optimizer_alone_keeps_the_names_that_it_was_made_with(tmp_path):
    model = torch.nn.DataParallel(net())
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    save(tmp_path / "f.pth", optimizer=optimizer)
    group = loaded(tmp_path / "f.pth")["optimizer"]["param_groups"][0]
    assert group["param_names"] == [name for name, _ in net().named_parameters()]


def test_parameters_that_are_none_of_the_models_leave_an_optimizer_without_names(tmp_path):
    model, loss = net(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with pytest.warns(CheckpointWarning, match="without parameter names"):
        save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    tree = loaded(tmp_path / "f.pth")
    assert "param_names" not in tree["optimizer"]["param_groups"][0]
    optimizer.load_state_dict(tree["optimizer"])


def test_a_whole_tensor_of_shards_is_made_once_for_all_its_names(tmp_path):
    class Spread(torch.Tensor):
        """As a DTensor offers its whole."""

        gathered = 0

        def full_tensor(self):
            Spread.gathered += 1
            return torch.ones(4)

    part = torch.nn.Parameter(torch.ones(2)).data.as_subclass(Spread)
    model = torch.nn.Module()
    model.one = torch.nn.Parameter(part, requires_grad=False)
    model.other = model.one
    save(tmp_path / "f.pth", model=model, loose=part)
    tree = loaded(tmp_path / "f.pth")
    one, other = tree["state_dict"].values()
    assert one.shape == (4,)
    assert one.data_ptr() == other.data_ptr()
    assert tree["loose"].shape == (4,)
    assert Spread.gathered == 2


def test_parameters_that_join_later_need_names_as_torch_wants_it(tmp_path):
    model, head = net(), torch.nn.Linear(2, 2)
    optimizer = trained(model)
    save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    optimizer.load_state_dict(loaded(tmp_path / "f.pth")["optimizer"])
    optimizer.add_param_group({"params": list(head.named_parameters())})
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]


def test_names_that_are_none_are_not_read(tmp_path):
    optimizer = trained(net())
    for names in (["a"], [1, 2, 3, 4], "abcd", None):
        optimizer.param_groups[0]["param_names"] = names
        save(tmp_path / "f.pth", optimizer=optimizer)
        groups = loaded(tmp_path / "f.pth")["optimizer"]["param_groups"]
        assert [group.get("param_names") for group in groups] == [names]


def two_deep():
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


WRAPPED = {
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


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_all_wrappers_go_from_tensors_parameters_and_modules(wrapping):
    plain, model = two_deep(), WRAPPED[wrapping](two_deep())
    bare = make_wrapper_remover(model)
    state = _rename_state(model.state_dict(), bare)
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
    assert list(_rename_state(state, make_wrapper_remover(model))) == [
        "module.weight",
        "module.bias",
    ]


def test_an_average_may_count_as_a_model_of_its_own():
    model = AveragedModel(torch.nn.DataParallel(two_deep()))
    bare = make_wrapper_remover(model, averages=False)
    assert bare("module.module.0.weight") == "module.0.weight"
    assert bare("n_averaged") == "n_averaged"


def test_two_names_that_become_one_are_refused():
    model = torch.nn.Module()
    model.net = torch.nn.Linear(2, 2)
    model.add_module("_orig_mod", torch.nn.Module())
    model._orig_mod.net = torch.nn.Linear(2, 2)
    with pytest.raises(NameCollision, match=r"'net.weight' and '_orig_mod.net.weight'"):
        _rename_state(model.state_dict(), make_wrapper_remover(model))


@pytest.mark.parametrize("made", [torch.jit.script, lambda one: torch.jit.trace(one, ones())])
def test_modules_of_torchscript_have_their_names(made):
    model = made(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    bare = make_wrapper_remover(model)
    assert bare("0.weight") == "0.weight"
    assert _find_counters(model, bare) == []


def ones():
    return torch.ones(1, 2)
