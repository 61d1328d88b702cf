"""Whether old torch reads the folders of DCP that ckptool writes and edits, by `make compat`.

Writes a folder from one file and edits in place one that this torch has saved, then loads both in
an environment of each old torch under `build/compat` (made once, some gigabytes). Where pip cannot
install one a line says so. torch 2.2 reads no index that this torch wrote, and takes a list of
dicts for one item: there a folder that ckptool wrote, without optimizer, is edited.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from run import installed, told

import ckptool

VERSIONS = ("2.2.2", "2.4.1", "2.6.0", "2.9.1")
OLDEST = "2.2.2"


def state(prefix: str, *, optimizer: bool) -> dict[str, Any]:
    """Return a run's state, whose parameters have names that begin so."""
    names = [f"{prefix}0.weight", f"{prefix}0.bias"]
    moments = {name: {"exp_avg": torch.ones(3) * number} for number, name in enumerate(names)}
    optim = {"state": moments, "param_groups": [{"lr": 0.1, "params": names}]}
    return {
        "model": {name: torch.arange(6.0).reshape(2, 3) * n for n, name in enumerate(names, 1)},
        "half": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "epoch": 3,
        **({"optim": optim} if optimizer else {}),
    }


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a tree by their paths: of a tensor its type, shape and numbers."""
    if isinstance(node, (dict, list)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {at: one for k, v in items for at, one in leaves(v, f"{path}/{k}").items()}
    if isinstance(node, torch.Tensor):
        return {path: [str(node.dtype), list(node.shape), node.double().tolist()]}
    return {path: node}


def folders(home: Path, *, saved: bool) -> dict[str, dict[str, Any]]:
    """Return folders, one written and one edited in place, with what torch must find in them."""
    torch.save(state("module.", optimizer=saved), home / "run.pth")
    written, edited = home / f"written-{saved}", home / f"edited-{saved}"
    ckptool.convert(home / "run.pth", written, ckptool.Strip(levels=0), format="dcp")
    if saved:
        dcp.save(state("module.", optimizer=saved), checkpoint_id=edited, no_dist=True)
    else:
        ckptool.convert(home / "run.pth", edited, ckptool.Strip(levels=0), format="dcp")
    with ckptool.open(edited) as checkpoint:
        checkpoint.strip_module().save(edited, in_place=True)
    return {
        str(written): leaves(state("module.", optimizer=saved)),
        str(edited): leaves(state("", optimizer=saved)),
    }


def main() -> int:
    """Run all of it; 1 where anything differs."""
    failed = False
    warnings.simplefilter("ignore")
    for version in VERSIONS:
        try:
            python = installed(f"torch-{version}", "3.11", f"torch=={version}", "numpy<2.4")
        except subprocess.CalledProcessError:
            print(f"skipped: pip does not install torch {version} here")
            continue
        with tempfile.TemporaryDirectory() as home:
            wanted = folders(Path(home), saved=version != OLDEST)
            found = told(python, "read_folder.py", dict.fromkeys(wanted))
            for folder, leaf in wanted.items():
                differs = json.loads(json.dumps(leaf)) != found[folder]
                what = Path(folder).name.partition("-")[0]
                print(f"torch {version}, {what}: {found[folder] if differs else 'agrees'}")
                failed |= differs
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
