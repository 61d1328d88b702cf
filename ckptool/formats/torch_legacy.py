"""The stream of pickles that torch.save wrote before 1.6, read and written."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.tree import name_of
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, Source
from ckptool.files.strided import swap_blocks
from ckptool.formats.base import NewFile, Probe, WritableFormat, WritePlan, details_from_pickle
from ckptool.formats.legacy_stream import (
    COUNT_STRUCT,
    MACHINE_DESCRIPTION,
    MAGIC,
    MAGIC_BYTES,
    MAGIC_NUMBER,
    VERSION,
    LegacyStream,
    find_second_copy,
    refuse_second_copy,
)

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput


def _describe_unloadable(checkpoint: Checkpoint, global_names: Collection[str]) -> str | None:
    """Return a noun phrase for content that torch cannot load from a legacy stream, or None.

    `global_names` are the classes and functions in the pickle of the checkpoint.
    """
    if any(name.endswith("UntypedStorage") for name in global_names):
        untyped_tensors = (  # with a dtype that has no typed storage class
            f"{name_of(path)!r} (dtype {tensor.dtype})"
            for path, tensor in checkpoint.tensors()
            if tensor.storage is not None and BY_NAME[tensor.dtype].storage is None
        )
        return next(untyped_tensors, "an untyped storage")
    if "torch._utils._rebuild_nested_tensor" in global_names:
        return "a nested tensor (its sizes would follow it)"
    return None


def _unloadable_error(checkpoint: Checkpoint, content: str) -> NotRepresentable:
    """Return the error for content that torch cannot load from a legacy stream."""
    return NotRepresentable(
        f"no torch version can load {content} from a legacy stream",
        file=checkpoint.path,
        hint="add --format torch-zip",
    )


class TorchLegacy(WritableFormat):
    """The format `torch-legacy`: read in every pickle protocol, written in protocol 2."""

    name = "torch-legacy"
    by_torch = True
    can_salvage = True
    legacy = True

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file begins with the pickled magic number."""
        return MAGIC.match(probe.head) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint; only the pickles and the counts before the storages are read.

        When salvaging, the last copy of a restarted download is read; else such a file is refused.
        """
        source = probe.require_source()
        salvages = probe.salvages is not None
        whole_file = ByteRange(source, 0, source.size)
        start = find_second_copy(whole_file, probe.limits) if salvages else 0
        data = whole_file.slice(start, source.size - start)
        stream = LegacyStream(data, probe.limits, salvages=salvages)
        if stream.end < data.length and not salvages:
            refuse_second_copy(data, probe.limits, stream.end)
        unpickled = stream.unpickled
        details = Details(
            size=source.size,
            writer=_identify_writer(unpickled.globals),
            # `framed` of the stream is about all its pickles, not only that of the object.
            **{**details_from_pickle(unpickled), "framed": stream.framed},
            storage_bytes=sum(stored.storage.nbytes for stored in stream.stored.values()),
            dead_bytes=data.length - stream.end,
            left_behind=(
                *_describe_leading_bytes(start),
                *stream.sources.describe(),
                *_describe_trailing_bytes(source, start + stream.end),
            ),
        )
        return Checkpoint(stream.root, self.name, probe.path, details, sources=(source,))

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """Plan a stream for torch 1.0 and newer, and for older versions that know the tensors.

        It is the pickles, then each storage after its element count, in little-endian order.

        Raises:
            NotRepresentable: it has an untyped storage, a nested tensor, or a storage without data.
        """
        from ckptool.symbolic.encoder import encode  # not needed to list tensors

        encoded = encode(checkpoint.root, legacy=True)
        unloadable = _describe_unloadable(checkpoint, encoded.globals)
        if unloadable is not None:
            raise _unloadable_error(checkpoint, unloadable)
        # For each storage: its packed element count, its bytes, the bytes to swap (1 for none).
        payloads: list[tuple[bytes, ByteRange, int]] = []
        for storage, dtype in zip(encoded.storages, encoded.dtypes, strict=True):
            if storage.data is None:
                content = f"storage {storage.key!r}, which is on the meta device and has no data,"
                raise _unloadable_error(checkpoint, content)
            # In elements of the dtype with which the pickle first uses the storage.
            count = COUNT_STRUCT.pack(storage.nbytes // BY_NAME[dtype].itemsize)
            swap = BY_NAME[dtype].swap_size if storage.byteorder == "big" else 1
            payloads.append((count, storage.data, swap))
        keys = [str(index) for index in range(len(payloads))]  # the encoder numbers the storages
        head = b"".join(
            encode(piece).data for piece in (MAGIC_NUMBER, VERSION, MACHINE_DESCRIPTION)
        )
        head += encoded.data + encode(keys).data

        def write(output: FileOutput) -> None:
            """Write the pickles, then each storage after its element count."""
            output.write(head)
            for count, data, swap in payloads:
                output.write(count)
                if swap == 1:
                    output.copy(data)
                else:
                    output.write_blocks(swap_blocks(data.iterate_blocks(), swap))

        size = len(head) + sum(len(count) + data.length for count, data, _ in payloads)
        return WritePlan(
            self.name,
            (NewFile(size, write, checkpoint),),
            tensors=sum(1 for _ in checkpoint.tensors()),
            blockers=encoded.blockers,
        )


def _identify_writer(global_names: tuple[str, ...]) -> str:
    """Return the torch versions that could have written a pickle that uses these names."""
    if "torch._utils._rebuild_tensor" in global_names:
        return "torch 0.1 to 0.3"
    return "torch 0.4 to 1.5, or newer with the legacy format"


def _describe_leading_bytes(start: int) -> tuple[str, ...]:
    """Return a phrase on the bytes before the copy that is read, which begins at `start`."""
    if not start:
        return ()
    return (f"{start:,} bytes before the last copy of a restarted download",)


def _describe_trailing_bytes(source: Source, end: int) -> tuple[str, ...]:
    """Return a phrase on the bytes after the stream, which torch does not read."""
    trailing = source.size - end
    if not trailing:
        return ()
    head = source.read(end, min(MAGIC_BYTES, trailing))
    if MAGIC.match(head):
        kind = "another torch.save stream (torch.load reads one per call)"
    else:
        kind = "other bytes"
    return (
        f"{trailing:,} bytes after the end of the checkpoint at offset {end:,} (not read): {kind}",
    )


TORCH_LEGACY = TorchLegacy()
