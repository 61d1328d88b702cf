"""What trainers save next to a model: files without weights, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, find_tensors
from ckptool.transforms.plain import class_of


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that a trainer saved next to a model."""

    what: str
    """Beginning with "it is"."""
    reader: str
    """Who reads it as it is."""


_GENERATORS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    # transformers/trainer.py, Trainer._save_rng_state
    "transformers.Trainer.train(resume_from_checkpoint=FOLDER)": (
        frozenset({"python", "numpy", "cpu"}),
        frozenset({"cuda", "xla", "npu", "mlu", "musa", "xpu", "hpu", "sdaa", "mps"}),
    ),
    # accelerate/checkpointing.py, save_accelerator_state
    "accelerate.Accelerator.load_state(FOLDER)": (
        frozenset({"random_state", "numpy_random_seed", "torch_manual_seed"}),
        frozenset({"step", "xm_seed", "xla_seed"})
        | {f"torch_{kind}_manual_seed" for kind in ("cuda", "xpu", "mlu", "sdaa", "musa", "hpu")},
    ),
}
"""By who reads them: keys that the states of all random generators have, and those of some."""
_ARGUMENTS = ("transformers", "trl", "setfit", "sentence_transformers")
"""Libraries whose trainers pickle their arguments as `training_args.bin`."""


def companion_of(checkpoint: Checkpoint) -> Companion | None:
    """Return what a trainer saved as this file, by its content; None if it is something else."""
    root = checkpoint.root
    if isinstance(root, dict):
        keys = {*map(str, root)}
        for reader, (needed, others) in _GENERATORS.items():
            if needed <= keys <= needed | others:
                what = "it is the state of the random generators of a training, not a model"
                return Companion(what, reader)
    if isinstance(root, Opaque) and not any(find_tensors(root)):
        name = class_of(root)
        if name.partition(".")[0] in _ARGUMENTS or name.endswith("TrainingArguments"):
            what = f"it is the arguments of a training ({name}), not a model"
            owner = name.partition(".")[0]
            return Companion(what, f"torch.load(FILE, weights_only=False) with {owner} installed")
    return None
