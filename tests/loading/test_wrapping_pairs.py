"""Whatever a model was wrapped in when it was saved, it goes into whatever it is wrapped in now."""

import itertools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptool
from tests.loading.wrappings import (
    MORE,
    WRAPPINGS,
    Block,
    Lightning,
    Net,
    answer,
    averaged,
    compiled,
    copied,
    made,
    saved,
    scramble,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
    pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]

KINDS = list(WRAPPINGS)
PAIRS = [
    *itertools.product(MORE, ["plain", "DDP", "compile inside", "Lightning"]),
    *itertools.product(["plain", "DP of compile", "AveragedModel"], MORE),
]


@pytest.fixture(scope="module", autouse=True)
def group():
    """A group of this one process, which DDP and FSDP ask for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sources():
    """Trained models by wrapping, with what they answer; made once."""
    return Once(trained)


@pytest.fixture(scope="module")
def targets():
    """Models to load into by wrapping: made once, for what is compiled is traced once then."""
    return Once(lambda wrapping: made(wrapping, 2))


class Once(dict):
    """Makes what is asked for and not there yet."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, wrapping):
        self[wrapping] = self.make(wrapping)
        return self[wrapping]


def fresh(targets, wrapping, wanted):
    """The target with numbers that are not those wanted."""
    model = targets[wrapping]
    scramble(model)
    assert not torch.allclose(answer(model), wanted)
    return model


def check(report, model, wanted, case):
    """All of the model is there, and it is the trained one."""
    assert (report.coverage, report.fits) == (1.0, True), case
    assert (report.missing_keys, report.unexpected_keys) == ([], []), case
    assert (report.mismatched, report.ambiguous, report.untied) == ((), (), ()), case
    assert torch.equal(answer(model), wanted), case


@pytest.mark.parametrize("source", WRAPPINGS)
def test_a_file_is_loaded_whole(tmp_path, sources, targets, source):
    wanted = answer(sources[source])
    file = saved(tmp_path / "f.pth", source, sources[source])
    for target in WRAPPINGS:
        model = fresh(targets, target, wanted)
        parameters = list(model.parameters())
        check(ckptool.load_into(model, file), model, wanted, target)
        assert all(now is was for now, was in zip(model.parameters(), parameters, strict=True))


def test_a_state_dict_is_loaded_whole_and_matched_for_torch_to_load(sources, targets):
    # Each with three others, as the names are the same: around it, inside it, and itself.
    for at, source in enumerate(KINDS):
        wanted = answer(sources[source])
        for target in (KINDS[(at + step) % len(KINDS)] for step in (0, 1, 4)):
            check_state_dict(copied(sources[source].state_dict()), targets, target, wanted)


def check_state_dict(state, targets, target, wanted):
    names, before = list(state), {name: tensor.clone() for name, tensor in state.items()}
    model = fresh(targets, target, wanted)
    check(ckptool.load_into(model, state), model, wanted, (names, target))

    model = fresh(targets, target, wanted)
    answered = answer(model)
    matched, report = ckptool.match(state, model)
    assert torch.equal(answer(model), answered)
    assert list(state) == names
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert list(matched) == [name for name in model.state_dict() if name in matched]
    left = model.load_state_dict(matched, strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys == [name for name, _ in report.kept]
    assert set(left.missing_keys) <= {"n_averaged"}
    check(report, model, wanted, (names, target))


@pytest.mark.parametrize("source", dict.fromkeys(source for source, _ in PAIRS))
def test_other_nestings_are_loaded_whole_too(tmp_path, sources, targets, source):
    wanted = answer(sources[source])
    file = saved(tmp_path / "f.pth", source, sources[source])
    for target in (target for one, target in PAIRS if one == source):
        for held in (file, copied(sources[source].state_dict())):
            model = fresh(targets, target, wanted)
            check(ckptool.load_into(model, held), model, wanted, target)


@pytest.mark.parametrize("target", WRAPPINGS)
def test_the_names_of_a_file_suffice(tmp_path, sources, targets, target):
    reference = saved(tmp_path / "reference.pth", target, targets[target])
    for source in WRAPPINGS:
        state = sources[source].state_dict()
        _, report = ckptool.match(state, list(targets[target].state_dict()))
        assert (report.missing_keys, report.unexpected_keys) == ([], []), source
        _, report = ckptool.match(state, reference)
        assert (report.coverage, report.fits) == (1.0, True), source


@pytest.mark.parametrize("source", WRAPPINGS)
def test_a_meta_model_is_filled_whole(tmp_path, sources, source):
    wanted = answer(sources[source])
    file = saved(tmp_path / "f.pth", source, sources[source])
    for target in ("plain", "DP", "compile inside", "Lightning"):
        with torch.device("meta"):
            model = made(target, 2)
        inner = inside(model)
        inner.passing = torch.ones(4)  # no file has it: a model on the meta device needs it set
        check(ckptool.load_into(model, file), model, wanted, target)
        assert inner.head.weight is inner.embed.weight
        assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


def test_ties_stay_ties(tmp_path, sources, targets):
    file = saved(tmp_path / "f.pth", "DP", sources["DP"])
    for target in WRAPPINGS:
        ckptool.load_into(targets[target], file)
        inner = inside(targets[target])
        assert torch.equal(inner.head.weight, inner.embed.weight), target
        if target != "FSDP1":  # which keeps views of one flat parameter
            assert inner.head.weight is inner.embed.weight, target


def inside(model):
    """The network in a wrapping."""
    (inner,) = [module for module in model.modules() if isinstance(module, Net)]
    return inner


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
