"""Where a changed checkpoint goes when the user does not say."""

from __future__ import annotations

import os

__all__ = ["default_target"]

_DOUBLE = (".safetensors.index.json", ".bin.index.json")
_UNWRITABLE = (".pt2", ".ptl", ".pkl")
"""Endings of formats that are read, and become torch files."""
_SUFFIXES = {"safetensors": ".safetensors", "torch-zip": ".pth", "torch-legacy": ".pth"}


def default_target(source: str, word: str, format: str | None = None) -> str:
    """`model.stripped.pth` for `model.pth` and the word `stripped`, in the same folder.

    `.pth.tar` stays whole, a name without a suffix gets none, a folder's gets `.pth`. Where the
    format is chosen and the source's suffix stands for another one, the format's own is taken.
    """
    stem, suffix = _split(source.rstrip(os.sep) or source)
    if os.path.isdir(source):
        stem, suffix = stem + suffix, ".pth"
    if suffix in _UNWRITABLE:
        suffix = ".pth"
    if format and (suffix == ".safetensors") != (format == "safetensors"):
        suffix = _SUFFIXES[format]
    return f"{stem}.{word}{suffix}"


def _split(path: str) -> tuple[str, str]:
    for ending in _DOUBLE:
        if path.endswith(ending):
            return path[: -len(ending)], ending
    stem, suffix = os.path.splitext(path)
    if suffix == ".tar":
        inner, before = os.path.splitext(stem)
        return (inner, before + suffix) if before else (stem, suffix)
    return stem, suffix
