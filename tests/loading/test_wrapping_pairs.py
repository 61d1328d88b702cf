"""Whatever a model was wrapped in when it was saved, it goes into whatever it is wrapped in now."""

import itertools

import pytest
import torch
import torch.distributed as dist

import ckptool
from tests.loading.wrappings import (
    MORE,
    WRAPPINGS,
    Net,
    answer,
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
every_pair = pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(WRAPPINGS, WRAPPINGS))
)
# Each with three others, as the names are the same: around it, inside it, and itself.
some_pairs = pytest.mark.parametrize(
    ("source", "target"),
    [(one, KINDS[(at + step) % len(KINDS)]) for at, one in enumerate(KINDS) for step in (0, 1, 4)],
)
MORE_PAIRS = [
    *itertools.product(MORE, ["plain", "DDP", "compile inside", "Lightning"]),
    *itertools.product(["plain", "DP of compile", "AveragedModel"], MORE),
]
more_pairs = pytest.mark.parametrize(("source", "target"), MORE_PAIRS)


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


def check(report, model, wanted):
    """All of the model is there, and it is the trained one."""
    assert report.coverage == 1.0
    assert report.fits
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert (report.mismatched, report.ambiguous, report.untied) == ((), (), ())
    assert torch.equal(answer(model), wanted)


@every_pair
def test_a_file_is_loaded_whole(tmp_path, sources, targets, source, target):
    trained_model = sources[source]
    wanted = answer(trained_model)
    model = fresh(targets, target, wanted)
    parameters = list(model.parameters())
    report = ckptool.load_into(model, saved(tmp_path / "f.pth", source, trained_model))
    check(report, model, wanted)
    assert all(now is was for now, was in zip(model.parameters(), parameters, strict=True))


@some_pairs
def test_a_state_dict_is_loaded_whole(sources, targets, source, target):
    wanted = answer(sources[source])
    model = fresh(targets, target, wanted)
    state = copied(sources[source].state_dict())
    before = {name: tensor.clone() for name, tensor in state.items()}
    check(ckptool.load_into(model, state), model, wanted)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


@some_pairs
def test_a_state_dict_is_matched_for_torch_to_load(sources, targets, source, target):
    wanted = answer(sources[source])
    model = fresh(targets, target, wanted)
    before = answer(model)
    state, report = ckptool.match(sources[source].state_dict(), model)
    assert torch.equal(answer(model), before)
    assert list(state) == [name for name in model.state_dict() if name in state]
    left = model.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys == [name for name, _ in report.kept]
    assert set(left.missing_keys) <= {"n_averaged"}
    check(report, model, wanted)


@more_pairs
def test_other_nestings_are_loaded_whole_too(tmp_path, sources, targets, source, target):
    wanted = answer(sources[source])
    file = saved(tmp_path / "f.pth", source, sources[source])
    for given in (file, copied(sources[source].state_dict())):
        model = fresh(targets, target, wanted)
        check(ckptool.load_into(model, given), model, wanted)


@every_pair
def test_the_names_of_a_file_suffice(tmp_path, sources, targets, source, target):
    state = sources[source].state_dict()
    _, report = ckptool.match(state, list(targets[target].state_dict()))
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    reference = saved(tmp_path / "reference.pth", target, targets[target])
    _, report = ckptool.match(state, reference)
    assert (report.coverage, report.fits) == (1.0, True)


@pytest.mark.parametrize("target", ["plain", "DP", "compile inside", "Lightning"])
@pytest.mark.parametrize("source", WRAPPINGS)
def test_a_meta_model_is_filled_whole(tmp_path, sources, source, target):
    wanted = answer(sources[source])
    file = saved(tmp_path / "f.pth", source, sources[source])
    with torch.device("meta"):
        model = made(target, 2)
    (inner,) = [module for module in model.modules() if isinstance(module, Net)]
    inner.passing = torch.ones(4)  # no file has it: a model on the meta device needs it set
    check(ckptool.load_into(model, file), model, wanted)
    assert inner.head.weight is inner.embed.weight
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("target", WRAPPINGS)
def test_ties_stay_ties(tmp_path, sources, targets, target):
    model = targets[target]
    ckptool.load_into(model, saved(tmp_path / "f.pth", "DP", sources["DP"]))
    (inner,) = [module for module in model.modules() if isinstance(module, Net)]
    assert torch.equal(inner.head.weight, inner.embed.weight)
    if target != "FSDP1":  # which keeps views of one flat parameter
        assert inner.head.weight is inner.embed.weight
