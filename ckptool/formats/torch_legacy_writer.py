"""A legacy torch stream written: its head, then each storage behind its count."""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files.output import Output
from ckptool.files.strided import swapped
from ckptool.formats.base import WritePlan
from ckptool.formats.legacy_stream import COUNT, MAGIC_NUMBER, VERSION
from ckptool.model import Storage
from ckptool.paths import name_of
from ckptool.symbolic.encoder import encode

__all__ = ["plan"]

_SYS_INFO = {
    "protocol_version": VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
"""Read by nobody, but unpickled by every torch."""


def plan(checkpoint: Checkpoint) -> WritePlan:
    """A stream that torch reads since 1.0, and older torch as far as it knows the tensors.

    Raises:
        NotRepresentable: a storage on the meta device, which has no bytes; an element type that
            has no storage class; a nested tensor of torch's own kind.
    """
    encoded = encode(checkpoint.root, legacy=True)
    if any(name.endswith("UntypedStorage") for name in encoded.globals):
        raise _untyped(checkpoint)
    if "torch._utils._rebuild_nested_tensor" in encoded.globals:
        raise _unloadable(checkpoint, "a nested tensor (its sizes would come after it)")
    payloads = [
        _Payload(storage, dtype, checkpoint.path)
        for storage, dtype in zip(encoded.storages, encoded.dtypes, strict=True)
    ]
    keys = [str(index) for index in range(len(payloads))]
    head = b"".join(encode(piece).data for piece in (MAGIC_NUMBER, VERSION, _SYS_INFO))
    head += encoded.data + encode(keys).data

    def write(output: Output) -> None:
        output.write(head)
        for payload in payloads:
            payload.write(output)

    return WritePlan(
        "torch-legacy",
        len(head) + sum(payload.size for payload in payloads),
        write,
        tensors=sum(1 for _ in checkpoint.tensors()),
        blockers=encoded.blockers,
    )


class _Payload:
    """A storage as the stream holds it: its element count, then its bytes, little-endian."""

    def __init__(self, storage: Storage, dtype: str, file: str) -> None:
        """Count in elements of `dtype`, as the pickle does at the storage's first mention."""
        if storage.data is None:
            raise NotRepresentable(
                f"storage {storage.key!r} is on the meta device and has no bytes: "
                "a legacy stream cannot hold it",
                file=file,
                hint="write it as torch-zip",
            )
        self.data = storage.data
        self.size = COUNT.size + storage.nbytes
        self.count = storage.nbytes // BY_NAME[dtype].itemsize
        swap = BY_NAME[dtype].swap_size
        self.swap = swap if storage.byteorder == "big" else 1

    def write(self, output: Output) -> None:
        """Write it where `output` stands."""
        output.write(COUNT.pack(self.count))
        if self.swap == 1:
            output.copy(self.data)
        else:
            output.stream(swapped(self.data.blocks(), self.swap))


def _untyped(checkpoint: Checkpoint) -> NotRepresentable:
    """The error for what torch saves over an untyped storage: it cannot load that stream itself."""
    what = "an untyped storage"
    for path, ref in checkpoint.tensors():
        if ref.storage is not None and BY_NAME[ref.dtype].storage is None:
            what = f"{name_of(path)!r} (of type {ref.dtype})"
            break
    return _unloadable(checkpoint, what)


def _unloadable(checkpoint: Checkpoint, what: str) -> NotRepresentable:
    return NotRepresentable(
        f"no torch can load {what} from a legacy stream",
        file=checkpoint.path,
        hint="write it as torch-zip",
    )
