"""Open checkpoints: recognize the format by the content, and read the header."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from ckptool._lazy import pause_gc
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.tree import walk
from ckptool.errors import CheckpointError, UnreadableFile, UnsupportedFormat, UsageError
from ckptool.files import Source as Bytes
from ckptool.files.place import place_of
from ckptool.files.system import allow_open_files
from ckptool.formats.base import Probe
from ckptool.formats.registry import find_candidate_formats, shard_format_of
from ckptool.limits import DEFAULT_LIMITS, Limits

TORCH_FILES = ("torch-zip", "torch-legacy")
"""The formats of a file that torch.save writes."""
_MAX_ATTEMPTS = 3
"""Attempts to read a file that changes at the same time."""

Source = str | os.PathLike[str] | Checkpoint
"""A path, or an open checkpoint."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    limits: Limits = DEFAULT_LIMITS,
    source: Bytes | None = None,
    salvage: bool = False,
) -> Checkpoint:
    """Return the checkpoint in a file or folder, recognized by content; only the header is read.

    A folder with one model under the name that its library uses stands for that file. A file that
    changes while it is read is read again, so that its header is consistent. `source` is the file,
    already open, without a check for a journal. With `salvage`, tensors of a torch or safetensors
    file that are damaged or truncated have no bytes, instead of an error.

    Raises:
        UnreadableFile: it cannot be opened, is not a checkpoint, is not supported, is damaged, or
            keeps changing.
    """
    salvages = None
    if salvage:
        from ckptool.formats.salvage import read_intact_records  # not needed for intact files

        salvages = read_intact_records
    # A given `source` is not opened again, so a second attempt would be no better.
    for _ in range(_MAX_ATTEMPTS if source is None else 1):
        checkpoint = read_probe(Probe(path, limits, source, salvages=salvages))
        if checkpoint is not None:  # None: the file changed
            return checkpoint
    raise UnreadableFile(
        "changed each time it was read",
        file=path,
        hint="try again when no process is writing to it",
    )


@contextmanager
def open_or_reuse(source: Source, *, salvage: bool = False) -> Iterator[Checkpoint]:
    """Yield the given open checkpoint, or open a path for the block.

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
def open_together(
    paths: Sequence[str], limits: Limits, formats: Collection[str]
) -> Iterator[list[Checkpoint]]:
    """Open the files of one set; they stay open unless an error is raised.

    Raises:
        UnreadableFile: as `open_checkpoint`.
        UnsupportedFormat: a file has none of `formats`.
    """
    with ExitStack() as stack:
        files: list[Checkpoint] = []
        allow_open_files(len(paths))
        if paths:
            place_of(paths[0]).expect(paths)  # far files are requested ahead, several at a time
        for path in paths:
            files.append(stack.enter_context(open_checkpoint(path, limits=limits)))
            # An unzipped archive is a folder with the format of a file, but it is no file of a set.
            if files[-1].format not in formats or place_of(path).is_folder(path):
                message = f"is {files[-1].format}, expected {' or '.join(formats)}"
                raise UnsupportedFormat(message, file=path)
        yield files
        stack.pop_all()


def read_probe(probe: Probe) -> Checkpoint | None:
    """Return the checkpoint of a probe; None if a file changed while it was read.

    The probe of a folder with one model is replaced by that of the model's file. Without a
    checkpoint, the probe is closed.

    Raises:
        UnreadableFile: as `open_checkpoint`.
    """
    try:
        if probe.is_folder:
            from ckptool.formats.model_folder import resolve_model_file  # not needed for files

            probe = resolve_model_file(probe)
        with pause_gc():
            checkpoint = _read_recognized(probe)
    except CheckpointError as error:
        from ckptool.formats.transfers import text_transfer_error  # not needed for files that open

        # The cause may be a change of the file, or its transfer as text, which the error hides.
        has_changed, transfer_error = False, None
        if probe.source is not None:
            has_changed = probe.source.describe_change() is not None
            with suppress(CheckpointError):
                transfer_error = text_transfer_error(probe.source)
        probe.close()
        if has_changed:
            return None
        if transfer_error is not None:
            transfer_error.file = probe.path
            raise transfer_error from error
        if error.file is None:
            error.file = probe.path
        raise
    if any(source.describe_change() for source in checkpoint.sources):
        checkpoint.close()
        return None
    return replace(checkpoint, original=checkpoint.root)


def _read_recognized(probe: Probe) -> Checkpoint:
    """Read the file in the first format that recognizes it, and check the nesting of its tree."""
    for candidate in find_candidate_formats(probe):
        if candidate.recognize(probe):
            if probe.salvages and not candidate.can_salvage:
                raise UsageError(
                    f"is {candidate.name}, which cannot be salvaged; only a torch.save or "
                    "safetensors file can be",
                    file=probe.path,
                    hint="salvage its shards one by one"
                    if shard_format_of(candidate.name)
                    else "remove --salvage; if the file is damaged, copy it again",
                )
            checkpoint = candidate.read(probe)
            for _ in walk(checkpoint.root, probe.limits):
                pass  # raises for a tree that is nested too deeply or used too often
            return checkpoint
    from ckptool.formats.identify import unrecognized_error  # not needed for files that open

    raise unrecognized_error(probe)
