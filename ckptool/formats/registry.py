"""The registry: which formats there are, in the order in which a file is held against them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

from ckptool.errors import UsageError
from ckptool.formats.base import EditableFormat, Format, Probe, WritableFormat

__all__ = ["REGISTRY", "SHARD_FORMATS", "WRITABLE", "Entry", "candidates", "editor", "writer"]


class Entry(NamedTuple):
    """A format that is imported when a file may be of it, so that the others cost nothing."""

    name: str
    module: str
    zipped: bool = False
    """Whether it is a zip (or an unzipped one), which the first bytes rule in or out."""
    folder: bool = False
    """Whether it is a folder of several files; of DCP, `.metadata` and shards stand for it."""
    indexed: bool = False
    """Whether it is a JSON index (or the folder of one), as the first byte tells too."""
    writable: bool = False

    def load(self) -> Format:
        """The format itself: the object that bears its name in capitals."""
        module = importlib.import_module(f"ckptool.formats.{self.module}")
        found: Format = getattr(module, self.name.upper().replace("-", "_"))
        return found


REGISTRY = (
    Entry("dcp", "dcp", folder=True),
    Entry("fsdp-ranks", "ranks", folder=True),
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
SHARD_FORMATS = {"safetensors-sharded": "safetensors", "torch-sharded": "torch-zip"}
"""What each of the shards is."""

WRITABLE = tuple(entry.name for entry in REGISTRY if entry.writable)


def candidates(probe: Probe) -> Iterator[Format]:
    """The formats that a file or folder may be of, as far as its first bytes tell."""
    zipped = probe.is_folder or probe.head.startswith(ZIP_MAGIC)
    indexed = probe.is_folder or probe.head.lstrip(JSON_SPACE).startswith(b"{")
    in_folder = probe.is_folder or probe.path.endswith((".metadata", ".distcp"))
    for entry in REGISTRY:
        if entry.folder:
            if in_folder:
                yield entry.load()
        elif indexed if entry.indexed else entry.zipped is zipped:
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
