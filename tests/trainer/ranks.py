"""The processes of one run: how they are started, and what each of them was told."""

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forks import FORKS, ended, start

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available() or os.name == "nt", reason="needs gloo"
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def started(module, *words, size, said):
    """Start `size` processes that find each other by torchrun's environment variables."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size}
    return [
        start(module, *words, environment={**group, "RANK": rank, "LOCAL_RANK": rank}, said=said)
        for rank in range(size)
    ]


def stepping(runs, stop=None, *, said, environment=None):
    """Start a process of some runs, options by folder; the pipe has the steps that it prints."""
    steps, told = FORKS.Pipe(duplex=False)
    words = [json.dumps(runs), *([] if stop is None else [stop])]
    child = start(
        "tests.trainer.stepping", *words, environment=environment or {}, said=said, printed=told
    )
    told.close()
    return child, steps


def by_ranks(module, folder, size):
    """What each process of `python -m module FOLDER RANK SIZE` leaves, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "said"
    ranks = [start(module, folder, rank, size, environment={}, said=said) for rank in range(size)]
    assert ended(ranks, timeout=200) == [0] * size, said.read_text()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def main(scenes):
    """Go through the scenes, functions of the folder, connected; keep what each returns."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=100),
    )
    told = {scene.__name__: scene(folder) for scene in scenes}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
