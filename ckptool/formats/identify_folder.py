"""Folders: checkpoints of many files that are not read yet, and folders that hold one that is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.files import FileSource
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import (
    DCP_HINT,
    Finding,
    few,
    looks_like_checkpoint,
    quoted,
    shell,
)

__all__ = ["FOLDER_KINDS", "FolderKind", "find"]

_MOST_OPENED = 64


class FolderKind(NamedTuple):
    """Names that a kind of folder has: each pattern must match the whole of some entry's name."""

    names: tuple[str, ...]
    what: str
    hint: str
    """`{folder}` stands for its path, `{entry}` for the first entry that the last name matches."""


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

FOLDER_KINDS: tuple[FolderKind, ...] = (
    FolderKind((r"\.metadata", r".*\.distcp"), "a distributed checkpoint (DCP)", DCP_HINT),
    FolderKind(
        (r".*\.distcp",),
        "a distributed checkpoint (DCP) whose index `.metadata` is missing",
        "copy `.metadata` too: it is written last, by the first rank",
    ),
    FolderKind((r"zero_to_fp32\.py",), "a DeepSpeed checkpoint", _DEEPSPEED),
    FolderKind((r"latest", r"global_step\d+"), "a DeepSpeed checkpoint", _DEEPSPEED),
    FolderKind(
        (r".*optim_states\.pt", r".*mp_rank_\d+_model_states\.pt"),
        "one step of a DeepSpeed checkpoint",
        "zero_to_fp32.py of the folder above makes one state dict of it; what one rank holds: "
        "ckptool list {entry}",
    ),
    FolderKind(
        (r".*mp_rank_\d+_model_states\.pt",),
        "one step of a DeepSpeed checkpoint",
        "what one rank holds: ckptool list {entry}",
    ),
    FolderKind((r"latest_checkpointed_iteration\.txt",), "a Megatron-LM checkpoint", _MEGATRON),
    FolderKind((r"iter_\d{7}",), "a Megatron-LM checkpoint", _MEGATRON),
    FolderKind((r"mp_rank_\d\d(?:_\d{3})*",), "one step of a Megatron-LM checkpoint", _MEGATRON),
    FolderKind((r"\.snapshot_metadata",), "a torchsnapshot", "torchsnapshot.Snapshot reads it"),
    FolderKind((r"_CHECKPOINT_METADATA",), "an Orbax checkpoint (JAX)", _ORBAX),
    FolderKind((r"_METADATA",), "an Orbax checkpoint (JAX)", _ORBAX),
    FolderKind((r"manifest\.ocdbt",), "an Orbax checkpoint (JAX, OCDBT)", _ORBAX),
    FolderKind((r"\.zarray|zarr\.json",), "a Zarr array", "tensorstore or zarr reads it"),
    FolderKind((r"saved_model\.pb(?:txt)?",), "a TensorFlow SavedModel", _SAVED_MODEL),
    FolderKind((r".*\.index", r".*\.data-\d{5}-of-\d{5}"), "a TensorFlow checkpoint", _TENSORFLOW),
    FolderKind(
        (r"config\.json", r"model\.weights\.h5"),
        "an unzipped Keras model",
        "Keras reads it when it is zipped again: keras.models.load_model",
    ),
    FolderKind((r"Manifest\.json", r"Data"), "a Core ML package", "coremltools reads it"),
    FolderKind(
        (r"tensor_0\.pt",),
        "the tensors of a torch_xla checkpoint, whose structure is in the file beside the folder",
        "load that with torch_xla.utils.serialization.load and save it with torch.save",
    ),
    FolderKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)", r".*\.index\.json"),
        "a checkpoint in shards whose index is none",
        "ckptool list {entry} says what is wrong with it",
    ),
    FolderKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)",),
        "a checkpoint in shards without their index, which tells what is in which",
        _SHARDS,
    ),
    FolderKind(
        (r"pytorch_model_fsdp_\d+",),
        "a checkpoint of FSDP by accelerate, whose model is a distributed one (DCP) in it",
        DCP_HINT.replace("{folder}", "{entry}"),
    ),
)


_BESIDE = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict|scaler|rng_state|random_states|training_args)"
    r"(_\d+)*\.(pt|pth|bin|pkl)"
)
"""What the trainers of transformers and accelerate save beside a model."""


def find(probe: Probe) -> Finding:
    """What kind of folder it is, or what is in it."""
    names = sorted(probe.entries)
    for row in FOLDER_KINDS:
        matches = [_first(pattern, names) for pattern in row.names]
        if all(matches):
            entry = os.path.join(probe.path, matches[-1] or "")
            hint = row.hint.format(folder=shell(probe.path), entry=shell(entry))
            return Finding(f"{row.what} (it holds {few(names)})", hint, UnsupportedFormat)
    return _other(probe.path, names)


def _first(pattern: str, names: Iterable[str]) -> str | None:
    matcher = re.compile(pattern)
    return next((name for name in names if matcher.fullmatch(name)), None)


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
