"""The registry: which formats there are, in the order in which a file is held against them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ckptool._lazy import uncollected
from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, UnreadableFile, UsageError
from ckptool.files import FileSource
from ckptool.formats.base import EditableFormat, EditPlan, Format, Probe, WritableFormat, WritePlan
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tree import walk

__all__ = [
    "REGISTRY",
    "SHARD_FORMATS",
    "WRITABLE",
    "EditPlan",
    "EditableFormat",
    "Format",
    "Probe",
    "Source",
    "WritableFormat",
    "WritePlan",
    "candidates",
    "editor",
    "open_checkpoint",
    "opened",
    "read_probe",
    "writer",
]


class Entry(NamedTuple):
    """A format that is imported when a file may be of it, so that the others cost nothing."""

    name: str
    module: str
    zipped: bool = False
    """Whether it is a zip (or an unzipped one), which the first bytes rule in or out."""
    indexed: bool = False
    """Whether it is a JSON index (or the folder of one), as the first byte tells too."""
    writable: bool = False

    def load(self) -> Format:
        """The format itself: the object that bears its name in capitals."""
        module = importlib.import_module(f"ckptool.formats.{self.module}")
        found: Format = getattr(module, self.name.upper().replace("-", "_"))
        return found


REGISTRY = (
    Entry("torch-zip", "torch_zip", zipped=True, writable=True),
    Entry("torchscript", "torchscript", zipped=True),
    Entry("pt2", "pt2", zipped=True),
    Entry("npz", "npz", zipped=True),
    Entry("safetensors", "safetensors", writable=True),
    Entry("torch-legacy", "torch_legacy", writable=True),
    Entry("torch-tar", "torch_tar"),
    Entry("pickle", "pickle_file"),
    Entry("safetensors-sharded", "sharded", indexed=True),
    Entry("torch-sharded", "sharded", indexed=True),
)
ZIP_MAGIC = b"PK\x03\x04"
JSON_SPACE = b" \t\r\n"
_ATTEMPTS = 3
"""How often a file is read that is changed meanwhile."""
SHARD_FORMATS = {"safetensors-sharded": "safetensors", "torch-sharded": "torch-zip"}
"""What each of the shards is."""

WRITABLE = tuple(entry.name for entry in REGISTRY if entry.writable)

Source = str | os.PathLike[str] | Checkpoint
"""A path, or a checkpoint that is open already."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    limits: Limits = DEFAULT_LIMITS,
    source: FileSource | None = None,
) -> Checkpoint:
    """The checkpoint in a file or folder, told apart by content; only the header is read.

    A folder that holds one model under the name that its library gives it is that file. A file
    that is changed meanwhile is read again: its header is that of one state. `source` is the file,
    already open, as it stands: no journal beside it is looked for.

    Raises:
        UnreadableFile: it cannot be opened, is no checkpoint, of a kind not read, or damaged; or
            something writes to it all the time.
    """
    for _ in range(_ATTEMPTS if source is None else 1):
        checkpoint = read_probe(Probe(path, limits, source))
        if checkpoint is not None:
            return checkpoint
    raise UnreadableFile(
        "changed whenever it was read",
        file=path,
        hint="try again when nothing writes to the file any more",
    )


@contextmanager
def opened(source: Source) -> Iterator[Checkpoint]:
    """A checkpoint that is open already, which stays so, or one opened for as long as this lasts.

    Raises:
        UnreadableFile: as `open_checkpoint`.
    """
    if isinstance(source, Checkpoint):
        yield source
        return
    with open_checkpoint(source) as checkpoint:
        yield checkpoint


def read_probe(probe: Probe) -> Checkpoint | None:
    """What a probe reads; None where something was written to a file meanwhile.

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
        changed = probe.source is not None and probe.source.changed() is not None
        probe.close()
        if changed:
            return None
        if error.file is None:
            error.file = probe.path
        raise
    if any(source.changed() for source in checkpoint.sources):
        checkpoint.close()
        return None
    return replace(checkpoint, original=checkpoint.root)


def _read(probe: Probe) -> Checkpoint:
    is_part = probe.path.endswith(".distcp") or ".data-" in probe.path
    if is_part or os.path.isdir(f"{probe.path}.tensors"):  # as torch_xla puts it beside the file
        from ckptool.formats.identify import refuse

        refused = refuse(probe)
        if refused is not None:
            raise refused
    for known in candidates(probe):
        if known.recognise(probe):
            checkpoint = known.read(probe)
            for _ in walk(checkpoint.root, probe.limits):
                pass  # nested too deep, or mentioned too often: told now, not half-way
            return checkpoint
    from ckptool.formats.identify import explain  # a file that opens waits for none of it

    raise explain(probe)


def candidates(probe: Probe) -> Iterator[Format]:
    """The formats that a file or folder may be of, as far as its first bytes tell."""
    zipped = probe.is_folder or probe.head.startswith(ZIP_MAGIC)
    indexed = probe.is_folder or probe.head.lstrip(JSON_SPACE).startswith(b"{")
    for entry in REGISTRY:
        if indexed if entry.indexed else entry.zipped is zipped:
            yield entry.load()


def writer(name: str) -> WritableFormat:
    """The format of that name, if it can be written.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    for entry in REGISTRY:
        if entry.name == name and isinstance(known := entry.load(), WritableFormat):
            return known
    raise UsageError(f"{name!r} cannot be written; --format takes {', '.join(WRITABLE)}")


def editor(name: str) -> EditableFormat | None:
    """The format of that name, if its files can be changed where they lie.

    Raises:
        UsageError: no format of that name can be written.
    """
    known = writer(name)
    return known if isinstance(known, EditableFormat) else None
