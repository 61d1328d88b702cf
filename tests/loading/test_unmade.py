"""What nothing can be made of, and models whose own `state_dict` leaves a part out."""

import argparse
import io
import pathlib
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from ckptool.loading.load_into import load_into
from ckptool.loading.plan import describe_opaque
from tests.conftest import FIXTURES
from tests.loading.bits import Untouched, untouched_by

np = pytest.importorskip("numpy")


class Stateful(nn.Module):
    def __init__(self, state=None):
        super().__init__()
        self.inner, self.state = nn.Linear(1, 1), state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (argparse.Namespace(a=1), "an object of argparse.Namespace"),
        ({"a": [io.BytesIO(b"1")]}, "an object of _io.BytesIO"),
        ({"a": pathlib.PurePosixPath("x")}, "an object of pathlib"),
        ([np.ones(2)], "a numpy array"),
    ],
)
def test_an_extra_state_with_objects_is_refused_with_its_name(value, what, tmp_path):
    torch.save(Stateful(value).state_dict(), tmp_path / "a.pth")
    model = Stateful()
    with untouched_by(MatchError, model) as caught:
        load_into(model, tmp_path / "a.pth")
    assert f"_extra_state: contains {what}" in str(caught.value)
    report = load_into(model, tmp_path / "a.pth", allow_missing=["_extra_state"])
    assert (report.missing_keys, model.state) == (["_extra_state"], None)


@pytest.mark.parametrize("value", [{1, 2}, torch.float32, {"a": (1, torch.Size([1]))}])
def test_plain_data_is_loaded(value, tmp_path):
    torch.save(Stateful(value).state_dict(), tmp_path / "a.pth")
    model = Stateful()
    assert load_into(model, tmp_path / "a.pth").fits
    assert model.state == value


def test_objects_in_memory_are_the_callers_own():
    value, model = argparse.Namespace(a=1), Stateful()
    assert load_into(model, Stateful(value).state_dict()).fits
    assert model.state is value


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_lazy_model_that_never_ran(where, tmp_path):
    source = lazy().state_dict()
    if where == "file":
        torch.save(source, tmp_path / "a.pth")
        source = tmp_path / "a.pth"
    said = "never ran" if where == "file" else "an uninitialized lazy parameter"
    for other in (nn.Sequential(nn.Linear(2, 3)), lazy()):
        with untouched_by(MatchError, other, match=said):
            load_into(other, source)


old = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


def per_tensor():
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 2, torch.quint8)


def per_channel():
    return torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
    )


@old
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [per_tensor, per_channel])
@pytest.mark.parametrize("stored", [True, False])
def test_what_torch_copies_into_no_other_type_is_refused(device, make, stored, tmp_path):
    value = make()
    source = {"weight": value, "bias": torch.ones(2)}
    if stored:
        torch.save(source, tmp_path / "a.pth")
        source = tmp_path / "a.pth"
    model = nn.Linear(3, 2, device=device)
    before = Untouched(model)
    for allowed in (False, True):
        if device == "meta" and allowed:
            continue  # torch dequantizes what it makes for the meta device
        with pytest.raises(MatchError):
            load_into(model, source, allow_lossy_cast=allowed)
        before.check()


@old
def test_a_hook_may_do_what_torch_does_not():
    def dequantized(state, prefix, *_):
        state["weight"] = state["weight"].dequantize()

    model = nn.Linear(3, 2)
    model._register_load_state_dict_pre_hook(dequantized)
    load_into(model, {"weight": per_tensor(), "bias": torch.ones(2)}, allow_lossy_cast=True)
    assert torch.allclose(model.weight, torch.ones(2, 3))


@old
def test_what_is_assigned_is_of_its_own_type():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(2, 3))
            self.weight = nn.Parameter(torch.zeros(2))

    model = Codes()
    load_into(model, {"codes": per_tensor(), "weight": torch.ones(2)}, assign=True)
    assert model.codes.is_quantized
    with untouched_by(MatchError, model, match="weight: Only Tensors of floating point"):
        load_into(model, {"codes": per_tensor(), "weight": torch.ones(2).int()}, assign=True)


@old
def test_numbers_are_quantized_where_torch_does_that():
    model = nn.Module()
    model.register_buffer("codes", per_tensor().clone())
    load_into(model, {"codes": torch.zeros(2, 3)}, allow_lossy_cast=True, min_coverage=0)
    assert not model.codes.dequantize().any()
    with pytest.raises(MatchError, match="Quantized Copy only works with same qscheme"):
        load_into(model, {"codes": per_channel()}, allow_lossy_cast=True)


def test_a_tie_that_is_not_loaded_is_counted_once(tmp_path):
    def net(layer):
        parts = {name: layer(4, 4, bias=False) for name in "ab"}
        return nn.ModuleDict({**parts, "c": nn.Linear(10, 1, bias=False)})

    model = net(nn.Linear)
    model["b"].weight = model["a"].weight
    state = net(lambda _, size, bias: nn.LazyLinear(size, bias=bias)).state_dict()
    torch.save(state, tmp_path / "a.pth")
    for source in (state, tmp_path / "a.pth"):
        report = load_into(model, source, strict=False)
        assert (report.loaded, report.parameters, report.tied) == (10, 26, ())
        assert (report.fitting, report.names) == (1, 3)


def test_loading_code_is_not_given_what_only_its_class_makes():
    file = FIXTURES / "distributed" / "dtensor_0_of_2.pth"
    model = nn.Module()
    model.plain, model.sharded = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(5))
    model._register_load_state_dict_pre_hook(lambda *_: None)
    with untouched_by(MatchError, model):
        load_into(model, file)
    report = load_into(model, file, allow_unexpected=True, allow_mismatched=True)
    assert {*report.unexpected_keys} == {"by_column", "replicated", "parameter"}
    assert [one.own for one in report.mismatched] == ["sharded"]
    assert model.plain.all()
    assert not model.sharded.any()


MADE = [
    None, 1.5, {"a": [1, (2, "b")]}, OrderedDict(a=1), {1, frozenset({2, frozenset({3})})},
    Counter("aab"), defaultdict(list, a=[1]), bytearray(b"ab"), torch.float16, torch.sparse_coo,
    torch.device("cpu"), torch.Size([1, 2]), torch.ones(2), np.float64(2.5),
]  # fmt: skip
NOT_MADE = [
    (argparse.Namespace(a=1), "an object of argparse.Namespace"),
    ([{"a": (io.BytesIO(b"1"),)}], "an object of _io.BytesIO"),
    (defaultdict(list, a=[argparse.Namespace()]), "an object of argparse.Namespace"),
    ({"a": argparse.Namespace}, "argparse.Namespace"),
    ([np.ones(2)], "a numpy array"),
]


def stored(value, path):
    torch.save({"w": torch.ones(1), "x": value}, path)
    return ckptool.open(path)


def test_what_is_made_is_as_it_was(tmp_path):
    with stored(MADE, tmp_path / "a.pth") as checkpoint:
        assert [describe_opaque(value) for value in checkpoint.root["x"]] == [""] * len(MADE)
    for made, value in zip(ckptool.load(tmp_path / "a.pth")["x"], MADE, strict=True):
        assert type(made) is type(value) or isinstance(value, np.float64)
        assert torch.equal(made, value) if isinstance(value, torch.Tensor) else made == value


def test_what_is_not_is_named(tmp_path):
    with stored([value for value, _ in NOT_MADE], tmp_path / "a.pth") as checkpoint:
        for value, (_, said) in zip(checkpoint.root["x"], NOT_MADE, strict=True):
            assert said in describe_opaque(value)


def test_what_holds_itself_ends():
    node = [1]
    node.append(node)
    assert describe_opaque(node) == ""


class Teacher(nn.Module):
    """Its frozen part is in no file."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if not name.startswith("frozen")}


class Looking(Teacher):
    """Code of its own sees the state dict before torch does."""

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(lambda *_: None)


class Renaming(Teacher):
    """Its file has other names than torch asks for, which is no part left out."""

    def state_dict(self, *args, **options):
        state = nn.Module.state_dict(self, *args, **options)
        return {f"net_{name}": value for name, value in state.items()}

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(self.back)

    def back(self, state, *_):
        for name in list(state):
            state[name.removeprefix("net_")] = state.pop(name)


def hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def leave_out(module, state, prefix, local):
        for name in [name for name in state if name.startswith(f"{prefix}0.")]:
            del state[name]

    model._register_state_dict_hook(leave_out)
    return model


KINDS = {
    "state dict": (Teacher, "frozen"),
    "looking": (Looking, "frozen"),
    "hook": (hooked, "0"),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def file(kind, tmp_path):
    ckptool.save(tmp_path / "f.pth", model=kind[0]())
    return tmp_path / "f.pth"


def torch_asks_for(make, file):
    found = make().load_state_dict(torch.load(file)["state_dict"], strict=False)
    return found.missing_keys


def test_what_torch_misses_is_missing_for_match_and_load_into(kind, file):
    make, part = kind
    names = [f"{part}.weight", f"{part}.bias"]
    assert torch_asks_for(make, file) == names
    _, report = ckptool.match(file, make())
    if make is Looking:  # its own code could fill them
        told = dict(report.kept)
        assert all(told[name].startswith("decided by torch") for name in names)
    else:
        assert (report.fits, report.missing_keys, report.coverage) == (False, names, 0.5)
    model = make()
    with untouched_by(
        MatchError, model, match=f"2 tensors are missing from the file: {part}"
    ) as caught:
        ckptool.load_into(model, file)
    assert caught.value.report.missing_keys == names


def test_the_hint_is_followed_and_the_part_stays_as_it_is(kind, file):
    make, part = kind
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(make(), file)
    for options in (dict(caught.value.remedy.arguments), {"strict": False}):
        model = make()
        frozen = model.get_submodule(part).weight.detach().clone()
        report = ckptool.load_into(model, file, **options)
        assert report.coverage == 0.5
        assert report.missing_keys == [f"{part}.weight", f"{part}.bias"]
        assert torch.equal(model.get_submodule(part).weight, frozen)
        wanted = torch.load(file)["state_dict"]
        assert all(torch.equal(wanted[name], model.state_dict()[name]) for name in wanted)


def test_a_file_that_has_the_part_loads_whole(kind):
    make, part = kind
    source = make()
    state = nn.Module.state_dict(source) if part == "frozen" else Whole().state_dict()
    model = make()
    report = ckptool.load_into(model, state)
    assert (report.fits, report.coverage) == (True, 1.0)
    assert torch.equal(model.get_submodule(part).weight, state[f"{part}.weight"])


class Whole(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


class Alone(nn.Module):
    """Its `load_state_dict` takes the state alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def load_state_dict(self, state):
        return super().load_state_dict(state)


class Anything(Alone):
    def load_state_dict(self, *args, **options):
        return nn.Module.load_state_dict(self, *args, **options)


@pytest.mark.parametrize("make", [Alone, Anything])
def test_a_loading_is_called_with_what_it_takes(make):
    source, model = make(), make()
    assert ckptool.load_into(model, source.state_dict()).fits
    assert torch.equal(model.layer.weight, source.layer.weight)


def test_what_a_hook_takes_away_may_be_allowed_and_is_told():
    def build():
        model = nn.Linear(2, 2)
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("bias"))
        return model

    state = nn.Linear(2, 2).state_dict()
    with pytest.raises(MatchError, match="1 tensor is missing from the file: bias") as caught:
        ckptool.load_into(build(), state)
    report = ckptool.load_into(build(), state, **dict(caught.value.remedy.arguments))
    assert report.missing_keys == ["bias"]
