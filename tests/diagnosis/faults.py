"""Files with one fault each, made by torch itself, and what mending it is to give."""

import argparse
import copy
import functools
import shlex
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ckptool
from ckptool.cli import main


def run(*commands):
    """Run what a diagnosis proposes."""
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command


class Net(torch.nn.Module):
    """A model with parameters, buffers and a layer that counts."""

    def __init__(self, classes=4):
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        self.head = torch.nn.Linear(5, classes)

    def forward(self, x):
        return self.head(self.features(x))


class Options:
    """A class that the machine that loads the file may not have."""

    def __init__(self):
        self.lr = 0.1


@dataclass(frozen=True)
class Fault:
    """How to make a file with the fault, and how the diagnosis is to be asked for.

    What the commands make of it goes into a `Net` with strict=True.
    """

    kind: str
    make: Callable[[Path], Path]
    severity: str = "fails"
    options: tuple[str, ...] = ()
    name: str = ""

    @property
    def id(self):
        return self.name or self.kind


@functools.cache
def _trained():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def trained():
    """A model and its optimizer after a step."""
    return copy.deepcopy(_trained())


def saved(root, **options):
    """What saves `root` in a folder."""

    def make(folder: Path) -> Path:
        path = folder / "model.pth"
        torch.save(root() if callable(root) else root, path, **options)
        return path

    return make


def state(net=None) -> OrderedDict[str, Any]:
    return (net or trained()[0]).state_dict()


def healthy():
    return state()


def wrapped(*layers):
    """The names of a model inside these wrappers, outermost first."""

    def make():
        before = "".join(f"{layer}." for layer in layers)
        return OrderedDict((before + name, value) for name, value in state().items())

    return make


def compiled_part():
    return OrderedDict(
        (name.replace("features.", "features._orig_mod."), value) for name, value in state().items()
    )


def parallel_part():
    net = trained()[0]
    net.features = torch.nn.DataParallel(net.features)
    return net.state_dict()


def retagged(make, device):
    """A file as `make` makes it, its storages tagged as if they were on another device."""

    def made(folder: Path) -> Path:
        with mock.patch("torch.serialization.location_tag", return_value=device):
            return make(folder)

    return made


def on_a_tpu(folder: Path) -> Path:
    """Tensors of a TPU, which torch pickles by another function."""
    with ckptool.open(saved(healthy)(folder)) as checkpoint:
        checkpoint.remap({"*": "xla:0"}).save(folder / "tpu.pth")
    return folder / "tpu.pth"


def training_run():
    net, optimizer = trained()
    return {"epoch": 3, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}


def bloated():
    values = state()
    values["head.bias"] = torch.arange(100_000.0)[:4]
    return values


def as_numpy_scalar():
    net, _ = trained()
    return {"model": net.state_dict(), "best": torch.ones(1).numpy()[0], "args": Options()}


def plain_objects_in_state():
    """A training file whose settings are a Namespace."""
    return {"model": state(), "args": argparse.Namespace(lr=0.1)}


def unzipped(folder: Path) -> Path:
    path = saved(healthy)(folder)
    target = folder / "model"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(target)
    path.unlink()
    return target


def deflated(folder: Path) -> Path:
    path, target = saved(healthy)(folder), folder / "again.pth"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return target


def without_folder(folder: Path) -> Path:
    path, target = saved(healthy)(folder), folder / "flat.pth"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name.partition("/")[2], old.read(name))
    return target


def big_endian(folder: Path) -> Path:
    path = folder / "model.pth"
    torch.save(healthy(), path)
    swapped = folder / "big.pth"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/byteorder"):
                data = b"big"
            elif "/data/" in name:
                size = 8 if len(data) == 8 else 4
                data = b"".join(data[at : at + size][::-1] for at in range(0, len(data), size))
            new.writestr(name, data)
    return swapped


def scripted(folder: Path) -> Path:
    path = folder / "model.pt"
    torch.jit.save(torch.jit.script(trained()[0]), path)
    return path


def exported(folder: Path) -> Path:
    path = folder / "model.pt2"
    net = trained()[0].eval()
    torch.export.save(torch.export.export(net, (torch.randn(2, 3),)), path)
    return path


def sharded(folder: Path) -> Path:
    path = saved(healthy)(folder)
    index = folder / "parts" / "model.safetensors.index.json"
    ckptool.convert(path, index, max_shard_size=64)
    return index


def parallel_shards(folder: Path) -> Path:
    path = saved(wrapped("module"))(folder)
    index = folder / "parts" / "model.safetensors.index.json"
    ckptool.convert(path, index, ckptool.Strip(levels=0), max_shard_size=64)
    return index


def safetensors(make):
    def made(folder: Path) -> Path:
        path = make(folder)
        target = folder / "weights.safetensors"
        ckptool.convert(path, target, ckptool.Strip(levels=0))
        return target

    return made


def with_values():
    """A state dict among whose tensors somebody has noted something."""
    return {**state(), "epoch": 3, "args": argparse.Namespace(lr=0.1)}


class TiedNet(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def tied_safetensors(folder: Path) -> Path:
    """A file with one of two names, as safetensors' own `save_model` writes it."""
    from safetensors.torch import save_model

    save_model(TiedNet(), folder / "tied.safetensors")
    return folder / "tied.safetensors"


def averaged():
    averaging = torch.optim.swa_utils.AveragedModel(trained()[0])
    return averaging.state_dict()


def leftover():
    """An optimizer that has the state of a parameter which no group has."""
    run = training_run()
    run["optimizer"]["state"][99] = copy.deepcopy(run["optimizer"]["state"][0])
    return run


def permuted():
    run = training_run()
    held = run["optimizer"]["state"]
    held[0], held[1] = held[1], held[0]
    return run


def too_many():
    run = training_run()
    held = run["optimizer"]
    held["param_groups"][0]["params"] = list(range(10))
    held["state"] = {}
    return run


def merged_adapter():
    return OrderedDict((f"base_model.model.{name}", value) for name, value in state().items())


def everything_at_once(folder: Path) -> Path:
    """DataParallel, compiled, on GPU 3, a Namespace, protocol 4, a view of something large."""
    run = training_run()
    run["state_dict"] = wrapped("module", "_orig_mod")()
    run["state_dict"]["module._orig_mod.head.bias"] = torch.arange(100_000.0)[:4]
    run["args"] = argparse.Namespace(lr=0.1, when=Options())
    return retagged(saved(run, pickle_protocol=4), "cuda:3")(folder)


CPU = ("--devices", "cpu")
GPU = ("--devices", "cpu,cuda:0")

MENDED = [
    Fault("wrappers", saved(wrapped("module"))),
    Fault("wrappers", saved(wrapped("module", "_orig_mod")), name="compiled inside parallel"),
    Fault("wrappers", saved(wrapped("_orig_mod", "module")), name="parallel inside compiled"),
    Fault("wrappers", saved(compiled_part), name="a compiled part"),
    Fault("wrappers", safetensors(saved(wrapped("module"))), name="wrapped safetensors"),
    Fault("submodule-wrapper", saved(parallel_part)),
    Fault("averaged", saved(averaged)),
    Fault("adapter", saved(merged_adapter), name="merged adapter"),
    Fault("level", saved(lambda: {"net": state()})),
    Fault("level", saved(training_run), "note", name="a training"),
    Fault("values-inside", saved(lambda: {**state(), "epoch": 3})),
    Fault("values-inside", saved(with_values), name="values and objects inside"),
    Fault("values-inside", saved(lambda: {"net": with_values()}), name="values one level down"),
    Fault("module", saved(lambda: trained()[0])),
    Fault("module", saved(lambda: torch.nn.DataParallel(trained()[0])), name="parallel module"),
    Fault("module", saved(lambda: {"epoch": 1, "net": trained()[0]}), name="module one level down"),
    Fault("objects", saved(plain_objects_in_state)),
    Fault("objects", saved(as_numpy_scalar), name="numpy scalar and a class"),
    Fault("numpy", saved(as_numpy_scalar), "note"),
    Fault("protocol", saved(healthy, pickle_protocol=4)),
    Fault("protocol", saved(healthy, pickle_protocol=5), name="protocol 5"),
    Fault("protocol", saved(healthy, pickle_protocol=4, _use_new_zipfile_serialization=False),
          name="protocol 4, legacy"),
    Fault("legacy", saved(healthy, _use_new_zipfile_serialization=False), "note"),
    Fault("folder", unzipped),
    Fault("compressed", deflated, "misleads"),
    Fault("records", without_folder),
    Fault("big-endian", big_endian, "misleads"),
    Fault("torchscript", scripted),
    Fault("exported-program", exported),
    Fault("shards", sharded, "note"),
    Fault("shards", parallel_shards, "note", name="shards with wrappers"),
    Fault("device", retagged(saved(healthy), "cuda:3"), options=CPU),
    Fault("device", retagged(saved(healthy), "cuda:3"), options=GPU, name="GPU 3 of one"),
    Fault("device", retagged(saved(healthy), "mps"), options=GPU, name="mps"),
    Fault("device", retagged(saved(healthy), "npu:0"), options=GPU, name="npu"),
    Fault("device", on_a_tpu, options=GPU, name="xla"),
    Fault("one-gpu", retagged(saved(healthy), "cuda:0"), "misleads", GPU),
    Fault("bloat", saved(bloated), "misleads"),
    Fault("optimizer-leftover", saved(leftover), "misleads"),
    Fault("optimizer-order", saved(permuted), "misleads"),
    Fault("optimizer-size", saved(too_many)),
]  # fmt: skip
"""Faults that the commands mend."""
