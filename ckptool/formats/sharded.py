"""A checkpoint in shards, in Hugging Face's layout: parts of one state dict, and an index."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from ckptool.checkpoint import Checkpoint
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileBusy,
    FileMissing,
    UnsupportedFormat,
)
from ckptool.files.locking import leads_to
from ckptool.files.names import has_journal
from ckptool.files.system import allow_open_files
from ckptool.formats import candidates, identify
from ckptool.formats.base import Format, Probe
from ckptool.formats.shard_details import details_of
from ckptool.formats.shard_index import ShardIndex
from ckptool.formats.shard_joining import joined
from ckptool.limits import Limits
from ckptool.words import listed

__all__ = ["SAFETENSORS_SHARDED", "TORCH_SHARDED", "Sharded"]

_SPARE = 64
"""Files that may be opened beside the shards."""


class Sharded:
    """The formats `safetensors-sharded` and `torch-sharded`: told apart by what the shards are."""

    def __init__(self, name: str, members: tuple[str, ...]) -> None:
        """Stand for shards that are each of one of the formats `members`."""
        self.name = name
        self.members = members

    def recognise(self, probe: Probe) -> bool:
        """Whether it is an index, or a folder with one, whose first shard is of these formats.

        Raises:
            UnreadableFile: it is an index, and that shard cannot be read.
        """
        index = probe.shard_index
        if index is None:
            return False
        if not index.shards:
            named_so = ".safetensors." in os.path.basename(index.path).lower()
            return named_so == ("safetensors" in self.members)
        shard, known = _opened(index, index.shards[0], probe.limits)
        shard.close()
        every = (*SAFETENSORS_SHARDED.members, *TORCH_SHARDED.members)
        if known.name not in every:
            raise _wrong_kind(shard.path, known, every)
        return known.name in self.members

    def read(self, probe: Probe) -> Checkpoint:
        """One state dict of what all shards hold, in the order of the index.

        Raises:
            FileMissing: a shard is not there.
            CorruptFile: index and shards contradict each other, or one of them is damaged.
            UnsupportedFormat: a shard is of another format than the first.
            LimitExceeded: one asks for more than `probe.limits`.
        """
        index = probe.shard_index
        if index is None:
            raise CorruptFile("this is no index of shards", file=probe.path)
        allow_open_files(_wanted(index))
        with ExitStack() as opened:
            shards: dict[str, Checkpoint] = {}
            for name in index.shards:
                shards[name] = self._read_shard(index, name, probe.limits)
                opened.callback(shards[name].close)
            _check_still_there(index)
            root = joined(index, shards)
            opened.pop_all()
        sources = (source for shard in shards.values() for source in shard.sources)
        return Checkpoint(
            root,
            self.name,
            index.path,
            details_of(index, shards, root),
            sources=(*sources, index.source),
        )

    def _read_shard(self, index: ShardIndex, name: str, limits: Limits) -> Checkpoint:
        shard, known = _opened(index, name, limits)
        try:
            if known.name not in self.members:
                raise _wrong_kind(shard.path, known, self.members)
            return known.read(shard)
        except CheckpointError as error:
            shard.close()
            if error.file is None:
                error.file = shard.path
            raise


SAFETENSORS_SHARDED = Sharded("safetensors-sharded", ("safetensors",))
TORCH_SHARDED = Sharded("torch-sharded", ("torch-zip", "torch-legacy"))


def _wrong_kind(path: str, known: Format, wanted: tuple[str, ...]) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"is a {known.name} file, where the index has a shard of {' or '.join(wanted)}",
        file=path,
        hint="the shards of a checkpoint are files of one kind, each with a flat state dict",
    )


def _opened(index: ShardIndex, name: str, limits: Limits) -> tuple[Probe, Format]:
    """A shard's file, and the format that it has: any that is read."""
    try:
        shard = Probe(index.beside(name), limits)
    except FileMissing as error:
        raise _missing(index) from error
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
            error.advise(f"allow the process more open files: ulimit -n {_wanted(index)}")
        raise
    try:
        for known in candidates(shard):
            if not isinstance(known, Sharded) and known.recognise(shard):
                return shard, known
        raise identify.explain(shard)
    except CheckpointError as error:
        shard.close()
        if error.file is None:
            error.file = shard.path
        raise


def _check_still_there(index: ShardIndex) -> None:
    """Refuse shards of which some may belong to the index that came after this one."""
    if has_journal(index.path) or not leads_to(index.path, index.source.fileno()):
        raise FileBusy(
            "is being written anew, shards and all",
            file=index.path,
            hint="try again when that has finished",
        )


def _wanted(index: ShardIndex) -> int:
    """Files to have open: the index, whose descriptor was the lowest free, tells how many are."""
    return index.source.fileno() + len(index.shards) + _SPARE


def _missing(index: ShardIndex) -> FileMissing:
    gone = [name for name in index.shards if not os.path.exists(index.beside(name))]
    which = "a shard is" if len(gone) == 1 else f"{len(gone)} of {len(index.shards)} shards are"
    lost = set(gone)
    count = sum(1 for name in index.weight_map.values() if name in lost)
    return FileMissing(
        f"{which} missing: there is no {listed(map(repr, gone))} beside the index, which places "
        f"{count:,} of its {len(index.weight_map):,} tensors there",
        file=index.path,
        hint="fetch what is missing; a shard that is there opens by itself: ckptool list SHARD",
    )
