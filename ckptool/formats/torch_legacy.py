"""The legacy torch stream: what `torch.save` wrote from 0.1.10 to 1.5, and still can.

How it is laid out stands in `legacy_stream`, which reads it.
"""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, Details
from ckptool.files import ByteRange, FileSource
from ckptool.formats.base import Probe, WritePlan
from ckptool.formats.legacy_stream import MAGIC, MAGIC_BYTES, LegacyStream

__all__ = ["TORCH_LEGACY", "TorchLegacy"]


class TorchLegacy:
    """The format `torch-legacy`: read in every pickle protocol, written in protocol 2."""

    name = "torch-legacy"

    def recognise(self, probe: Probe) -> bool:
        """Whether it begins with the pickled magic number."""
        return MAGIC.match(probe.head) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """The checkpoint, over its pickles and the counts before its storages.

        Raises:
            CorruptFile: a pickle is damaged, or the storages are not those that it names.
            TruncatedFile: it ends before its last storage does.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        source = probe.source or FileSource(probe.path)
        stream = LegacyStream(ByteRange(source, 0, source.size), probe.limits)
        unpickled = stream.unpickled
        details = Details(
            size=source.size,
            writer=_writer(unpickled.globals),
            protocol=unpickled.protocol,
            globals=unpickled.globals,
            opcodes=unpickled.opcodes,
            tidy=unpickled.tidy,
            framed=stream.framed,
            storage_bytes=sum(stored.whole.nbytes for stored in stream.stored.values()),
            dead_bytes=source.size - stream.end,
            left_behind=(*stream.sources.left_behind(), *_behind(source, stream.end)),
        )
        return Checkpoint(stream.root, self.name, probe.path, details, sources=(source,))

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """A stream that torch reads since 1.0, and older torch as far as it knows the tensors.

        Raises:
            NotRepresentable: a storage on the meta device, which has no bytes; an element type
                that has no storage class; a nested tensor of torch's own kind.
        """
        from ckptool.formats.torch_legacy_writer import plan

        return plan(checkpoint)


def _writer(names: tuple[str, ...]) -> str:
    """Which torch wrote it, as far as the functions that it names tell."""
    if "torch._utils._rebuild_tensor" in names:
        return "torch 0.1 to 0.3"
    return "torch 0.4 to 1.5, or a newer one asked for the legacy format"


def _behind(source: FileSource, end: int) -> tuple[str, ...]:
    """A sentence on what follows the stream, which torch does not look at."""
    rest = source.size - end
    if not rest:
        return ()
    head = source.read(end, min(MAGIC_BYTES, rest))
    if MAGIC.match(head):
        what = "another torch.save stream follows (torch.load reads one a call)"
    elif head.startswith(b"PK\x03\x04"):
        what = "a zip archive follows"
    elif not head.strip(b"\0"):
        what = "zero bytes follow"
    else:
        what = "bytes of another kind follow"
    return (f"the checkpoint ends at offset {end:,}: {what}, {rest:,} bytes that are not read",)


TORCH_LEGACY = TorchLegacy()
