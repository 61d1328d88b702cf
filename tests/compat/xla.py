"""Whether `--strategy xla` trains on real torch_xla, by `make compat`.

Makes an environment with torch_xla and its torch under `build/compat` (once, 7 GB: pip brings CUDA
along, which nothing uses), runs `tests/trainer/strategies/test_xla.py` there on some numbers of CPU
devices, and opens what these runs saved here, where torch_xla is not. Where pip cannot install it a
line says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from run import ROOT, installed

import ckptool

VERSION = "2.9.0"
PACKAGES = ("torch==2.9.1", f"torch_xla=={VERSION}", "numpy<2.4", "click", "tabulate")
TESTING = ("safetensors", "pytest", "hypothesis")
DEVICES = (1, 2, 3, 4)


def train(python: str, devices: int, folder: Path) -> bool:
    """Run the tests of the strategy on so many devices; whether all pass."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", folder]
    done = subprocess.run(
        [python, *words, "tests/trainer/strategies/test_xla.py"],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)},
        timeout=900,
        check=False,
    )
    return done.returncode == 0


def differing(files: list[Path]) -> list[str]:
    """Return the checkpoints that hold a tensor of another device than the CPU.

    All but pickled modules, which are no plain data, load by `torch.load` as it is.
    """
    wrong = []
    for file in files:
        with ckptool.open(file) as held:
            tags = {ref.device for _, ref in held.tensors()}
            if isinstance(held.root, dict):
                torch.load(file, weights_only=True)
        wrong += [] if tags == {"cpu"} else [f"{file}: {tags}"]
    return wrong


def main() -> int:
    """Run all of it; 1 where anything fails."""
    try:
        python = installed(f"torch_xla-{VERSION}", "3.11", *PACKAGES, *TESTING)
    except subprocess.CalledProcessError:
        print(f"skipped: pip does not install {' '.join(PACKAGES[:2])} here")
        return 0
    failed = False
    for devices in DEVICES:
        with tempfile.TemporaryDirectory() as name:
            passed = train(python, devices, Path(name, "runs"))
            files = sorted(Path(name).rglob("*.pth"))
            wrong = differing(files)
        print(f"torch_xla {VERSION}, {devices} x CPU: {passed=}, {len(files)} files, {wrong=}")
        failed |= not passed or bool(wrong) or not files
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
