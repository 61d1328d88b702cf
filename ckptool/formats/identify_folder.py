"""Folders: checkpoints of many files that are not read yet, and folders that hold one that is."""

from __future__ import annotations

import os
import re

from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.files import FileSource
from ckptool.formats.base import Probe
from ckptool.formats.identify import (
    DCP_HINT,
    Finding,
    NameKind,
    few,
    looks_like_checkpoint,
    quoted,
    shell,
)

__all__ = ["FOLDER_KINDS", "find"]

_MOST_OPENED = 64

_ORBAX = "orbax-checkpoint reads it: orbax.checkpoint.StandardCheckpointer().restore"
_DEEPSPEED = (
    "DeepSpeed's script makes one state dict of it: python {folder}/zero_to_fp32.py {folder} OUT"
)
_MEGATRON = "Megatron-LM's tools/checkpoint/convert.py makes other formats of it"
_SAVED_MODEL = "TensorFlow reads it: tf.saved_model.load"
_TENSORFLOW = "TensorFlow reads it: tf.train.load_checkpoint"
_SHARDS = (
    "copy the index too (model.safetensors.index.json, pytorch_model.bin.index.json); "
    "one shard alone: ckptool list {entry}"
)

FOLDER_KINDS: tuple[NameKind, ...] = (
    NameKind((r"\.metadata", r".*\.distcp"), "a distributed checkpoint (DCP)", DCP_HINT),
    NameKind(
        (r".*\.distcp",),
        "a distributed checkpoint (DCP) whose index `.metadata` is missing",
        "copy `.metadata` too: it is written last, by the first rank",
    ),
    NameKind((r"zero_to_fp32\.py",), "a DeepSpeed checkpoint", _DEEPSPEED),
    NameKind((r"latest", r"global_step\d+"), "a DeepSpeed checkpoint", _DEEPSPEED),
    NameKind(
        (r".*optim_states\.pt", r".*mp_rank_\d+_model_states\.pt"),
        "one step of a DeepSpeed checkpoint",
        "zero_to_fp32.py of the folder above makes one state dict of it; what one rank holds: "
        "ckptool list {entry}",
    ),
    NameKind(
        (r".*mp_rank_\d+_model_states\.pt",),
        "one step of a DeepSpeed checkpoint",
        "what one rank holds: ckptool list {entry}",
    ),
    NameKind((r"latest_checkpointed_iteration\.txt",), "a Megatron-LM checkpoint", _MEGATRON),
    NameKind((r"iter_\d{7}",), "a Megatron-LM checkpoint", _MEGATRON),
    NameKind((r"mp_rank_\d\d(?:_\d{3})*",), "one step of a Megatron-LM checkpoint", _MEGATRON),
    NameKind(
        (r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt",), "an Orbax checkpoint (JAX)", _ORBAX
    ),
    NameKind((r"saved_model\.pb(?:txt)?",), "a TensorFlow SavedModel", _SAVED_MODEL),
    NameKind((r".*\.index", r".*\.data-\d{5}-of-\d{5}"), "a TensorFlow checkpoint", _TENSORFLOW),
    NameKind(
        (r"tensor_0\.pt",),
        "the tensors of a torch_xla checkpoint, whose structure is in the file beside the folder",
        "load that with torch_xla.utils.serialization.load and save it with torch.save",
    ),
    NameKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)", r".*\.index\.json"),
        "a checkpoint in shards whose index is none",
        "ckptool list {entry} says what is wrong with it",
    ),
    NameKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)",),
        "a checkpoint in shards without their index, which tells what is in which",
        _SHARDS,
    ),
    NameKind(
        (r"pytorch_model_fsdp_\d+",),
        "a checkpoint of FSDP by accelerate, whose model is a distributed one (DCP) in it",
        DCP_HINT.replace("{folder}", "{entry}"),
    ),
)


_WEIGHTS = r"\.(?:safetensors|bin|pth?|ckpt)(?:\.index\.json)?\Z"
_BESIDE = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict|scaler|rng_state|random_states|training_args)"
    r"(_\d+)*\.(pt|pth|bin|pkl)"
)
"""What the trainers of transformers and accelerate save beside a model."""


def find(probe: Probe) -> Finding:
    """Return what kind of folder it is, or what is in it."""
    names = sorted(probe.entries)
    for row in FOLDER_KINDS:
        matches = row.first_matches(names)
        if matches is not None:
            entry = os.path.join(probe.path, matches[-1])
            hint = row.hint.format(folder=shell(probe.path), entry=shell(entry))
            return Finding(f"{row.what} (it holds {few(names)})", hint, row.kind)
    if "model_index.json" in names:
        return _pipeline(probe.path, names)
    return _other(probe.path, names)


def _pipeline(path: str, names: list[str]) -> Finding:
    """A pipeline of diffusers: a model in each of some folders."""
    parts = [
        name
        for name in names
        if os.path.isdir(os.path.join(path, name))
        and any(re.search(_WEIGHTS, file) for file in os.listdir(os.path.join(path, name)))
    ]
    what = f"a pipeline of diffusers, whose parts with weights are {few(parts, 12)}"
    first = os.path.join(path, parts[0]) if parts else path
    return Finding(what, f"give one part: ckptool list {shell(first)}", UnsupportedFormat)


def _other(path: str, names: list[str]) -> Finding:
    """A folder of no known kind: whoever gave it may mean a file in it."""
    if not names:
        return Finding("an empty folder", None)
    what = f"a folder that is no checkpoint: it holds {few(names)}"
    files = [name for name in names[:_MOST_OPENED] if _may_be_checkpoint(os.path.join(path, name))]
    if not files:
        return Finding(what, "give the checkpoint itself")
    command = f"ckptool list {shell(os.path.join(path, files[0]))}"
    if len(files) == 1:
        return Finding(f"a folder; the checkpoint is {quoted(files[0])} in it", command)
    if all(map(_BESIDE.fullmatch, files)):
        what = f"a trainer's folder without the model itself: it holds {few(files)}"
        return Finding(what, f"put the model's file beside them, or give one of them: {command}")
    return Finding(f"a folder with several checkpoints in it: {few(files)}", f"give one: {command}")


def _may_be_checkpoint(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        source = FileSource(path)
    except CheckpointError:
        return False
    try:
        return looks_like_checkpoint(source.read(0, min(16, source.size)))
    except (CheckpointError, OSError):
        return False
    finally:
        source.close()
