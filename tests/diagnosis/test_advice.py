"""No command of doctor loses weights: its result loads into the reference, or a sentence helps."""

import re
import shlex
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.optim.swa_utils import AveragedModel

import ckptool
from ckptool.cli import main
from tests.diagnosis.faults import Net


class Attention(nn.Module):
    """A layer with its projections apart, or in one."""

    def __init__(self, joint):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        for name in ["qkv"] if joint else ["q", "k", "v"]:
            self.add_module(name, nn.Linear(4, 12 if joint else 4))


def layers(joint):
    return nn.Sequential(*(Attention(joint) for _ in range(3)))


def changed(change):
    """A net after a change to its first layer."""
    net = Net()
    change(net.features[0])
    return net


def pruned():
    return changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.5))


def spectral():
    return changed(spectral_norm)


def parametrised():
    return changed(parametrizations.spectral_norm)


class Placed(nn.Module):
    """A model of so many positions."""

    def __init__(self, positions):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, positions, 4))
        self.head = nn.Linear(4, 2)


class Wrapped:
    """The state dict of a model that PEFT wrapped, a head and a layer trained beside it."""

    def __init__(self, adapted):
        self.adapted = adapted

    def state_dict(self):
        held = OrderedDict()
        for name, value in Net().state_dict().items():
            new = f"base_model.model.{name}"
            if name.startswith("head."):
                held[new.replace("head.", "head.original_module.")] = value
                held[new.replace("head.", "head.modules_to_save.default.")] = value + 1
            elif self.adapted and name.startswith("features.0."):
                held[new.replace("features.0.", "features.0.base_layer.")] = value
            else:
                held[new] = value
        if self.adapted:
            held["base_model.model.features.0.lora_A.default.weight"] = torch.ones(2, 3)
        return held


def run(diagnosis):
    """Run every command; the targets of those with a reference."""
    others = [one for complaint in diagnosis.complaints for one in complaint.alternatives]
    for command in dict.fromkeys([*diagnosis.commands, *others]):
        words = shlex.split(command)
        assert main(words[1:]) == 0, command
        if "--like" in words:
            yield torch.load(words[3])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "reference", "says"),
    [
        (pruned, Net, r"prune\.remove\(module, 'weight'\) \(weight = weight_orig \* weight_mask\)"),
        (Net, pruned, r"plain weights: call torch\.nn\.utils\.prune\.remove"),
        (spectral, Net, r"torch\.nn\.utils\.remove_spectral_norm\(module, 'weight'\)"),
        (parametrised, Net, r"remove_parametrizations\(module, 'weight'\)"),
        (lambda: layers(False), lambda: layers(True),
         r"0\.qkv\.weight = torch\.cat\(\[0\.q\.weight, 0\.k\.weight, 0\.v\.weight\]\)"),
        (lambda: layers(True), lambda: layers(False), r"0\.qkv\.weight\.chunk\(3\)"),
        (lambda: Placed(4), lambda: Placed(9),
         r"resize position embeddings .* strict=False: the model keeps its own pos_embed"),
        (lambda: Wrapped(True), Net, "merge-lora"),
        (lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))),
         lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))),
         r"architectures differ: the file has 4 tensors that the model does not have"),
        (lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))),
         lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))),
         r"architectures differ: 4 of the model's 12 tensors are not in the file"),
        (lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))),
         lambda: nn.Sequential(*(nn.Linear(3, 3 + n) for n in range(1))),
         r"architectures differ: the file has 6 tensors"),
        (Net, lambda: AveragedModel(Net()),
         r"strict=False: the model keeps its own n_averaged"),
        (lambda: nn.LSTM(3, 4), Net, "no key matches: the file is for a different architecture"),
    ],
    ids=["pruned", "into pruned", "spectral norm", "parametrised", "q, k, v", "qkv",
         "positions", "adapter", "fewer layers", "more layers", "one of the layers",
     "average", "another model"],
)  # fmt: skip
def test_a_difference_that_no_command_mends_is_explained(diagnosed, model, reference, says):
    model, reference = model(), reference()
    with pytest.raises(RuntimeError):
        reference.load_state_dict(model.state_dict(), strict=True)
    found = diagnosed(model.state_dict(), like=reference.state_dict())
    assert list(run(found)) == []
    assert re.search(says, " ".join(one.hint or "" for one in found.complaints))


def test_what_the_sentences_say_makes_it_right(diagnosed):
    net = pruned()
    prune.remove(net.features[0], "weight")
    Net().load_state_dict(net.state_dict(), strict=True)
    net = parametrised()
    nn.utils.parametrize.remove_parametrizations(net.features[0], "weight")
    assert diagnosed(net.state_dict(), like=Net().state_dict()).ok
    apart, joint = layers(False), layers(True)
    held = apart.state_dict()
    for name in [name for name in joint.state_dict() if "qkv" in name]:
        parts = [held.pop(name.replace("qkv", part)) for part in ("q", "k", "v")]
        held[name] = torch.cat(parts)
    joint.load_state_dict(held, strict=True)


class Dense(nn.Module):
    """The names of torchvision's DenseNet: `norm1`, `conv1`; its first files have `norm.1`."""

    def __init__(self):
        super().__init__()
        for at in (1, 2):
            self.add_module(f"norm{at}", nn.BatchNorm2d(4 * at))
            self.add_module(f"conv{at}", nn.Conv2d(4 * at, 8, 3))


def test_rules_that_match_proposes_are_a_command_where_all_then_fits(diagnosed):
    net = nn.ModuleDict({f"denselayer{at}": Dense() for at in range(3)})
    old = OrderedDict(
        (re.sub(r"(norm|conv)(\d)", r"\1.\2", name), value)
        for name, value in net.state_dict().items()
    )
    found = diagnosed(old, like=net.state_dict())
    assert found.commands == ()  # the rules are the user's to judge
    (made,) = run(found)
    net.load_state_dict(made, strict=True)
    assert all(torch.equal(value, made[name]) for name, value in net.state_dict().items())


def test_names_are_made_right_where_something_else_is_missing(diagnosed):
    wrapped = OrderedDict((f"module.{name}", value) for name, value in Net(9).state_dict().items())
    found = diagnosed(wrapped, like=Net().state_dict())
    (fitted,) = run(found)
    assert torch.load(found.target).keys() == Net().state_dict().keys()
    assert fitted.keys() == Net().state_dict().keys() - {"head.weight", "head.bias"}


def test_a_head_of_another_size_is_left_out_and_the_rest_is_loaded(diagnosed):
    big, small = Net(9), Net()
    kept = small.head.weight.clone()
    found = diagnosed({"net": big.state_dict(), "epoch": 1}, like=small.state_dict())
    (wrong,) = [one for one in found.complaints if one.kind == "size-mismatch"]
    list(run(found))
    assert wrong.code in str(found)
    exec(wrong.code, {"ckptool": ckptool, "model": small})
    assert torch.equal(small.features[0].weight, big.features[0].weight)
    assert torch.equal(small.head.weight, kept)


def test_no_line_to_resume_changes_what_the_training_calls_its_parameters(diagnosed):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    inner = OrderedDict((f"net.{name}", value) for name, value in net.state_dict().items())
    lightning = {
        "pytorch-lightning_version": "2.0",
        "state_dict": inner,
        "optimizer_states": [optimizer.state_dict()],
    }
    bare = diagnosed(lightning, like=net.state_dict())
    assert bare.commands
    assert bare.resume is None
    lightning["when"] = torch.ones(1).numpy()[0]
    found = diagnosed(lightning, like=net.state_dict())
    assert main(shlex.split(found.resume)[1:]) == 0
    assert torch.load(shlex.split(found.resume)[3])["state_dict"].keys() == inner.keys()


def test_what_peft_trained_beside_an_adapter_is_what_is_kept(diagnosed):
    held, net = Wrapped(adapted=False).state_dict(), Net()
    (made,) = run(diagnosed(held, like=net.state_dict()))
    net.load_state_dict(made, strict=True)
    trained = held["base_model.model.head.modules_to_save.default.weight"]
    assert torch.equal(net.head.weight, trained)


RESUMED = {
    "optimizer": (["optimizer"], "with the optimizer"),
    "optimizer, epoch": (["optimizer", "epoch"], "with the optimizer and epoch"),
    "scheduler": (["optimizer", "epoch", "scheduler"], "with the optimizer, epoch and schedule"),
}


@pytest.mark.parametrize("word", RESUMED)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_who_resumes_with_a_model_keeps_what_the_training_saved(diagnosed, word, is_wrapped):
    keys, title = RESUMED[word]
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    values = {"optimizer": optimizer.state_dict(), "epoch": 3, "scheduler": schedule.state_dict()}
    outer = nn.DataParallel(net) if is_wrapped else net
    saved = {"model": outer.state_dict(), **{key: values[key] for key in keys}}
    found = diagnosed(saved, like=net.state_dict())
    assert f"To resume training, {title}:\n" in str(found)
    fresh = Net()
    mine = torch.optim.Adam(fresh.parameters())
    scope = {"ckptool": ckptool, "model": fresh, "optimizer": mine}
    exec(found.code, scope)
    assert scope.get("epoch") == (3 if "epoch" in keys else None)
    state = mine.state_dict()["state"]
    assert state.keys() == {*range(len(optimizer.state))}
    assert all(
        torch.equal(state[n]["exp_avg"], one["exp_avg"])
        for n, one in values["optimizer"]["state"].items()
    )
    if not is_wrapped:
        assert found.resume is None
        return
    words = shlex.split(found.resume)
    assert words[4:] == ["--wrappers", "strip"]
    assert main(words[1:]) == 0
    made = torch.load(words[3])
    Net().load_state_dict(made["model"])
    assert made.keys() == saved.keys()


def test_the_engine_of_deepspeed_does_not_resume_from_one_file():
    folder = Path(__file__).parents[2] / "fixtures" / "zero" / "z1-bf16"
    assert ckptool.doctor(folder).resume is None
    assert "resume" not in ckptool.info(folder).commands
