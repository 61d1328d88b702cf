"""Planning a safetensors file: where each tensor goes, what is copied and what is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.files import ByteRange
from ckptool.files.output import Output
from ckptool.formats.base import WritePlan
from ckptool.formats.safetensors_content import (
    flat_tensors,
    left_out,
    overlapping,
    remarks,
    true_ties,
)
from ckptool.formats.safetensors_header import Entry, header_bytes
from ckptool.formats.safetensors_metadata import FORMAT, RESERVED, metadata_of, plain_versions
from ckptool.model import TensorRef
from ckptool.words import listed

__all__ = ["Content", "content_of", "header_shape", "plan"]


@dataclass(frozen=True, slots=True)
class Content:
    """What of a checkpoint a file will have."""

    tensors: Mapping[str, TensorRef]
    """Under every name, in the order of the state dict."""
    ties: Mapping[str, str]
    """Each name that has no entry of its own, with the name that has."""
    metadata: Mapping[str, str]
    """The header's `__metadata__`."""
    left_out: tuple[str, ...]
    """What the file will not have, a phrase each."""

    @property
    def written(self) -> dict[str, TensorRef]:
        """The tensors that have an entry of their own."""
        return {name: ref for name, ref in self.tensors.items() if name not in self.ties}


def content_of(checkpoint: Checkpoint, given: Mapping[str, str]) -> Content:
    """What of `checkpoint` a file will have; `given` are the other entries of `__metadata__`.

    Raises:
        NotRepresentable: a tensor that safetensors cannot hold, or no state dict.
    """
    tensors = flat_tensors(checkpoint.root, checkpoint.path)
    ties = true_ties(tensors, RESERVED | given.keys())
    versions, lost = plain_versions(getattr(checkpoint.root, "attributes", {}))
    attributes = (f"attributes: {listed(lost)}",) if lost else ()
    return Content(
        tensors,
        ties,
        {**given, **metadata_of(ties, tensors, versions, given)},
        (*left_out(checkpoint.root), *attributes),
    )


def plan(checkpoint: Checkpoint) -> WritePlan:
    """The file for a checkpoint whose root is one flat state dict.

    Raises:
        NotRepresentable: a tensor that safetensors cannot hold, or no state dict.
    """
    content = content_of(checkpoint, {FORMAT: "pt", **checkpoint.details.header})
    written = content.written
    entries = _entries(written)
    head = header_bytes((entries[name] for name in written), content.metadata, file=checkpoint.path)
    pieces = list(_pieces(written[name] for name in entries))

    def write(output: Output) -> None:
        output.write(head)
        for piece in pieces:
            if isinstance(piece, ByteRange):
                output.copy(piece)
            else:
                output.stream(piece.content())

    return WritePlan(
        "safetensors",
        len(head) + sum(tensor.nbytes for tensor in written.values()),
        write,
        left_out=content.left_out,
        notes=(*remarks(content.tensors, content.ties), *overlapping(written)),
        tensors=len(content.tensors),
    )


def _entries(tensors: Mapping[str, TensorRef]) -> dict[str, Entry]:
    """Each tensor's entry, in the order of the bytes.

    The largest elements come first, so that every tensor is aligned; otherwise the order stays.
    """
    entries: dict[str, Entry] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -_alignment(tensors[name])):
        tensor = tensors[name]
        code = BY_NAME[tensor.dtype].safetensors or ""
        entries[name] = Entry(name, code, header_shape(tensor), end, end + tensor.nbytes)
        end += tensor.nbytes
    return entries


def _alignment(tensor: TensorRef) -> int:
    """The power of two that divides an element's size: F6 has three bytes for four elements."""
    return tensor.itemsize & -tensor.itemsize


def header_shape(tensor: TensorRef) -> tuple[int, ...]:
    """The shape as the header counts: torch's pairs of F4 are two elements there."""
    shape = tuple(size or 0 for size in tensor.shape)
    if tensor.dtype == "float4_e2m1fn_x2":
        return (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return shape


def _pieces(tensors: Iterable[TensorRef]) -> Iterator[ByteRange | TensorRef]:
    """What to copy and what to stream, in order; neighbours in one file are one copy."""
    last: ByteRange | TensorRef | None = None
    for tensor in tensors:
        if tensor.nbytes == 0:
            continue
        piece = tensor.data if tensor.is_verbatim else tensor
        if isinstance(last, ByteRange) and isinstance(piece, ByteRange) and _adjoin(last, piece):
            last = ByteRange(last.source, last.offset, last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _adjoin(first: ByteRange, second: ByteRange) -> bool:
    return first.source is second.source and first.offset + first.length == second.offset
