"""Wrappers nested at random, around a model and inside it, in the file and where it is loaded."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptool
from tests.loading.wrappings import Block, Lightning, averaged, compiled

INSIDE = {"DP": nn.DataParallel, "compile": compiled, "checkpoint": checkpoint_wrapper}
AROUND = {"DP": nn.DataParallel, "compile": compiled, "model": Lightning}
PLACES = ["blocks.2.0.fc", "blocks.2", "blocks.0", "blocks", "head"]  # the inner ones first


class Deep(nn.Module):
    """Layers that are alike, perhaps beside one that is named as a wrapper names what it wraps."""

    def __init__(self, trap):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.Sequential(Block(), Block(), nn.Sequential(Block(), nn.Linear(4, 5)))
        self.head = nn.Linear(5, 2)
        if trap == "of its root":
            self.add_module("module", nn.Linear(3, 4))
            self.scale = nn.Parameter(torch.ones(3))
        elif trap == "like the root":
            self.model = nn.Module()
            self.model.stem = nn.Linear(3, 4)
            self.model.head = nn.Linear(5, 2)
        elif trap:
            self.add_module(trap, nn.Linear(3, 4))
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def no_two_compiled(names):
    """What is compiled is not compiled once more."""
    return ("compile", "compile") not in pairwise(names)


nestings = st.tuples(
    st.dictionaries(st.sampled_from(PLACES), st.sampled_from(list(INSIDE)), max_size=3),
    st.lists(st.sampled_from(list(AROUND)), max_size=3).filter(no_two_compiled),
)


def wrapped(model, nesting):
    inside, around = nesting
    for place in PLACES:
        if place in inside:
            parent, _, leaf = place.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, leaf, INSIDE[inside[place]](getattr(owner, leaf)))
    for name in around:
        model = AROUND[name](model)
    return model


def pair(trap):
    """Two models of one kind with other numbers, and the tensors of both under their own names."""
    torch.manual_seed(0)
    first, second = Deep(trap), Deep(trap)
    return first, second, first.state_dict(keep_vars=True), second.state_dict(keep_vars=True)


@pytest.mark.parametrize("trap", ["", "module", "model", "of its root", "like the root"])
@given(source=nestings, target=nestings, average=st.booleans())
@settings(max_examples=25)
def test_any_nesting_goes_into_any_other(trap, source, target, average):
    first, second, wanted, found = pair(trap)
    given_model = wrapped(first, source)
    state = (averaged(given_model) if average else given_model).state_dict()
    report = ckptool.load_into(wrapped(second, target), state)
    assert report.coverage == 1.0
    assert report.fits
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
