"""What the parts of `identify` share: a finding, and names and sizes as a message shows them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ckptool.errors import CheckpointError, NotACheckpoint

__all__ = [
    "DCP_HINT",
    "Finding",
    "as_argument",
    "few",
    "looks_like_checkpoint",
    "quoted",
    "shell",
    "size_in_words",
    "untar",
    "unused",
]

DCP_HINT = (
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} whole.pth "
    "&& ckptool list whole.pth"
)

_LONGEST_NAME = 240
"""Bytes of a file's name; 255 are allowed, and a number may come."""
_KEPT_ENDING = 60
"""Characters at the end of a name that is too long: what it was called, and its endings."""


class Finding(NamedTuple):
    """What something is, so that "FILE is ..." is a sentence, and the step that helps."""

    what: str
    hint: str | None
    kind: type[CheckpointError] = NotACheckpoint

    def error(self, path: str) -> CheckpointError:
        """The error to raise for `path`."""
        return self.kind(f"{path} is {self.what}", file=path, hint=self.hint)


def as_argument(path: str) -> str:
    """A path that no command takes for an option."""
    return os.path.join(".", path) if path.startswith("-") else path


def shell(path: str) -> str:
    """A path as one word of a command."""
    import shlex  # here: only what is wrong with a file is told with commands

    return shlex.quote(as_argument(path))


def untar(path: str, folder: str) -> str:
    """The command that unpacks a tar, whatever it is compressed with, into a new folder.

    In the folder at hand it would write over files without asking.
    """
    return f"mkdir {shell(folder)} && tar -xf {shell(path)} -C {shell(folder)}"


def unused(path: str, taken: Collection[str] = ()) -> str:
    """The path, or one with a number before its ending, where there is nothing yet.

    A name that no file system takes loses some of its middle.
    """
    folder, name = os.path.split(path)
    while len(os.fsencode(name)) > _LONGEST_NAME:
        name = name[: -_KEPT_ENDING - 1] + name[-_KEPT_ENDING:]
    wanted = os.path.join(folder, name)
    stem, suffix = os.path.splitext(wanted)
    number, found = 1, wanted
    while os.path.lexists(found) or found in taken:
        number += 1
        found = f"{stem}-{number}{suffix}"
    return found


def quoted(name: str, most: int = 80) -> str:
    """A name out of a file: control characters escaped, quotes around it, cut if it is long."""
    return repr(name if len(name) <= most else name[: most - 3] + "...")


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    if not names:
        return "nothing"
    shown = ", ".join(quoted(name) for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def size_in_words(nbytes: int) -> str:
    """A size as people say it."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def looks_like_checkpoint(head: bytes) -> bool:
    """Whether 16 bytes may begin a checkpoint: a zip, a pickle or legacy stream, safetensors."""
    if head.startswith((b"PK\x03\x04", b"L119547037146038")):
        return True
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000
