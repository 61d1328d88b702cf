"""`load_state_dict`: what a model takes, out of whatever file there is."""

import io

import pytest
import torch

import ckptool
from ckptool.errors import (
    AmbiguousName,
    CheckpointWarning,
    NameCollision,
    NotFound,
    UnsupportedFormat,
    UsageError,
)
from ckptool.formats import open_checkpoint
from ckptool.model import TensorRef
from tests.loading.bits import saved
from tests.loading.wrappings import WRAPPINGS
from tests.tensors.judge import assert_same


def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )


@pytest.mark.parametrize("wrapper", ["plain", "DP", "compile", "compile of DP"])
def test_a_wrapped_model_goes_into_a_bare_one(tmp_path, wrapper):
    model = net()
    state = WRAPPINGS[wrapper](model).state_dict()
    file = saved(tmp_path / "f.pt", {"epoch": 1, "state_dict": state})
    wanted = torch.load(saved(tmp_path / "bare.pt", model.state_dict()))
    for mmap in (False, True):
        loaded = ckptool.load_state_dict(file, mmap=mmap)
        assert_same(loaded, wanted)
        fresh = net()
        assert fresh.load_state_dict(loaded).missing_keys == []
        assert torch.equal(fresh[3].weight, model[3].weight)


FILES = [
    "ddp/ddp.pth", "ddp/ddp_compiled.pth", "ddp/ddp_full.pth", "ecosystem/compiled.pth",
    "ecosystem/compiled_dp.pth", "ecosystem/dp_compiled.pth",
]  # fmt: skip


def test_files_of_real_wrappers(fixtures):
    single = ckptool.load_state_dict(fixtures / "torch-2.13.0" / "single.pth")
    for name in FILES:
        loaded = ckptool.load_state_dict(fixtures / name)
        assert list(loaded) == list(single), name
        assert [t.shape for t in loaded.values()] == [t.shape for t in single.values()], name
        assert list(loaded._metadata) == list(single._metadata), name


@pytest.mark.parametrize("folder", ["torch-1.4.0", "torch-1.6.0", "torch-1.13.1", "torch-2.13.0"])
def test_modules_and_torchscript_give_their_state_dict(fixtures, folder):
    plain = ckptool.load_state_dict(fixtures / folder / "single.pth")
    for name in ("whole_single.pth", "whole_dp.pth", "scripted.pt"):
        assert set(ckptool.load_state_dict(fixtures / folder / name)) == set(plain), name


def test_names_can_be_kept(tmp_path):
    state = torch.nn.DataParallel(net()).state_dict()
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", state), wrappers="keep")
    assert_same(loaded, torch.load(tmp_path / "f.pt"))


def test_a_key_chooses(fixtures):
    file = fixtures / "ecosystem" / "ema.pth"
    with pytest.raises(AmbiguousName):
        ckptool.load_state_dict(file)
    theirs = torch.load(file)
    loaded = ckptool.load_state_dict(file, key="model_ema", wrappers="keep")
    assert_same(loaded, theirs["model_ema"])
    with pytest.raises(NotFound):
        ckptool.load_state_dict(file, key="nothing")


def test_an_open_checkpoint_will_do(fixtures):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp_full.pth") as checkpoint:
        first = ckptool.load_state_dict(checkpoint)
        assert_same(ckptool.load_state_dict(checkpoint), first)


def test_parameters_stay_parameters_and_ties_stay_ties(tmp_path):
    weight = torch.nn.Parameter(torch.randn(2))
    tree = {"a": weight, "b": weight, "c": torch.randn(4)[1:]}
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))
    assert type(loaded["a"]) is torch.nn.Parameter
    assert loaded["a"] is loaded["b"]


class Marked(torch.nn.Module):
    """Parameters of several kinds: frozen, with attributes, tied; a `Buffer` has attributes too."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.fc.bias.requires_grad_(False)
        self.tied = self.fc
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.scale.note = "mine"
        self.mark = torch.nn.Buffer(torch.zeros(1)) if hasattr(torch.nn, "Buffer") else None


@pytest.mark.parametrize("wrap", [lambda net: net, torch.nn.DataParallel, torch.compile])
def test_a_pickled_module_gives_plain_tensors_as_state_dict_does(tmp_path, wrap):
    model = wrap(Marked())
    expected = model.state_dict()
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", model), wrappers="keep")
    assert_same(loaded, expected)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert not any(tensor.requires_grad or vars(tensor) for tensor in loaded.values())


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_an_exported_program_gives_plain_tensors(fixtures, name):
    loaded = ckptool.load_state_dict(fixtures / name)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_floating_tensors_are_cast_and_counters_are_not(tmp_path):
    file = saved(tmp_path / "f.pt", net().state_dict())
    loaded = ckptool.load_state_dict(file, dtype=torch.float16)
    theirs = torch.load(file)
    for name, tensor in loaded.items():
        expected = torch.float16 if theirs[name].is_floating_point() else theirs[name].dtype
        assert tensor.dtype is expected
    net().half().load_state_dict(loaded)


def test_meta_gives_the_shapes_of_a_state_dict(tmp_path):
    with torch.device("meta"):
        model = net()
    file = saved(tmp_path / "f.pt", net().state_dict())
    loaded = ckptool.load_state_dict(file, map_location="meta")
    model.load_state_dict(loaded, assign=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_extra_state_comes_along(tmp_path):
    tree = {"w": torch.zeros(1), "w2": torch.zeros(1), "_extra_state": {"scale": torch.ones(2)}}
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))
    assert_same(dict(loaded), tree)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize(
    "wrap",
    [
        averaged,
        lambda model: torch.nn.DataParallel(averaged(model)),
        lambda model: torch.compile(averaged(model)),
        lambda model: averaged(torch.compile(model)),
    ],
)
def test_the_counter_of_an_averaged_model_is_left_out_with_its_wrapper(tmp_path, wrap):
    wrapped = wrap(net())
    for content in (wrapped, wrapped.state_dict()):
        file = saved(tmp_path / "f.pt", {"swa": content})
        with pytest.warns(CheckpointWarning, match="'n_averaged'"):
            loaded = ckptool.load_state_dict(file)
        net().load_state_dict(loaded)
        kept = ckptool.load_state_dict(file, wrappers="keep")
        wrap(net()).load_state_dict(kept)


def test_a_buffer_of_that_name_is_the_models_own(tmp_path):
    model = net()
    model.register_buffer("n_averaged", torch.tensor(3))
    for wrapped in (model, torch.nn.DataParallel(model)):
        loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", wrapped.state_dict()))
        assert loaded["n_averaged"] == 3


@pytest.mark.parametrize("wrappers", ["strip", "keep"])
def test_plain_values_beside_the_tensors_are_left_out(tmp_path, wrappers):
    state = net().state_dict()
    state.update({"epoch": 3, "args": {"lr": 0.1}, "run.name": "x\x1b[2J"})
    file = saved(tmp_path / "f.pt", state)
    with pytest.warns(CheckpointWarning, match="'epoch', 'args', 'run.name'") as caught:
        loaded = ckptool.load_state_dict(file, wrappers=wrappers)
    assert net().load_state_dict(loaded).unexpected_keys == []
    assert list(loaded._metadata) == list(net().state_dict()._metadata)
    assert [warning.filename for warning in caught] == [__file__]


def test_what_a_module_itself_keeps_beside_its_tensors_stays(tmp_path):
    state = net().state_dict()
    state["0._extra_state"], state["0.bias"], state["0.dtype"] = "any", None, torch.qint8
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", state))
    assert_same(loaded, state)


def test_names_that_would_collide_are_refused(tmp_path):
    tree = {"module._orig_mod.w": torch.zeros(1), "module.w": torch.ones(1)}
    with pytest.raises(NameCollision):
        ckptool.load_state_dict(saved(tmp_path / "f.pt", tree))


@pytest.mark.parametrize("name", ["dtensor", "fsdp2", "sharded_tensor", "fsdp1_sharded"])
def test_one_part_of_a_distributed_tensor_is_no_state_dict(fixtures, name):
    file = fixtures / "distributed" / f"{name}_0_of_2.pth"
    with open_checkpoint(file) as checkpoint:
        wrapped = [path[-1] for path, ref in checkpoint.tensors() if isinstance(ref, TensorRef)]
    with pytest.raises(UnsupportedFormat, match="this file holds one part") as caught:
        ckptool.load_state_dict(file)
    assert any(str(name) in str(caught.value) for name in wrapped)
    assert "local" in caught.value.hint


def test_no_state_dict_at_all(tmp_path):
    with pytest.raises(NotFound):
        ckptool.load_state_dict(saved(tmp_path / "f.pt", {"epoch": 1}))


def test_options_that_are_none(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(1)})
    with pytest.raises(UsageError, match="'strip' nor 'keep'"):
        ckptool.load_state_dict(file, wrappers="remove")
    with pytest.raises(UsageError, match="int8"):
        ckptool.load_state_dict(file, dtype="int8")


def test_what_was_loaded_can_be_saved_and_loaded_safely(tmp_path):
    """Nothing of ours is left inside that a reader would have to import."""
    model = torch.nn.DataParallel(net())
    loaded = ckptool.load_state_dict(saved(tmp_path / "f.pt", model.state_dict()))
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=True), loaded)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_model_in_a_wrapper_loads_into_the_bare_one(tmp_path):
    """Its layers keep a dtype among their entries, whose names must follow the tensors'."""
    from torch.ao.quantization import quantize_dynamic

    bare = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(3, 4)), {torch.nn.Linear})
    torch.save(torch.nn.DataParallel(bare).state_dict(), tmp_path / "quantised.pth")
    found = ckptool.load_state_dict(tmp_path / "quantised.pth")
    assert str(bare.load_state_dict(found)) == "<All keys matched successfully>"
