"""Files of PyTorch/XLA: tensors in a folder next to the file, and rank files of its FSDP.

Sources, torch_xla 1.6 to 2.9: utils/serialization.py (`save`), distributed/fsdp/state_dict_utils.py
(`consolidate_sharded_state_dicts`), distributed/fsdp/xla_fully_sharded_data_parallel.py
(`get_shard_metadata`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, OrderedMap, TensorRef, find_tensors, make_plain_tensor
from ckptool.core.tree import rebuild, walk_everything
from ckptool.errors import CheckpointError, CorruptFile
from ckptool.files.computed import join_ranges
from ckptool.formats.base import (
    Format,
    Probe,
    Refusal,
    add_error_context,
    combine_details,
    distributed_refusal,
)
from ckptool.formats.distributed.placements import (
    ONE_SAVE,
    check_ranks,
    parse_sizes,
    row_major_data,
)
from ckptool.formats.opening import TORCH_FILES, open_together
from ckptool.formats.torch_zip import TORCH_ZIP, read_torch_file
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.words import counted, listed, printable

_REFERENCE_CLASS = "torch_xla.utils.serialization.TensorReference"
_RANK_FILE_NAME = re.compile(
    r".*?rank[-_]?(?P<rank>\d{1,9})-of-\d{1,9}.*\.(?:pth|pt|bin)", re.ASCII
)
_WRAPPER_PREFIXES = re.compile(r"_fsdp_wrapped_module\.|_fpw_module\.")
_SHARD_PREFIX = "_fsdp_shard"
"""The start of the component for a shard in a parameter's name."""
_RANK_FILE_KEYS = {"model", "shard_metadata"}


class XlaXser(Format):
    """The format `xla-xser`: a torch.save file with its tensors in the folder `FILE.tensors`."""

    name = "xla-xser"
    refusal = Refusal(
        "distributed",
        "its tensors are in files of their own next to it, as torch_xla saves them",
        quote("global", _REFERENCE_CLASS),
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for a torch.save file with references to tensors."""
        if not TORCH_ZIP.recognize(probe):
            return False
        return any(map(_is_reference, walk_everything(TORCH_ZIP.read(probe).root)))

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tree of the file; each reference is replaced by the tensor in its own file."""
        checkpoint = TORCH_ZIP.read(probe)
        tensors: dict[str, TensorRef] = {}

        def replace_reference(node: Any) -> Any:
            """Return the tensor that a reference stands for; any other node unchanged."""
            if not _is_reference(node):
                return node
            path = os.path.join(f"{probe.path}.tensors", f"tensor_{node.attributes.get('tid')}.pt")
            if path not in tensors:
                tensors[path] = _read_tensor(path, probe.limits)
            return tensors[path]

        root = rebuild(checkpoint.root, replace_reference)
        size = sum(map(probe.place.size, tensors))
        details = replace(
            checkpoint.details,
            size=checkpoint.details.size + size,
            globals=tuple(name for name in checkpoint.details.globals if name != _REFERENCE_CLASS),
            storage_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            notes=(
                *checkpoint.details.notes,
                f"{counted(len(tensors), 'tensor')} in files next to it",
            ),
        )
        return replace(checkpoint, root=root, format=self.name, details=details)


def _is_reference(node: Any) -> bool:
    return isinstance(node, Opaque) and node.class_name == _REFERENCE_CLASS


def _read_tensor(path: str, limits: Limits) -> TensorRef:
    """Return the tensor in a file of its own."""
    tensor = read_torch_file(path, limits)
    if not isinstance(tensor, TensorRef) or tensor.storage is None:
        raise CorruptFile(
            "does not contain a tensor, as expected from the file that refers to it", file=path
        )
    key = os.path.splitext(os.path.basename(path))[0]  # a key such as 0 repeats in other files
    return replace(tensor, storage=replace(tensor.storage, key=key))


class XlaFsdp(Format):
    """The format `xla-fsdp`: a folder of rank files, each with `model` and `shard_metadata`."""

    name = "xla-fsdp"
    refusal = distributed_refusal(
        "it is a folder of torch_xla FSDP rank files: each has a part of every parameter"
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for a folder of rank files, the first of which describes the sharding."""
        paths = find_rank_files(probe)
        if not paths:
            return False
        try:
            with open_together(paths[:1], probe.limits, TORCH_FILES) as (first,):
                first.close()
                return isinstance(first.root, dict) and first.root.keys() >= _RANK_FILE_KEYS
        except CheckpointError:
            return False

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tree of rank 0 with full parameters under the keys of the unwrapped model."""
        paths = find_rank_files(probe)
        rules = add_error_context(probe.path, hint=ONE_SAVE, rules_of="torch_xla")
        with open_together(paths, probe.limits, TORCH_FILES) as ranks, rules:
            root, notes = _join_ranks(ranks, probe.path)
        note = f"joined {counted(len(ranks), 'torch_xla FSDP rank file')}"
        checkpoint = Checkpoint(root, self.name, probe.path)
        return combine_details(ranks, checkpoint, notes=(note, *notes))


XLA_XSER, XLA_FSDP = XlaXser(), XlaFsdp()


def find_tensor_files(probe: Probe) -> list[str]:
    """Return the tensor files next to a file, in the order of their names."""
    folder = f"{probe.path}.tensors"
    names = probe.place.list_names(folder) if probe.place.is_folder(folder) else ()
    return [os.path.join(folder, name) for name in sorted(names) if name.endswith(".pt")]


def find_rank_files(probe: Probe) -> list[str]:
    """Return the rank files of a folder, in the order of the ranks."""
    matches = [match for name in probe.entries if (match := _RANK_FILE_NAME.fullmatch(name))]
    matches.sort(key=lambda match: int(match["rank"]))
    return [os.path.join(probe.path, match.string) for match in matches]


def _join_ranks(ranks: Sequence[Checkpoint], folder: str) -> tuple[dict[Any, Any], list[str]]:
    """Return the tree of rank 0 with full parameters, and notes.

    `shard_info` has the parameters whose parts are joined; other tensors are buffers. A parameter
    in `flatten_info` is split into those that were flattened. The optimizer state is left out if it
    has tensors.
    """
    rank_metadata = [rank.root["shard_metadata"] for rank in ranks]
    _check_stated_ranks(rank_metadata, folder)
    first_metadata = rank_metadata[0]
    infos = {  # module path and description, by the key of a part in the rank files
        _join_names(module_path, suffix): (module_path, info)
        for module_path, parameters in first_metadata["shard_info"].items()
        for suffix, info in parameters.items()
    }
    model, unflattened = OrderedMap(), OrderedMap()  # parameters that were flattened come last
    for name, first_part in ranks[0].root["model"].items():
        if name not in infos:
            if any(part.startswith(_SHARD_PREFIX) for part in name.split(".")):
                raise CorruptFile(
                    f"shard_info does not list {printable(name)!r}", file=ranks[0].path
                )
            model[_strip_wrappers(name)] = first_part  # a buffer, which all ranks have
            continue
        module_path, info = infos[name]
        parts = [(rank.root["model"].get(name), rank.path) for rank in ranks]
        full_name = _join_names(module_path, info["_orig_name"])
        shape = parse_sizes(info["_orig_size"])
        flat_info = first_metadata["flatten_info"].get(full_name)  # None: not flattened
        state_dict = model if flat_info is None else unflattened
        for key, tensor in _split_parameter(full_name, shape, flat_info, parts):
            state_dict[_strip_wrappers(key)] = tensor
    model.update(unflattened)
    root = {key: node for key, node in ranks[0].root.items() if key != "shard_metadata"}
    notes = []
    if any(True for _ in find_tensors([root.get("optimizer")])):
        del root["optimizer"]
        notes.append("left out the optimizer state, which is in parts of flat parameters")
    if first_metadata.get("buffer_info"):
        names = sorted(map(_strip_wrappers, first_metadata["buffer_info"]))
        notes.append(f"buffers had another dtype in the model: {listed(names)}")
    return {**root, "model": model}, notes


def _check_stated_ranks(rank_metadata: Sequence[Mapping[Any, Any]], folder: str) -> None:
    """Refuse files that do not state all ranks of one world size, in their order."""
    world = rank_metadata[0]["world_size"]
    stated_ranks = [metadata["rank"] for metadata in rank_metadata]
    pattern = f"rank-{{rank}}-of-{world}"
    check_ranks(stated_ranks, world, pattern, folder, "copy it as well")
    has_other_world = any(metadata["world_size"] != world for metadata in rank_metadata)
    if stated_ranks != list(range(world)) or has_other_world:
        numbers = listed(map(str, stated_ranks))
        message = f"has the files of ranks {numbers}, but the world size is {world}"
        raise CorruptFile(message, hint=ONE_SAVE)


def _join_names(module_path: str, name: str) -> str:
    """Return the key of a parameter; the root module has an empty path."""
    return f"{module_path}.{name}" if module_path else name


def _strip_wrappers(name: str) -> str:
    return _WRAPPER_PREFIXES.sub("", name)


def _split_parameter(
    name: str, shape: tuple[int, ...], flat_info: Any, parts: Sequence[tuple[Any, str]]
) -> Iterator[tuple[str, TensorRef]]:
    """Yield the key and tensor of each parameter in the concatenated parts of all ranks.

    `parts` are the tensor and file of each rank; the last may end with padding. `flat_info` has the
    suffixes and shapes of the parameters in a flattened one; None for a single parameter with this
    `name` and `shape`.
    """
    first = parts[0][0]
    for part, path in parts:
        if not isinstance(part, TensorRef) or part.dtype != first.dtype:
            raise CorruptFile(f"{printable(name)!r} has another dtype than in rank 0", file=path)
        if len(part.shape) > 1 and part.shape[1:] != shape[1:]:
            message = (
                f"{printable(name)!r} of shape {list(shape)} has a part of shape {list(part.shape)}"
            )
            raise CorruptFile(message, file=path, hint=ONE_SAVE)
    joined_data = join_ranges([row_major_data(part, printable(name), path) for part, path in parts])
    keys_and_shapes = [(name, shape)]
    if flat_info is not None:
        parent = name.rpartition(".")[0]
        suffixes, shapes, *_ = flat_info
        keys = (_join_names(parent, suffix) for suffix in suffixes)
        keys_and_shapes = list(zip(keys, map(parse_sizes, shapes), strict=True))
    available, start = joined_data.length // first.itemsize, 0
    if prod(shape) != sum(prod(size) for _, size in keys_and_shapes) or prod(shape) > available:
        message = (
            f"{printable(name)!r} of shape {list(shape)} has {available:,} elements in all "
            "ranks together"
        )
        raise CorruptFile(message, file=parts[0][1], hint=ONE_SAVE)
    for key, size in keys_and_shapes:
        data = joined_data.slice(start, prod(size) * first.itemsize)
        start += data.length
        yield key, make_plain_tensor(key, first.dtype, size, data, first.device)
