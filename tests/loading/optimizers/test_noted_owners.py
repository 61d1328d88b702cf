"""Whose optimizer is whose in a file of `ckptool.save`, where names do not tell."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from tests.loading.bits import Untouched
from tests.loading.optimizing import assert_alike, by_name, stepped, three


def part():
    model = three()
    return model, stepped(model)


@pytest.fixture
def pair():
    """Two models that are alike, each with its optimizer."""
    return part(), part()


@pytest.fixture(params=["file", "open", "load", "torch"])
def read(request, tmp_path):
    """What is saved, as it is given to `load_into`."""
    how = {"file": str, "open": ckptool.open, "load": ckptool.load, "torch": torch.load}

    def saved(**content):
        ckptool.save(tmp_path / "f.pth", **content)
        return how[request.param](tmp_path / "f.pth")

    return saved


def loads(source, trained, **options):
    """It gives what this model and its optimizer had."""
    model = three()
    optimizer = torch.optim.Adam(model.parameters())
    ckptool.load_into(model, source, optimizer=optimizer, **options)
    assert_alike(by_name(model, optimizer), by_name(*trained))
    torch.testing.assert_close(model.a.weight, trained[0].a.weight)


def refused(source, **options):
    model = three()
    optimizer = torch.optim.Adam(model.parameters())
    untouched = Untouched(model, optimizer)
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, source, optimizer=optimizer, **options)
    untouched.check()
    return caught.value


def test_each_model_has_its_own(read, pair):
    (g, og), (d, od) = pair
    source = read(model=g, optimizer=og, disc=nn.DataParallel(d), optim_D=od)
    loads(source, (g, og))
    loads(source, (d, od), key="disc")


def test_the_only_one_is_the_models(read, pair):
    (g, og), (d, _) = pair
    source = read(model=nn.DataParallel(g), optimizer=og, disc=d)
    loads(source, (g, og))
    error = refused(source, key="disc")
    assert "the only optimizer, optimizer, is that of state_dict, which is not the" in str(error)


def test_an_optimizer_of_another_module_is_that_ones(read, pair):
    (g, _), (d, od) = pair
    source = read(model=g, optimizer=od, disc=d)
    assert "is that of disc, which is not the model chosen" in str(refused(source))
    loads(source, (d, od), key="disc")


def test_the_hint_names_first_what_is_not_of_another_model(read, pair):
    (g, og), (d, od) = pair
    source = read(model=g, optimizer=og, disc=d, more={"D": od})
    loads(source, (g, og))
    error = refused(source, key="disc")
    assert error.remedy.arguments == (("key", "disc"), ("optimizer_key", "more/D"))
    assert [way.arguments[-1] for way in error.remedy.instead] == [("optimizer_key", "optimizer")]


def test_an_average_has_the_parameters_of_its_model(read, pair):
    (g, og), (d, _) = pair
    average = torch.optim.swa_utils.AveragedModel(g)
    source = read(model=g, optimizer=og, ema=average, disc=d, disc_ema=average)
    loads(source, (g, og), key="ema")
    assert "is that of state_dict" in str(refused(source, key="disc_ema"))


@pytest.mark.filterwarnings("ignore:an optimizer is saved with no names")
def test_one_over_two_models_is_neithers(tmp_path, pair):
    (g, _), (d, _) = pair
    both = stepped(g, parameters=[*g.parameters(), *d.parameters()])
    ckptool.save(tmp_path / "f.pth", model=g, optimizer=both, disc=d)
    for key in (None, "disc"):
        assert "12 parameters" in str(refused(tmp_path / "f.pth", key=key))
    assert ckptool.doctor(tmp_path / "f.pth")


def test_tensors_of_nobody_stand_at_the_root_too(tmp_path, pair):
    (g, og), (d, od) = pair
    extra = {f"{name}_w": torch.ones(2) for name in "xyz"}
    ckptool.save(tmp_path / "f.pth", model=g, optimizer=og, disc=d, optim_D=od, **extra)
    loads(tmp_path / "f.pth", (d, od), key="disc")
    assert ckptool.doctor(tmp_path / "f.pth")


@pytest.mark.parametrize("noted", [True, None, {"optimizer": "gone"}, {"optimizer": ["disc"]}, {}])
def test_a_note_that_leads_nowhere_is_none(tmp_path, pair, noted):
    (g, og), (d, od) = pair
    ckptool.save(tmp_path / "f.pth", model=g, optimizer=og, disc=d, optim_D=od)
    content = torch.load(tmp_path / "f.pth")
    content["state_dict"]._ckptool_model = noted
    torch.save(content, tmp_path / "f.pth")
    assert "there are 2 optimizers" in str(refused(tmp_path / "f.pth"))
