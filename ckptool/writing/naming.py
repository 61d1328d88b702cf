"""Where a changed checkpoint goes when the user does not say."""

from __future__ import annotations

import os
import re

from ckptool.errors import UsageError
from ckptool.formats import SHARD_FORMATS

__all__ = ["default_target"]

_INDEX = re.compile(r"(\.[^./\\]+)?\.index(\.[^./\\]+)?\.json$", re.IGNORECASE)
_UNWRITABLE = (".pt2", ".ptl", ".pkl")
"""Endings of formats that are read, and become torch files."""
_SUFFIXES = {"safetensors": ".safetensors", "torch-zip": ".pth", "torch-legacy": ".pth"}


def default_target(
    source: str, word: str, format: str | None = None, *, sharded: bool = False
) -> str:
    """`model.stripped.pth` for `model.pth` and the word `stripped`, in the same folder.

    `.pth.tar` stays whole, a name without a suffix gets none, a folder's gets `.pth`. Where the
    format is chosen and the source's suffix stands for another one, the format's own is taken.

    Raises:
        UsageError: the source is `sharded`, and the format is not chosen to be of one file.
    """
    if sharded and (format is None or format in SHARD_FORMATS):
        raise UsageError(
            "is a checkpoint in shards: -o must say where the result goes",
            file=source,
            hint="-o model.safetensors writes one file, "
            "-o FOLDER/model.safetensors.index.json shards",
        )
    stem, suffix = _split(source.rstrip(os.sep) or source)
    if os.path.isdir(source):
        stem, suffix = stem + suffix, ".pth"
    if suffix in _UNWRITABLE or sharded:
        suffix = ".pth"
    if format and (suffix == ".safetensors") != (format == "safetensors"):
        suffix = _SUFFIXES[format]
    return f"{stem}.{word}{suffix}"


def _split(path: str) -> tuple[str, str]:
    index = _INDEX.search(path)
    if index:
        return path[: index.start()], index[0]
    stem, suffix = os.path.splitext(path)
    if suffix == ".tar":
        inner, before = os.path.splitext(stem)
        return (inner, before + suffix) if before else (stem, suffix)
    return stem, suffix
