"""One step of Megatron-LM's classic checkpoints: a folder for each rank of tensor parallelism.

No file states the dimension of a split. Source: megatron/training/checkpointing.py.
"""

from __future__ import annotations

import os
import re

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque
from ckptool.formats.base import Format, Probe, combine_details, distributed_refusal
from ckptool.formats.distributed.placements import check_ranks
from ckptool.formats.opening import TORCH_FILES, open_together
from ckptool.words import counted

_RANK = re.compile(r"mp_rank_(\d{2,9})", re.ASCII)
RANK_FILE = "model_optim_rng.pt"
"""The file in the folder of a rank."""
_FILES = (RANK_FILE, "model_rng.pt")


class Megatron(Format):
    """The format `megatron`."""

    name = "megatron"
    resumes = False
    refusal = distributed_refusal(
        "it is a folder of Megatron ranks: each has a part of every matrix", "Megatron-LM"
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True if each rank's folder has a file, and there are no pipeline ranks."""
        return bool(find_rank_files(probe))

    def read(self, probe: Probe) -> Checkpoint:
        """Return a dict of the trees of all ranks, by folder name."""
        files = find_rank_files(probe)
        with open_together(files, probe.limits, TORCH_FILES) as ranks:
            roots = {os.path.basename(os.path.dirname(rank.path)): rank.root for rank in ranks}
            checkpoint = Checkpoint(roots, self.name, probe.path)
            numbers = [int(name.removeprefix("mp_rank_")) for name in roots]
            world_size = max(_read_world_size(ranks[0]), len(files))  # it may be unknown: 0
            hint = "copy it as well"
            check_ranks(numbers, world_size, "mp_rank_{rank:02d}", probe.path, hint=hint)
            note = f"{counted(len(files), 'Megatron rank')}"
            return combine_details(ranks, checkpoint, notes=(note, *ranks[0].details.notes))


MEGATRON = Megatron()


def is_rank_folder(name: object) -> bool:
    """Return True if a key is the name of a rank's folder."""
    return isinstance(name, str) and _RANK.fullmatch(name) is not None


def find_rank_files(probe: Probe) -> list[str]:
    """Return the files of the ranks in order; empty if a folder has none."""
    folders = [
        os.path.join(probe.path, name) for name in sorted(filter(is_rank_folder, probe.entries))
    ]
    candidates = [os.path.join(folder, name) for folder in folders for name in _FILES]
    files = [path for path in candidates if probe.place.is_file(path)]
    return files if len(files) == len(folders) else []


def _read_world_size(rank: Checkpoint) -> int:
    """Return the number of ranks in the arguments of the run, or 0."""
    args = rank.root.get("args") if isinstance(rank.root, dict) else None
    stated = args.attributes.get("tensor_model_parallel_size") if isinstance(args, Opaque) else None
    return stated if type(stated) is int and stated < 10**6 else 0
