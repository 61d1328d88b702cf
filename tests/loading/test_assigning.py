"""What takes the place of a tensor: one object for one, and memory of its own."""

import pytest
import torch
from torch import nn

from ckptool.loading.fill import Assigned
from ckptool.loading.load_into import load_into


def parameter(*shape, **options):
    return nn.Parameter(torch.empty(shape, device="meta", **options))


def test_a_tie_is_one_object_and_another_tensor_another():
    made = Assigned(cast=True)
    value = torch.ones(2)
    one = made.made(parameter(2), "tie", value)
    assert made.made(parameter(2), "tie", torch.zeros(2)) is one
    other = made.made(parameter(2), None, value)
    assert one.data_ptr() == value.data_ptr() != other.data_ptr()
    assert other.tolist() == [1, 1]


def test_memory_is_given_away_once():
    made = Assigned(cast=True)
    memory = torch.arange(10.0)
    cuts = [memory[2:5], memory[5:], memory[:2], memory[4:6], memory[0:1], torch.ones(1).expand(3)]
    wanted = [parameter(*cut.shape) for cut in cuts]
    given = [made.made(one, None, cut) for one, cut in zip(wanted, cuts, strict=True)]
    assert [one.data_ptr() == cut.data_ptr() for one, cut in zip(given, cuts, strict=True)] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    assert all(torch.equal(one, cut) for one, cut in zip(given, cuts, strict=True))


def test_types_are_the_models_unless_they_are_to_be_the_files():
    wide = parameter(2, dtype=torch.float64)
    assert Assigned(cast=True).made(wide, None, torch.ones(2)).dtype == torch.float64
    assert Assigned(cast=False).made(wide, None, torch.ones(2)).dtype == torch.float32


def test_parameters_and_buffers_stay_what_they_are():
    frozen = parameter(1)
    frozen.requires_grad_(False)
    made = Assigned(cast=True).made(frozen, None, torch.ones(1))
    assert (type(made), made.requires_grad) == (nn.Parameter, False)
    buffer = torch.empty(1, device="meta")
    made = Assigned(cast=True).made(buffer, None, nn.Parameter(torch.ones(1)))
    assert (type(made), made.requires_grad) == (torch.Tensor, False)
    given = nn.Parameter(torch.ones(1))
    assert Assigned(cast=True).made(parameter(1), None, given) is given


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_is_the_models_choice_as_in_torch(tmp_path, trained):
    state = {"weight": nn.Parameter(torch.ones(2, 2), requires_grad=not trained)}
    torch.save(state, tmp_path / "f.pth")
    for source in (state, tmp_path / "f.pth"):
        by_torch, own = (nn.Linear(2, 2, bias=False).requires_grad_(trained) for _ in range(2))
        load_into(own, source, assign=True)
        assert state["weight"].requires_grad != trained
        by_torch.load_state_dict(torch.load(tmp_path / "f.pth"), assign=True)
        assert own.weight.requires_grad == by_torch.weight.requires_grad == trained
        assert torch.equal(own.weight, by_torch.weight)


def test_a_scalar_that_was_a_list_of_one():
    assert Assigned(cast=True).made(parameter(), None, torch.ones(1)).shape == ()


def test_what_is_assigned_in_inference_mode_can_be_trained(tmp_path):
    source = torch.nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "f.pth")
    for given in (tmp_path / "f.pth", source.state_dict()):
        with torch.device("meta"):
            model = torch.nn.Linear(2, 2)
        with torch.inference_mode():
            load_into(model, given)
        assert not model.weight.is_inference()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
