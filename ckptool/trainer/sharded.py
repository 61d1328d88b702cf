"""A checkpoint as a folder of torch.distributed.checkpoint (DCP): each process writes its shards.

    last/
        .metadata         which tensor is in which file, by DCP
        __0_0.distcp      the shards of process 0, of model, optimizer and moving average
        __1_0.distcp
        run.pth           all other values, by ckptool.save: counters, schedule, random numbers

Any number of processes, under any strategy, reads it: each process reads its shards of a sharded
tensor, and the whole of any other tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import ckptool
from ckptool.errors import CheckpointError, CorruptFile, MatchError, WriteError
from ckptool.files import ByteRange, FileSource
from ckptool.files.folders import atomic_folder
from ckptool.files.system import worded
from ckptool.loading.ranks import Ranks, is_spread
from ckptool.matching import Allowance
from ckptool.symbolic import unpickle

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

VALUES = "run.pth"
"""The file that is written last: a folder without it is incomplete."""


def _dcp() -> Any:
    """Import torch.distributed.checkpoint, which takes a second."""
    return import_module("torch.distributed.checkpoint")


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder of DCP, damaged or not."""
    names = os.listdir(path) if os.path.isdir(path) else ()
    return any(name == ".metadata" or name.endswith(".distcp") for name in names)


_GROUPS = "param_groups"
_METADATA = "torch.distributed.checkpoint.metadata"
_OF_AN_INDEX = {
    *("pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
    *("torch.Size", "torch.serialization._get_layout"),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"{_METADATA}.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_METADATA}.{name}" for name in ("TensorProperties", "TensorStorageMetadata")),
    f"{_METADATA}._MEM_FORMAT_ENCODING",
}
"""The names in the pickle `.metadata`, besides dtypes: torch's reader imports any name."""


def damage(path: str) -> str | None:
    """Return what is missing or damaged in a folder, or in any other checkpoint, or None."""
    try:
        if os.path.isdir(path):
            _metadata(path)
            path = os.path.join(path, VALUES)
        problems = ckptool.verify(path).problems
    except CheckpointError as error:
        return str(error)
    return f"{path}: {problems[0].text}" if problems else None


def write(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Write a folder next to `path`, then rename it; every process calls it.

    Raises:
        WriteError: nothing is written; `path` is unchanged, or the next run restores it.
    """
    names = _names(model)
    state = {
        "state_dict": model.state_dict(),
        "optimizer": {names[one]: dict(held) for one, held in optimizer.state.items()},
        **({"ema": values["ema"]} if "ema" in values else {}),
    }
    rest = {name: one for name, one in values.items() if name != "ema"}
    rest[_GROUPS] = [
        {**group, "params": [names[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    with atomic_folder(path, _size(state), last=VALUES, first=ranks.first, own=ranks.own) as new:
        with ranks.raise_on_all_ranks(), worded(path):
            _write_parts(state if ranks.own == 0 else _parts_in(state), new)
        ckptool.save(os.path.join(new, VALUES), **rest)


def _size(state: Mapping[str, Any]) -> int:
    """Return the size of all tensors, with the shards of the other processes."""
    tensors = (one for one in tree_leaves(state) if isinstance(one, torch.Tensor))
    return sum(one.numel() * one.element_size() for one in tensors)


def _parts_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded tensors; only rank 0 writes the whole ones."""
    found = {
        name: _parts_in(one) if isinstance(one, dict) else one
        for name, one in state.items()
        if isinstance(one, dict) or is_spread(one)
    }
    return {name: one for name, one in found.items() if not isinstance(one, dict) or one}


def _write_parts(state: dict[str, Any], path: str) -> None:
    try:
        _dcp().save(state, storage_writer=_dcp().FileSystemWriter(path))
    except _dcp().CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise WriteError(f"a shard cannot be written: {_reason(error)}") from error


def load_values(path: str, average: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values that were given to `write`; every process calls it.

    If the folder has a moving average of the same tensors, it is read as `average` is sharded.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        UnreadableFile: its `run.pth` cannot be read.
    """
    metadata = _metadata(path)
    held: dict[str, Any] = ckptool.load(os.path.join(path, VALUES))
    del held[_GROUPS]
    stored = {name: tuple(one.size) for name, one in _section(metadata, "ema").items()}
    if stored and stored == {name: tuple(one.shape) for name, one in average.items()}:
        held["ema"] = {name: torch.empty_like(one) for name, one in average.items()}
        _read({"ema": held["ema"]}, path)
    return held


def load_model(path: str, model: nn.Module) -> None:
    """Fill a model; every process calls it, and reads its shards of each parameter.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        MatchError: it is of another architecture; the model is unchanged.
    """
    stored = {
        name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
        for name, one in _section(_metadata(path), "state_dict").items()
    }
    fitting, report = ckptool.match(stored, model)
    refusal = Allowance().refusal(report)
    if refusal is not None:
        raise refusal
    called = {id(one): name for name, one in stored.items()}
    own = model.state_dict()
    _read({"state_dict": {called[id(one)]: own[name] for name, one in fitting.items()}}, path)


def load_optimizer(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill an optimizer of the parameters of `model`; every process calls it.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        MatchError: it has other parameters; the optimizer is unchanged.
    """
    names = _names(model)
    (group,) = optimizer.param_groups
    live = [names[one] for one in group["params"]]
    saved = ckptool.load(os.path.join(path, VALUES))[_GROUPS]
    if [one["params"] for one in saved] != [live]:
        raise MatchError("the saved optimizer has other parameters", file=path)
    kept: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, one in _section(_metadata(path), "optimizer").items():
        name, _, word = key.rpartition(".")
        kept.setdefault(name, {})[word] = one
    state = {
        name: {word: _room(one, parameter) for word, one in kept[name].items()}
        for name, parameter in zip(live, group["params"], strict=True)
        if name in kept
    }
    _read({"optimizer": state}, path)
    numbered = {number: state[name] for number, name in enumerate(live) if name in state}
    groups = [{**saved[0], "params": list(range(len(live)))}]
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {one: name for name, one in model.named_parameters()}


def _room(one: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor to read into: sharded as the parameter, or a number in every process."""
    if one.size == parameter.shape:
        return torch.empty_like(parameter, dtype=one.properties.dtype)
    return torch.empty(one.size, dtype=one.properties.dtype)


def _section(metadata: Metadata, section: str) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    before = f"{section}."
    return {
        name.removeprefix(before): one
        for name, one in metadata.state_dict_metadata.items()
        if name.startswith(before) and isinstance(one, TensorStorageMetadata)
    }


def _read(state: dict[str, Any], path: str) -> None:
    try:
        with warnings.catch_warnings():  # torch warns if there is only one process
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            _dcp().load(state, storage_reader=_dcp().FileSystemReader(path))
    except _dcp().CheckpointException as error:
        raise CorruptFile(f"a shard cannot be read: {_reason(error)}", file=path) from error


def _reason(error: Any) -> str:
    failures = [failure for failure, _ in error.failures.values()]
    return f"{type(failures[0]).__name__}: {failures[0]}" if failures else str(error)


def _require_an_index(path: str) -> None:
    """Check that a pickle names only the classes and functions of an index of DCP."""
    with closing(FileSource(path)) as source:
        named = unpickle(ByteRange(source, 0, source.size)).globals
    for name in named:
        module, _, last = name.rpartition(".")
        is_dtype = module == "torch" and isinstance(getattr(torch, last, None), torch.dtype)
        if not is_dtype and name not in _OF_AN_INDEX:
            raise CorruptFile(f"its index refers to {name}, which no DCP index uses", file=path)


def _metadata(path: str) -> Metadata:
    """Return DCP's index of a folder, after a check that all its files are complete."""
    if not os.path.exists(os.path.join(path, VALUES)):
        raise CorruptFile(f"{VALUES}, which is written last, is missing", file=path)
    try:
        _require_an_index(os.path.join(path, ".metadata"))
        metadata: Metadata = _dcp().FileSystemReader(path).read_metadata()
    except Exception as error:  # a truncated or foreign pickle raises anything
        raise CorruptFile(f".metadata cannot be read: {error}", file=path) from error
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    for name, end in ends.items():
        try:
            size = os.path.getsize(os.path.join(path, name))
        except OSError as error:
            raise CorruptFile(f"{name} is missing", file=path) from error
        if size < end:
            raise CorruptFile(f"{name} is truncated: {size:,} of {end:,} bytes", file=path)
    return metadata
