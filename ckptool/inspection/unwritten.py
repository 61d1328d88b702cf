"""Tensors in files without checksums that were never written: zeros up to the end."""

from __future__ import annotations

import math
from typing import NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.sections import MOMENTS
from ckptool.core.tree import drop_ties, name_of
from ckptool.files import Source
from ckptool.tensors.bytewise import is_floating
from ckptool.words import listed

_MIN_ZEROS = 4096
"""Bytes of a page, the least that a file system writes."""
_BLOCK_BYTES = 64 << 10
_MIN_ROW_BYTES = 256
"""From this size, zeros that begin at a row are padding: vocabularies are padded with rows."""


class _Span(NamedTuple):
    """Where the bytes of a tensor are in its file."""

    start: int
    stop: int
    itemsize: int
    row_bytes: int
    """Bytes of a row, a run of the last dimension; of an element if there is only one."""
    name: str

    def is_cut(self, zeros_start: int) -> bool:
        """Return True if zeros from that offset begin inside the tensor, and not at a row."""
        # The first element of zeros only. The one before it may end with zero bytes.
        elements_before = math.ceil((zeros_start - self.start) / self.itemsize)
        offset = elements_before * self.itemsize
        is_padding = self.row_bytes >= _MIN_ROW_BYTES and offset % self.row_bytes == 0
        return 0 < offset < self.stop - self.start and not is_padding


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
    spans_by_source: dict[int, list[_Span]] = {}
    for path, tensor in drop_ties(list(checkpoint.tensors())):
        storage = tensor.storage
        if id(tensor) in optimizer_tensors or storage is None:
            continue
        if storage.data is None or storage.crc32:  # computed, or checked by its checksum
            continue
        if str(path[-1]).rpartition(".")[2] in MOMENTS:  # an optimizer in a flat file
            continue
        data = storage.data
        if is_floating(tensor.dtype) and data.length:
            row_bytes = tensor.itemsize * (tensor.sizes[-1] if len(tensor.sizes) > 1 else 1)
            stop = data.offset + data.length
            span = _Span(data.offset, stop, tensor.itemsize, row_bytes, name_of(path))
            spans_by_source.setdefault(id(data.source), []).append(span)
    names: list[str] = []
    first_start = 0  # in the first file that ends with unwritten tensors
    for source in checkpoint.sources:
        spans = sorted(spans_by_source.get(id(source), ()))
        if not spans:
            continue
        zeros_start = _find_trailing_zeros(source)
        cut = [span for span in spans if span.is_cut(zeros_start)]
        unwritten = [span for span in spans if span.start >= zeros_start]
        if cut and unwritten and source.size - zeros_start >= _MIN_ZEROS:
            first_start = first_start or zeros_start
            names += [span.name for span in (*cut, *unwritten)]
    if not names:
        return None
    return (
        f"from offset {first_start:,}, inside a tensor, the file has only zeros; these were "
        f"probably never written: {listed(dict.fromkeys(names))}"
    )


def _find_trailing_zeros(source: Source) -> int:
    """Return the offset at which the zeros at the end of a file begin."""
    end = source.size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        used_bytes = len(source.read(start, end - start).rstrip(b"\0"))
        if used_bytes:
            return start + used_bytes
        end = start
    return 0
