"""Other tools, installed into an environment of their own below build/."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["ENVIRONMENT", "PEERS", "PROJECT", "SCANNERS", "installed", "versions"]

PROJECT = Path(__file__).parent.parent
ENVIRONMENT = PROJECT / "build" / "peers"
PEERS = {
    "torch.load(weights_only=True)": "torch",
    "checkpoint-tools convert": "checkpoint-tools",
    "ckptkit info": "ckptkit",
    "mergekit, its lazy loader": "mergekit",
    "pt-safe-loader": "pt-safe-loader",
    "sft convert": "sft-cli",
}
"""What is asked, and the package that has it."""
SCANNERS = ("picklescan", "fickling")
"""They list what a pickle names, and read no tensors."""
ALSO = ("safetensors", "numpy", "typing_extensions", *SCANNERS)


def installed() -> str:
    """The interpreter of an environment with all of them, made anew where one is missing."""
    python = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
    packages = [*PEERS.values(), *ALSO]
    ready = ENVIRONMENT / ".ready"
    if not ready.exists() or ready.read_text(encoding="utf-8").split() != packages:
        print(f"setting up {ENVIRONMENT} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(PROJECT / "constraints.txt")]
        subprocess.run([*pip, *packages], check=True)
        ready.write_text(" ".join(packages), encoding="utf-8")
    return str(python)


def versions(python: str, packages: Iterable[str]) -> str:
    """Each of the packages of that environment with its version."""
    names = list(packages)
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return ", ".join(map(" ".join, zip(names, done.stdout.split(), strict=True)))
