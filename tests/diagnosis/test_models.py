"""What the verbs call the model of a file is one thing, and what they make of it has all of it."""

import shlex
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ckptool
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.sections import choose_only_model, find_likely_models
from ckptool.errors import CheckpointError

Linear, Loss = torch.nn.Linear, torch.nn.CrossEntropyLoss


class Held:
    """An object of a library that the file's reader may not have."""

    def __init__(self, content):
        self.content = content


def stepped():
    net = Linear(2, 2)
    made = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    made.step()
    return made.state_dict()


def table():
    return {"a": torch.arange(3), "b": torch.arange(2)}


MAKERS = {
    "state dict": lambda: Linear(2, 3).state_dict(),
    "nested": lambda: torch.nn.Sequential(Linear(2, 2), Linear(2, 1)).state_dict(),
    "module": lambda: Linear(3, 2),
    "loss": Loss,
    "weighted loss": lambda: Loss(weight=torch.ones(2)),
    "table": table,
    "unnamed": lambda: {"mean": torch.ones(2), "std": torch.ones(2)},
    "optimizer": stepped,
    "flat optimizer": lambda: {"adam/m:0": torch.ones(2)},
    "values": lambda: {"lr": 0.1, "names": ["a"]},
    "object": lambda: Held({"x": torch.ones(2), "n": 1}),
    "holder": lambda: Held({"model": Linear(2, 2), "loss": Loss()}),
    "pair": lambda: ({"x": torch.ones(2)}, table()),
}
KEYS = ["model", "state_dict", "ema", "optimizer", "vocab", "loss", "net", "best", "stats"]
trees = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sorted(MAKERS)), max_size=4)


def quietly(call, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **options)


def bytes_of(tensors):
    return sorted(one.detach().contiguous().numpy().tobytes() for one in tensors)


def convert(command):
    """Run the command that was printed, and return what it wrote."""
    from ckptool.cli import main

    assert main(shlex.split(command)[1:]) == 0, command
    return shlex.split(command)[3]


def chosen(source: Checkpoint):
    """Return the model, and its tensors as the file has them."""
    model = choose_only_model(find_likely_models(source))
    return model, [one.torch() for _, one in model.tensors()] if model else []


@given(trees)
@settings(max_examples=60)
def test_all_verbs_mean_one_model_and_a_command_writes_all_of_it(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    path = folder / "in.pth"
    torch.save({key: MAKERS[kind]() for key, kind in tree.items()}, path)
    with ckptool.open(path) as source:
        model, tensors = chosen(source)
        every = [one for _, one in source.tensors()]
    try:
        loaded = quietly(ckptool.load_state_dict, path)
    except CheckpointError:
        assert model is None
        loaded = {}
    assert bytes_of(loaded.values()) == bytes_of(tensors)
    told = ckptool.info(path)
    if model is not None:
        assert model.kind in {part.kind for part in told.sections if part.name == model.name}
        assert not any("--key" in command for command in told.commands.values())
    for part in told.sections:  # nothing without tensors is one
        assert part.tensors or part.kind in ("values", "optimizer")
    for command in {*told.commands.values(), *ckptool.doctor(path, quick=True).commands}:
        if "--key NAME" in command:  # several, of which the user chooses
            continue
        for old in folder.glob("in.*.pth"):
            old.unlink()
        written = quietly(convert, command)
        with ckptool.open(written) as result:
            kept = [one.torch() for _, one in result.tensors()]
            assert kept or not every, command
            left = bytes_of(kept)
            for one in bytes_of(tensors):
                left.remove(one)
        assert kept or torch.load(written, weights_only=True), command


@pytest.mark.parametrize("kind", ["loss", "table", "unnamed", "optimizer", "object"])
def test_nothing_beside_a_model_competes_with_it(tmp_path, kind):
    path = tmp_path / "in.pth"
    torch.save({"other": MAKERS[kind](), "model": MAKERS["nested"]()}, path)
    assert len(quietly(ckptool.load_state_dict, path)) == 4
    receipt = quietly(ckptool.convert, path, tmp_path / "out.safetensors")
    assert receipt.tensors == 4
    assert "several-models" not in {one.kind for one in ckptool.doctor(path, quick=True).complaints}
