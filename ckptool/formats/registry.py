"""The registry: all formats, in the order in which a file is tested for them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from ckptool.errors import UsageError
from ckptool.formats.base import Format, Probe, WritableFormat


class RegisteredFormat(NamedTuple):
    """A format that is imported only if a file may have it.

    It has the facts that are needed before the import; the format itself has all others.
    """

    name: str
    module: str
    zipped: bool = False
    """True if it is a zip (or an unzipped one), which the first bytes show."""
    folder: bool = False
    """True if it is a folder of several files; `.metadata` or a shard stands for a DCP folder."""
    folder_suffix: str = ""
    """The suffix of the folder next to each of its files."""
    indexed: bool = False
    """True if it is a JSON index (or a folder with one), which the first byte shows."""
    writable: bool = False
    shard: str = ""
    """The format of each of its files, if it has several."""
    endings: tuple[str, ...] = ()
    """The extensions; the first is that of a new file."""

    def load(self) -> Format:
        """Return the format itself: the object with its name in capitals."""
        module = importlib.import_module(f"ckptool.formats.{self.module}")
        loaded: Format = getattr(module, self.name.upper().replace("-", "_"))
        return loaded


TORCH_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")

REGISTRY = (
    RegisteredFormat("dcp", "distributed.dcp", folder=True, writable=True),
    RegisteredFormat("dcp-safetensors", "distributed.dcp_safetensors", folder=True),
    RegisteredFormat("fsdp-ranks", "distributed.ranks", folder=True),
    RegisteredFormat("deepspeed", "distributed.zero", folder=True),
    RegisteredFormat("megatron", "distributed.megatron", folder=True),
    RegisteredFormat("tensorflow", "foreign.tensorflow", folder=True),
    RegisteredFormat("xla-fsdp", "distributed.xla", folder=True),
    RegisteredFormat("xla-xser", "distributed.xla", zipped=True, folder_suffix=".tensors"),
    RegisteredFormat("torch-zip", "torch_zip", zipped=True, writable=True, endings=TORCH_ENDINGS),
    RegisteredFormat("torchscript", "torchscript", zipped=True, endings=(".ptl",)),
    RegisteredFormat("pt2", "pt2", zipped=True, endings=(".pt2",)),
    RegisteredFormat("keras", "foreign.hdf5", zipped=True, endings=(".keras",)),
    RegisteredFormat("npz", "foreign.npz", zipped=True, endings=(".npz",)),
    RegisteredFormat("safetensors", "safetensors", writable=True, endings=(".safetensors",)),
    RegisteredFormat("hdf5", "foreign.hdf5", endings=(".h5", ".hdf5")),
    RegisteredFormat("gguf", "foreign.gguf", endings=(".gguf",)),
    RegisteredFormat("torch-legacy", "torch_legacy", writable=True, endings=TORCH_ENDINGS),
    RegisteredFormat("torch-tar", "torch_tar"),
    RegisteredFormat("pickle", "pickle_file", endings=(".pkl",)),
    RegisteredFormat("flax", "foreign.flax", endings=(".msgpack",)),
    RegisteredFormat(
        "safetensors-sharded", "sharded", indexed=True, writable=True, shard="safetensors"
    ),
    RegisteredFormat("torch-sharded", "sharded", indexed=True, writable=True, shard="torch-zip"),
)
ZIP_MAGIC = b"PK\x03\x04"
_MEMBER = re.compile(r"\.(metadata|distcp|index|data-\d{5}-of-\d{5})\Z")
"""The names of files that stand for a DCP folder or a TensorFlow checkpoint."""
JSON_SPACE = b" \t\r\n"
WRITABLE = tuple(
    entry.name for entry in sorted(REGISTRY, key=lambda entry: entry.folder) if entry.writable
)
"""The values of `--format`: files, then folders."""


def load_format(name: str) -> Format:
    """Return the format with a name from `Checkpoint.format`; a plain `Format` if it has none."""
    return next((entry.load() for entry in REGISTRY if entry.name == name), Format())


def shard_format_of(name: str) -> str:
    """Return the name of the format that each shard of a sharded format has; else an empty text."""
    return next((entry.shard for entry in REGISTRY if entry.name == name), "")


def find_candidate_formats(probe: Probe) -> Iterator[Format]:
    """Yield the formats that a file or folder may have, judging by its first bytes.

    A folder may also be an unzipped archive, or contain an index of shards.
    """
    yield from find_folder_formats(probe)
    may_be_zip = probe.is_folder or probe.head.startswith(ZIP_MAGIC)
    may_be_index = probe.is_folder or probe.head.lstrip(JSON_SPACE).startswith(b"{")
    for entry in REGISTRY:
        is_possible = may_be_index if entry.indexed else entry.zipped is may_be_zip
        if entry.folder or not is_possible:  # folder formats are among the first ones
            continue
        if not entry.folder_suffix or probe.place.is_folder(probe.path + entry.folder_suffix):
            yield entry.load()


def find_folder_formats(probe: Probe) -> Iterator[Format]:
    """Yield the formats of folders, for a folder or for a file that stands for its folder."""
    if probe.is_folder or _MEMBER.search(probe.path):
        yield from (entry.load() for entry in REGISTRY if entry.folder)


def load_writable_format(name: str) -> WritableFormat:
    """Return the format of single files with that name, if it can be written.

    Raises:
        UsageError: it cannot be written; the message lists those that can.
    """
    loaded = load_format(name)
    if isinstance(loaded, WritableFormat):
        return loaded
    raise UsageError(f"{name!r} cannot be written; use --format with {', '.join(WRITABLE)}")
