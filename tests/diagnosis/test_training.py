"""Optimizers that do not belong to the weights beside them."""

import copy

import pytest
import torch

from tests.diagnosis.faults import Net, permuted, too_many, trained, training_run


def kinds(diagnosis):
    return {one.kind for one in diagnosis.complaints if one.kind.startswith("optimizer")}


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta"])
def test_an_optimizer_that_fits_has_no_complaint(diagnosed, optimizer):
    net = Net()
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options)
    net(torch.randn(6, 3)).sum().backward()
    made.step()
    root = {"model": net.state_dict(), "optimizer": made.state_dict()}
    assert kinds(diagnosed(root)) == set()
    assert kinds(diagnosed(root, like=root)) == set()


def test_groups_of_part_of_the_parameters_in_another_order_are_fine(diagnosed):
    net = Net()
    groups = [{"params": net.head.parameters()}, {"params": [net.features[1].weight]}]
    made = torch.optim.Adam(groups)
    net(torch.randn(6, 3)).sum().backward()
    made.step()
    assert kinds(diagnosed({"model": net.state_dict(), "o": made.state_dict()})) == set()


def test_state_in_another_order_is_told_and_torch_says_nothing(complaint):
    root = permuted()
    _, optimizer = trained()
    optimizer.load_state_dict(root["optimizer"])  # no error: the silent fault
    found = complaint("optimizer-order", root)
    assert found.where == ("features.0.weight", "features.0.bias")
    assert found.severity == "misleads"


def test_names_of_parameters_say_their_order(diagnosed):
    net = Net()
    named = list(net.named_parameters())[::-1]
    made = torch.optim.Adam(named)
    net(torch.randn(6, 3)).sum().backward()
    made.step()
    root = {"model": net.state_dict(), "optimizer": made.state_dict()}
    assert kinds(diagnosed(root)) == set()


def test_more_parameters_than_the_model_has(complaint):
    root = too_many()
    _, optimizer = trained()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(root["optimizer"])
    assert complaint("optimizer-size", root).severity == "fails"


@pytest.mark.parametrize("params", [[[0], {"a": 1}, None], "abc", 7, [1.5, True]])
def test_groups_that_make_no_sense_end_no_diagnosis(diagnosed, params):
    root = copy.deepcopy(training_run())
    root["optimizer"]["param_groups"][0]["params"] = params
    root["optimizer"]["state"][("odd", 1)] = 3
    assert "optimizer-leftover" in kinds(diagnosed(root))


def run_of(net, made):
    """A training file of a model and its optimizer after a step."""
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return {"model": net.state_dict(), "optimizer": made.state_dict()}


def equal_layers():
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})


@pytest.mark.parametrize("before", ["module.", "model."])
def test_other_names_in_the_same_order_are_no_complaint(diagnosed, before):
    net = equal_layers()
    named = list(net.named_parameters())
    root = run_of(net, torch.optim.Adam([(before + name, value) for name, value in named]))
    assert kinds(diagnosed(root, like=run_of(net, torch.optim.Adam(named)))) == set()


def test_any_tensor_may_be_a_parameter(complaint):
    """Those of quantizers are: 70 may be optimized where 34 look like it."""
    root = {**training_run(), "optimizer": too_many()["optimizer"]}
    found = complaint("optimizer-size", root)
    assert "10 parameters, but the model has 9 tensors" in found.text
    root["state_dict"]["head.mask"] = torch.ones(4, dtype=torch.bool)
    assert complaint("optimizer-size", root) is None
    net = torch.nn.Linear(2, 2)
    net.bits = torch.nn.Parameter(torch.tensor([8, 4]), requires_grad=False)
    net.on = torch.nn.Parameter(torch.tensor(True), requires_grad=False)
    root = {"model": net.state_dict(), "optimizer": torch.optim.Adam(net.parameters()).state_dict()}
    assert complaint("optimizer-size", root) is None


def test_no_groups_at_all_fail(diagnosed):
    root = training_run()
    root["optimizer"]["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        trained()[1].load_state_dict(root["optimizer"])
    found = [one for one in diagnosed(root).complaints if one.kind.startswith("optimizer")]
    assert [(one.kind, one.severity) for one in found] == [("optimizer-groups", "fails")]


def test_an_optimizer_of_another_model_is_not_held_against_this_one(diagnosed):
    net, other = Net(), torch.nn.Linear(9, 9)
    foreign = run_of(other, torch.optim.Adam(other.parameters()))["optimizer"]
    own = run_of(net, torch.optim.Adam(net.parameters()))["optimizer"]
    assert kinds(diagnosed({"G": net.state_dict(), "optG": own, "optD": foreign})) == set()
    assert kinds(diagnosed({"G": net.state_dict(), "optimizer_D": foreign})) == set()
    both = {"netG": net.state_dict(), "netD": other.state_dict(), "optG": own, "optD": foreign}
    assert kinds(diagnosed(both)) == set()
    swapped = {**both, "optG": foreign, "optD": own}
    assert kinds(diagnosed(swapped)) == {"optimizer-size"}
    assert kinds(diagnosed({"G": net.state_dict(), "optG": foreign})) == {"optimizer-size"}
