"""What each strategy of `ckptool train` costs and comes to: `python -m benchmarks.training`.

Every row is one run of the command line on generated data (friedman, 400 samples, 13 steps an
epoch), on the CPU, one thread a process. Steps a second are the median of the epochs after the
first, evaluation and checkpoints left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLES, STEPS = 400, 13
COMMON = "--device cpu --data friedman --schedule cosine --no-tensorboard --quiet"
SERVER = "--strategy parameter-server"
ROWS = {
    "single": "--strategy single",
    "dp": "--strategy dp",
    "ddp, 2 processes": "--strategy ddp --nproc 2",
    "fsdp, 2 processes": "--strategy fsdp --nproc 2",
    **{
        f"parameter server, {workers} workers, staleness {limit}": (
            f"{SERVER} --nproc {workers + 1} --staleness {limit}"
        )
        for workers in (2, 3)
        for limit in (0, 1, 4)
    },
}


def measured(options: str, model: str, epochs: int) -> tuple[float, float]:
    """Steps a second, and the validation loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ckptool", "train", "--out", folder, *COMMON.split()]
        command += ["--model", model, "--epochs", str(epochs), *options.split()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    speed = statistics.median(line["samples_per_s"] for line in told[1:])
    return speed * STEPS / SAMPLES, told[-1]["val_loss"]


def main() -> None:
    """Print one row of a table for each strategy, as it is there."""
    model, epochs = sys.argv[1:] or ("mlp:64", "40")
    print(f"| `--model {model} --epochs {epochs}` | steps/s | validation loss |")
    print("| --- | ---: | ---: |")
    for name, options in ROWS.items():
        speed, loss = measured(options, model, int(epochs))
        print(f"| {name} | {speed:.0f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
