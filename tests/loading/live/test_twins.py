"""A twin of a model, to try things on."""

import torch
from torch import nn

from ckptool.loading.live.twins import twin_of


def test_a_large_tensor_that_is_a_plain_attribute_is_not_copied_and_a_small_one_is():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].small, model[0].large = torch.ones(3), torch.ones(1 << 19)
    twin = twin_of(model)[0]
    assert twin.weight.is_meta
    assert twin.large.is_meta
    assert twin.large.shape == model[0].large.shape
    assert twin.small.tolist() == [1, 1, 1]
    assert twin.small is not model[0].small
