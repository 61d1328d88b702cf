"""Optimizers that do not belong to the weights beside them."""

import copy

import pytest
import torch

from tests.inspection.doctor.faults import Net, permuted, too_many, trained, training_run


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
    same = torch.optim.Adam(net.named_parameters())
    wanted = {"model": net.state_dict(), "optimizer": same.state_dict()}
    assert kinds(diagnosed(root, like=wanted)) == {"optimizer-order"}


def test_more_parameters_than_the_model_has(complaint):
    root = too_many()
    _, optimizer = trained()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(root["optimizer"])
    assert complaint("optimizer-size", root).severity == "fails"


def test_groups_are_held_against_those_of_the_reference(complaint):
    root, wanted = training_run(), training_run()
    group = wanted["optimizer"]["param_groups"][0]
    wanted["optimizer"]["param_groups"] = [
        {**group, "params": [0, 1]},
        {**group, "params": [2, 3, 4, 5]},
    ]
    found = complaint("optimizer-groups", root, like=wanted)
    assert "a different number of parameter groups" in found.why
    wanted["optimizer"]["param_groups"] = [{**group, "params": [0, 1, 2]}]
    found = complaint("optimizer-groups", root, like=wanted)
    assert found.what == "the optimizer has groups of 6 parameters, and the reference of 3"


@pytest.mark.parametrize("params", [[[0], {"a": 1}, None], "abc", 7, [1.5, True]])
def test_groups_that_make_no_sense_end_no_diagnosis(diagnosed, params):
    root = copy.deepcopy(training_run())
    root["optimizer"]["param_groups"][0]["params"] = params
    root["optimizer"]["state"][("odd", 1)] = 3
    assert "optimizer-leftover" in kinds(diagnosed(root))
