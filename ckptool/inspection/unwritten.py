"""Tensors of a file without checksums whose bytes were never written: zeros up to its end."""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint
from ckptool.files import Source
from ckptool.tensors.bytewise import is_floating
from ckptool.tree import distinct, name_of
from ckptool.words import listed

__all__ = ["unwritten"]

_FEWEST = 4096
"""Bytes of a page: a file system writes no less."""
_BLOCK = 64 << 10


def unwritten(checkpoint: Checkpoint) -> str | None:
    """Return a sentence on the weights that were probably never written, None if there are none.

    The zeros must begin inside a tensor and cover another one: layers that begin as zeros (a LoRA
    B, a zero convolution, a new head) begin with the first byte of a tensor. The state of an
    optimizer has zeros of its own. Of an intact file the last block is read.
    """
    state = {
        id(tensor)
        for section in checkpoint.sections
        if section.kind == "optimizer"
        for _, tensor in section.tensors()
    }
    names: list[str] = []
    spans: dict[int, list[tuple[int, int, int, str]]] = {}
    for path, tensor in distinct(list(checkpoint.tensors())):
        storage = tensor.storage
        if id(tensor) in state or storage is None or storage.data is None or storage.crc32:
            continue
        if is_floating(tensor.dtype) and storage.data.length:
            data = storage.data
            span = (data.offset, data.offset + data.length, tensor.itemsize, name_of(path))
            spans.setdefault(id(data.source), []).append(span)
    first = 0
    for source in checkpoint.sources:
        found = sorted(spans.get(id(source), ()))
        if not found:
            continue
        zeros = _first_zero(source)
        cut = [one for one in found if one[0] < _element(zeros, one) < one[1]]
        whole = [one for one in found if one[0] >= zeros]
        if cut and whole and source.size - zeros >= _FEWEST:
            first = first or zeros
            names += [one[3] for one in (*cut, *whole)]
    if not names:
        return None
    return (
        f"the file has only zeros from offset {first:,} to its end, beginning inside a tensor: "
        f"probably these were never written: {listed(dict.fromkeys(names))}"
    )


def _element(zeros: int, span: tuple[int, int, int, str]) -> int:
    """Return where the first element of zeros alone begins."""
    start, _, itemsize, _ = span
    return start - (start - zeros) // itemsize * itemsize


def _first_zero(source: Source) -> int:
    """Return where the zeros at the end of a file begin."""
    end = source.size
    while end:
        start = max(0, end - _BLOCK)
        kept = len(source.read(start, end - start).rstrip(b"\0"))
        if kept:
            return start + kept
        end = start
    return 0
