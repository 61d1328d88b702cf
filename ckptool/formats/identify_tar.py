"""Tar archives that are no checkpoint of torch's: its own of 2017 is a format."""

from __future__ import annotations

import os

from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import Finding, few, shell, untar, unused
from ckptool.formats.tar_members import is_tar, read_members

__all__ = ["find"]


def find(probe: Probe) -> Finding | None:
    """A tar with what is in it; None for anything else."""
    if probe.source is None or not is_tar(probe.head):
        return None
    try:
        names = list(read_members(probe.source, probe.limits))
    except CheckpointError as error:
        return Finding(f"a damaged tar archive: {error.message}", error.hint, type(error))
    folder = unused(f"{probe.path}.unpacked")
    unpacking = untar(probe.path, folder)
    if any(name.endswith("model_config.yaml") for name in names):
        weights = next((name for name in names if name.endswith(".ckpt")), "model_weights.ckpt")
        return Finding(
            "a NeMo model: a tar archive with the checkpoint and its settings in it",
            f"{unpacking} {shell(weights)} && ckptool list {shell(os.path.join(folder, weights))}",
            UnsupportedFormat,
        )
    return Finding(f"a tar archive that holds {few(names)}", f"unpack it: {unpacking}")
