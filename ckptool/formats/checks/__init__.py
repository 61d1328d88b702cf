"""What is right or wrong with a file beyond what its reader must know.

`structure` looks at a file before it is opened, `content` at what has been opened. Checksums are
named here and computed by who asks: that reads the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checkpoint import Checkpoint
from ckptool.formats.base import Findings, Probe, Problem
from ckptool.formats.checks.contents import (
    archive_findings,
    frame_problems,
    legacy_findings,
    pickle_findings,
    pickle_problems,
    safetensors_findings,
    tar_findings,
    torch_zip_findings,
)
from ckptool.formats.registry import folder_formats
from ckptool.formats.sharded import open_index, total_size_notes
from ckptool.formats.torch_zip import contents_of
from ckptool.model import OrderedMap

__all__ = ["content", "structure"]

_BARE_PICKLES = ("torch-legacy", "torch-tar", "pickle")
"""Formats whose pickles have no checksum."""


def structure(probe: Probe) -> Findings:
    """Return what can be said of a file that may not be readable: zip headers and checksums."""
    folder = next((known for known in folder_formats(probe) if known.recognise(probe)), None)
    return archive_findings(probe) if folder is None else folder.findings(probe)


def content(checkpoint: Checkpoint, probe: Probe) -> Findings:
    """Return what can be said of a file that has been read.

    Raises:
        CheckpointError: the file is not what it was when it was read.
    """
    found = Findings(notes=checkpoint.details.unreferenced)
    source, limits = probe.source, probe.limits
    if checkpoint.format in _BARE_PICKLES or probe.is_folder:
        found += Findings(tuple(pickle_problems(checkpoint)))
    found += Findings(tuple(frame_problems(checkpoint)))
    match checkpoint.format:
        case "torch-zip":
            contents = probe.ask(contents_of)
            found += Findings(notes=checkpoint.details.left_behind)
            return found + torch_zip_findings(contents, unzipped=probe.is_folder)
        case "fsdp-ranks":
            return found + Findings(notes=checkpoint.details.left_behind)
        case "safetensors-sharded" | "torch-sharded":
            return found + Findings(tuple(_total_size(checkpoint, probe)))
        case "torch-legacy" if source is not None:
            return found + legacy_findings(checkpoint, source, limits)
        case "torch-tar" if source is not None:
            return found + tar_findings(checkpoint, source, limits)
        case "pickle" if source is not None:
            return found + pickle_findings(checkpoint, source, limits)
        case "safetensors" if source is not None:
            return found + safetensors_findings(source)
    return found


def _total_size(checkpoint: Checkpoint, probe: Probe) -> Iterator[Problem]:
    """Return whether the index states a size that no writer counts."""
    index = probe.ask(open_index)
    if index is not None and isinstance(checkpoint.root, OrderedMap):
        for text in total_size_notes(index, checkpoint.root):
            yield Problem("total-size", "", text)
