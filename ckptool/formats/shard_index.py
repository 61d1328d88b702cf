"""The index of a checkpoint in shards, in Hugging Face's layout: which file holds which tensor.

`{"metadata": {"total_size": BYTES}, "weight_map": {tensor: file name}}` beside the shards, as
huggingface_hub/serialization writes it.
"""

from __future__ import annotations

import ntpath
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded
from ckptool.files import FileSource
from ckptool.files.names import has_journal, journalled
from ckptool.formats.base import Probe
from ckptool.formats.identify import Finding, few, quoted, shell
from ckptool.formats.safetensors_header import parse_json
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import printable

__all__ = ["ShardIndex", "open_index", "shards_named_by"]

_WEIGHT_MAP = "weight_map"
_MARK = f'"{_WEIGHT_MAP}"'.encode()
_NAME = re.compile(r".+\.index(\.[^.]+)?\.json", re.IGNORECASE)
"""How an index is called: `model.safetensors.index.json`, `model.safetensors.index.fp16.json`."""
_INDEXED = re.compile(r"\.index(\.[^.]+)?\.json$", re.IGNORECASE)
_NUMBERED = re.compile(r"(.*)-\d{5,}-of-(\d{5,})(.*)")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An index that keeps the rules of its own: what the shards hold is another question."""

    source: FileSource
    weight_map: Mapping[str, str]
    """Tensor -> file name, in the order of the index."""
    metadata: Mapping[str, Any]
    """Free text, and `total_size`."""

    @property
    def path(self) -> str:
        """The index itself."""
        return self.source.path

    shards: tuple[str, ...]
    """The file names, each once, in the order of their first tensors."""

    def names_by_shard(self) -> dict[str, list[str]]:
        """The tensors that each shard should have."""
        names: dict[str, list[str]] = {name: [] for name in self.shards}
        for tensor, name in self.weight_map.items():
            names[name].append(tensor)
        return names

    def beside(self, name: str) -> str:
        """The path of a file in the folder of the index."""
        return os.path.join(os.path.dirname(self.path), name)

    def unnamed(self) -> Iterator[str]:
        """Files beside it that by their names are of the same set, and that it does not name."""
        series = {found.groups() for name in self.shards if (found := _NUMBERED.fullmatch(name))}
        if not series:
            return
        named, there = set(self.shards), []
        with suppress(OSError):  # a folder that we may enter, and not list
            there = sorted(os.listdir(os.path.dirname(self.path) or "."))
        for name in there:
            found = _NUMBERED.fullmatch(name)
            if found and found.groups() in series and name not in named:
                yield name


def open_index(probe: Probe) -> ShardIndex | None:
    """The index that a file is, or the only one that a folder holds; None for anything else.

    A file is an index by its content, an object with a `weight_map`; in a folder those are looked
    at that are called like one.

    Raises:
        NotACheckpoint: the folder holds several.
        CorruptFile: it breaks a rule: not JSON, a name twice, a shard that is no plain file name.
        LimitExceeded: it is longer than `limits.max_json_bytes`.
    """
    if probe.source is not None:
        return _index_of(probe.source, probe.limits)
    with ExitStack() as opened:
        found = []
        for path in _called_so(probe):
            inner = Probe(path, probe.limits)
            opened.callback(inner.close)
            found.append(inner.shard_index)
        indexes = [index for index in found if index is not None]
        if len(indexes) > 1:
            raise _several(probe.path, indexes)
        _refuse_rival(probe, indexes)
        if indexes:
            opened.pop_all()
        return indexes[0] if indexes else None


def shards_named_by(path: str) -> tuple[str, ...]:
    """The files that an index names which is about to be replaced; none, if it is no index."""
    with suppress(CheckpointError):
        source = FileSource(path)
        try:
            index = _index_of(source, DEFAULT_LIMITS)
        finally:
            source.close()
        return index.shards if index else ()
    return ()


def _called_so(probe: Probe) -> Iterator[str]:
    """Files in a folder that are called like an index, or would be had a write not been killed."""
    names = {journalled(name) or name for name in probe.entries}
    for name in sorted(filter(_NAME.fullmatch, names)):
        path = os.path.join(probe.path, name)
        if os.path.isfile(path) or has_journal(path):
            yield path


def _refuse_rival(probe: Probe, indexes: list[ShardIndex]) -> None:
    """Refuse to choose between shards and the one file that would bear the name of all."""
    for index in indexes:
        name = os.path.basename(index.path)
        whole = _INDEXED.sub("", name)
        if whole in probe.entries:
            what = f"a folder with {quoted(whole)} and, in shards, {quoted(name)}"
            hint = f"give one: ckptool list {shell(os.path.join(probe.path, whole))}"
            raise Finding(what, hint).error(probe.path)


def _several(folder: str, indexes: list[ShardIndex]) -> CheckpointError:
    names = [os.path.basename(index.path) for index in indexes]
    what = f"a folder with several checkpoints in shards, whose indexes are {few(names)}"
    return Finding(what, f"give one: ckptool list {shell(indexes[0].path)}").error(folder)


def _index_of(source: FileSource, limits: Limits) -> ShardIndex | None:
    head = source.read(0, min(512, source.size))
    called_so = _NAME.fullmatch(os.path.basename(source.path)) is not None
    if not head.lstrip(b" \t\r\n").startswith(b"{"):
        return None
    if source.size > limits.max_json_bytes:
        if not called_so and _MARK not in head:
            return None
        raise LimitExceeded(
            f"the index has {source.size:,} bytes; {limits.max_json_bytes:,} are allowed",
            file=source.path,
        )
    raw = source.read(0, source.size)
    if not called_so and _MARK not in raw:
        return None
    try:
        return _parsed(raw, source)
    except CorruptFile as error:
        error.file = source.path
        raise


def _parsed(raw: bytes, source: FileSource) -> ShardIndex | None:
    try:
        document = parse_json(raw.decode("utf-8"), "the index")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"the index is not UTF-8 at byte {error.start:,}") from error
    if _WEIGHT_MAP not in document:
        return None
    weight_map = document[_WEIGHT_MAP]
    if not isinstance(weight_map, dict):
        raise CorruptFile(f"the index's {_WEIGHT_MAP} is not an object of strings")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CorruptFile(
                f"the index's {_WEIGHT_MAP} is not an object of strings: it has {name!r} for "
                f"tensor '{printable(tensor)}'"
            )
    for name in dict.fromkeys(weight_map.values()):
        if not _is_plain(name):
            raise CorruptFile(
                f"the index names the shard {quoted(name)}, which is no name of a file beside it"
            )
    metadata = document.get("metadata")
    return ShardIndex(
        source,
        weight_map,
        metadata if isinstance(metadata, dict) else {},
        tuple(dict.fromkeys(weight_map.values())),
    )


def _is_plain(name: str) -> bool:
    """Whether it can only be a file in the folder of the index, on whatever system."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return not ntpath.splitdrive(name)[0]
