"""What processes do that shard a model: `python -m tests.trainer.strategies.fsdp_scenes`."""

import contextlib
import sys
from functools import partial

import torch
from torch import nn

from tests.trainer.ranks import main
from tests.trainer.runs import BytesDone, Crash, crash_at, losses_of, net, refusal, run

EXACT = {"dtype": "float64", "epochs": 7, "max_steps": 20}
"""Three steps an epoch of 4 + 4 samples, the last of 4 + 2: of three processes one has none."""
AGREEING = {
    "plain": EXACT,
    "all": {
        **EXACT,
        "clip": 0.1,
        "ema": 0.9,
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "schedule": "step",
        "step_size": 2,
        "warmup": 3,
    },
    "sgd": {**EXACT, "optimizer": "sgd"},
    "bf16": {**EXACT, "amp": "bf16", "clip": 0.1},
    "fp16": {**EXACT, "amp": "fp16", "clip": 0.1},
}
SHARDED = ("all", "sgd", "fp16")
RESUMING = {"clip": 0.5, "ema": 0.9, "schedule": "cosine", "save_every": 2, "epochs": 2}


class Summing(nn.Module):
    """A buffer that the samples of this process change, and that changes what comes out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.sum += x.detach().sum()
        return x + self.sum.tanh()


class Tied(nn.Module):
    """Two layers with one weight, a parameter of its own, one that is frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(3, 3), Summing(), nn.Linear(3, 3)])
        self.inside[2].weight = self.inside[0].weight
        self.head = nn.Linear(3, 1)
        self.head.bias.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for layer in self.inside:
            x = nn.functional.dropout(layer(x).tanh(), 0.2, self.training)
        return self.head(x * self.factor)


def tied():
    torch.manual_seed(5)
    return Tied()


def cut(out, step, model, **options):
    """A run that crashes at a step, and goes on."""
    with contextlib.suppress(Crash):
        run(out, crash_at(step), model=model(), **options)
    told = BytesDone()
    run(out, told, model=model(), resume="auto", **options)
    return told.notes


error = partial(refusal, strategy="fsdp")


def agreeing(folder):
    """Three processes take long: what is special about them is an empty share, and empty parts."""
    kinds = SHARDED if torch.distributed.get_world_size() == 2 else SHARDED[:1]
    return {
        kind: losses_of(folder / kind, strategy="fsdp", model=net(dropout=0.0), **AGREEING[kind])
        for kind in kinds
    }


def going_on(folder):
    """Runs that are cut and go on, beside those that are not."""
    found = {}
    for kind, sharded in (("file", False), ("folder", True)):
        options = {**RESUMING, "strategy": "fsdp", "sharded": sharded}
        run(folder / kind, model=tied(), **options)
        found[kind] = cut(folder / f"{kind}_cut", 5, tied, **options)
    return found


def kinds(folder):
    for save in ("wrapped", "unwrapped"):
        run(folder / save, strategy="fsdp", save=save, epochs=1)
    return error(folder / "module", save="module", epochs=1)


def refused(folder):
    paths = {"file": folder / "file" / "last.pth", "folder": folder / "folder" / "last"}
    return {
        kind: error(folder / f"{kind}_other", model=net(), resume=str(path), **RESUMING)
        for kind, path in paths.items()
    }


def damaged(folder):
    """The newest of a run has lost a part: an older one is gone on from."""
    out = folder / "damaged"
    with contextlib.suppress(Crash):
        run(out, crash_at(6), strategy="fsdp", sharded=True, **RESUMING)
    torch.distributed.barrier()
    newest = max(out.glob("step-*"))
    (newest / "__0_0.distcp").unlink(missing_ok=True)
    torch.distributed.barrier()
    refused_here = error(folder / "elsewhere", resume=str(newest), **RESUMING)
    told = BytesDone()
    run(out, told, strategy="fsdp", sharded=True, resume="auto", **RESUMING)
    return {"error": refused_here, "notes": told.notes, "newest": str(newest)}


def elsewhere(folder):
    """Half of a run, by other processes than those of the rest: by one, by two, by three."""
    half = AGREEING["all"]
    if torch.distributed.get_world_size() == 2:
        half = {**half, "max_steps": 10}
        run(folder / "half", strategy="fsdp", sharded=True, model=net(dropout=0.0), **half)
        return {}
    sources = {
        "single": folder.parent / "single" / "last.pth",
        "folder": folder.parent / "two" / "half" / "last",
        "folder with ddp": folder.parent / "two" / "half" / "last",
    }
    return {
        kind: losses_of(
            folder / f"from_{kind}",
            strategy="ddp" if "ddp" in kind else "fsdp",
            resume=str(path),
            model=net(dropout=0.0),
            **half,
        )
        for kind, path in sources.items()
    }


if __name__ == "__main__":
    main([agreeing, elsewhere] if sys.argv[3] == "3" else [
        agreeing, going_on, kinds, refused, damaged, elsewhere
    ])  # fmt: skip
