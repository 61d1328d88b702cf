"""Signs of a transfer that went wrong: bytes treated as text, or a download that began again."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder

from ckptool.errors import CorruptFile, without_query
from ckptool.files import Source
from ckptool.files.source import BLOCK
from ckptool.words import shell

_REPLACED = "\ufffd"
_FEWEST = 3
"""Line feeds that are all preceded by a carriage return: by chance 1 in 16 million files."""
_FEWEST_REPLACED = 8
AS_TEXT_HINT = "transfer it again in binary mode, and compare the size"


def text_fault(source: Source) -> CorruptFile | None:
    """Return the error for a binary file that was transferred as text; None for any other file.

    The result is certain only for a file that does not open. A text has no zero bytes.
    """
    block = source.read(0, min(source.size, BLOCK))
    if b"\0" not in block:
        return None
    line_feeds = block.count(b"\n")
    if line_feeds >= _FEWEST and line_feeds == block.count(b"\r\n"):
        how = f"each of its {line_feeds:,} line feeds follows a carriage return"
    else:
        try:  # a block may end within a character
            text = getincrementaldecoder("utf-8")().decode(block)
        except UnicodeDecodeError:
            return None
        replaced = text.count(_REPLACED)
        if replaced < _FEWEST_REPLACED:
            return None
        how = f"{replaced:,} characters are U+FFFD (ef bf bd), which replaced other bytes"
    return CorruptFile(f"the file was transferred as text: {how}", hint=AS_TEXT_HINT)


def salvage_command(file: str) -> str:
    """Return the command that saves the intact tensors of a file under another name."""
    path = os.path.basename(without_query(file)) if "://" in file else file
    stem, extension = os.path.splitext(path)
    target = f"{stem}.salvaged{extension}"
    return f"ckptool convert --salvage {shell(file)} {shell(target)}"


def last_copy(source: Source, head: bytes) -> int:
    """Return where `head`, the beginning of the file, is found for the last time."""
    found, overlap = 0, len(head) - 1
    for start in range(0, source.size, BLOCK):
        at = source.read(start, min(BLOCK + overlap, source.size - start)).rfind(head)
        found = start + at if at >= 0 else found
    return found
