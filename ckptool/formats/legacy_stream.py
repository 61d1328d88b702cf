"""Read one legacy torch stream: a file, or bytes in a pickle.

Consecutive pickles (magic number, version, facts about the writer's machine, the object, the list
of storage keys), then for each key its element count (int64) and its bytes, all little-endian. The
offsets of storages follow from the counts. See torch's serialization.py (`_legacy_load`) and
csrc/generic/serialization.cpp.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from ckptool.core.model import Storage, StorageRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    LimitExceeded,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.files import ByteRange, MemorySource
from ckptool.formats.transfers import find_last_copy, salvage_command
from ckptool.limits import Limits
from ckptool.symbolic import Unpickled, unpickle
from ckptool.symbolic.rebuild import StoragePid, is_storage_pid, parse_storage_pid
from ckptool.words import few, listed

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
VERSION = 1001
MACHINE_DESCRIPTION = {
    "protocol_version": VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
"""The description of the writer's machine, always the same: no version of torch uses it."""
MAGIC = re.compile(
    rb"(?:\x80[\x02\x03]|\x80[\x04\x05](?:\x95.{8})?)\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L%dL\n\."
    % MAGIC_NUMBER,
    re.DOTALL,
)
"""The pickled magic number in protocols 2 to 5, and as text in 0 and 1."""

MAGIC_BYTES = 40
"""Bytes of the longest form of `MAGIC`."""

RECORD_BYTES = 4096
"""More than the size of a pickle of a few numbers and names."""

COUNT_STRUCT = struct.Struct("<q")
"""The element count before the bytes of a storage."""

_NESTED_TENSOR = "torch._utils._rebuild_nested_tensor"
_COPY_AGAIN = "download or copy it again; several processes that save to one file also cause this"


class SourceTexts:
    """The source code of modules, which old torch saved with each pickled class."""

    def __init__(self) -> None:
        """Start without classes."""
        self.names: dict[str, None] = {}
        """The classes with source code, in the order of the file."""

    def remember_class(self, cls: Any, text: Any) -> Any:
        """Return the class, and remember its name if its source code is not empty."""
        if text:
            self.names[getattr(cls, "qualified", str(cls))] = None
        return cls

    def describe(self) -> tuple[str, ...]:
        """Return a phrase for the user, if any class has source code."""
        phrase = f"the source code of {listed(self.names, 5)} (not read)"
        return (phrase,) if self.names else ()


class NestedStreams:
    """Reads the arguments of `torch.storage._load_from_bytes`, at bounded cost.

    Bytes inside a pickle can be used many times, and can be nested. A valid file has each stream
    once, so that at each depth all streams together are not longer than the file.
    """

    def __init__(self, file: str, limits: Limits, outer_bytes: int) -> None:
        """Read streams in a pickle of `file`, which is in a range of `outer_bytes` bytes."""
        self.file = file
        self.limits = limits
        self.depth = 0
        """The number of streams around the current one."""
        self.bytes_left = outer_bytes * limits.max_nested_pickles
        """The bytes that all further streams may have together."""

    def load(self, data: bytes) -> Any:
        """Return the root of the stream in `data`.

        Raises:
            CorruptFile: it is not a legacy stream, or is damaged.
            LimitExceeded: it is nested too deeply, or used too often.
        """
        self.bytes_left -= len(data)
        if self.bytes_left < 0 or self.depth >= self.limits.max_nested_pickles:
            raise LimitExceeded("pickles in the pickle are nested too deeply or used too often")
        source = MemorySource(bytes(data), self.file)
        self.depth += 1
        try:
            return LegacyStream(ByteRange(source, 0, source.size), self.limits, self.load).root
        finally:
            self.depth -= 1


def unpickle_outer(
    data: ByteRange,
    limits: Limits,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> Unpickled:
    """Return the pickle at `start` of `data`; read the streams inside it too."""
    nested = NestedStreams(data.source.name, limits, data.length).load
    return unpickle(
        data, persistent_load=persistent_load, nested=nested, limits=limits, start=start
    )


def unpickle_record(data: ByteRange, start: int, limits: Limits) -> Unpickled:
    """Return a small pickle at `start` of `data`, reading little of what follows it.

    Raises:
        TruncatedFile: `data` ends there.
        CorruptFile: it is not a pickle, is damaged, or is not small.
    """
    window = data.slice(0, min(start + RECORD_BYTES, data.length))
    return unpickle(window, limits=limits, start=start)


class _PendingStorage:
    """A storage of the pickle, which gets its bytes later.

    The pickle precedes the storages that its tensors need, so they are created without bytes, and
    `set_data` sets these before the tree is returned.
    """

    def __init__(self, pid: StoragePid) -> None:
        """Take size and device from the first use in the pickle, as torch does."""
        self.numel = pid.numel
        self.storage = Storage(pid.key, None, pid.nbytes, pid.device)
        self.views: dict[str, tuple[Storage, int]] = {}
        """By key, each view that the pickle uses, and its start in bytes."""

    def select_storage(self, pid: StoragePid) -> Storage:
        """Return the whole storage, or the view of a part that a persistent id refers to.

        One object per view. Like the storage, it has no bytes yet.
        """
        if pid.nbytes != self.storage.nbytes:
            raise CorruptFile(
                f"storage {pid.key!r} has {self.storage.nbytes:,} bytes when first used and "
                f"{pid.nbytes:,} later"
            )
        if pid.view is None:
            return self.storage
        key, offset, numel = pid.view
        itemsize = BY_NAME[pid.dtype].itemsize
        if key not in self.views:
            view = Storage(key, None, numel * itemsize, pid.device)
            self.views[key] = (view, offset * itemsize)
        view, _ = self.views[key]
        return view

    def set_data(self, data: ByteRange | None) -> None:
        """Set the bytes of the storage and its views (None: they have none)."""
        _set_storage_data(self.storage, data)
        for view, offset in self.views.values():
            _set_storage_data(view, data.slice(offset, view.nbytes) if data else None)


def _set_storage_data(storage: Storage, data: ByteRange | None) -> None:
    object.__setattr__(storage, "data", data)  # frozen, but not returned to any caller yet


class LegacyStream:
    """One legacy stream at the start of `data`: the tree, the storages, the end."""

    def __init__(
        self,
        data: ByteRange,
        limits: Limits,
        nested: Callable[[bytes], Any] | None = None,
        *,
        salvages: bool = False,
    ) -> None:
        """Read it. With `salvages`, storages from the first incomplete one on have no bytes.

        `nested` returns the root of a stream inside the pickle; by default `NestedStreams` does.

        Raises:
            CorruptFile: a pickle is damaged, or does not match the storages.
            TruncatedFile: `data` ends before the last storage does.
            UnsupportedFormat: the stream has another version.
        """
        self.data = data
        self.file = data.source.name
        self.limits, self.salvages = limits, salvages
        self.nested = nested or NestedStreams(self.file, limits, data.length).load
        self.stored: dict[str, _PendingStorage] = {}
        """The storages that the pickle uses, by key."""
        self.sources = SourceTexts()
        """The classes that were saved with their source code."""
        self.framed = True
        """True if the frames of all its pickles are where a pickler puts them."""
        start = self._read_header()
        self.unpickled = self._unpickle_object(start)
        keys = unpickle(data, limits=limits, start=self.unpickled.end)
        self.framed &= self.unpickled.framed and keys.framed
        self.end = self._locate_storages(self._check_keys(keys.root), keys.end)
        """The position after the last storage."""
        if _NESTED_TENSOR in self.unpickled.globals:
            # The shape of a nested tensor is in its storages, whose bytes are known only now.
            self.unpickled = self._unpickle_object(start)
        self.root = self.unpickled.root

    def _read_header(self) -> int:
        """Check magic number and version, skip the machine description, and return its end.

        There the pickle of the object starts. Sets `framed`: True if a pickler could have written
        the three pickles as they are.
        """
        magic = MAGIC.match(self.data.read(0, min(MAGIC_BYTES, self.data.length)))
        if magic is None:
            raise CorruptFile("a legacy torch stream does not begin as expected")
        magic_number = unpickle_record(self.data, 0, self.limits)
        version = unpickle_record(self.data, magic.end(), self.limits)
        if version.root != VERSION:
            raise UnsupportedFormat(
                f"the legacy stream has version {version.root!r:.20}, expected {VERSION}"
            )
        description = unpickle_record(self.data, version.end, self.limits)
        self.framed = magic_number.framed and version.framed and description.framed
        return description.end

    def _unpickle_object(self, start: int) -> Unpickled:
        """Return the pickle of the object at `start`."""
        return unpickle(
            self.data,
            persistent_load=self._load_persistent,
            nested=self.nested,
            limits=self.limits,
            start=start,
        )

    def _load_persistent(self, pid: Any) -> Any:
        """Return the class or storage of a persistent id.

        A class comes with its source file and code. A storage has no bytes yet: those are after the
        pickle, and `_locate_storages` sets them.
        """
        match pid:
            case ("module", cls, _, source_code):
                return self.sources.remember_class(cls, source_code)
        if not is_storage_pid(pid):
            raise CorruptFile("the pickle uses a persistent id that is not a storage")
        if len(pid) != 6:
            raise CorruptFile(f"the persistent id of a storage has {len(pid)} parts, expected 6")
        storage = parse_storage_pid(pid, self.file)
        stored = self.stored.get(storage.key)
        if stored is None:
            stored = self.stored[storage.key] = _PendingStorage(storage)
        return StorageRef(stored.select_storage(storage), storage.dtype, storage.untyped)

    def _check_keys(self, items: Any) -> list[str]:
        """Return the keys in the list after the pickle, in the order of the storages in the file.

        It must have each storage of the pickle once, and no other.
        """
        if not isinstance(items, list) or not all(isinstance(item, (str, int)) for item in items):
            raise CorruptFile("the list of storages after the pickle is missing")
        keys = list(map(str, items))
        counts = Counter(keys)
        mismatched = [
            key for key in {**self.stored, **counts} if counts[key] != 1 or key not in self.stored
        ]
        if mismatched:
            message = "the list after the pickle must have each storage of the pickle once"
            raise CorruptFile(f"{message}: {few(mismatched)}")
        return keys

    def _locate_storages(self, keys: list[str], position: int) -> int:
        """Set the bytes of each storage, in the order of `keys`; return their end.

        The first one's count is at `position`. When salvaging, the storages from the first damaged
        one on get no bytes.
        """
        length = self.data.length
        for index, key in enumerate(keys):
            stored = self.stored[key]
            nbytes = stored.storage.nbytes
            try:
                if position + COUNT_STRUCT.size > length:
                    raise self._truncated_error(keys, index, position)
                self._check_count(key, stored.numel, position)
                if position + COUNT_STRUCT.size + nbytes > length:
                    raise self._truncated_error(keys, index, position)
            except CorruptFile as error:
                if not self.salvages:
                    is_whole_file = self.data.length == self.data.source.size
                    if is_whole_file:  # a restarted download explains the damage better
                        refuse_second_copy(self.data, self.limits)
                    raise
                # A wrong count shows bytes missing or added before it: in the previous storage.
                if index and not isinstance(error, TruncatedFile):
                    self.stored[keys[index - 1]].set_data(None)
                return length
            position += COUNT_STRUCT.size
            stored.set_data(self.data.slice(position, nbytes))
            position += nbytes
        return position

    def _check_count(self, key: str, numel: int, position: int) -> None:
        """Raise CorruptFile if the count in the file differs from that in the pickle."""
        (count,) = COUNT_STRUCT.unpack(self.data.read(position, COUNT_STRUCT.size))
        if count != numel:
            raise CorruptFile(
                f"storage {key!r:.80} should have {numel:,} elements, but the count at offset "
                f"{position:,} is {count:,}",
                hint=_COPY_AGAIN,
            )

    def _truncated_error(self, keys: list[str], index: int, position: int) -> TruncatedFile:
        """Return the error for a stream that ends before storage number `index` does.

        The count of that storage is, or should be, at `position`.
        """
        needed = sum(COUNT_STRUCT.size + self.stored[key].storage.nbytes for key in keys[index:])
        full_length = position + needed
        missing = full_length - self.data.length
        hint = "copy it again"
        if index:  # the storages before it are intact
            hint += f", or run {salvage_command(self.file, self.unpickled.root)}"
        return TruncatedFile(
            f"the file ends in storage {keys[index]!r:.80} ({index + 1:,} of {len(keys):,}): "
            f"{missing:,} of {full_length:,} bytes are missing",
            hint=hint,
        )


_COPY_HEAD_BYTES = 1024
"""Bytes that identify the copies of one file: they reach into the pickle of the object."""


def find_second_copy(data: ByteRange, limits: Limits) -> int:
    """Return the start of the last copy of a restarted download, if it is complete; else 0.

    A download that begins again appends the file to what it had; each copy has the same beginning.
    """
    start = find_last_copy(data.source, data.read(0, min(_COPY_HEAD_BYTES, data.length)))
    try:
        if start:
            LegacyStream(data.slice(start, data.length - start), limits)
    except CheckpointError:
        return 0
    return start


def refuse_second_copy(data: ByteRange, limits: Limits, end: int | None = None) -> None:
    """Refuse a file with a second copy of itself that begins before the first one ends.

    `end` is that of the first copy, None if it is damaged. After it, the same bytes may be another
    object that was saved to the same file.

    Raises:
        CorruptFile: the first copy is truncated, and its last storages have bytes of the second.
    """
    start = find_second_copy(data, limits)
    if start and (end is None or start < end):
        raise CorruptFile(
            f"the download restarted: a second copy of the file begins at offset {start:,}",
            hint=f"download it again, or run {salvage_command(data.source.name)}",
        )
