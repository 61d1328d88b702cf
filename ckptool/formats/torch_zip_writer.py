"""The zip that `torch.save` of torch 2.13 writes, planned from a checkpoint of any format."""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files.output import Output
from ckptool.files.strided import swapped
from ckptool.formats.base import WritePlan
from ckptool.formats.zip_writer import NewRecord, literal, plan_zip
from ckptool.model import Storage
from ckptool.symbolic.encoder import encode

__all__ = ["plan"]

ALIGNMENT = 64


def plan(checkpoint: Checkpoint) -> WritePlan:
    """Torch's layout but for `.data/serialization_id`, a hash for its own logging.

    Raises:
        NotRepresentable: a storage on the meta device, or an object that cannot be pickled.
    """
    encoded = encode(checkpoint.root)
    records = [
        literal("data.pkl", encoded.data),
        literal(".format_version", b"1"),
        literal(".storage_alignment", str(ALIGNMENT).encode()),
        literal("byteorder", b"little"),
    ]
    for index, storage in enumerate(encoded.storages):
        records.append(_payload(index, storage, encoded.dtypes[index], checkpoint.path))
    records.append(literal("version", b"3\n"))
    new = plan_zip("archive", records, ALIGNMENT)
    return WritePlan(
        "torch-zip",
        new.size,
        new.write,
        tensors=sum(1 for _ in checkpoint.tensors()),
        blockers=encoded.blockers,
    )


def _payload(index: int, storage: Storage, dtype: str, file: str) -> NewRecord:
    """The record `data/INDEX`, its bytes little-endian; `dtype` tells what a change reverses."""
    data = storage.data
    if data is None:
        raise NotRepresentable(
            f"storage {storage.key!r} is on the {storage.device} device and has no bytes to write",
            file=file,
        )
    swap = BY_NAME[dtype].swap_size if storage.byteorder == "big" else 1

    def write(output: Output) -> int:
        if swap > 1:
            return output.stream(swapped(data.blocks(), swap))
        if storage.crc32 is not None and not storage.compressed:
            output.copy(data)
            return storage.crc32
        return output.copy_checked(data)

    return NewRecord(f"data/{index}", storage.nbytes, write)
