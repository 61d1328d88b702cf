"""Tensors in files without checksums that were never written: zeros up to the end."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.sections import MOMENTS
from ckptool.core.tree import drop_ties, name_of
from ckptool.files import Source
from ckptool.tensors.bytewise import is_floating
from ckptool.words import listed

_FEWEST = 4096
"""Bytes of a page, the least that a file system writes."""
_BLOCK = 64 << 10


_ROW = 256
"""Bytes from which the end of a row is no chance: vocabularies are padded with rows of zeros."""


class _Span(NamedTuple):
    """Where the bytes of a tensor are in its file."""

    start: int
    stop: int
    itemsize: int
    row: int
    """Bytes of an index of its first dimensions: a run of the last one."""
    name: str

    def is_cut(self, zeros: int) -> bool:
        """Return True if zeros from that offset begin inside the tensor, and not at a row."""
        first = -((self.start - zeros) // self.itemsize) * self.itemsize
        return 0 < first < self.stop - self.start and (self.row < _ROW or first % self.row > 0)


def find_unwritten(checkpoint: Checkpoint) -> str | None:
    """Return a sentence about weights that were probably never written, or None.

    The zeros must begin inside a tensor and cover another one: zeros of initial layers (a LoRA B,
    a zero convolution, a new head) begin with the first byte of a tensor, and padding of a
    vocabulary with a row. The state of an optimizer may be zero, so it is skipped. Reads only the
    last block of an intact file.
    """
    optimizer_tensors = {
        id(tensor)
        for section in checkpoint.sections
        if section.kind == "optimizer"
        for _, tensor in section.tensors()
    }
    names: list[str] = []
    spans: dict[int, list[_Span]] = {}
    for path, tensor in drop_ties(list(checkpoint.tensors())):
        storage = tensor.storage
        if (
            id(tensor) in optimizer_tensors
            or storage is None
            or storage.data is None
            or storage.crc32
        ):
            continue
        if str(path[-1]).rpartition(".")[2] in MOMENTS:  # an optimizer in a flat file
            continue
        if is_floating(tensor.dtype) and storage.data.length:
            data = storage.data
            row = tensor.itemsize * (tensor.sizes[-1] if len(tensor.sizes) > 1 else 1)
            span = _Span(
                data.offset, data.offset + data.length, tensor.itemsize, row, name_of(path)
            )
            spans.setdefault(id(data.source), []).append(span)
    first = 0
    for source in checkpoint.sources:
        spans_of_source = sorted(spans.get(id(source), ()))
        if not spans_of_source:
            continue
        zeros = _find_trailing_zeros(source)
        partial = [span for span in spans_of_source if span.is_cut(zeros)]
        empty = [span for span in spans_of_source if span.start >= zeros]
        if partial and empty and source.size - zeros >= _FEWEST:
            first = first or zeros
            names += [span.name for span in (*partial, *empty)]
    if not names:
        return None
    return (
        f"from offset {first:,}, inside a tensor, the file has only zeros; these were probably "
        f"never written: {listed(dict.fromkeys(names))}"
    )


def _find_trailing_zeros(source: Source) -> int:
    """Return the offset at which the zeros at the end of a file begin."""
    end = source.size
    while end:
        start = max(0, end - _BLOCK)
        used = len(source.read(start, end - start).rstrip(b"\0"))
        if used:
            return start + used
        end = start
    return 0
