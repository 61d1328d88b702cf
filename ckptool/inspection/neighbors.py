"""Notes on files that a training saved next to the weights in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptool.core.checkpoint import Checkpoint
from ckptool.formats.model_folder import ADAPTER_CONFIG, identify_library
from ckptool.formats.run_folder import read_trainer_state
from ckptool.words import listed

_TRAINING = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt",
             "rng_state", "random_states_", "training_args.bin")  # fmt: skip
"""Name prefixes of the state files of the transformers Trainer and accelerate."""


def describe_neighbors(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes on files next to the weights, if the weights are in a model folder."""
    path = checkpoint.path
    if identify_library(path) is None:
        return
    folder = os.path.dirname(path) or os.curdir
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    state_files = [
        name for name in names if name.startswith(_TRAINING) and not name.endswith(".json")
    ]
    if state_files:
        step = read_trainer_state(folder).get("global_step")
        when = f"the training at step {step:,}" if type(step) is int else "the training"
        yield f"next to it is the state of {when}: {listed(state_files)}"
    adapters = [name for name in names if identify_library(name) == "peft"]
    if adapters and identify_library(path) != "peft":
        files = listed([*adapters, *({ADAPTER_CONFIG} & {*names})])
        yield f"next to it is an adapter: {files}"
