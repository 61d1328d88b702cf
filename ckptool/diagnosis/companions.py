"""Files without weights that trainers save next to a model, and the calls that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, find_tensors
from ckptool.transforms.plain import get_class_name


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that a trainer saved next to a model."""

    what: str
    """The sentence about it, with the subject "it"."""
    reader: str
    """The call that reads it as is."""


_RANDOM_STATE_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
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
"""For each call that reads generator states: the keys they always have, and optional keys."""
_TRAINER_LIBRARIES = ("transformers", "trl", "setfit", "sentence_transformers")
"""Libraries whose trainers pickle their arguments as `training_args.bin`."""


def recognize_companion(checkpoint: Checkpoint) -> Companion | None:
    """Recognize a file that a trainer saves next to a model by its content; None for others."""
    root = checkpoint.root
    if isinstance(root, dict):
        keys = {*map(str, root)}
        for reader, (needed, optional) in _RANDOM_STATE_KEYS.items():
            if needed <= keys <= needed | optional:
                description = "it is the state of random number generators, not a model"
                return Companion(description, reader)
    if isinstance(root, Opaque) and not any(find_tensors(root)):
        name = get_class_name(root)
        library = name.partition(".")[0]
        if library in _TRAINER_LIBRARIES or name.endswith("TrainingArguments"):
            description = f"it contains training arguments ({name}), not a model"
            return Companion(
                description, f"torch.load(FILE, weights_only=False) with {library} installed"
            )
    return None
