"""A safetensors file edited where it lies: its header rewritten in as many bytes as it had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.files import ByteRange, FileSource
from ckptool.files.editing import Patch
from ckptool.formats.base import EditPlan
from ckptool.formats.safetensors_content import remarks
from ckptool.formats.safetensors_header import LENGTH, Entry, header_text
from ckptool.formats.safetensors_writer import content_of, header_shape
from ckptool.model import TensorRef

__all__ = ["plan_edit"]


def plan_edit(checkpoint: Checkpoint) -> EditPlan | None:
    """The header that makes the file hold `checkpoint`; None if that takes a new file.

    It does where the header becomes longer, or cannot say something that there is to say, and
    where the tensors are not, each as it is, the runs of bytes behind the header. What the header
    says beside the state dict stays as it is; the rest of the old length is filled with spaces.

    Raises:
        NotRepresentable: a tensor that safetensors cannot hold, or no state dict.
    """
    if checkpoint.format != "safetensors" or len(checkpoint.sources) != 1:
        return None
    content = content_of(checkpoint, checkpoint.details.header)
    if content.left_out:
        return None
    source = checkpoint.sources[0]
    body = _body(source)
    entries = _entries(content.written, body)
    if entries is None or not _tile(entries, body.length):
        return None
    text = header_text(entries, content.metadata)
    length = body.offset - LENGTH.size
    if len(text) > length:
        return None
    return EditPlan(
        Patch(0, LENGTH.pack(length) + text.ljust(length)),
        source.size,
        notes=tuple(remarks(content.tensors, content.ties)),
        tensors=len(content.tensors),
    )


def _body(source: FileSource) -> ByteRange:
    """The bytes behind the header of a file that has been opened as safetensors."""
    (length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    begin = LENGTH.size + length
    return ByteRange(source, begin, source.size - begin)


def _entries(tensors: Mapping[str, TensorRef], body: ByteRange) -> list[Entry] | None:
    """Each tensor's entry over the bytes that it has; None if one is no run of `body`."""
    entries = []
    for name, tensor in tensors.items():
        if not tensor.is_verbatim or tensor.data.source is not body.source:
            return None
        start = tensor.data.offset - body.offset
        code = BY_NAME[tensor.dtype].safetensors or ""
        entries.append(Entry(name, code, header_shape(tensor), start, start + tensor.nbytes))
    return entries


def _tile(entries: Iterable[Entry], length: int) -> bool:
    """Whether they cover `length` bytes, each once."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            return False
        end = entry.stop
    return end == length
