"""`python -m tests.trainer.served OUT SCENE`: one process of runs with a parameter server.

Every process goes through the same runs, one after the other, and writes what it was told of each
to OUT/rank<N>.jsonl.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.distributed import rpc

from ckptool.errors import CheckpointError
from ckptool.trainer import Trainer
from ckptool.trainer.strategies import parameter_server
from ckptool.trainer.strategies.parameter_server import InFlight
from tests.trainer.runs import BytesDone, config, net, run
from tests.trainer.served_cases import EVERYTHING, EXACT, LIMITS

FRIEDMAN = {"data": "friedman", "model": "mlp:64", "epochs": 40, "schedule": "cosine"}

RANK = int(os.environ["RANK"])
released = threading.Event()


def wait_in_server():
    """Called by a worker: comes back when the server has got as far as it can without it."""
    assert released.wait(120)


class Acting(nn.Linear):
    """Calls `act` in a worker, with the number of the batch that it sees."""

    def __init__(self, act, *, rank=1):
        torch.manual_seed(0)
        super().__init__(3, 1)
        self.act = act if rank == RANK else lambda batch: None
        self.batch = 0

    def forward(self, x):
        if self.training:
            self.batch += 1
            self.act(self.batch)
        return super().forward(x)


class Normed(nn.Module):
    """Has running statistics, a parameter that is frozen, and one that gets no gradient."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.last.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Watched(InFlight):
    """Lets the worker that waits go on when the updates without it are as many as may be."""

    def finish(self, number):
        age = super().finish(number)
        if self.applied == self._limit:
            released.set()
        return age


def served(case, out, *, model=None, act=lambda event: None, **options):
    """One run, with whatever comes of it in the records of this process."""
    told, record = BytesDone(act), {"case": case}
    if "strategy" not in options:
        options = {"strategy": "parameter-server", "staleness": 0, **options}
        if options.get("updates"):
            options["staleness"] = 1
    try:
        if "data" in options:
            chosen = config(out / case, **options)
            record["result"] = Trainer(chosen, observer=told).fit().to_dict()
        else:
            model = model or net(dropout=0)
            record["result"] = run(out / case, told, model=model, **options).to_dict()
    except CheckpointError as error:
        record["error"], record["hint"] = str(error), error.hint
    except Exception as error:
        record["error"] = repr(error)
    record["staleness"] = [event.staleness for event in told.of("Stepped")]
    record["val_loss"] = [event.val_loss for event in told.of("EpochEnded")]
    record["processes"] = [event.processes for event in told.of("Started")]
    with (out / f"rank{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def single(case, out, *, model=None, **options):
    """The same in one process, in the server's."""
    if RANK == 0 and "data" in options:
        served(f"{case}-single", out, strategy="single", **options)
    elif RANK == 0:
        run(out / f"{case}-single", model=model or net(dropout=0), **options)


def exact(out):
    for case, options in EXACT.items():
        single(case, out, **options)
        served(case, out, **options)
    single("split", out, dtype="float64")
    served("split", out, updates="synchronous", dtype="float64")
    served("split-dropout", out, updates="synchronous", model=net())
    single("normed", out, model=Normed())
    served("normed", out, model=Normed())
    served("whole", out, model=net())
    for limit in (4, 5, None):
        served("cut", out, model=net(), resume="auto", max_steps=limit)
    served("to-single", out, max_steps=4)
    if RANK == 0:
        run(out / "to-single", model=net(dropout=0), resume="auto")
        run(out / "from-single", model=net(dropout=0), max_steps=4)
    served("from-single", out, resume="auto")


def stale(out):
    single("friedman", out, **FRIEDMAN)
    served("friedman", out, staleness=max(LIMITS), **FRIEDMAN)
    served("saving", out, staleness=2, save_every=1, epochs=4)
    parameter_server.InFlight = Watched
    for limit in LIMITS:
        released.clear()

        def hold(batch):
            if batch == 1:
                rpc.rpc_sync("server", wait_in_server, timeout=120)

        served(f"slow-{limit}", out, model=Acting(hold), staleness=limit, accumulate=1)
    parameter_server.InFlight = InFlight


def broken(out):
    def fail(batch):
        if batch == 3:
            raise ValueError("that is no picture")

    def spoil(batch):
        if batch == 3:
            model.weight.data.fill_(float("nan"))

    model = Acting(spoil)
    served("nan", out, model=model, staleness=1)
    served("raises", out, model=Acting(fail), staleness=1)
    device = "cuda:7" if RANK == 1 else "cpu"
    served("no-device", out, device=device)
    served("after", out)


def two(out):
    os.environ["WORLD_SIZE"] = "2"
    served("one-worker", out, staleness=4, **EVERYTHING)
    stop = Acting(lambda batch: os.kill(os.getpid(), signal.SIGTERM) if batch == 3 else None)
    served("signal", out, model=stop)
    served("dies", out, model=Acting(lambda batch: os._exit(3) if batch == 3 else None))


def server_dies(out):
    served("dies", out, act=lambda event: os._exit(4) if hasattr(event, "staleness") else None)


def main():
    out, scene = Path(sys.argv[1]), sys.argv[2]
    if scene == "all":
        exact(out)
        stale(out)
        broken(out)
        if RANK < 2:
            two(out)
    else:
        server_dies(out)


if __name__ == "__main__":
    from tests.trainer import served as myself  # what is called elsewhere has a name that imports

    myself.main()
