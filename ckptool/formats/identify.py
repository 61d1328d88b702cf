"""What a file is that no format takes: one sentence, and the step that helps.

`refuse` comes before the formats, for what one of them would mistake; `explain` after them.
"""

from __future__ import annotations

import os
import re

from ckptool.errors import CheckpointError, TruncatedFile, UnsupportedFormat
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import DCP_HINT, Finding, quoted, shell
from ckptool.words import counted

__all__ = ["explain", "refuse"]

_XSER_MARK = b"torch_xla.utils.serialization"
_SHARD_NAME = re.compile(r"__\d+_\d+\.distcp")
_LOOKED_AT = 64 << 10
_ZEROS = 1 << 20
_MAGICS = (
    b"PK\x03\x04",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    b"\x89HDF\r\n\x1a\n",
    b"GGUF",
)
"""Beginnings of files, for those that end within them."""


def refuse(probe: Probe) -> CheckpointError | None:
    """The error for a file that a format would take for something else than it is, else None.

    Such are one shard of a distributed checkpoint, which is a zip, and the main file of one of
    torch_xla's, which is an ordinary file with the tensors elsewhere.
    """
    finding = None
    if probe.source is not None:
        finding = _shard_of_dcp(probe) or _xser(probe)
    return None if finding is None else finding.error(probe.path)


def explain(probe: Probe) -> CheckpointError:
    """The error for a file or folder that no format takes; it says what it is instead."""
    # Imported here: a file that opens needs none of it, and should not wait for it.
    from ckptool.formats import (
        identify_folder,
        identify_magic,
        identify_tar,
        identify_text,
        identify_zip,
    )

    if probe.is_folder:
        return identify_folder.find(probe).error(probe.path)
    if not probe.head:
        return _EMPTY.error(probe.path)
    finding = (
        _cut_in_its_magic(probe)
        or _zeros(probe)
        or identify_zip.find(probe)
        or identify_tar.find(probe)
        or identify_magic.find(probe)
        or identify_text.find(probe)
        or _unknown(probe)
    )
    return finding.error(probe.path)


_EMPTY = Finding(
    "empty: it has no bytes at all",
    "a save or a download that failed leaves such a file: save or download it again",
    TruncatedFile,
)


def _shard_of_dcp(probe: Probe) -> Finding | None:
    folder, name = os.path.split(probe.path)
    if not _SHARD_NAME.fullmatch(name) or not os.path.exists(os.path.join(folder, ".metadata")):
        return None
    return Finding(
        "one shard of a distributed checkpoint (DCP), which is read as a whole folder",
        DCP_HINT.format(folder=shell(folder or ".")),
        UnsupportedFormat,
    )


def _xser(probe: Probe) -> Finding | None:
    source, beside = probe.source, f"{probe.path}.tensors"
    if source is None or not os.path.isdir(beside):
        return None
    if _XSER_MARK not in source.read(0, min(source.size, _LOOKED_AT)):
        return None
    return Finding(
        "the main file of a torch_xla checkpoint, whose tensors lie in the folder "
        f"{quoted(os.path.basename(beside))} beside it",
        "load it with torch_xla.utils.serialization.load and save the result with torch.save",
        UnsupportedFormat,
    )


def _cut_in_its_magic(probe: Probe) -> Finding | None:
    head = probe.head
    if not any(magic != head and magic.startswith(head) for magic in _MAGICS):
        return None
    return Finding(
        f"cut off after {counted(len(head), 'byte')}, in the very mark of its format",
        TruncatedFile.usual_hint,
        TruncatedFile,
    )


def _zeros(probe: Probe) -> Finding | None:
    if probe.source is None or probe.head.strip(b"\0"):
        return None
    size = probe.source.size
    looked = min(size, _ZEROS)
    if probe.source.read(0, looked).strip(b"\0"):
        return Finding(
            "a file that begins with a run of zero bytes, and no checkpoint does",
            "a download or copy that was broken off leaves such a file: fetch it again",
        )
    more = "" if looked == size else f" in its first {looked:,} of {size:,} bytes"
    return Finding(
        f"nothing but zero bytes{more}: space was reserved and its content never written",
        "a download, a copy or a crashed disk leaves such a file: fetch it again",
    )


def _unknown(probe: Probe) -> Finding:
    shown = probe.head[:8].hex(" ")
    return Finding(
        f"of no kind that is known; its first bytes are {shown}",
        f"file {shell(probe.path)}",
    )
