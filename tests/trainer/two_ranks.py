"""`python -m tests.trainer.two_ranks FOLDER RANK SIZE`: runs over two processes."""

import math
import os
import signal
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ckptool.trainer import TrainData
from tests.trainer.ranks import main
from tests.trainer.runs import BytesDone, data, net, refusal, run, when


def rank():
    return torch.distributed.get_rank()


refused = partial(refusal, strategy="ddp")


def kinds(folder):
    for kind in ("full", "wrapped", "unwrapped", "module"):
        run(folder / kind, strategy="ddp", save=kind, epochs=1, save_every=1, keep=2)


def there_and_back(folder):
    """A crash in two processes goes on in each by itself, and what that saved in two again."""
    told = BytesDone()
    run(folder / "there", strategy="ddp", max_steps=4, model=net(dropout=0.0))
    if rank() == 0:
        os.rename(folder / "there" / "last.pth", folder / "there" / "moved.pth")
    torch.distributed.barrier()
    alone = folder / f"alone{rank()}"
    run(alone, resume=folder / "there" / "moved.pth", max_steps=7, model=net(dropout=0.0))
    torch.distributed.barrier()
    last = folder / "alone0" / "last.pth"
    run(folder / "back", told, strategy="ddp", resume=last, model=net(dropout=0.0))
    return told.of("Resumed")[0].without


def in_the_way(folder):
    """Only rank 0 looks, and all are told."""
    return refused(folder / "full")


def a_file_in_place_of_the_folder(folder):
    (folder / "file").touch()
    return refused(folder / "file")


def another_architecture(folder):
    return refused(folder / "other", model=net(width=9), resume=folder / "full" / "last.pth")


def missing_for_one(folder):
    """As on a second machine that has not the disk of the first."""
    here = Path.cwd()
    os.chdir(folder if rank() == 0 else "/")
    try:
        return refused(folder / "missing", resume="full/last.pth")
    finally:
        os.chdir(here)


def no_number_in_one(folder):
    """The loss of the other is one; in the end both know."""
    given = data()
    if rank() == 1:
        given = TrainData(
            TensorDataset(given.train.tensors[0] * math.nan, given.train.tensors[1]),
            None,
            given.loss,
        )
    else:
        given = TrainData(given.train, None, given.loss)
    return refused(folder / "nan", given=given)


def a_disk_that_fills(folder):
    """The figures cannot be written any more, which rank 0 alone notices."""

    def act(_event):
        path = folder / "full disk" / "metrics.jsonl"
        if rank() == 0:
            path.unlink()
            path.mkdir()

    return refused(folder / "full disk", when(act, "Stepped", step=2))[:2]


def a_signal_for_one(folder):
    def act(_event):
        if rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    result = run(folder / "stopped", when(act, "Stepped", step=4), strategy="ddp")
    return [result.stopped, result.step]


def dropout(folder):
    """What is drawn in the two processes is not the same."""
    run(folder / "dropout", strategy="ddp", epochs=1)
    return torch.rand(1).item()


def by_the_clock_of_the_first(folder):
    """Both save where rank 0 says so, whatever the other's clock has."""
    run(folder / "clock", strategy="ddp", save_seconds=[1e-9, 1e9][rank()], keep=9, epochs=1)


def batch_norm(folder):
    """Of each process's share, which is told; torch has one of all for GPUs alone."""
    told = BytesDone()
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    run(folder / "norm", told, strategy="ddp", epochs=1, batch_size=8, model=model)
    return [*told.notes, refused(folder / "synced", model=model, sync_batchnorm=True)]


def each_the_whole_model(folder):
    """A script that has connected its processes for something else."""
    run(folder / "whole", epochs=1)


if __name__ == "__main__":
    main(
        [
            kinds,
            there_and_back,
            in_the_way,
            a_file_in_place_of_the_folder,
            another_architecture,
            missing_for_one,
            no_number_in_one,
            a_disk_that_fills,
            a_signal_for_one,
            dropout,
            by_the_clock_of_the_first,
            batch_norm,
            each_the_whole_model,
        ]
    )
