"""`match`: a state dict under the names of a model, and the report of it."""

import random
import warnings
from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptool
from ckptool.errors import AmbiguousName, NameCollision, NotFound, UnsupportedFormat, UsageError
from ckptool.loading import plan
from ckptool.loading.plan import describe_like, describe_loss
from tests.loading.bits import saved


def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Linear(8, 2))


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "decode": nn.Linear(3, 5)})
    model["decode"].weight = model["embed"].weight
    return model


def test_a_wrapped_state_dict_is_ready_for_a_bare_model_and_the_reverse():
    wrapped = torch.compile(nn.DataParallel(net()))
    for source, target in ((wrapped, net()), (net(), wrapped)):
        state_dict, report = ckptool.match(source.state_dict(), target)
        expected = target.state_dict()
        assert list(state_dict) == list(expected)
        assert state_dict._metadata == expected._metadata
        assert (report.coverage, report.fits) == (1.0, True)
        assert target.load_state_dict(state_dict).missing_keys == []
        assert all(map(torch.equal, target.state_dict().values(), source.state_dict().values()))


def test_neither_argument_is_touched_and_the_tensors_are_the_same():
    source, model = nn.DataParallel(net()).state_dict(), net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names, metadata = list(source), dict(source._metadata)
    state_dict, _ = ckptool.match(source, model)
    assert all(state_dict[name] is source[f"module.{name}"] for name in state_dict)
    assert (list(source), dict(source._metadata)) == (names, metadata)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_file_or_an_open_one_is_read(tmp_path):
    source = net()
    file = saved(
        tmp_path / "f.pt", {"state_dict": nn.DataParallel(source).state_dict(), "epoch": 3}
    )
    with ckptool.open(file) as checkpoint:
        for given in (file, str(file), checkpoint, checkpoint["state_dict"]):
            state_dict, report = ckptool.match(given, net())
            assert report.fits
            assert torch.equal(state_dict["3.weight"], source[3].weight)
            assert state_dict._metadata == source.state_dict()._metadata
            assert not state_dict["3.weight"].requires_grad
    assert ckptool.match(file, net())[1].file == str(file)


def test_only_what_fits_is_in_the_result():
    source = net().state_dict()
    source["head.weight"] = torch.ones(7)
    source["3.weight"] = torch.ones(4, 4)
    del source["0.bias"]
    state_dict, report = ckptool.match(source, net())
    assert [name for name in net().state_dict() if name not in state_dict] == ["0.bias", "3.weight"]
    assert (report.missing_keys, report.unexpected_keys) == (["0.bias"], ["head.weight"])
    (wrong,) = report.mismatched
    assert (wrong.name, wrong.shape, wrong.wanted) == ("3.weight", (4, 4), (2, 8))
    assert not report.fits


def like_forms(tmp_path):
    model = net()
    state_dict = model.state_dict()
    file = saved(tmp_path / "like.pt", {"model": state_dict, "epoch": 1})
    return {
        "module": model,
        "meta": net().to("meta"),
        "state dict": state_dict,
        "checkpoint dict": {"model": state_dict, "epoch": 1},
        "shapes": {name: tensor.shape for name, tensor in state_dict.items()},
        "lists": {name: list(tensor.shape) for name, tensor in state_dict.items()},
        "file": file,
        "str": str(file),
        "names": list(state_dict),
        "keys": state_dict.keys(),
        "generator": (name for name in state_dict),
    }


def test_a_model_may_be_given_in_many_ways(tmp_path):
    source = nn.DataParallel(net()).state_dict()
    for form, like in like_forms(tmp_path).items():
        state_dict, report = ckptool.match(source, like)
        assert list(state_dict) == list(net().state_dict()), form
        assert report.fits, form
        assert net().load_state_dict(state_dict).unexpected_keys == [], form


def test_an_open_reference_and_what_it_holds_will_do(tmp_path):
    source = nn.DataParallel(net()).state_dict()
    with ckptool.open(saved(tmp_path / "f.pt", {"model": net().state_dict()})) as checkpoint:
        for like in (checkpoint, checkpoint["model"]):
            assert ckptool.match(source, like)[1].fits


@pytest.mark.parametrize("like", [3, None, torch.ones(2), b"name", [1, 2]])
def test_what_is_no_model_is_refused(like):
    with pytest.raises(UsageError):
        ckptool.match(net().state_dict(), like)


def test_keys_choose_on_both_sides(tmp_path):
    both = {"model": net().state_dict(), "ema": net().state_dict()}
    with pytest.raises(
        AmbiguousName, match=r"the dict has 2 state dicts: model \(9 tensors\), ema \(9 tensors\)"
    ) as raised:
        ckptool.match(both, net())
    assert raised.value.hint == "choose one with `key='model'` or `key='ema'`"
    with pytest.raises(AmbiguousName) as raised:
        ckptool.match(net().state_dict(), both)
    assert raised.value.hint == "choose one with `like_key='model'` or `like_key='ema'`"
    with pytest.raises(NotFound, match="the dict has no state dict"):
        ckptool.match({"epoch": 3}, net())
    state_dict, _ = ckptool.match(both, both, key="ema", like_key="model")
    assert state_dict["0.weight"] is both["ema"]["0.weight"]


def test_lazy_parameters_take_any_shape():
    state_dict, report = ckptool.match(nn.Linear(3, 2).state_dict(), nn.LazyLinear(2))
    assert report.fits
    model = nn.LazyLinear(2)
    model.load_state_dict(state_dict)
    assert model.weight.shape == (2, 3)


def test_rules_and_prefixes_of_the_user_come_first():
    source = OrderedDict((f"old.{name}", value) for name, value in net().state_dict().items())
    for options in ({"rename": [r"^old\.=>"]}, {"prefixes": ["old.="]}):
        state_dict, report = ckptool.match(source, net(), **options)
        assert report.fits
        assert [renaming.kind for renaming in report.renamed] == ["rule"]
        assert list(state_dict) == list(net().state_dict())
    with pytest.raises(NameCollision):
        ckptool.match(source, net(), rename=["weight|bias=>x"])
    with pytest.raises(UsageError):
        ckptool.match(source, net(), rename="a=>b")


def test_plain_values_are_left_out_and_named():
    source = net().state_dict()
    source["epoch"] = 3
    state_dict, report = ckptool.match(source, net())
    assert report.fits
    assert [name for name, _ in report.left_out] == ["epoch"]
    assert "epoch" not in state_dict


# Versions.


def test_an_old_batch_norm_goes_into_a_new_one():
    source = net().state_dict()
    del source["1.num_batches_tracked"]
    source._metadata["1"]["version"] = 1
    wrapped = OrderedDict((f"module.{name}", tensor) for name, tensor in source.items())
    wrapped._metadata = {"": {"version": 1}} | {
        f"module.{path}".rstrip("."): entry for path, entry in source._metadata.items()
    }
    state_dict, report = ckptool.match(wrapped, net())
    assert report.fits
    assert [name for name, _ in report.kept] == ["1.num_batches_tracked"]
    assert state_dict._metadata["1"]["version"] == 1
    assert net().load_state_dict(state_dict).missing_keys == []


def test_a_file_without_metadata_gives_none():
    plain = dict(net().state_dict())
    state_dict, report = ckptool.match(plain, net())
    assert not hasattr(state_dict, "_metadata")
    del plain["1.num_batches_tracked"]
    state_dict, report = ckptool.match(plain, net())
    assert report.fits
    assert net().load_state_dict(state_dict).missing_keys == []


class Versioned(nn.Linear):
    """Says what version it was given."""

    _version = 7

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.given = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


WRAPPERS = {
    "plain": lambda model: model,
    "parallel": nn.DataParallel,
    "compiled": torch.compile,
    "checkpointed": lambda model: nn.Sequential(checkpoint_wrapper(model[0])),
    "parallel of checkpointed": lambda model: nn.DataParallel(
        nn.Sequential(checkpoint_wrapper(model[0]))
    ),
}


@pytest.mark.parametrize("source", WRAPPERS)
def test_versions_follow_the_modules_through_wrappers(source):
    given = WRAPPERS[source](nn.Sequential(Versioned(2, 2))).state_dict()
    for path, entry in given._metadata.items():
        if entry["version"] == 7:
            given._metadata[path] = {"version": 5}
    for target, wrap in WRAPPERS.items():
        inner = Versioned(2, 2)
        model = wrap(nn.Sequential(inner))
        state_dict, report = ckptool.match(given, model)
        model.load_state_dict(state_dict)
        assert report.fits, target
        assert inner.given == 5, target


def test_versions_follow_inferred_names():
    given = OrderedDict(
        (f"a.{n}", v) for n, v in nn.Sequential(Versioned(2, 2)).state_dict().items()
    )
    given._metadata = {"": {"version": 1}, "a": {"version": 1}, "a.0": {"version": 5}}
    model = nn.ModuleDict({"b": nn.ModuleList([Versioned(2, 2)])})
    state_dict, _ = ckptool.match(given, model, prefixes=["a=b"])
    model.load_state_dict(state_dict)
    assert model["b"][0].given == 5


def test_entries_of_metadata_that_are_none_are_left_out():
    given = net().state_dict()
    given._metadata["1"] = "odd"
    given._metadata[3] = {"version": 1}
    state_dict, _ = ckptool.match(given, net())
    assert list(state_dict._metadata) == ["", "0", "2", "3"]
    net().load_state_dict(state_dict)


# Ties.


def test_a_name_that_the_model_ties_is_filled_in():
    source = tied().state_dict()
    del source["decode.weight"]
    state_dict, report = ckptool.match(source, tied())
    assert state_dict["decode.weight"] is state_dict["embed.weight"]
    assert report.tied == (("embed.weight", "decode.weight"),)
    assert report.fits


@pytest.mark.parametrize("place", ["memory", "file"])
def test_copies_of_one_tensor_fit_a_tie_and_others_do_not(tmp_path, place):
    def matched(state_dict):
        source = saved(tmp_path / "f.pt", state_dict) if place == "file" else state_dict
        return ckptool.match(source, tied())[1]

    source = tied().state_dict()
    source["decode.weight"] = source["decode.weight"].clone()
    report = matched(source)
    assert (report.untied, report.fits) == ((), True)
    source["decode.weight"] = source["decode.weight"].t().contiguous().t()
    assert matched(source).fits
    source["decode.weight"][4, 2] += 1
    report = matched(source)
    assert report.untied == (("embed.weight", "decode.weight"),)
    assert (report.tied, report.fits) == ((), False)


def test_a_tie_of_the_file_alone_is_none_of_the_model():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "decode": nn.Linear(3, 5)})
    _, report = ckptool.match(tied().state_dict(), model)
    assert (report.tied, report.untied, report.fits) == ((), (), True)


# Types.


@pytest.mark.parametrize("place", ["memory", "file"])
def test_a_cast_is_judged_by_the_numbers(tmp_path, place):
    def casts(values, model):
        source = {"weight": values, "bias": torch.zeros(1)}
        given = saved(tmp_path / "f.pt", source) if place == "file" else source
        return {cast.name: (cast.lossy, cast.loss) for cast in ckptool.match(given, model)[1].cast}

    half = nn.Linear(3, 1).half()
    assert casts(torch.tensor([[1.0, 2.0, 0.5]]), half)["weight"] == (False, "")
    assert casts(torch.tensor([[1e6, 2.0, 0.1]]), half)["weight"] == (
        True, "1 of 3 overflow, 1 of 3 change"
    )  # fmt: skip
    strided = torch.tensor([[1e6], [2.0], [0.1]]).t()
    assert casts(strided, half)["weight"] == (True, "1 of 3 overflow, 1 of 3 change")
    exact = casts(torch.ones(1, 3).bfloat16(), nn.Linear(3, 1))
    assert exact == {"weight": (False, "")}


def test_large_tensors_are_judged_in_blocks(tmp_path):
    values = torch.zeros(3, 200_000)
    values[2, 199_999] = 1e9
    for source in ({"weight": values}, {"weight": values.t().contiguous().t()}):
        for given in (source, saved(tmp_path / "f.pt", source)):
            (cast,) = ckptool.match(given, {"weight": values.half()})[1].cast
            assert cast.loss == "1 of 600,000 overflow"


def test_without_elements_the_types_alone_judge():
    source = {"weight": torch.empty(3, device="meta")}
    (cast,) = ckptool.match(source, {"weight": torch.empty(3).half()})[1].cast
    assert (cast.lossy, cast.loss) == (True, "")


# What cannot be made.


def test_a_part_of_a_distributed_tensor_is_refused(fixtures):
    with pytest.raises(UnsupportedFormat, match="DTensor"):
        ckptool.match(
            fixtures / "distributed" / "dtensor_0_of_2.pth",
            fixtures / "distributed" / "dtensor_1_of_2.pth",
        )


def test_extra_state_goes_as_it_is():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": [1]}

        def set_extra_state(self, state):
            self.note = state

    source = nn.DataParallel(Extra(2, 2)).state_dict()
    model = Extra(2, 2)
    state_dict, report = ckptool.match(source, model)
    assert state_dict["_extra_state"] is source["module._extra_state"]
    model.load_state_dict(state_dict)
    assert (model.note, report.fits) == ({"note": [1]}, True)


def test_several_state_dicts_of_a_reference_are_not_guessed_between(tmp_path):
    state = torch.nn.Linear(2, 2).state_dict()
    torch.save({"model": state, "ema": torch.nn.Linear(2, 3).state_dict()}, tmp_path / "ref.pth")
    with pytest.raises(AmbiguousName, match=r"the reference: .*2 state dicts") as caught:
        describe_like(tmp_path / "ref.pth")
    assert caught.value.hint == "choose one with `like_key='model'` or `like_key='ema'`"
    assert describe_like(tmp_path / "ref.pth", key="ema").slots["bias"].shape == (3,)
    with pytest.raises(NotFound):
        describe_like(tmp_path / "ref.pth", key="gone")


def test_what_is_open_or_in_memory_is_a_reference_too(tmp_path):
    net = torch.nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "ref.pth")
    with ckptool.open(tmp_path / "ref.pth") as checkpoint:
        assert describe_like(checkpoint).label == str(tmp_path / "ref.pth")
    assert list(describe_like(net).slots) == list(describe_like(net.state_dict()).slots)
    with pytest.raises(UsageError, match="like is a int, expected a model or a description of one"):
        describe_like(3)


@pytest.mark.parametrize("sizes", [None, 3, (2.0,), (-1,), (2, "x")])
def test_of_what_is_no_shape_it_is_said_what_one_is(sizes):
    with pytest.raises(
        NotFound, match="the reference is not a state dict or a dict of shapes"
    ) as caught:
        describe_like({"weight": sizes})
    assert caught.value.hint.endswith("{'weight': (4, 3)}")


class Copied:
    """An attribute that counts how often it is copied."""

    made = 0

    def __deepcopy__(self, memo):
        Copied.made += 1
        return Copied()


class Odd(nn.Linear):
    """With an extra state that is hard to compare, and a loading that throws dice."""

    state = None

    def __init__(self):
        super().__init__(2, 2)
        self.held, self.told = Copied(), []

    def get_extra_state(self):
        return self.state() if callable(self.state) else self.state

    def set_extra_state(self, state):
        self.told.append(state)

    def _load_from_state_dict(self, *args):
        random.random()
        numpy.random.rand()
        torch.rand(1)
        super()._load_from_state_dict(*args)


def no_order():
    return {"array": numpy.arange(3), "object": object()}


@pytest.mark.parametrize("state", [numpy.arange(3), object, no_order, float("nan")])
def test_an_extra_state_is_not_set_on_the_model(state):
    model = Odd()
    model.state = state
    _, report = ckptool.match({"weight": torch.ones(2, 2)}, model)
    assert [name for name, _ in report.kept] == ["bias", "_extra_state"]
    assert model.told == []


def test_random_numbers_come_as_they_would_have():
    def dice():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    model = Odd()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    wanted = dice()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    ckptool.match({"weight": torch.ones(2, 2)}, model)
    assert dice() == wanted


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_the_model_is_neither_copied_nor_loaded(shape):
    model, tensor = Odd(), torch.ones(shape)
    before, weight = Copied.made, model.weight.detach().clone()
    ckptool.match({"weight": tensor}, model)
    assert Copied.made == before
    assert torch.equal(model.weight, weight)


NAN, INF = float("nan"), float("inf")
LOSSES = [
    ([1, 2.5, 70000, 1e-9, 0.1], "float32", "float16", "1 of 5 overflow, 2 of 5 change"),
    ([65519.0, 65504.0], "float32", "float16", "1 of 2 change"),
    ([1, 2.5, 1e39, NAN, INF], "float64", "float32", "1 of 5 overflow"),
    ([1.0, 500.0, 0.3], "float32", "float8_e4m3fn", "1 of 3 overflow, 1 of 3 change"),
    ([1.5, 2, 3e10, NAN, -1], "float32", "int32", "3 of 5 change"),
    ([-0.5, -1.5], "float32", "uint8", "2 of 2 change"),
    ([1, 2**24 + 1, 2**40], "int64", "float32", "1 of 3 change"),
    ([1, 2**40], "int64", "int32", "1 of 2 change"),
    ([0, 1, 2], "int64", "bool", "1 of 3 change"),
    ([0.0, 1.0, 0.5], "float32", "bool", "1 of 3 change"),
    ([70000, 3], "int32", "float16", "1 of 2 change"),
    ([1 + 2j, 3], "complex64", "float32", "1 of 2 change"),
    ([1 + 1e-20j, 3e39], "complex128", "complex64", "2 of 2 change"),
    ([3.7], "float32", "int8", "1 of 1 change"),
    ([-1, 1], "int8", "uint8", "1 of 2 change"),
    ([200, 1], "uint8", "int8", "1 of 2 change"),
    ([40000, 1], "uint16", "int16", "1 of 2 change"),
    ([-3, 1], "int16", "uint32", "1 of 2 change"),
    ([2**32 - 1, 1], "uint32", "int32", "1 of 2 change"),
    ([17, 16], "int32", "float8_e4m3fn", "1 of 2 change"),
    ([-(2**31), 1], "int32", "float16", "1 of 2 change"),
    ([-(2**31), 1], "int32", "float8_e5m2", "1 of 2 change"),
    ([-(2**31), -(2**15), 1], "int32", "float8_e4m3fnuz", "2 of 3 change"),
    ([2**63 - 1, 1], "int64", "float64", "1 of 2 change"),
    ([0, 1], "bool", "float8_e8m0fnu", "1 of 2 change"),
]


def test_what_is_lost_is_counted_and_told():
    for values, before, after, words in LOSSES:
        block = torch.tensor(values, dtype=getattr(torch, before))
        assert describe_loss(block, after) == words, (values, before, after)


def test_an_infinity_is_no_integer_whatever_is_made_of_it_on_the_way_back():
    block = torch.tensor([-(2**63), 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a type that it calls experimental
        assert describe_loss(block, "complex32") == "1 of 2 change"


KEPT = [
    ([1.0, NAN, -INF, 0.0, -0.0], "float32", "bfloat16"), ([1.0, 2.0, -3.0], "float32", "int64"),
    ([1, 5], "uint64", "int32"), ([0.5, 1.0], "float32", "complex64"),
    ([3, 4], "int8", "complex64"), ([3 + 0j], "complex64", "float16"),
    ([True, False], "bool", "float32"), ([-(2**31), 2**30], "int32", "float32"),
    ([-(2**63), 2**62], "int64", "bfloat16"), ([-128, 64], "int8", "float8_e4m3fn"),
    ([], "float32", "float16"), ([1, 2, 16, -8], "int32", "float8_e4m3fn"),
    ([1, 100], "int8", "uint16"),
]  # fmt: skip


def test_what_is_not_lost_is_not_told():
    for values, before, after in KEPT:
        block = torch.tensor(values, dtype=getattr(torch, before))
        assert describe_loss(block, after) == "", (values, before, after)


def test_losses_of_blocks_add_up(monkeypatch):
    monkeypatch.setattr(plan, "CHUNK", 2)
    assert (
        describe_loss(torch.tensor([1e9, 1.0, 0.1]), "float16") == "1 of 3 overflow, 1 of 3 change"
    )


def test_what_has_no_elements_here_is_not_known():
    assert describe_loss(torch.ones(2, device="meta"), "float16") is None
    assert describe_loss(torch.eye(2).to_sparse(), "float16") is None


def test_the_elements_of_a_parameter_are_known_too(tmp_path):
    torch.save({"weight": torch.nn.Parameter(torch.tensor([1.0, 0.1]))}, tmp_path / "f.pth")
    with ckptool.open(tmp_path / "f.pth") as checkpoint:
        assert describe_loss(checkpoint["weight"], "float16") == "1 of 2 change"
        assert describe_loss(checkpoint["weight"][:1], "float16") == ""


class Scale(nn.Module):
    """A parametrization with the names and shapes of a weight norm, and another meaning."""

    def forward(self, scale, weight):
        return scale * weight

    def right_inverse(self, weight):
        return torch.ones(weight.shape[0], 1), weight


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_only_a_weight_norm_takes_the_names_of_an_old_one(wrap):
    utils = nn.utils
    with pytest.warns(FutureWarning):
        old = nn.Sequential(utils.weight_norm(nn.Linear(3, 4))).state_dict()
    norm, other = (nn.Sequential(nn.Linear(3, 4)) for _ in range(2))
    utils.parametrizations.weight_norm(norm[0])
    utils.parametrize.register_parametrization(other[0], "weight", Scale())
    assert ckptool.match(old, wrap(norm))[1].fits
    assert len(ckptool.match(old, wrap(other))[1].missing_keys) == 2


def test_the_result_is_unpacked_as_two_and_prints_as_one_line():
    model = nn.Linear(2, 3)
    found = ckptool.match(model.state_dict(), model)
    state, report = found
    assert (found.state_dict, found.report) == (state, report)
    assert str(found) == repr(found) == repr(report)
    assert "\n" not in str(found)
