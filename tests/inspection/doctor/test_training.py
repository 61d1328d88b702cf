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


def run_of(net, made):
    """A training file of a model and its optimizer after a step."""
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return {"model": net.state_dict(), "optimizer": made.state_dict()}


KINDS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize(("wanted", "others"), KINDS)
def test_an_optimizer_of_another_kind_is_told_where_its_step_fails(
    complaint, kind, options, wanted, others
):
    net = Net()
    root = run_of(net, kind(net.parameters(), lr=0.1, **options))
    made = wanted(net.parameters(), lr=0.1, **others)
    like = run_of(net, made)
    found = complaint("optimizer-kind", root, like=like)
    if kind is wanted:
        assert found is None
        return
    with pytest.raises(KeyError) as raised:  # noqa: PT012 - either of both
        made.load_state_dict(root["optimizer"])
        made.step()
    assert (found.severity, str(raised.value) in found.why) == ("fails", True)


def test_an_option_more_is_no_other_kind(diagnosed):
    net = Net()
    root = run_of(net, torch.optim.Adam(net.parameters()))
    like = run_of(net, torch.optim.Adam(net.parameters(), amsgrad=True))
    assert kinds(diagnosed(root, like=like)) == set()


def equal_layers():
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})


def test_equal_shapes_in_another_order_are_told_by_their_names(complaint):
    net = equal_layers()
    named = list(net.named_parameters())
    like = run_of(net, torch.optim.Adam(named))
    found = complaint("optimizer-order", run_of(net, torch.optim.Adam(named[2:] + named[:2])), like)
    assert "4 of 4 names stand elsewhere" in found.what
    assert "shapes than" not in found.what


@pytest.mark.parametrize("before", ["module.", "model."])
def test_other_names_in_the_same_order_are_no_complaint(diagnosed, before):
    net = equal_layers()
    named = list(net.named_parameters())
    root = run_of(net, torch.optim.Adam([(before + name, value) for name, value in named]))
    assert kinds(diagnosed(root, like=run_of(net, torch.optim.Adam(named)))) == set()


def test_a_larger_model_has_an_optimizer_of_another_size(diagnosed):
    large, small = Net(classes=9), Net()
    root = run_of(large, torch.optim.Adam(large.parameters()))
    assert kinds(diagnosed(root)) == set()
    like = run_of(small, torch.optim.Adam(small.parameters()))
    assert kinds(diagnosed(root, like=like)) == {"optimizer-size"}


def test_what_has_no_fractions_is_no_parameter(complaint):
    root = training_run()
    root["state_dict"]["head.mask"] = torch.ones(4, dtype=torch.bool)
    assert complaint("optimizer-size", root) is None
    root["optimizer"] = too_many()["optimizer"]
    assert "9 parameters, and the model has 6" in complaint("optimizer-size", root).what


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
