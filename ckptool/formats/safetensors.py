"""Safetensors: one flat state dict behind a JSON header, on no device.

After safetensors/src/tensor.rs and the format's README; torch's side of it (the dtypes, the
doubled last dimension of F4) after bindings/python/py_src/safetensors/torch.py.
"""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import Checkpoint, Details
from ckptool.dtypes import BY_SAFETENSORS
from ckptool.errors import CorruptFile, UnreadableFile
from ckptool.files import ByteRange
from ckptool.formats.base import EditPlan, Probe, WritePlan
from ckptool.formats.safetensors_header import LENGTH, Entry, Header, read_header
from ckptool.formats.safetensors_metadata import FORMAT, restored
from ckptool.model import Storage, TensorRef, row_major_strides
from ckptool.words import listed, printable

__all__ = ["SAFETENSORS", "Safetensors"]

_LIKELY_HEADER = 1 << 40
"""A header's length below it; eight letters of a text make a number far above."""


class Safetensors:
    """A file of safetensors."""

    name = "safetensors"

    def recognise(self, probe: Probe) -> bool:
        """A plausible length, then the beginning of a JSON object."""
        head = probe.head
        if len(head) <= LENGTH.size or LENGTH.unpack_from(head)[0] >= _LIKELY_HEADER:
            return False
        text = head[LENGTH.size :].lstrip(b" \t\r\n")
        return text[:1] == b"{" and text[1:].lstrip(b" \t\r\n")[:1] in (b'"', b"}", b"")

    def read(self, probe: Probe) -> Checkpoint:
        """The state dict, its tied names and `_metadata` restored.

        Raises:
            CorruptFile: the header breaks a rule of the format.
            LimitExceeded: the header is longer than `probe.limits` allows.
        """
        source = probe.source
        if source is None:
            raise UnreadableFile("is a folder, not a safetensors file", file=probe.path)
        header = read_header(source, probe.limits)
        tensors = {entry.name: _tensor(entry, header) for entry in header.entries}
        root, rest = restored(tensors, header.metadata)
        return Checkpoint(
            root,
            self.name,
            probe.path,
            Details(
                size=source.size,
                writer="safetensors",
                storage_bytes=header.body.length,
                notes=_notes(rest),
                header=rest,
            ),
            sources=(source,),
        )

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """The file for a checkpoint whose root is one flat state dict.

        Raises:
            NotRepresentable: a tensor that safetensors cannot hold, or no state dict.
        """
        from ckptool.formats.safetensors_writer import plan  # a list needs no writer

        return plan(checkpoint)

    def plan_edit(self, checkpoint: Checkpoint) -> EditPlan | None:
        """The new header of the file itself (`safetensors_edit.plan_edit`).

        Raises:
            NotRepresentable: a tensor that safetensors cannot hold, or no state dict.
        """
        from ckptool.formats.safetensors_edit import plan_edit  # nor one

        return plan_edit(checkpoint)


SAFETENSORS = Safetensors()


def _tensor(entry: Entry, header: Header) -> TensorRef:
    dtype = BY_SAFETENSORS[entry.code]
    nbytes = entry.stop - entry.start
    data = ByteRange(header.body.source, header.body.offset + entry.start, nbytes)
    shape = _torch_shape(entry)
    storage = Storage(entry.name, data, nbytes)
    return TensorRef(dtype.name, shape, row_major_strides(shape), 0, storage, "cpu")


def _torch_shape(entry: Entry) -> tuple[int, ...]:
    """The shape in torch, which counts pairs of F4."""
    if entry.code != "F4":
        return entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise CorruptFile(
            f"tensor '{printable(entry.name)}' of F4 and shape {list(entry.shape)} "
            "splits a byte: its last dimension is not even"
        )
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def _notes(rest: dict[str, Any]) -> tuple[str, ...]:
    facts = [f"{key}={value}" for key, value in rest.items() if key != FORMAT]
    return (f"the header says {listed(facts)}",) if facts else ()
