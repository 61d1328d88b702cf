"""`load_into`: the whole of a file in a model, with all that torch does when it loads."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptool
from ckptool.errors import CheckpointWarning, CorruptFile, DeviceError, MatchError, UsageError
from ckptool.loading.load_into import load_into
from ckptool.loading.plan import match
from tests.conversions import convert_by_options
from tests.loading.bits import Untouched, saved, untouched_by


class Net(nn.Module):
    """Of every kind: a convolution, counters, a bare parameter, a buffer, a tie."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.randn(5))
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def same(one, other):
    """Whether two tensors are the same bytes, on the CPU."""
    a, b = (tensor.detach().cpu().contiguous() for tensor in (one, other))
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_loaded(model, source):
    """Every entry of the model is that of another of its kind."""
    state, wanted = model.state_dict(), source.state_dict()
    assert list(state) == list(wanted)
    assert all(same(state[name], wanted[name]) for name in wanted)


@pytest.fixture
def trained():
    torch.manual_seed(1)
    net = Net()
    net.norm.num_batches_tracked.fill_(9)
    return net


@pytest.fixture
def file(tmp_path, trained):
    return saved(tmp_path / "net.pth", {"epoch": 3, "state_dict": trained.state_dict()})


def test_a_model_is_filled_in_place(trained, file):
    model = Net()
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    report = load_into(model, file)
    assert (report.coverage, report.missing_keys, report.unexpected_keys) == (1.0, [], [])
    assert_loaded(model, trained)
    assert model.head.weight is model.embed.weight
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.data_ptr()) == before[name][:2]
        assert parameter._version > before[name][2]  # a graph that was made before knows of it


@pytest.mark.parametrize("kind", ["pickle", "safetensors", "sharded", "zip"])
def test_files_of_other_formats(tmp_path, trained, kind):
    state = trained.state_dict()
    source = saved(tmp_path / "net.pth", state)
    if kind == "pickle":
        torch.save(state, source, _use_new_zipfile_serialization=False)
    elif kind != "zip":
        shards = {"max_shard_size": 300} if kind == "sharded" else {}
        convert_by_options(source, tmp_path / "net.safetensors", ties="copy", **shards)
        source = min(tmp_path.glob("*.index.json" if shards else "*.safetensors"))
    model = Net()
    assert load_into(model, source).coverage == 1.0
    assert_loaded(model, trained)


def test_a_state_dict_in_memory_is_copied(trained):
    model, state = Net(), trained.state_dict()
    assert load_into(model, {"model": state, "epoch": 1}).coverage == 1.0
    assert_loaded(model, trained)
    assert model.conv.weight.data_ptr() != trained.conv.weight.data_ptr()


def test_a_model_can_be_loaded_from_itself_under_other_names():
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.zeros(2))})
    load_into(model, {"a": model["b"], "b": model["a"]})
    assert (model["a"].tolist(), model["b"].tolist()) == ([0, 0], [1, 1])


def test_an_open_checkpoint_will_do_and_a_key_chooses(tmp_path, trained):
    other = Net()
    path = saved(tmp_path / "f.pth", {"model": other.state_dict(), "ema": trained.state_dict()})
    model = Net()
    with ckptool.open(path) as checkpoint:
        load_into(model, checkpoint, key="ema")
    assert_loaded(model, trained)


def test_numbers_are_cast_to_the_type_of_the_model(trained, file):
    model = Net().double()
    report = load_into(model, file)
    assert {(cast.before, cast.after, cast.lossy) for cast in report.cast} == {
        ("float32", "float64", False)
    }
    assert_loaded(model, copy.deepcopy(trained).double())


def test_a_cast_that_loses_numbers_is_refused_unless_it_is_allowed(trained, file):
    model = Net().bfloat16()
    untouched = Untouched(model)
    with pytest.raises(MatchError) as caught:
        load_into(model, file)
    assert any(cast.lossy for cast in caught.value.report.cast)
    untouched.check()
    load_into(model, file, allow_lossy_cast=True)
    assert_loaded(model, copy.deepcopy(trained).bfloat16())


def test_other_orders_of_elements_on_either_side(tmp_path):
    stored = torch.randn(40, 30, 5, 6)
    state = {
        "whole": stored,
        "turned": stored.permute(3, 1, 0, 2),
        "last": stored.to(memory_format=torch.channels_last),
        "part": stored[3:9, ::2],
        "conj": torch.randn(3, 4, dtype=torch.complex64).conj(),
    }
    path = saved(tmp_path / "f.pth", state)
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.zeros_like(tensor.resolve_conj()))
            for name, tensor in state.items()
        }
    )
    model["whole"] = nn.Parameter(torch.zeros(6, 5, 30, 40).permute(3, 2, 1, 0))
    model["last"] = nn.Parameter(torch.zeros(40, 30, 5, 6, dtype=torch.float64))
    strides = {name: parameter.stride() for name, parameter in model.items()}
    load_into(model, path)
    for name, tensor in state.items():
        assert torch.equal(model[name].to(tensor.dtype), tensor), name
        assert model[name].stride() == strides[name]


def test_a_negated_tensor_keeps_its_sign_in_another_type(tmp_path):
    state = {"w": torch._neg_view(torch.tensor([1.0, -2.0]))}
    for source in (state, saved(tmp_path / "f.pth", state)):
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2).half())})
        load_into(model, source, allow_lossy_cast=True)
        assert model["w"].tolist() == [-1, 2]  # torch's own cast forgets that it is negated


def test_large_tensors_go_block_by_block(tmp_path):
    stored = torch.randn(3, 700_000)
    path = saved(tmp_path / "f.pth", {"a": stored, "b": stored.t(), "c": stored})
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(3, 700_000, dtype=torch.float64))
    model.b = nn.Parameter(torch.zeros(700_000, 3))
    model.c = nn.Parameter(torch.zeros(3, 700_000))
    load_into(model, path)
    assert torch.equal(model.a, stored.double())
    assert torch.equal(model.b, stored.t())
    assert torch.equal(model.c, stored)


def test_scalars_that_torch_0_3_saved_as_a_list_of_one():
    model = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0))})
    load_into(model, {"a": torch.tensor([4.0])})
    assert model["a"].item() == 4
    meta = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0, device="meta"))})
    load_into(meta, {"a": torch.tensor([4.0])})
    assert (meta["a"].item(), meta["a"].shape) == (4, ())


def test_memory_that_names_share_in_part_is_filled_in_the_order_of_torch():
    def overlapping():
        model, memory = nn.Module(), torch.zeros(6)
        model.register_buffer("a", memory[:4])
        model.register_buffer("b", memory[2:])
        return model

    for b in (torch.arange(2.0, 6.0), torch.full((4,), 7.0)):
        state = {"a": torch.arange(4.0), "b": b}
        model, theirs = overlapping(), overlapping()
        load_into(model, state)
        theirs.load_state_dict(state)
        assert_loaded(model, theirs)


# the meta device


def on_meta():
    with torch.device("meta"):
        model = Net()
    model.passing = torch.ones(2)
    return model


def test_a_model_on_the_meta_device_is_mapped(trained, file):
    model = on_meta()
    model.scale.requires_grad_(False)
    assert load_into(model, file).coverage == 1.0
    assert_loaded(model, trained)
    assert model.head.weight is model.embed.weight
    assert (model.scale.requires_grad, model.head.bias.requires_grad) == (False, True)
    model.scale.data.fill_(7)  # private: the file does not change
    assert same(torch.load(file)["state_dict"]["scale"], trained.scale)


def test_a_tie_of_the_file_alone_makes_none_in_a_mapped_model(tmp_path):
    weight = torch.randn(4, 4)
    path = saved(
        tmp_path / "f.pth", {"0.weight": weight, "1.weight": weight, "2.weight": weight.t()}
    )
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    load_into(model, path)
    assert len({layer.weight.data_ptr() for layer in model}) == 3
    model[0].weight.data.zero_()
    assert same(model[1].weight, weight)
    assert same(model[2].weight, weight.t())


def test_a_model_on_the_meta_device_keeps_its_types(trained, file):
    model = on_meta().double()
    load_into(model, file)
    assert_loaded(model, copy.deepcopy(trained).double())
    model = on_meta().double()
    report = load_into(model, file, assign=True)
    assert report.cast == ()
    assert model.conv.weight.dtype == torch.float32


def test_what_stays_on_the_meta_device_is_told(tmp_path, trained):
    state = trained.state_dict()
    del state["scale"]
    with torch.device("meta"):
        model = Net()
    with pytest.warns(CheckpointWarning, match="scale, passing"):
        report = load_into(model, state, allow_missing="scale")
    assert "scale, passing" in report.notes[-1]
    assert report.missing_keys == ["scale"]
    assert "fits Net with the allowed differences" in str(report)
    assert not report.fits
    assert "accepted" not in report.to_dict()


def test_only_what_is_on_the_meta_device_is_replaced(trained, file):
    model = Net()
    model.head.bias = nn.Parameter(torch.empty(7, device="meta"))
    model.norm.bias = nn.Parameter(torch.empty(3, device="meta"))
    weight, scale = model.head.weight, model.norm.weight
    load_into(model, file)
    assert_loaded(model, trained)
    assert model.head.weight is weight
    assert model.norm.weight is scale


def test_a_meta_model_is_not_copied_into(file):
    with pytest.raises(UsageError, match="on the meta device"):
        load_into(on_meta(), file, assign=False)


def test_assigning_takes_the_tensors_of_the_file(trained, file):
    model = Net().double()
    old = model.conv.weight
    load_into(model, file, assign=True)
    assert model.conv.weight is not old
    assert_loaded(model, trained)


def test_where_assigned_tensors_go(trained, file):
    model = on_meta()
    with pytest.warns(CheckpointWarning):
        load_into(model, file, map_location="meta")
    assert model.conv.weight.is_meta


# what torch's own hooks do


class Versioned(nn.Module):
    """Renamed what it has in its second version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen = None

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.seen = metadata.get("version")
        if self.seen == 1:
            state[prefix + "weight"] = state[prefix + "weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_follow_the_names(tmp_path):
    old = nn.DataParallel(nn.Sequential(Versioned()))
    old.module[0].weight.data.fill_(1)
    state = old.state_dict()
    state._metadata["module.0"]["version"] = 1
    model = nn.Sequential(Versioned())
    load_into(model, saved(tmp_path / "f.pth", state))
    assert (model[0].seen, model[0].weight.tolist()) == (1, [10, 10])


class Counted(nn.Module):
    """With an extra state."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.count = [0]
        self.at_call = None

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]
        self.at_call = self.weight.detach().clone()


@pytest.mark.parametrize("from_file", [True, False])
def test_extra_state_is_set_over_loaded_weights(tmp_path, from_file):
    source, model = nn.Sequential(Counted()), nn.Sequential(Counted())
    source[0].count = [4]
    state = source.state_dict()
    load_into(model, saved(tmp_path / "f.pth", state) if from_file else state)
    assert model[0].count == [4]
    assert same(model[0].at_call, source[0].weight)


def test_hooks_see_real_tensors_before_and_loaded_ones_after(trained, file):
    model, seen = Net(), []

    def before(module, state, prefix, *rest):
        seen.append(state[prefix + "weight"].clone())
        state[prefix + "weight"] = state[prefix + "weight"] + 1

    def after(module, keys):
        seen.append(module.weight.detach().clone())

    model.conv.register_load_state_dict_pre_hook(before)
    model.conv.register_load_state_dict_post_hook(after)
    load_into(model, file)
    assert same(seen[0], trained.conv.weight)
    assert same(seen[1], trained.conv.weight + 1)
    assert same(model.conv.weight, trained.conv.weight + 1)
    assert same(model.conv.bias, trained.conv.bias)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_activation_checkpointing(tmp_path, device):
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.device(device):
        model = nn.Sequential(*map(checkpoint_wrapper, (nn.Linear(2, 2), nn.BatchNorm1d(2))))
    assert load_into(model, saved(tmp_path / "f.pth", source.state_dict())).coverage == 1.0
    assert_loaded(model, source)


def test_a_model_with_a_loading_of_its_own_is_asked(trained, file):
    class Own(Net):
        calls = 0

        def load_state_dict(self, state_dict, strict=True, assign=False):
            self.calls += 1
            return super().load_state_dict(state_dict, strict, assign)

    model = Own()
    load_into(model, file)
    assert model.calls == 1
    assert_loaded(model, trained)


def test_lazy_parameters_are_made(trained, file):
    source = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(1))
    load_into(model, source.state_dict())
    assert_loaded(model, source)
    assert not any(map(nn.parameter.is_lazy, model.parameters()))


def test_parametrisations_old_and_new(tmp_path):
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(3, 2))
    load_into(new, saved(tmp_path / "f.pth", old.state_dict()))
    assert torch.allclose(new.weight, old(torch.eye(3)).t() - old.bias[:, None], atol=1e-6)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    target = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    load_into(target, saved(tmp_path / "f.pth", spectral.state_dict()))
    assert_loaded(target, spectral)


def test_tensors_swapped_as_torch_can_be_told_to(trained, file):
    model = Net()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load_into(model, file)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert_loaded(model, trained)


def test_a_subclass_of_parameter_takes_what_it_is_given(tmp_path):
    class Marked(nn.Parameter):
        pass

    model = nn.Module()
    model.weight = Marked(torch.zeros(3))
    load_into(model, {"weight": torch.ones(3)})
    assert type(model.weight) is Marked
    assert model.weight.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_sparse_and_quantized_buffers(tmp_path):
    def made(value):
        model = nn.Module()
        model.register_buffer("sparse", (torch.eye(3) * value).to_sparse())
        model.register_buffer(
            "q", torch.quantize_per_tensor(torch.ones(3) * value, 0.5, 0, torch.qint8)
        )
        return model

    source, model = made(2.0), made(1.0)
    load_into(model, saved(tmp_path / "f.pth", source.state_dict()))
    assert torch.equal(model.sparse.to_dense(), source.sparse.to_dense())
    assert torch.equal(model.q.dequantize(), source.q.dequantize())


def test_modules_that_torch_scripted(trained, file):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x)

    source, model = Plain(), torch.jit.script(Plain())
    load_into(model, source.state_dict())
    assert same(model.fc.weight, source.fc.weight)


def test_thousands_of_modules_with_a_loading_of_their_own():
    source = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(1000))
    model = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(1000))
    for layer in source:
        layer.weight.data.normal_()
    load_into(model, source.state_dict())
    assert_loaded(model, source)


def test_what_is_no_model():
    with pytest.raises(UsageError, match=r"model is a dict, expected a torch\.nn\.Module"):
        load_into({}, {})


def test_an_optimizer_goes_with_its_model(tmp_path):
    def trained_pair():
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(list(model.parameters()))
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    source, theirs = trained_pair()
    ckptool.save(tmp_path / "f.pth", model=source, optimizer=theirs)
    model, own = trained_pair()
    report = load_into(model, tmp_path / "f.pth", optimizer=own)
    assert (report.optimizer.by, report.optimizer.matched) == ("names", 4)
    assert_loaded(model, source)
    for one, other in zip(source.parameters(), model.parameters(), strict=True):
        assert same(theirs.state[one]["exp_avg"], own.state[other]["exp_avg"])


def test_an_optimizer_over_parameters_that_are_replaced():
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(
        UsageError, match="the optimizer has parameters that would be replaced"
    ) as caught:
        load_into(
            model,
            {"model": {}, "optimizer": {}} | nn.Linear(2, 2).state_dict(),
            optimizer=optimizer,
        )
    assert "load the model, build the optimizer" in caught.value.hint


def test_in_inference_mode():
    with torch.inference_mode():
        source, model = nn.Linear(2, 2), nn.Linear(2, 2)
        load_into(model, source.state_dict())
        assert_loaded(model, source)


def test_a_pickle_that_is_not_what_was_written_is_refused(tmp_path):
    file = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(8), "b": torch.ones(8)}, file)
    raw = bytearray(file.read_bytes())
    at = raw.index(b"X\x01\x00\x00\x000q")  # the key of the first storage
    raw[at + 5 : at + 6] = b"1"
    file.write_bytes(raw)
    model = nn.ParameterDict({name: nn.Parameter(torch.full((8,), 7.0)) for name in "ab"})
    for verify in (None, True):
        with pytest.raises(CorruptFile, match=r"data\.pkl' is damaged"):
            load_into(model, file, verify=verify)
    assert all((one == 7).all() for one in model.parameters())
    assert load_into(model, file, verify=False).fits


SLIPS = (None, "a=>b", b"a=>b", "", 5, {"a": "b"}, [None], [5], [b"a=>b"], nn.Linear)
"""Given where a list of rules is wanted."""
VALUES = {
    "min_coverage": (float("nan"), -1, 2, "1", True), "allow_missing": (5,),
    "allow_unexpected": ([1],), "strict": ("no", None), "assign": ("x",), "verify": ("q", 1),
    "rename": SLIPS, "prefixes": SLIPS,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_slip_is_refused_with_the_name_of_the_argument_by_match_too(name):
    state = nn.Linear(1, 1).state_dict()
    for value in VALUES[name]:
        model = nn.Linear(1, 1)
        with untouched_by(UsageError, model) as caught:
            load_into(model, state, **{name: value})
        assert any(word in str(caught.value) for word in (name.rstrip("s"), "OLD=NEW")), value
        if VALUES[name] is SLIPS:
            with pytest.raises(UsageError) as again:
                match(state, model, **{name: value})
            told = (caught.value.message, caught.value.hint)
            assert (again.value.message, again.value.hint) == told, value


def test_a_text_in_the_place_of_a_list_is_shown_as_one():
    with pytest.raises(UsageError, match="rename='a=>b' is not a list") as caught:
        match({}, nn.Linear(1, 1), rename="a=>b")
    assert caught.value.hint == "use rename=['a=>b']"


def test_a_place_that_is_none_is_noticed_where_it_is_of_no_use():
    for value in ("nope", 5):
        with pytest.raises(DeviceError, match="map_location"):
            load_into(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), map_location=value)


def test_what_can_be_meant_is_taken():
    options = {
        "min_coverage": 1, "allow_missing": ("a*",), "allow_unexpected": {"b"}, "assign": False,
        "verify": True, "map_location": torch.device("cpu"), "rename": iter(["^x=>y"]),
    }  # fmt: skip
    load_into(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), **options)


def test_statistics_alone_are_nothing_of_the_model():
    model = nn.BatchNorm1d(2)
    state = {"running_mean": torch.ones(2), "running_var": torch.ones(2)}
    with untouched_by(MatchError, model):
        load_into(model, state, strict=False)
    load_into(model, state, strict=False, min_coverage=0)
    assert model.running_mean.tolist() == [1, 1]


class Viewing(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.register_buffer("v", view(self.w.data))


@pytest.mark.parametrize("view", [lambda w: w.view(2, 2), lambda w: w[1:3], lambda w: w[::2]])
def test_views_load_as_torch_loads_them_whether_the_file_has_one_content_or_two(view, tmp_path):
    numbers, path = torch.tensor([1.0, 2, 3, 4]), tmp_path / "a.pth"
    for seen in (view(torch.full((4,), 9.0)), view(numbers)):
        model, judge, state = Viewing(view), Viewing(view), {"w": numbers, "v": seen}
        torch.save(state, path)
        judge.load_state_dict(state)
        for source in (state, path):
            report = load_into(model, source)
            assert (report.fits, report.overlapping) == (True, ())
            assert torch.equal(model.w, judge.w)
            assert torch.equal(model.v, judge.v)
    assert model.w.tolist() == [1, 2, 3, 4]
    assert torch.equal(model.v, view(numbers))


def test_neighbors_do_not_overlap():
    flat = torch.zeros(8)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    assert load_into(model, {"0": torch.ones(4), "1": torch.zeros(4)}).fits
    assert flat.tolist() == [1] * 4 + [0] * 4


def test_what_torch_copies_nothing_into_is_its_refusal_as_an_error_of_ours(tmp_path):
    model = Viewing(lambda w: w[:1].expand(3))
    state = {"w": torch.ones(4), "v": torch.ones(3)}
    torch.save(state, tmp_path / "a.pth")
    before = Untouched(model)
    for source in (state, tmp_path / "a.pth"):
        with pytest.raises(MatchError, match="more than one element of the written-to tensor"):
            load_into(model, source)
        before.check()
