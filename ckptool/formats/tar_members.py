"""The members of a tar, by name, without the stdlib's: what is asked of a few headers and no more.

Headers are blocks of 512 bytes (POSIX.1-2001, "ustar Interchange Format"); pax records and GNU's
long names stand in members of their own before the one that they speak of.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.files import ByteRange, Source
from ckptool.limits import Limits

__all__ = ["BLOCK", "is_tar", "read_members"]

BLOCK = 512
"""Bytes of a header; the content of a member is filled up to a multiple of it."""
_MOST_EXTRA = 1 << 20
_FILES = (b"\0", b"0", b"7")
_LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK = b"L", b"x", b"g", b"K"


def is_tar(head: bytes) -> bool:
    """Whether the first block is a tar header, by its magic and its checksum."""
    return head[257:262] == b"ustar" and len(head) >= BLOCK and _checksum_fits(head[:BLOCK])


def read_members(source: Source, limits: Limits) -> dict[str, ByteRange]:
    """The files in the tar, by name, in its order; the last of one name counts.

    Raises:
        CorruptFile: a header that is none.
        TruncatedFile: a member that reaches behind the end of the file.
        LimitExceeded: more members than `limits` allows.
    """
    members: dict[str, ByteRange] = {}
    position, extra = 0, _Extra()
    for _ in range(limits.max_records):
        if position + BLOCK > source.size:
            return members
        header = source.read(position, BLOCK)
        if not header.strip(b"\0"):
            return members
        kind, name, size = _parse(header, position, source.name)
        size = size if extra.size is None else extra.size
        data = _content(source, position + BLOCK, size, extra.name or name)
        if kind in (_PAX, _LONG_NAME):
            extra = extra.with_record(kind, _small(data))
        elif kind not in (_PAX_GLOBAL, _LONG_LINK):
            if kind in _FILES:
                members[extra.name or name] = data
            extra = _Extra()
        position += BLOCK + -(-size // BLOCK) * BLOCK
    raise LimitExceeded(f"the tar has more than {limits.max_records:,} members", file=source.name)


class _Extra(NamedTuple):
    """What the next header cannot hold: a name longer than 100 bytes, a size beyond 8 GiB."""

    name: str = ""
    size: int | None = None

    def with_record(self, kind: bytes, raw: bytes) -> _Extra:
        """What `raw` adds: GNU's long name, or pax records: `LENGTH KEY=VALUE` and a newline."""
        if kind == _LONG_NAME:
            return _Extra(_text(raw), self.size)
        name, size = self.name, self.size
        while raw:
            length, _, _ = raw.partition(b" ")
            if not length.isdigit() or len(length) > 9 or not int(length):
                break
            record, raw = raw[: int(length)], raw[int(length) :]
            key, _, value = record[len(length) + 1 : -1].partition(b"=")
            if key == b"path":
                name = _text(value)
            elif key == b"size" and value.isdigit() and len(value) < 20:
                size = int(value)
        return _Extra(name, size)


def _parse(header: bytes, position: int, file: str) -> tuple[bytes, str, int]:
    """Type flag, name and size of a member."""
    if not _checksum_fits(header):
        raise CorruptFile(f"the tar has no member header at offset {position:,}", file=file)
    size = _number(header[124:136])
    if size is None:
        raise CorruptFile(f"the tar member at offset {position:,} has no size", file=file)
    name, prefix = _text(header[:100]), _text(header[345:500])
    whole = f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name
    return header[156:157], whole, size


def _content(source: Source, start: int, size: int, name: str) -> ByteRange:
    missing = start + size - source.size
    if missing > 0:
        raise TruncatedFile(
            f"the file ends in tar member {name!r:.80}: "
            f"{missing:,} of its {size:,} bytes are missing",
            file=source.name,
            hint="download or copy it again",
        )
    return ByteRange(source, start, size)


def _small(data: ByteRange) -> bytes:
    if data.length > _MOST_EXTRA:
        raise LimitExceeded(
            f"a tar header takes {data.length:,} bytes, more than {_MOST_EXTRA:,}",
            file=data.source.name,
        )
    return data.read()


def _checksum_fits(header: bytes) -> bool:
    """The sum of all bytes, those of the checksum itself taken as spaces."""
    wanted = _number(header[148:156])
    return wanted == sum(header[:148]) + sum(header[156:]) + 8 * ord(" ")


def _number(field: bytes) -> int | None:
    """Octal text, or base 256 where the first bit is set; None for anything else."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    text = field.strip(b"\0 ")
    if not all(byte in b"01234567" for byte in text):
        return None
    return int(text or b"0", 8)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "replace")
