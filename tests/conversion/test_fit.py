"""A checkpoint under the names of a model: its state dicts, `_metadata`, optimizers."""

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ckptool
from ckptool.conversion.fit import Fit, Reference
from ckptool.core.sections import find_model_state_dict
from ckptool.errors import MatchError, NameCollision, NotFound, NotRepresentable
from ckptool.loading.target import ModelTarget
from ckptool.matching import Allowance, slots_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.encoder = inner


def fitted(checkpoint, target, allowance=None):
    given = allowance or Allowance()
    return Fit(
        Reference(None, "", target),
        allow_missing=given.missing,
        allow_unexpected=given.unexpected,
        allow_mismatched=given.mismatched,
        min_coverage=given.min_coverage,
    )(checkpoint)


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def made(tmp_path):
    """The checkpoint of something, open; and the slots of a model."""
    opened = []

    def make(root, name="model.pth"):
        torch.save(root, tmp_path / name)
        opened.append(ckptool.open(tmp_path / name))
        return opened[-1]

    yield make
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def slots(made):
    def of(model):
        made_of = made(model.state_dict(), f"{id(model)}.pth")
        return ModelTarget("", slots_of(find_model_state_dict(made_of)))

    return of


def saved(checkpoint, tmp_path):
    checkpoint.save(tmp_path / "out.pth", overwrite=True)
    return torch.load(tmp_path / "out.pth", weights_only=True)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile, Outer])
def test_the_whole_checkpoint_follows_the_names(made, slots, tmp_path, wrap):
    model, target = nn.DataParallel(net()), wrap(net())
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    root = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    found = saved(fitted(made(root), slots(target)), tmp_path)
    assert list(found) == list(root)
    target.load_state_dict(found["state_dict"])
    assert found["state_dict"]._metadata.keys() == target.state_dict()._metadata.keys()
    versions = {path: entry["version"] for path, entry in target.state_dict()._metadata.items()}
    assert {p: entry["version"] for p, entry in found["state_dict"]._metadata.items()} == versions
    names = [name for name, _ in target.named_parameters()]
    assert found["optimizer"]["param_groups"][0]["param_names"] == names
    for mine, theirs in zip(model.parameters(), target.parameters(), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel])
def test_old_and_new_spellings_become_each_other(made, slots, tmp_path, wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = wrap(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU()))
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    found = saved(fitted(made(new.state_dict()), slots(old)), tmp_path)
    assert found._metadata == old.state_dict()._metadata
    old.load_state_dict(found)
    found = saved(fitted(made(old.state_dict(), "old.pth"), slots(new)), tmp_path)
    assert found.keys() == new.state_dict().keys()
    new.load_state_dict(found)


def test_of_metadata_of_the_root_alone_the_root_follows(made, slots, tmp_path):
    state = net().state_dict()
    state._metadata = OrderedDict({"": {"version": 1}})
    found = saved(fitted(made(state), slots(nn.DataParallel(net()))), tmp_path)
    assert found._metadata == {"": {"version": 1}, "module": {"version": 1}}


def test_what_fits_already_comes_back_itself(made, slots):
    checkpoint = made(net().state_dict())
    assert fitted(checkpoint, slots(net())) is checkpoint


def test_the_order_of_the_file_and_its_types_stay(made, slots, tmp_path):
    state = OrderedDict((f"module.{n}", v.half()) for n, v in reversed(net().state_dict().items()))
    found = saved(fitted(made(state), slots(net())), tmp_path)
    assert list(found) == list(reversed(net().state_dict()))
    assert found["0.weight"].dtype == torch.float16


def test_a_name_tied_to_one_that_is_there_is_put_beside_it(made, slots, tmp_path):
    model = Tied()
    state = model.state_dict()
    del state["head.weight"]
    changed = fitted(made({f"module.{name}": value for name, value in state.items()}), slots(model))
    assert any(
        "added head.weight, which the model ties to embed.weight" in change.text
        for change in changed.changes
    )
    found = saved(changed, tmp_path)
    assert list(found)[:2] == ["embed.weight", "head.weight"]
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    Tied().load_state_dict(found)


def test_the_counter_of_an_average_is_left_out_and_named(made, slots, tmp_path):
    state = torch.optim.swa_utils.AveragedModel(net()).state_dict()
    changed = fitted(made({"ema": state}), slots(net()))
    assert [c.text.partition(":")[0] for c in changed.changes if c.kind == "left-out"] == [
        "n_averaged"
    ]
    net().load_state_dict(saved(changed, tmp_path)["ema"])


def test_what_the_model_does_not_take_is_left_out_and_reported(made, slots, tmp_path):
    state = nn.DataParallel(net()).state_dict()
    state["module.aux.weight"] = torch.ones(9, 9)
    checkpoint = made(state)
    with pytest.raises(MatchError):
        fitted(checkpoint, slots(net()))
    changed = fitted(checkpoint, slots(net()), allowance=Allowance(unexpected=True))
    (gone,) = [change.text for change in changed.changes if change.kind == "left-out"]
    assert "module.aux.weight" in gone
    net().load_state_dict(saved(changed, tmp_path), strict=True)


def test_what_is_missing_or_of_another_shape_is_told(made, slots, tmp_path):
    state = nn.DataParallel(net()).state_dict()
    del state["module.0.bias"]
    state["module.3.bias"] = torch.ones(8)
    allowance = Allowance(missing=True, mismatched=True)
    changed = fitted(made(state), slots(net()), allowance=allowance)
    (warning,) = [change.text for change in changed.changes if change.kind == "warning"]
    (gone,) = [change.text for change in changed.changes if change.kind == "left-out"]
    assert "0.bias" in warning
    assert "3.bias" in gone
    found = net().load_state_dict(saved(changed, tmp_path), strict=False)
    assert sorted(found.missing_keys)[0] == "0.bias"
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias", "3.bias"], [])


def test_every_state_dict_is_treated(made, slots, tmp_path):
    root = {"model": nn.DataParallel(net()).state_dict(), "ema": torch.compile(net()).state_dict()}
    found = saved(fitted(made(root), slots(net())), tmp_path)
    for state in found.values():
        net().load_state_dict(state)


def test_of_several_the_one_that_fits_is_proposed(made, slots):
    root = {"critic": nn.Linear(9, 9).state_dict(), "model": nn.DataParallel(net()).state_dict()}
    with pytest.raises(MatchError, match="critic") as caught:
        fitted(made(root), slots(net()))
    assert caught.value.hint == "`key='model'` takes only the matching state dict"
    assert caught.value.report.missing_keys


def test_a_file_without_a_state_dict_is_an_error(made, slots):
    with pytest.raises(NotFound):
        fitted(made({"epoch": 3}), slots(net()))


def test_a_pickled_module_is_told_how_it_goes(made, slots, tmp_path):
    module = nn.DataParallel(net())
    with pytest.raises(NotRepresentable, match="module at net cannot") as caught:
        fitted(made({"net": module}), slots(net()))
    assert caught.value.hint.startswith("add --model-only")
    checkpoint = made({"net": net()}, "plain.pth")
    assert fitted(checkpoint, slots(net())) is checkpoint


def test_an_optimizer_whose_names_have_other_wrappers_follows_as_well(made, slots, tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    root = {"model": torch.compile(model).state_dict(), "optimizer": optimizer.state_dict()}
    found = saved(fitted(made(root), slots(Outer(net()))), tmp_path)
    names = [name for name, _ in Outer(net()).named_parameters()]
    assert found["optimizer"]["param_groups"][0]["param_names"] == names


def test_a_value_that_stands_in_the_way_is_no_silent_loss(made, slots):
    state = OrderedDict(nn.DataParallel(net()).state_dict())
    state["0.weight"] = "a note"
    with pytest.raises(NameCollision):
        fitted(made(state), slots(net()), allowance=Allowance(unexpected=True))


@pytest.mark.parametrize("equal", [True, False])
def test_tensors_that_the_model_ties_are_compared(made, slots, equal):
    model = Tied()
    state = {f"net.{name}": value.clone() for name, value in model.state_dict().items()}
    state["net.head.weight"][3, 1] += 0 if equal else 1
    checkpoint, target = made(state), slots(model)
    if equal:
        assert fitted(checkpoint, target).root.keys() == model.state_dict().keys()
        return
    with pytest.raises(MatchError, match="are tied in the model, but differ") as caught:
        fitted(checkpoint, target)
    assert caught.value.report.untied == (("embed.weight", "head.weight"),)
