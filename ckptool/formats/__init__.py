"""The registry: which formats there are, in the order in which a file is held against them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, UsageError
from ckptool.formats import identify
from ckptool.formats.base import Format, Probe, WritableFormat, WriteOptions, WritePlan
from ckptool.formats.pickle_file import PICKLE
from ckptool.formats.pt2 import PT2
from ckptool.formats.safetensors import SAFETENSORS
from ckptool.formats.torch_legacy import TORCH_LEGACY
from ckptool.formats.torch_tar import TORCH_TAR
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.formats.torchscript import TORCHSCRIPT
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.paths import walk

__all__ = [
    "FORMATS",
    "Format",
    "Probe",
    "WritableFormat",
    "WriteOptions",
    "WritePlan",
    "open_checkpoint",
    "writer",
]

FORMATS: tuple[Format, ...] = (
    TORCH_ZIP,
    TORCHSCRIPT,
    PT2,
    TORCH_LEGACY,
    TORCH_TAR,
    SAFETENSORS,
    PICKLE,
)


def open_checkpoint(path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Checkpoint:
    """The checkpoint in a file or folder, told apart by content; only the header is read.

    Raises:
        UnreadableFile: it cannot be opened, is no checkpoint, of a kind not read, or damaged.
    """
    probe = Probe(path, limits)
    try:
        with _collector_paused():
            return _read(probe)
    except CheckpointError as error:
        probe.close()
        if error.file is None:
            error.file = probe.path
        raise


def _read(probe: Probe) -> Checkpoint:
    refused = identify.refuse(probe)
    if refused is not None:
        raise refused
    for candidate in FORMATS:
        if candidate.recognise(probe):
            checkpoint = candidate.read(probe)
            for _ in walk(checkpoint.root, probe.limits):
                pass  # nested too deep, or mentioned too often: told now, not half-way
            return checkpoint
    raise identify.explain(probe)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile.

    A reader makes a million objects that all live; searching them for dead ones again and again
    takes a third of its time.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def writer(name: str) -> WritableFormat:
    """The format of that name, if it can be written.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    writable = {known.name: known for known in FORMATS if isinstance(known, WritableFormat)}
    if name not in writable:
        raise UsageError(f"{name!r} cannot be written; --format takes {', '.join(writable)}")
    return writable[name]
