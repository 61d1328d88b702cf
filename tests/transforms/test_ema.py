"""`extract --ema`, on the layouts that the libraries write; DeepSpeed's fp32 masters."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import ckptool
from ckptool.errors import AmbiguousName, NotFound


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.head.weight


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def averaged(net):
    """A model with other parameters, and the same buffers."""
    made = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1)
    return made


@pytest.fixture
def extracted(tmp_path):
    """What torch loads of an extraction of a root, and what was told."""

    def run(root):
        torch.save(root, tmp_path / "run.pth")
        with ckptool.open(tmp_path / "run.pth") as checkpoint:
            made = checkpoint.then(ckptool.Take(ema=True))
            made.save(tmp_path / "ema.pth", overwrite=True)
        told = [f"{change.kind}: {change.text}" for change in made.changes]
        return torch.load(tmp_path / "ema.pth", weights_only=False), told

    return run


def same(made, wanted):
    assert list(made) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name


BUFFERS = (
    "keep: kept the model's own norm.running_mean, norm.running_var, norm.num_batches_tracked, "
    "which have no average"
)


class LitEma(torch.nn.Module):
    """The names of latent-diffusion's `ldm/modules/ema.py`."""

    def __init__(self, model, values):
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.999))
        self.register_buffer("num_updates", torch.tensor(3))
        self.m_name2s_name = {}
        for name, _ in model.named_parameters():
            self.m_name2s_name[name] = name.replace(".", "")
            value = dict(values.named_parameters(remove_duplicate=False))[name]
            self.register_buffer(self.m_name2s_name[name], value.detach().clone())


def test_latent_diffusion(net, averaged, extracted):
    whole = torch.nn.Module()
    whole.first_stage_model = torch.nn.Linear(2, 2)
    whole.model = net
    whole.model_ema = LitEma(net, averaged)
    made, told = extracted({"state_dict": whole.state_dict(), "epoch": 1})
    whole.model = averaged
    wanted = {k: v for k, v in whole.state_dict().items() if not k.startswith("model_ema.")}
    same(made, wanted)
    assert set(made._metadata) == {
        name for name in whole.state_dict()._metadata if "_ema" not in name
    }
    assert told[0] == "ema: took 8 averaged weights from state_dict/model_ema."
    assert "first_stage_model.weight" in told[1]


@pytest.mark.parametrize("key", ["shadow_params"])
def test_torch_ema_and_diffusers(net, averaged, extracted, key):
    shadow = [one.detach().clone() for one in averaged.parameters()]
    root = {"model": net.state_dict(), "ema": {"decay": 0.9, key: shadow, "step": 3}}
    made, told = extracted(root)
    same(made, averaged.state_dict())
    assert told[:2] == [f"ema: took {len(made) - 3} averaged weights from ema/{key}", BUFFERS]
    assert "shadow_params" not in " ".join(told[2:])


def test_shapes_that_fit_in_several_ways_are_refused(net, averaged, extracted):
    shadow = [one.detach().clone() for one in averaged.parameters()]
    for missing in (1, -1):  # biases of one size
        less = [one for at, one in enumerate(shadow) if at != missing % len(shadow)]
        with pytest.raises(NotFound, match="no model uniquely"):
            extracted({"model": net.state_dict(), "ema": {"shadow_params": less}})


def test_frozen_weights_and_buffers_of_any_name_are_passed_over(extracted):
    state = {"a.w": torch.randn(2, 3), "a.table": torch.randn(9), "b.w": torch.randn(3, 2)}
    shadow = [state["a.w"] + 1, state["b.w"] + 1]
    made, told = extracted({"net": state, "ema": {"shadow_params": shadow}})
    same(made, {"a.w": shadow[0], "a.table": state["a.table"], "b.w": shadow[1]})
    assert told[1] == "keep: kept the model's own a.table, which has no average"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_state_dict_called_ema(net, averaged, extracted, wrapped):
    model = torch.nn.DataParallel(net) if wrapped else net
    average = AveragedModel(averaged)
    root = {"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 2}
    made, told = extracted(root)
    target = torch.nn.DataParallel(averaged) if wrapped else averaged
    same(made, target.state_dict())
    assert made._metadata == model.state_dict()._metadata
    assert "left-out: model (state dict, 11 tensors)" in told


def test_timm(net, averaged, extracted):
    root = {"state_dict": net.state_dict(), "state_dict_ema": averaged.state_dict()}
    same(extracted(root)[0], averaged.state_dict())


def test_pickled_modules(net, averaged, extracted):
    made, _ = extracted({"model": net.half(), "ema": averaged})
    same(made, averaged.state_dict())
    assert not made["conv.weight"].requires_grad


def test_an_average_without_a_model_beside_it_has_the_names_of_the_model(net, averaged, extracted):
    """As Ultralytics saves a training that goes on: the average alone, as a pickled module."""
    made, told = extracted({"epoch": 3, "model": None, "ema": averaged})
    same(made, averaged.state_dict())
    assert told[0] == "ema: took 11 averaged weights from ema"
    made, _ = extracted({"ema": torch.nn.DataParallel(averaged).state_dict()})
    same(made, torch.nn.DataParallel(averaged).state_dict())


def test_ema_pytorch(net, averaged, extracted):
    both = torch.nn.Module()
    both.online_model, both.ema_model = net, averaged
    both.register_buffer("initted", torch.tensor(True))
    both.register_buffer("step", torch.tensor(3))
    same(extracted(both.state_dict())[0], averaged.state_dict())
    del both.online_model
    root = {"model": net.state_dict(), "ema": both.state_dict()}
    same(extracted(root)[0], averaged.state_dict())


def test_ema_pytorch_without_the_model(averaged, extracted):
    root = {f"ema_model.{name}": value for name, value in averaged.state_dict().items()}
    root.update(initted=torch.tensor(True), step=torch.tensor(3))
    same(extracted(root)[0], averaged.state_dict())


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("attribute", ["model", "net"])
def test_timm_inside_a_lightning_module(net, averaged, extracted, attribute):
    """As `ModelEmaV2` has it, whose own name for its copy is `module`."""
    own = prefixed(net.state_dict(), f"{attribute}.")
    ema = prefixed(averaged.state_dict(), "model_ema.module.")
    loss = {"loss.weight": torch.ones(3)}
    made, told = extracted({"state_dict": {**own, **ema, **loss}})
    same(made, prefixed(averaged.state_dict(), f"{attribute}.") | loss)
    assert "11 averaged weights from state_dict/model_ema.module." in told[0]
    same(extracted(ema)[0], averaged.state_dict())
    with pytest.raises(NotFound, match="no model uniquely"):
        extracted({**own, **prefixed(net.state_dict(), "teacher."), **ema})


def test_lightning(net, averaged, extracted):
    root = {
        "state_dict": dict(averaged.state_dict()),
        "current_model_state": net.state_dict(),
        "averaging_state": {"n_averaged": torch.tensor(3)},
    }
    same(extracted(root)[0], averaged.state_dict())
    callbacks = {"EMACallback{'decay': 0.9}": {"weights": averaged.state_dict()}}
    made, _ = extracted({"state_dict": net.state_dict(), "callbacks": callbacks})
    same(made, averaged.state_dict())


def test_raw_weights_are_never_taken_for_averages(net, averaged, extracted):
    with pytest.raises(NotFound, match=r"has no averaged weights; searched for .*shadow_params"):
        extracted({"state_dict": net.state_dict(), "schema": {"a.w": torch.ones(2)}})
    state = averaged.state_dict()
    with pytest.raises(AmbiguousName, match="several averages: ema, ema_2"):
        extracted({"model": net.state_dict(), "ema": state, "ema_2": averaged.state_dict()})
    other = {"other.weight": torch.ones(2)}
    with pytest.raises(NotFound, match="no model uniquely"):
        extracted({"model": net.state_dict(), "ema": other})
    state["conv.bias"] = torch.ones(5)
    with pytest.raises(
        NotFound, match="11 averaged tensors of ema match no model uniquely by key and shape"
    ):
        extracted({"model": net.state_dict(), "ema": state})


ZERO = Path(__file__).parents[2] / "fixtures" / "zero"
SCRIPT = json.loads((ZERO / "masters.json").read_text())
"""What DeepSpeed's `zero_to_fp32` makes of each folder: shape and hash of each tensor."""
NAMES = ["scale", "embed.weight", "up.weight", "up.bias", "down.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("name", [name for name in SCRIPT if isinstance(SCRIPT[name], dict)])
def test_the_weights_are_those_of_deepspeeds_script(name):
    with ckptool.open(ZERO / name, master=True) as checkpoint:
        rows = ckptool.list_tensors(checkpoint, hash=True).to_dict()["tensors"]
        found = {row["name"]: row["sha256"] for row in rows}
        assert checkpoint["module/head.weight"].place == checkpoint["module/embed.weight"].place
    assert not [key for key in found if key.endswith("/fp32")]
    for key in (*NAMES, "head.weight"):
        assert found[f"module/{key}"] == SCRIPT[name][key][1]


@pytest.mark.parametrize("name", ["z1-fp32", "z1-bf16", "z2-bf16", "z3-bf16", "bf16"])
def test_convert_writes_them(name, tmp_path):
    target = tmp_path / "model.safetensors"
    ckptool.convert(ZERO / name, target, ckptool.Masters(), ckptool.Take(model_only=True))
    made = ckptool.load(target)
    with ckptool.open(ZERO / name) as checkpoint:
        for key in NAMES:
            state = checkpoint["optimizer"]["state"][key]
            master = state["fp32"] if "fp32" in state else checkpoint["module"][key]
            assert torch.equal(made[key], master.torch())
        for key in ("down.weight", "angles", "count"):
            assert torch.equal(made[key], checkpoint["module"][key].torch())


def test_what_was_done_is_told(tmp_path):
    with ckptool.open(ZERO / "z2-bf16", master=True) as checkpoint:
        (change,) = checkpoint.changes
    assert (change.kind, change.count) == ("master", 8)
    assert change.text.endswith("; 3 tensors without a master are unchanged")
    with ckptool.open(ZERO / "z3-fp32", master=True) as checkpoint:
        assert not checkpoint.changes
    with ckptool.open(ZERO / "z3-bf16") as checkpoint:
        assert [one.kind for one in checkpoint.changes] == ["cast"]
    receipt = ckptool.convert(ZERO / "z3-bf16", tmp_path / "m.pth", ckptool.Masters())
    assert [one.kind for one in receipt.changes] == ["format", "master"]
    assert not receipt.outcomes


@pytest.mark.parametrize("name", ["torch-2.13.0/dp_full_cuda3.pth", "numpy/jax.npz"])
def test_a_file_without_masters_is_refused(name):
    with pytest.raises(
        NotFound, match="has no fp32 master weights of a DeepSpeed optimizer"
    ) as caught:
        ckptool.open(ZERO.parent / name, master=True)
    assert "master=True" in caught.value.hint
