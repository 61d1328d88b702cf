"""A folder of safetensors files written by torch.distributed.checkpoint (DCP) for the hub.

It has no index: the header of each file has the offsets of its part of each tensor
(`DCP_SHARDING_INFO`). Source: torch/distributed/checkpoint/hf_storage.py, torch 2.7 to 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap, TensorRef, make_plain_tensor
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, FileMissing
from ckptool.files.tiled import Tile, join_tiles
from ckptool.formats.base import (
    Format,
    Probe,
    add_error_context,
    combine_details,
    distributed_refusal,
)
from ckptool.formats.distributed.placements import ONE_SAVE, parse_sizes
from ckptool.formats.opening import open_together
from ckptool.formats.safetensors_header import parse_json
from ckptool.words import counted, printable

SHARDING_INFO = "DCP_SHARDING_INFO"
_PART_FILE_NAME = re.compile(r"shard-\d{5,}-model-(\d{5,9})-of-(\d{5,9})\.safetensors", re.ASCII)
_UNKNOWN_RANK_COUNT = (
    "no file states the number of ranks, so ckptool cannot notice if the files of the last ranks "
    "are missing"
)


class DcpSafetensors(Format):
    """The format `dcp-safetensors`."""

    name = "dcp-safetensors"
    flat = True
    tensors_only = True
    refusal = distributed_refusal(
        "it is a folder of safetensors files with parts of tensors (torch.distributed.checkpoint)",
        "torch.distributed.checkpoint.load with HuggingFaceStorageReader",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for a folder with files named by DCP."""
        return any(map(is_part_file, probe.entries))

    def read(self, probe: Probe) -> Checkpoint:
        """Return one state dict of complete tensors, from the headers of the files."""
        with open_together(find_part_files(probe), probe.limits, ("safetensors",)) as files:
            parts_by_key: dict[str, list[tuple[Tile, TensorRef]]] = {}
            for file in files:
                for name, part in _read_parts(file):
                    parts_by_key.setdefault(name, []).append(part)
            root = OrderedMap(
                {
                    name: _join_parts(name, tensor_parts, files)
                    for name, tensor_parts in parts_by_key.items()
                }
            )
        return combine_details(
            files,
            Checkpoint(root, self.name, probe.path),
            writer="torch.distributed.checkpoint",
            notes=(f"joined {counted(len(files), 'file')}; {_UNKNOWN_RANK_COUNT}",),
            header={},
        )


DCP_SAFETENSORS = DcpSafetensors()


def is_part_file(path: str) -> bool:
    """Return True if DCP gives this name to a file with a rank's parts of tensors."""
    return _PART_FILE_NAME.fullmatch(os.path.basename(path)) is not None


def find_part_files(probe: Probe) -> tuple[str, ...]:
    """Return the paths of the folder's part files, in the order of the ranks.

    Names with `-of-TOTAL` state how many files one save has.

    Raises:
        FileMissing: if the names imply more files than exist.
    """
    names = sorted(filter(is_part_file, probe.entries))
    numbers_and_totals = {
        match.groups() for name in names if (match := _PART_FILE_NAME.fullmatch(name))
    }
    for total in {total for _, total in numbers_and_totals}:
        missing = set(range(1, int(total) + 1)) - {int(number) for number, _ in numbers_and_totals}
        if missing:
            message = f"lacks the files shard-*-model-{min(missing):05d}-of-{total}.safetensors"
            raise FileMissing(message, file=probe.path, hint=ONE_SAVE)
    return tuple(os.path.join(probe.path, name) for name in names)


def _read_parts(file: Checkpoint) -> Iterator[tuple[str, tuple[Tile, TensorRef]]]:
    """Yield the key, tile and tensor of each part in a file."""
    with add_error_context(file.path):
        parts_by_key = parse_json(file.details.header.get(SHARDING_INFO, "null"), SHARDING_INFO)
        for name, tensor in file.root.items():
            offsets = _parse_offsets(parts_by_key, name, tensor)
            yield name, (Tile(offsets, tensor.shape, tensor.data), tensor)


def _parse_offsets(parts_by_key: Any, name: str, tensor: TensorRef) -> tuple[int, ...]:
    """Return the offsets of a part in the full tensor, as the header states them."""
    info = parts_by_key.get(name) if isinstance(parts_by_key, dict) else None
    offsets = parse_sizes(info.get("saved_offsets") if isinstance(info, dict) else None)
    if len(offsets) != len(tensor.shape):
        message = f"the header does not state where its part of {printable(name)!r} begins"
        raise CorruptFile(f"{message} ({SHARDING_INFO}: {printable(repr(info))})", hint=ONE_SAVE)
    return offsets


def _join_parts(
    name: str, parts: Sequence[tuple[Tile, TensorRef]], files: Sequence[Checkpoint]
) -> TensorRef:
    """Return the full tensor of a key, joined from its parts.

    No file states its shape: along each axis it ends where its last part ends.
    """
    folder = os.path.dirname(files[0].path)
    with add_error_context(folder, f"tensor {printable(name)!r}", hint=ONE_SAVE):
        if len({(tensor.dtype, len(tensor.shape)) for _, tensor in parts}) > 1:
            raise CorruptFile("its dtype or dimensions differ between files")
        tiles = [tile for tile, _ in parts]
        part_ends = [
            [offset + size for offset, size in zip(tile.offsets, tile.sizes, strict=True)]
            for tile in tiles
        ]
        shape = tuple(map(max, zip(*part_ends, strict=True)))
        (_, first_tensor), *_ = parts
        dtype = first_tensor.dtype
        data = join_tiles(folder, shape, BY_NAME[dtype].itemsize, tiles)
    return make_plain_tensor(name, dtype, shape, data)
