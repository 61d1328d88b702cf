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
from ckptool.files.folders import open_atomic_folder
from ckptool.files.system import convert_os_errors
from ckptool.loading.ranks import Ranks, is_dtensor
from ckptool.matching import Allowance
from ckptool.symbolic import unpickle

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

VALUES = "run.pth"
"""The file that is written last: a folder without it is incomplete."""


def _import_dcp() -> Any:
    """Import torch.distributed.checkpoint, which takes a second."""
    return import_module("torch.distributed.checkpoint")


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a DCP folder, damaged or not."""
    names = os.listdir(path) if os.path.isdir(path) else ()
    return any(name == ".metadata" or name.endswith(".distcp") for name in names)


_GROUPS = "param_groups"
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_NAMES = {
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


def find_damage(path: str) -> str | None:
    """Return a sentence on a missing or damaged part of a folder or file; None if intact."""
    try:
        if os.path.isdir(path):
            _read_metadata(path)  # checks that the files of shards are complete
            path = os.path.join(path, VALUES)
        problems = ckptool.verify(path).problems
    except CheckpointError as error:
        return str(error)
    return f"{path}: {problems[0].text}" if problems else None


def write_folder(
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
    name_of = _name_parameters(model)
    state = {  # the tensors, which DCP writes
        "state_dict": model.state_dict(),
        "optimizer": {
            name_of[parameter]: dict(parameter_state)
            for parameter, parameter_state in optimizer.state.items()
        },
        **({"ema": values["ema"]} if "ema" in values else {}),
    }
    other_values = {key: value for key, value in values.items() if key != "ema"}
    other_values[_GROUPS] = [
        {**group, "params": [name_of[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    with open_atomic_folder(
        path, count_bytes(state), last_file=VALUES, run_first=ranks.run_on_first, rank=ranks.rank
    ) as new_folder:
        with ranks.raise_on_all_ranks(), convert_os_errors(path):
            # Every process has the tensors that are not sharded; only rank 0 writes these.
            _write_shards(state if ranks.rank == 0 else _select_shards(state), new_folder)
        ckptool.save(os.path.join(new_folder, VALUES), **other_values)


def count_bytes(tree: Any) -> int:
    """Return the size of all tensors in a tree; a sharded tensor counts with all its shards."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _select_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of dicts with only its sharded tensors, without dicts that become empty."""
    selected = {}
    for key, value in state.items():
        if isinstance(value, dict):
            shards = _select_shards(value)
            if shards:
                selected[key] = shards
        elif is_dtensor(value):
            selected[key] = value
    return selected


def _write_shards(state: dict[str, Any], path: str) -> None:
    """Write the tensors of this process with DCP into the folder `path`.

    Raises:
        OSError: the system refused; DCP wraps this error in its own.
        WriteError: DCP failed for another reason.
    """
    try:
        _import_dcp().save(state, storage_writer=_import_dcp().FileSystemWriter(path))
    except _import_dcp().CheckpointException as error:
        for failure, _traceback in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise WriteError(f"a shard cannot be written: {_describe_failure(error)}") from error


def load_values(path: str, average: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values that `write_folder` stored; every process calls it.

    The stored moving average is the value `ema`, sharded like the tensors of `average`, the one
    of this run. It is left out if it has other keys or shapes.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        UnreadableFile: its `run.pth` cannot be read.
    """
    metadata = _read_metadata(path)
    values: dict[str, Any] = ckptool.load(os.path.join(path, VALUES))
    del values[_GROUPS]  # added by `write_folder`, for `load_optimizer`
    stored_shapes = {
        key: tuple(entry.size) for key, entry in _tensors_of_section(metadata, "ema").items()
    }
    live_shapes = {key: tuple(tensor.shape) for key, tensor in average.items()}
    if stored_shapes and stored_shapes == live_shapes:
        values["ema"] = {key: torch.empty_like(tensor) for key, tensor in average.items()}
        _read_shards({"ema": values["ema"]}, path)
    return values


def load_model(path: str, model: nn.Module) -> None:
    """Fill a model; every process calls it, and reads its shards of each parameter.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        MatchError: it is of another architecture; the model is unchanged.
    """
    # Tensors without data stand for the stored ones: a match needs only names, shapes and dtypes.
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for key, entry in _tensors_of_section(_read_metadata(path), "state_dict").items()
    }
    fitting, report = ckptool.match(stored, model)
    refusal = Allowance().refusal_error(report)
    if refusal is not None:
        raise refusal
    # `fitting` has the same tensor objects as `stored`, under the keys of the model.
    stored_key_by_id = {id(tensor): key for key, tensor in stored.items()}
    live = model.state_dict()
    targets = {stored_key_by_id[id(tensor)]: live[key] for key, tensor in fitting.items()}
    _read_shards({"state_dict": targets}, path)


def load_optimizer(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill an optimizer of the parameters of `model`; every process calls it.

    Raises:
        CorruptFile: a file of the folder is missing or damaged.
        MatchError: it has other parameters; the optimizer is unchanged.
    """
    name_of = _name_parameters(model)
    (group,) = optimizer.param_groups  # the trainer makes one
    parameter_by_name = {name_of[parameter]: parameter for parameter in group["params"]}
    names = list(parameter_by_name)
    saved_groups = ckptool.load(os.path.join(path, VALUES))[_GROUPS]
    if [saved_group["params"] for saved_group in saved_groups] != [names]:
        raise MatchError("the saved optimizer has other parameters", file=path)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, entry in _tensors_of_section(_read_metadata(path), "optimizer").items():
        name, _, state_key = key.rpartition(".")  # "fc.weight.exp_avg"
        if name in parameter_by_name:
            state.setdefault(name, {})[state_key] = _make_empty(entry, parameter_by_name[name])
    _read_shards({"optimizer": state}, path)
    # torch's format has the numbers of the parameters instead of their names.
    state_by_number = {number: state[name] for number, name in enumerate(names) if name in state}
    groups = [{**saved_groups[0], "params": list(range(len(names)))}]
    optimizer.load_state_dict({"state": state_by_number, "param_groups": groups})


def _name_parameters(model: nn.Module) -> dict[torch.Tensor, str]:
    """Map each parameter of a model to its name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def _make_empty(entry: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor to read a stored entry of the optimizer's state into.

    An entry with the shape of its parameter, such as a moment, is sharded like it; any other one,
    such as `step`, is whole in every process.
    """
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _tensors_of_section(metadata: Metadata, section: str) -> dict[str, TensorStorageMetadata]:
    """Return the entries of a section's tensors in DCP's index: "ema.fc.weight" -> "fc.weight"."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = f"{section}."
    return {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _read_shards(state: dict[str, Any], path: str) -> None:
    """Fill the tensors of a state from a DCP folder, each process its shards."""
    try:
        with warnings.catch_warnings():  # torch warns if there is only one process
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            _import_dcp().load(state, storage_reader=_import_dcp().FileSystemReader(path))
    except _import_dcp().CheckpointException as error:
        raise CorruptFile(
            f"a shard cannot be read: {_describe_failure(error)}", file=path
        ) from error


def _describe_failure(error: Any) -> str:
    """Return the first error that DCP collected, with its class."""
    failures = [failure for failure, _ in error.failures.values()]
    return f"{type(failures[0]).__name__}: {failures[0]}" if failures else str(error)


def _require_dcp_index(path: str) -> None:
    """Check that a pickle only names the classes and functions of a DCP index.

    ckptool's own unpickler lists the names here, and imports none.

    Raises:
        CorruptFile: it names another one, which torch's reader would import.
    """
    with closing(FileSource(path)) as source:
        global_names = unpickle(ByteRange(source, 0, source.size)).globals
    for name in global_names:
        module, _, attribute = name.rpartition(".")
        is_dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
        if not is_dtype and name not in _INDEX_NAMES:
            raise CorruptFile(f"its index refers to {name}, which no DCP index uses", file=path)


def _read_metadata(path: str) -> Metadata:
    """Return DCP's index of a folder, after a check that all its files are complete."""
    if not os.path.exists(os.path.join(path, VALUES)):
        raise CorruptFile(f"{VALUES}, which is written last, is missing", file=path)
    try:
        _require_dcp_index(os.path.join(path, ".metadata"))
        metadata: Metadata = _import_dcp().FileSystemReader(path).read_metadata()
    except Exception as error:  # a truncated or foreign pickle raises anything
        raise CorruptFile(f".metadata cannot be read: {error}", file=path) from error
    needed_sizes: dict[str, int] = {}  # by file name: the end of its last shard
    for shard in (metadata.storage_data or {}).values():
        end = shard.offset + shard.length
        needed_sizes[shard.relative_path] = max(end, needed_sizes.get(shard.relative_path, 0))
    for name, needed in needed_sizes.items():
        try:
            size = os.path.getsize(os.path.join(path, name))
        except OSError as error:
            raise CorruptFile(f"{name} is missing", file=path) from error
        if size < needed:
            raise CorruptFile(f"{name} is truncated: {size:,} of {needed:,} bytes", file=path)
    return metadata
