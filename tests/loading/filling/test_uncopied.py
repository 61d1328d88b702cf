"""What is advised where torch copies no way, and that it helps."""

import pytest
import torch
from torch import nn

from ckptool.errors import MatchError
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched


def expanded():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1).expand(3))
    return model, torch.arange(3.0)


def inference():
    with torch.inference_mode():
        model = nn.Linear(2, 2, bias=False)
    return model, torch.eye(2)


def refused(model, state):
    before = Untouched(model)
    with pytest.raises(MatchError) as caught:
        load_into(model, state)
    before.check()
    return caught.value


@pytest.mark.parametrize("make", [expanded, inference])
def test_tensors_that_take_no_copy_are_replaced(make):
    model, weight = make()
    error = refused(model, {"weight": weight})
    assert error.hint.startswith("`assign=True`")
    assert load_into(model, {"weight": weight}, **dict(error.remedy.arguments)).fits
    assert torch.equal(model.weight, weight)


def test_a_sparse_tensor_is_made_dense_by_who_gives_it():
    model, sparse = nn.Linear(2, 2, bias=False), torch.eye(2).to_sparse()
    assert refused(model, {"weight": sparse}).hint == "give `weight` as `.to_dense()` makes it"
    assert load_into(model, {"weight": sparse.to_dense()}).fits


def test_a_tensor_without_elements_is_called_so():
    error = refused(nn.Linear(2, 2, bias=False), {"weight": torch.eye(2, device="meta")})
    assert "on the meta device, without elements" in error.hint
