"""Files of `ckptool.save`, and what old torch makes of them: a model, its optimizer, values."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy
import torch
from take_back import leaves
from training import CASES, built, step

import ckptool

STEPS = 3


@dataclass
class Saved:
    """A file that `ckptool.save` wrote."""

    case: str
    path: str
    expected: dict[str, list[Any]]
    """What is to be read there, and held by the model and the optimizer that load it."""


def save_all(folder: Path, only: str = "*") -> list[Saved]:
    """A trained model of each case whose name matches, saved."""
    cases = [case for case in CASES if fnmatch(case, only)]
    return [save(case, folder / f"{number}.pth") for number, case in enumerate(cases)]


def save(case: str, path: Path) -> Saved:
    """One file. Half of the models are in a wrapper, which leaves no trace."""
    torch.manual_seed(len(case))
    model, optimizer = built(case)
    for _ in range(STEPS):
        step(case, model, optimizer)
    values, read = everything(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    wrapped = torch.nn.DataParallel(model) if len(case) % 2 else model
    ckptool.save(path, model=wrapped, optimizer=optimizer, **values)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    state["param_groups"] = [
        {**group, "param_names": [names[id(parameter)] for parameter in own["params"]]}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    tree = {"state_dict": model.state_dict(), "optimizer": state, **read}
    expected = {
        "read": leaves(tree),
        "model": leaves(dict(model.state_dict())),
        "optimizer": leaves(state),
    }
    return Saved(case, str(path), expected)


def everything(scheduler: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of every kind that is written; and what they are when they are read."""
    values: dict[str, Any] = {
        "epoch": 3,
        "best": 0.1,
        "done": False,
        "nothing": None,
        "rng": {"torch": torch.get_rng_state(), "python": random.Random(3).getstate()},
        "config": {"name": "ä", "sizes": [1, (2, 3)], 7: 2**70, "odd": [float("inf"), -0.0, 1j]},
        "kinds": [torch.Size([2, 3]), torch.device("cpu"), torch.float16, b"\x00\xff", {2, 1}],
        "counts": Counter("abca"),
        "order": OrderedDict(b=1, a=2),
        "views": [(whole := torch.arange(12.0).reshape(3, 4)).t(), whole[1]],
        "tensors": [
            torch.tensor(1, dtype=torch.uint8), torch.zeros(0, 3), torch.tensor([True, False]),
            torch.tensor([1.5], dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(2)),
        ],
    }  # fmt: skip
    made = {"scheduler": scheduler, "accuracy": numpy.float64(0.25), "count": numpy.int64(5)}
    found = {"scheduler": scheduler.state_dict(), "accuracy": 0.25, "count": 5}
    return {**values, **made}, {**values, **found}


def differing(saved: Saved, found: dict[str, Any]) -> Iterator[str]:
    """Where an old torch read, or took, something else than was saved."""
    if "error" in found:
        yield found["error"]
        return
    for what, rows in json.loads(json.dumps(saved.expected)).items():
        mine, theirs = (
            {json.dumps(row[0]): row[1:] for row in every} for every in (rows, found[what])
        )
        for path in {**mine, **theirs}:
            before, after = mine.get(path), theirs.get(path)
            if before != after and not _is_other_step(what, path, before, after):
                yield f"{what}: {path} is {after}, and was {before}"


def _is_other_step(what: str, path: str, before: Any, after: Any) -> bool:
    """Whether an old optimizer has taken a count into the type of its parameter, as it does."""
    is_step = what == "optimizer" and path.endswith('"step"]')
    return is_step and bool(before and after) and before[0] != after[0]
