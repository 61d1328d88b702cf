"""The tar archive of torch 0.1."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import Storage, StorageRef, TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import ByteRange, Source
from ckptool.formats.base import (
    Format,
    Probe,
    Refusal,
    add_error_context,
    check_limit,
    details_from_pickle,
)
from ckptool.formats.legacy_stream import COUNT_STRUCT, SourceTexts, unpickle_outer, unpickle_record
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.symbolic import unpickle
from ckptool.symbolic.rebuild import parse_storage_class

BLOCK = 512
"""Bytes of a header; the content of a member is padded to a multiple of it."""
_MAX_EXTRA_BYTES = 1 << 20
_LINK_KINDS = (b"1", b"2")
_KINDS_WITHOUT_DATA = (*_LINK_KINDS, b"3", b"4", b"5", b"6")
"""Links, devices and folders; like Python's tarfile, treat other kinds as files."""
_TORCH_MEMBERS = ("pickle", "tensors", "storages")
_LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK = b"L", b"x", b"g", b"K"


def is_tar(head: bytes) -> bool:
    """Return whether the first block is a tar header, by its checksum: older ones have no magic."""
    return len(head) >= BLOCK and _has_valid_checksum(head[:BLOCK])


def read_members(source: Source, limits: Limits) -> dict[str, ByteRange]:
    """Return the files in the tar, by name, in its order; the last file of a name counts.

    A member may have its name and size in an extra member before it. Other members without data
    are left out, but a link in place of a member of torch is refused.

    Raises:
        CorruptFile: a header is invalid.
        TruncatedFile: a member reaches past the end of the file.
        LimitExceeded: it has more members than `limits` allows.
    """
    members: dict[str, ByteRange] = {}
    position, extra = 0, _Extra()
    for _ in range(limits.max_records):
        if position + BLOCK > source.size:
            return members
        header = source.read(position, BLOCK)
        if not header.strip(b"\0"):
            return members
        kind, name, size = _parse_header(header, position)
        if extra.size is not None:
            size = extra.size
        name = extra.name or name
        with add_error_context(source.name, f"tar member {name!r:.80}"):
            data = ByteRange(source, position + BLOCK, size)
        if kind in (_PAX, _LONG_NAME):  # about the next member
            extra = extra.with_record(kind, _read_extra(data))
        elif kind not in (_PAX_GLOBAL, _LONG_LINK):
            if kind in _LINK_KINDS and name in _TORCH_MEMBERS:
                raise CorruptFile(f"member {name!r:.80} of the tar is a link")
            if kind not in _KINDS_WITHOUT_DATA:
                members[name] = data
            extra = _Extra()
        position += BLOCK + -(-size // BLOCK) * BLOCK  # the content is padded to whole blocks
    raise LimitExceeded(f"the tar has more than {limits.max_records:,} members")


class _Extra(NamedTuple):
    """Facts that do not fit the next header: a name longer than 100 bytes, a size over 8 GiB."""

    name: str = ""
    size: int | None = None

    def with_record(self, kind: bytes, raw: bytes) -> _Extra:
        """Add the facts of `raw`: a GNU long name, or pax records, `LENGTH KEY=VALUE` per line.

        LENGTH counts the bytes of the whole line. Pax records after an invalid length are ignored.
        """
        if kind == _LONG_NAME:
            return _Extra(_decode_text(raw), self.size)
        name, size = self.name, self.size
        while raw:
            length, _, _ = raw.partition(b" ")
            if not length.isdigit() or len(length) > 9 or not int(length):
                break
            line, raw = raw[: int(length)], raw[int(length) :]
            key, _, value = line.removeprefix(length + b" ")[:-1].partition(b"=")
            if key.startswith(b"GNU.sparse"):
                raise CorruptFile("a member of the tar is sparse")
            if key == b"path":
                name = _decode_text(value)
            elif key == b"size" and value.isdigit() and len(value) < 20:
                size = int(value)
        return _Extra(name, size)


def _parse_header(header: bytes, position: int) -> tuple[bytes, str, int]:
    """Return kind, name and size of the member with this header block at `position`.

    The offsets of the fields are those of the ustar format, which puts a long path in two fields.
    """
    if not _has_valid_checksum(header):
        raise CorruptFile(f"the tar has no member header at offset {position:,}")
    size = _parse_number(header[124:136])
    if size is None or size < 0:
        raise CorruptFile(f"the tar member at offset {position:,} has no size")
    kind = header[156:157]
    if kind == b"S":
        raise CorruptFile(f"the tar member at offset {position:,} is sparse")
    name, prefix = _decode_text(header[:100]), _decode_text(header[345:500])
    is_ustar = header[257:263] == b"ustar\0"
    return kind, f"{prefix}/{name}" if prefix and is_ustar else name, size


def _read_extra(data: ByteRange) -> bytes:
    """Return the content of a member with facts about the next one, which must be short."""
    check_limit("a tar header takes", data.length, "bytes", _MAX_EXTRA_BYTES)
    return data.read()


def _has_valid_checksum(header: bytes) -> bool:
    """Return whether the stated checksum is the sum of the bytes, its own field as spaces.

    Some old programs added the bytes as signed numbers.
    """
    stated = _parse_number(header[148:156])
    if not stated:
        return False
    summed = header[:148] + b" " * 8 + header[156:]
    unsigned_sum = sum(summed)
    signed_sum = unsigned_sum - 256 * sum(byte > 127 for byte in summed)
    return stated in (unsigned_sum, signed_sum)


def _parse_number(field: bytes) -> int | None:
    """Return the number in a field of a header; None if it is invalid.

    It is octal text, or binary after a first byte of 0x80, as in GNU tar for sizes over 8 GiB.
    """
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None


def _decode_text(raw: bytes) -> str:
    """Return the text before the first zero byte."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


class TorchTar(Format):
    """The format `torch-tar`: read only; nothing has written it since 2017."""

    name = "torch-tar"
    by_torch = True
    refusal = Refusal(
        "tar",
        "it is a tar file of torch 0.1",
        quote("tar"),
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file is a tar with torch's members."""
        if not is_tar(probe.head):
            return False
        members = read_members(probe.require_source(), probe.limits)
        return all(name in members for name in _TORCH_MEMBERS)

    def read(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint; the bytes of its storages are not read."""
        source = probe.require_source()
        tar = _Tar(read_members(source, probe.limits), probe.limits)
        unpickled = tar.unpickled
        details = Details(
            size=source.size,
            writer="torch 0.1.1 to 0.1.9",
            **details_from_pickle(unpickled),
            storage_bytes=tar.storage_bytes,
            dead_bytes=tar.unread,
            left_behind=tar.sources.describe(),
        )
        return Checkpoint(unpickled.root, self.name, probe.path, details, sources=(source,))


class _Tar:
    """The content of the members: storages and tensors by key, and the object that uses them."""

    def __init__(self, members: dict[str, ByteRange], limits: Limits) -> None:
        """Read storages, views and tensors, then the pickle that uses them."""
        self.limits = limits
        self.sources = SourceTexts()
        """The classes that were saved with their source code."""
        self.storages: dict[int, StorageRef] = {}
        """The storages and their views, by key."""
        self.tensors: dict[int, TensorRef] = {}
        """The tensors, by key."""
        pickle = members["pickle"]
        self.file = pickle.source.name
        storages = _Member("storages", members["storages"], limits)
        self._read_storages(storages)
        self.storage_bytes = sum(ref.storage.nbytes for ref in self.storages.values())
        self._read_views(storages)
        tensors = _Member("tensors", members["tensors"], limits)
        self._read_tensors(tensors)
        self.unpickled = unpickle_outer(pickle, limits, persistent_load=self._load_persistent)
        unread_in_pickle = pickle.length - self.unpickled.end
        self.unread = storages.bytes_left + tensors.bytes_left + unread_in_pickle
        """Bytes after the content of these members."""

    def _read_storages(self, member: _Member) -> None:
        """Add the storages: each is a pickle (key, device, class), its element count, its bytes."""
        for _ in range(member.read_count()):
            match member.read_record():
                case (int() as key, str() as device, storage_class) if self._is_new_key(key):
                    pass
                case (int() as key, storage_class) if self._is_new_key(key):
                    device = "cpu"  # the first version of the tar states none
                case _:
                    content = "a storage without a key or device, or with a key that is used twice"
                    raise member.corrupt_error(content)
            dtype, untyped = parse_storage_class(storage_class, self.file)
            (numel,) = member.read_integers(1)
            nbytes = numel * BY_NAME[dtype].itemsize
            storage = Storage(str(key), member.take_range(nbytes), nbytes, device)
            self.storages[key] = StorageRef(storage, dtype, untyped)

    def _is_new_key(self, key: int) -> bool:
        """Return whether no storage has this key; a bool, which is an int too, is no key."""
        return type(key) is int and key not in self.storages

    def _read_views(self, member: _Member) -> None:
        """Add a storage for each view, which is a part of another storage.

        The views are in a pickle after the storages: (key, key of the storage, offset, elements).
        """
        unpickled = unpickle(member.data, limits=self.limits, start=member.position)
        member.position = unpickled.end
        views = unpickled.root
        for view in views if isinstance(views, list) else ():
            match view:
                case (int() as key, int() as root_key, int() as offset, int() as numel) if (
                    root_key in self.storages
                ):
                    self.storages[key] = _make_view(self.storages[root_key], key, offset, numel)
                case _:
                    raise CorruptFile("the view of a storage has an unknown form")

    def _read_tensors(self, member: _Member) -> None:
        """Add the tensors: each is a pickle (key, key of the storage, class), then its layout."""
        for _ in range(member.read_count()):
            record = member.read_record()
            match record:
                case (int() as key, int() as storage_key, _) if storage_key in self.storages:
                    self.tensors[key] = self._read_layout(member, self.storages[storage_key])
                case _:
                    raise member.corrupt_error(
                        "a tensor without a key, or with a storage that is missing"
                    )

    def _read_layout(self, member: _Member, ref: StorageRef) -> TensorRef:
        """Return the next tensor of the member, over the storage `ref`.

        It has the number of dimensions, the sizes, the strides, and the offset.
        """
        dimensions = member.read_short_integer()
        if not 0 <= dimensions <= self.limits.max_dimensions:
            raise member.corrupt_error(f"a tensor with {dimensions:,} dimensions")
        shape, stride = member.read_integers(dimensions), member.read_integers(dimensions)
        (offset,) = member.read_integers(1)
        return TensorRef(ref.dtype, shape, stride, offset, ref.storage, ref.storage.device)

    def _load_persistent(self, pid: Any) -> Any:
        """Return the class, tensor or storage of a persistent id.

        A class comes with its source code; a tensor or storage is a decimal number, its key.
        """
        match pid:
            case (cls, _, source_code):
                return self.sources.remember_class(cls, source_code)
            # Python refuses to parse very long numbers; the keys of torch are addresses.
            case str() | int() if str(pid).isdecimal() and len(str(pid)) < 30:
                key = int(pid)
                if key in self.tensors:
                    return self.tensors[key]
                if key in self.storages:
                    return self.storages[key]
        raise CorruptFile(
            f"the pickle uses {pid!r:.80}, which is neither a tensor nor a storage of the tar"
        )


def _make_view(root: StorageRef, key: int, offset: int, numel: int) -> StorageRef:
    """Return a view of `numel` elements of the storage `root`, as a storage of its own."""
    itemsize = BY_NAME[root.dtype].itemsize
    nbytes, data = numel * itemsize, root.storage.data
    with add_error_context(None, f"view {key} of storage {root.storage.key}"):
        part = None if data is None else data.slice(offset * itemsize, nbytes)
    storage = Storage(str(key), part, nbytes, root.storage.device)
    return StorageRef(storage, root.dtype, root.untyped)


@dataclass
class _Member:
    """A member that is read from front to back: small pickles and binary numbers in turn."""

    name: str
    data: ByteRange
    limits: Limits
    position: int = 0

    @property
    def bytes_left(self) -> int:
        """Bytes that have not been read."""
        return self.data.length - self.position

    def read_count(self) -> int:
        """Return the number of entries that follow; each takes more than a byte."""
        number = self.read_record()
        if type(number) is not int or not 0 <= number <= self.data.length:
            raise self.corrupt_error(f"{number!r:.40} as a number of entries")
        return number

    def read_record(self) -> Any:
        """Return the small pickle at the current position."""
        unpickled = unpickle_record(self.data, self.position, self.limits)
        self.position = unpickled.end
        return unpickled.root

    def read_integers(self, count: int) -> tuple[int, ...]:
        """Return `read_count` integers of eight bytes."""
        raw = self.take_range(count * COUNT_STRUCT.size).read()
        return struct.unpack(f"<{count}q", raw)

    def read_short_integer(self) -> int:
        """Return the integer in the first four of eight bytes; the others are not used by torch."""
        return int.from_bytes(self.take_range(8).read()[:4], "little", signed=True)

    def take_range(self, length: int) -> ByteRange:
        """Return the next `length` bytes."""
        with add_error_context(self.data.source.name, f"member {self.name!r}"):
            content = self.data.slice(self.position, length)
        self.position += length
        return content

    def corrupt_error(self, content: str) -> CorruptFile:
        """Return the error for invalid content."""
        return CorruptFile(f"member {self.name!r} has {content} before byte {self.position:,}")


TORCH_TAR = TorchTar()
