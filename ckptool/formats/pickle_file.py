"""A bare pickle of arrays or tensors, written by `pickle.dump`, joblib or numpy.

From protocol 2 on, Python writes `PROTO n` first. Protocols 0 and 1 have no signature: a file is a
pickle if it can be read as one, and has a container or an object.
"""

from __future__ import annotations

import os
import re

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import Opaque, find_tensors
from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.files import ByteRange
from ckptool.formats.base import Format, Probe, Refusal, details_from_pickle
from ckptool.formats.identify import JOBLIB_HINT
from ckptool.formats.legacy_stream import unpickle_outer
from ckptool.quotes import quote
from ckptool.symbolic import Unpickled
from ckptool.words import counted, printable, shell

_PROTOCOL_START = re.compile(rb"\x80[\x02-\x05]")
_PLAIN_START = re.compile(rb"[(}\])]|c[\w.]+\n[\w.]+\n", re.ASCII)
_JOBLIB = b"joblib.numpy_pickle"
_REBUILD = re.compile(rb"torch\._utils\n?.{0,3}_rebuild_|torch\n?.{0,3}\w+Storage", re.DOTALL)
"""The calls and classes that torch.save uses to pickle a tensor."""
_MAX_HEAD_BYTES = 1 << 20
"""Bytes at the beginning of a pickle that are searched for joblib's class."""


class PickleFile(Format):
    """The format `pickle`: read only."""

    name = "pickle"
    inline = True
    refusal = Refusal(
        "bare-pickle",
        "it is a bare pickle (pickle.dump, joblib, numpy), not a torch.save file",
        quote("weights-only"),
    )
    unsafe_loader = "pickle.load(open(FILE, 'rb'))"

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file states a pickle protocol, or can be read as protocol 0 or 1.

        Those have no signature, and other bytes may look like them, so the root must be a container
        or an object.
        """
        if _PROTOCOL_START.match(probe.head):
            return True
        if not _PLAIN_START.match(probe.head):
            return False
        try:
            root = _unpickle(probe).root
        except CheckpointError:
            return False
        return isinstance(root, (dict, list, tuple, Opaque))

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint; the bytes of arrays and plain pickled tensors are in memory.

        A file of joblib, or the bare `data.pkl` of a torch file, is refused with a hint.
        """
        source = probe.require_source()
        try:
            unpickled = _unpickle(probe)
        except CheckpointError as error:
            head = source.read(0, min(source.size, _MAX_HEAD_BYTES))
            if _JOBLIB in head:
                raise _joblib_error(probe) from error
            if _has_storage_references(head):
                raise _unzipped_error(probe) from error
            raise
        if any(name.encode().startswith(_JOBLIB) for name in unpickled.globals):
            raise _joblib_error(probe)
        trailing = source.size - unpickled.end
        storages = {id(ref.storage): ref.storage for ref in find_tensors(unpickled.root)}
        details = Details(
            size=source.size,
            writer="pickle.dump",
            **details_from_pickle(unpickled),
            storage_bytes=sum(storage.nbytes for storage in storages.values() if storage),
            dead_bytes=trailing,
            left_behind=(f"{counted(trailing, 'byte')} after the pickle (not read)",)
            if trailing
            else (),
        )
        return Checkpoint(unpickled.root, self.name, probe.path, details, sources=(source,))


def _unpickle(probe: Probe) -> Unpickled:
    """Return the first pickle of the file, with the streams inside it."""
    source = probe.require_source()
    return unpickle_outer(ByteRange(source, 0, source.size), probe.limits)


def _has_storage_references(head: bytes) -> bool:
    """Return whether a pickle refers to storages in the records of a zip, as torch.save does.

    A plain pickle of a tensor has its data in a nested stream instead.
    """
    has_nested_stream = b"_load_from_bytes" in head
    return b"storage" in head and not has_nested_stream and _REBUILD.search(head) is not None


def _unzipped_error(probe: Probe) -> UnsupportedFormat:
    """Return the error for the pickle of an unzipped file, with its data in other files."""
    folder, name = os.path.split(probe.path)
    description = "the pickle of an unzipped torch.save file"
    if os.path.isdir(os.path.join(folder, "data")):
        hint = f"give its folder: ckptool list {shell(folder or '.')}"
    else:
        description += ", without its folder data/, which contains the numbers"
        hint = f"give the file itself, or copy data/ next to {printable(name)} and give the folder"
    return UnsupportedFormat(f"{probe.path} is {description}", file=probe.path, hint=hint)


def _joblib_error(probe: Probe) -> UnsupportedFormat:
    """Return the error for a joblib file with arrays, which are between the opcodes."""
    description = "a joblib file with numpy arrays between the opcodes of its pickle"
    return UnsupportedFormat(f"{probe.path} is {description}", file=probe.path, hint=JOBLIB_HINT)


PICKLE = PickleFile()
