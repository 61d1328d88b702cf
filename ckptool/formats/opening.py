"""Checkpoints opened: the format of a file told by its content, and its header read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from ckptool._lazy import uncollected
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.tree import walk
from ckptool.errors import CheckpointError, UnreadableFile, UnsupportedFormat, UsageError
from ckptool.files import Source as Bytes
from ckptool.files.place import place_of
from ckptool.files.system import allow_open_files
from ckptool.formats.base import Probe
from ckptool.formats.registry import candidates, shard_of
from ckptool.limits import DEFAULT_LIMITS, Limits

TORCH_FILES = ("torch-zip", "torch-legacy")
"""The formats of a file that torch.save writes."""
_ATTEMPTS = 3
"""How often a file is read that is changed meanwhile."""

Source = str | os.PathLike[str] | Checkpoint
"""A path, or a checkpoint that is open already."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    limits: Limits = DEFAULT_LIMITS,
    source: Bytes | None = None,
    salvage: bool = False,
) -> Checkpoint:
    """Return the checkpoint in a file or folder, told apart by content; only the header is read.

    A folder that holds one model under the name that its library gives it is that file. A file
    that is changed meanwhile is read again: its header is that of one state. `source` is the file,
    already open, as it stands: no journal beside it is looked for. With `salvage` what a torch
    file or a file of safetensors lacks of the bytes of tensors is no error: they have none.

    Raises:
        UnreadableFile: it cannot be opened, is no checkpoint, of a kind not read, or damaged; or
            something writes to it all the time.
    """
    salvages = None
    if salvage:
        from ckptool.formats.salvage import whole_records  # what is whole needs none of it

        salvages = whole_records
    for _ in range(_ATTEMPTS if source is None else 1):
        checkpoint = read_probe(Probe(path, limits, source, salvages=salvages))
        if checkpoint is not None:
            return checkpoint
    raise UnreadableFile(
        "changed each time it was read",
        file=path,
        hint="try again when no process is writing to it",
    )


@contextmanager
def opened(source: Source, *, salvage: bool = False) -> Iterator[Checkpoint]:
    """Give a checkpoint that is open and stays so, or one opened for as long as this lasts.

    Raises:
        UnreadableFile: as `open_checkpoint`.
    """
    if isinstance(source, Checkpoint):
        if salvage:
            raise UsageError("an open checkpoint cannot be salvaged", hint="give its path")
        yield source
        return
    with open_checkpoint(source, salvage=salvage) as checkpoint:
        yield checkpoint


@contextmanager
def opened_together(
    paths: Sequence[str], limits: Limits, formats: Collection[str]
) -> Iterator[list[Checkpoint]]:
    """Open the files of one set; they stay open unless an error is raised.

    Raises:
        UnreadableFile: as `open_checkpoint`.
        UnsupportedFormat: a file is of none of `formats`.
    """
    with ExitStack() as stack:
        files: list[Checkpoint] = []
        allow_open_files(len(paths))
        if paths:
            place_of(paths[0]).expect(paths)
        for path in paths:
            files.append(stack.enter_context(open_checkpoint(path, limits=limits)))
            if files[-1].format not in formats or place_of(path).is_folder(path):
                what = f"is {files[-1].format}, expected {' or '.join(formats)}"
                raise UnsupportedFormat(what, file=path)
        yield files
        stack.pop_all()


def read_probe(probe: Probe) -> Checkpoint | None:
    """Return what a probe reads; None where something was written to a file meanwhile.

    A probe that gives no checkpoint is closed.

    Raises:
        UnreadableFile: as `open_checkpoint`.
    """
    try:
        if probe.is_folder:
            from ckptool.formats.model_folder import of_model_file  # a file needs none of it

            probe = of_model_file(probe)
        with uncollected():
            checkpoint = _read(probe)
    except CheckpointError as error:
        from ckptool.formats.transfers import text_fault  # a file that opens waits for none of it

        fault = None
        changed = probe.source is not None and probe.source.changed() is not None
        with suppress(CheckpointError):
            fault = None if probe.source is None else text_fault(probe.source)
        probe.close()
        if changed:
            return None
        if fault is not None:
            fault.file = probe.path
            raise fault from error
        if error.file is None:
            error.file = probe.path
        raise
    if any(source.changed() for source in checkpoint.sources):
        checkpoint.close()
        return None
    return replace(checkpoint, original=checkpoint.root)


def _read(probe: Probe) -> Checkpoint:
    for known in candidates(probe):
        if known.recognize(probe):
            if probe.salvages and not known.can_salvage:
                raise UsageError(
                    f"is {known.name}, which cannot be salvaged; only a torch.save or "
                    "safetensors file can be",
                    file=probe.path,
                    hint="salvage its shards one by one"
                    if shard_of(known.name)
                    else "remove --salvage; if the file is damaged, copy it again",
                )
            checkpoint = known.read(probe)
            for _ in walk(checkpoint.root, probe.limits):
                pass  # nested too deep, or mentioned too often: told now, not half-way
            return checkpoint
    from ckptool.formats.identify import explain  # a file that opens waits for none of it

    raise explain(probe)
