"""The folder of a run with several checkpoints: find the last and the best."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ckptool.errors import CheckpointError
from ckptool.files.json_object import read_json_object
from ckptool.formats.base import Probe
from ckptool.formats.registry import find_candidate_formats
from ckptool.limits import DEFAULT_LIMITS

_STEP_FOLDER = re.compile(r"checkpoint-(\d+)")
"""The name that the Trainer of transformers gives to the folder of a step."""
_TRAINER_STATE = "trainer_state.json"
_MAX_FILES, _MAX_STATE_BYTES = 64, 1 << 24


class Run(NamedTuple):
    """The checkpoints of one run."""

    library: str
    last: str
    """The name of the checkpoint with the most steps."""
    step: int
    best: str | None
    """The name of the checkpoint that the run states as its best, if it is in the folder."""

    @property
    def text(self) -> str:
        """A description of the folder, to complete "FOLDER is ..."."""
        best = "" if self.best is None else f", and the best is {self.best!r}"
        return (
            f"a folder of {self.library} checkpoints: the last is {self.last!r} "
            f"(step {self.step:,}){best}"
        )


def find_run(folder: str, names: Iterable[str]) -> Run | None:
    """Return the run with its checkpoints in a folder; None if there is no known one."""
    return _find_trainer_run(folder, names) or _find_lightning_run(folder, names)


def read_trainer_state(folder: str) -> Mapping[str, Any]:
    """Return the state that the Trainer of transformers saved in the folder of a step, or {}."""
    return read_json_object(os.path.join(folder, _TRAINER_STATE), _MAX_STATE_BYTES)


def _find_trainer_run(folder: str, names: Iterable[str]) -> Run | None:
    """Return the run of the transformers Trainer in a folder of `checkpoint-STEP` folders."""
    name_by_step = {
        int(match[1]): name for name in names if (match := _STEP_FOLDER.fullmatch(name))
    }
    if not name_by_step:
        return None
    last_step, last_name = max(name_by_step.items())
    state = read_trainer_state(os.path.join(folder, last_name))
    best_name = _match_last_part(state.get("best_model_checkpoint"), [*name_by_step.values()])
    return Run("Trainer", last_name, last_step, best_name)


def _find_lightning_run(folder: str, names: Iterable[str]) -> Run | None:
    """Return the run of Lightning in a folder with two or more `.ckpt` files; else None.

    The state of a callback in the last one has the path of the best one. Of files with the same
    step, `last.ckpt` is the last.
    """
    files = sorted(name for name in names if name.endswith(".ckpt"))
    roots = {name: _read_root(os.path.join(folder, name)) for name in files[:_MAX_FILES]}
    steps = {
        name: root["global_step"]
        for name, root in roots.items()
        if "pytorch-lightning_version" in root and type(root.get("global_step")) is int
    }
    if len(steps) < 2:
        return None
    last = max(steps, key=lambda name: (steps[name], name == "last.ckpt", name))
    callbacks = roots[last].get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    paths = (state.get("best_model_path") for state in states if isinstance(state, dict))
    best = next(filter(None, (_match_last_part(path, steps) for path in paths)), None)
    return Run("Lightning", last, steps[last], best)


def _match_last_part(path: object, names: Collection[str]) -> str | None:
    """Return the last part of a path, if it is one of `names`.

    The path is from the training machine, perhaps with backslashes; the folder may have been moved.
    """
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1] if isinstance(path, str) else None
    return name if name is not None and name in names else None


def _read_root(path: str) -> Mapping[Any, Any]:
    """Return the tree of a file, with no tensor data; {} if it cannot be read or is no dict."""
    with suppress(CheckpointError):
        probe = Probe(path, DEFAULT_LIMITS)
        try:
            for candidate in find_candidate_formats(probe):
                if candidate.recognize(probe):
                    root = candidate.read(probe).root
                    return root if isinstance(root, dict) else {}
        finally:
            probe.close()
    return {}
