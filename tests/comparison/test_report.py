"""Bars for what two checkpoints have otherwise."""

from ckptool.comparison.aligning import align
from ckptool.comparison.diff import diff
from ckptool.comparison.report import make_bars, summarize_file
from ckptool.core.model import Global, Opaque
from tests.inspection.handmade import checkpoint, floats, tensor


def made(**tensors):
    over = {name: floats(*numbers, key=name) for name, numbers in tensors.items()}
    return checkpoint({name: tensor(one, (one.nbytes // 4,)) for name, one in over.items()})


def drawn(a, b):
    found = make_bars(a, b, align(a, b), diff(a, b, structure=True))
    return [(bar.name, bar.status) for bar in found]


def test_the_bars_are_in_the_order_of_the_first_file():
    a = made(z=[1], m=[2], a=[3])
    assert drawn(a, made(a=[3], m=[2], z=[1])) == [("z", "="), ("m", "="), ("a", "=")]


def test_what_only_the_second_has_stands_where_it_does_there():
    a, b = made(one=[1], two=[2]), made(zero=[0], one=[1], extra=[9], more=[9], two=[2])
    names = [name for name, _ in drawn(a, b)]
    assert names == ["zero", "one", "extra", "more", "two"]
    assert dict(drawn(a, b))["extra"] == "A"


def test_what_only_the_first_has_is_gone_and_another_shape_is_another_type():
    assert drawn(made(a=[1], b=[1]), made(b=[1, 2])) == [("a", "D"), ("b", "T")]


def test_wrappers_are_off_the_names():
    over = floats(1.0)
    a = checkpoint({"state_dict": {"module.fc": tensor(over, (1,))}})
    b = checkpoint({"state_dict": {"fc": tensor(over, (1,))}})
    (bar,) = make_bars(a, b, align(a, b), diff(a, b, structure=True))
    assert (bar.name, bar.status) == ("state_dict/fc", "=")


def test_the_change_of_a_tensor_is_relative_to_its_norm():
    a, b = made(one=[3, 4], same=[1]), made(one=[3, 3], same=[1])
    assert [bar.change for bar in make_bars(a, b, align(a, b), diff(a, b))] == [0.2, None]


def trained(*groups, state=None, shapes=((2, 3), (2,))):
    """Two parameters behind a wrapper, a buffer, and an optimizer with these groups."""
    over = floats(*range(6))
    names = ("module.fc.weight", "module.fc.bias", "module.bn.running_mean")
    model = {
        name: tensor(over, shape) for name, shape in zip(names, ((2, 3), (2,), (2,)), strict=True)
    }
    kept = {
        number: {"step": tensor(floats(1), ()), "exp_avg": tensor(over, shape)}
        for number, shape in enumerate(shapes)
    }
    optimizer = {"state": state or kept, "param_groups": list(groups)}
    return checkpoint({"state_dict": model, "optim_dict": optimizer, "epoch": 3})


BY_NAME = {
    ("optim_dict", "state", "0"): "fc.weight",
    ("optim_dict", "state", "1"): "fc.bias",
}


def test_optimizer_state_has_the_names_of_the_parameters_where_they_are_proved():
    assert summarize_file(trained({"params": [0, 1]})).parameters == BY_NAME
    names = ["module.fc.bias", "module.fc.weight"]
    named = trained({"params": [0, 1], "param_names": names}, shapes=((2,), (2, 3)))
    assert summarize_file(named).parameters == dict(
        zip(BY_NAME, ("fc.bias", "fc.weight"), strict=True)
    )


def test_nothing_is_named_that_is_not_proved():
    for made in (
        trained({"params": [0]}, {"params": [1]}),  # two groups may have any order
        trained({"params": [0, 1]}, shapes=((2,), (2, 3))),
        trained({"params": [0, 1, 2]}),
    ):
        assert summarize_file(made).parameters == {}


def test_a_path_has_the_name_in_place_of_the_number():
    summary = summarize_file(trained({"params": [0, 1]}))
    path = "optim_dict", "state", 0, "exp_avg"
    assert summary.name_parameter(path) == ("optim_dict", "state", "fc.weight", "exp_avg")
    assert summary.name_parameter(("state_dict", "module.fc.weight")) == (
        "state_dict",
        "module.fc.weight",
    )


def test_values_are_those_of_no_section_and_the_attributes_of_objects():
    attributes = [("build", {"lr": 0.1, "steps": [1, 2]})]
    args = Opaque(Global("argparse", "Namespace"), steps=attributes)
    root = {**trained({"params": [0, 1]}).root, "args": args, "none": Opaque(Global("a", "B"))}
    assert summarize_file(checkpoint(root)).values == {
        "epoch": "3",
        "args/lr": "0.1",
        "args/steps": "[1, 2]",
        "none": "a.B object",
    }


def test_the_verdict_is_that_of_doctor():
    found = summarize_file(trained({"params": [0, 1]})).diagnosis
    assert not found.ok
    assert any("module." in complaint.text for complaint in found.complaints)
