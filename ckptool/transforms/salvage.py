"""What is left of a checkpoint whose file is damaged."""

from __future__ import annotations

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NotFound
from ckptool.files.source import MemorySource
from ckptool.model import TensorRef
from ckptool.transforms.extraction import without
from ckptool.tree import everything
from ckptool.words import counted

__all__ = ["salvaged"]


def salvaged(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint, opened to be salvaged, without the tensors whose bytes are not there.

    An optimizer goes whole, as its state is of no use without a part of it.

    Raises:
        NotFound: no tensor is whole.
        UsageError: a list or an object would lose some of its tensors.
    """
    every = list(checkpoint.tensors())
    lost = [path for path, tensor in every if any(map(_is_lost, everything(tensor)))]
    parts = (part for _, tensor in every for part in everything(tensor))
    storages = (part.storage for part in parts if isinstance(part, TensorRef))
    unsummed = (one.data.source for one in storages
                if one and one.data and one.nbytes and one.crc32 is None)  # fmt: skip
    is_unsummed = not all(isinstance(source, MemorySource) for source in unsummed)
    how = "; the file has no checksums, so only lengths were checked" if is_unsummed else ""
    if not lost:
        text = f"{counted(len(every), 'tensor')}, each of them whole{how}"
        return checkpoint.with_root(checkpoint.root, Change("salvage", text))
    gone = {path[:length] for path in lost for length in range(1, len(path) + 1)}
    root, changes = without(checkpoint, lambda path: path not in gone)
    if root is None:
        raise NotFound("no tensor of it is whole", file=checkpoint.path)
    left = checkpoint.with_root(root, *changes)
    count = sum(1 for _ in left.tensors())
    text = f"{count:,} of {counted(len(every), 'tensor')} salvaged, {len(lost):,} damaged{how}"
    return left.with_root(root, Change("salvage", text, len(lost)))


def _is_lost(tensor: object) -> bool:
    storage = getattr(tensor, "storage", None)
    return storage is not None and storage.data is None and storage.device != "meta"
