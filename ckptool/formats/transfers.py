"""Signs of a failed transfer: bytes treated as text, or a restarted download."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from typing import Any

from ckptool.core.model import Opaque
from ckptool.core.modules import to_model_state
from ckptool.core.tree import walk_everything
from ckptool.errors import CorruptFile, without_query
from ckptool.files import Source
from ckptool.files.source import BLOCK
from ckptool.words import shell

_REPLACEMENT = "\ufffd"
_MIN_LINE_FEEDS = 3
"""Line feeds that all follow a carriage return: by chance 1 in 16 million files."""
_MIN_REPLACED = 8
AS_TEXT_HINT = "transfer it again in binary mode, and compare the sizes"


def text_transfer_error(source: Source) -> CorruptFile | None:
    """Return the error for a binary file that was transferred as text; None for any other file.

    A text mode adds carriage returns, or replaces bytes that are not UTF-8. A real text has no zero
    bytes. The result is certain only for a file that does not open.
    """
    block = source.read(0, min(source.size, BLOCK))
    if b"\0" not in block:
        return None
    line_feeds = block.count(b"\n")
    if line_feeds >= _MIN_LINE_FEEDS and line_feeds == block.count(b"\r\n"):
        evidence = f"each of its {line_feeds:,} line feeds follows a carriage return"
    else:
        try:  # a block may end within a character
            text = getincrementaldecoder("utf-8")().decode(block)
        except UnicodeDecodeError:
            return None
        replaced = text.count(_REPLACEMENT)
        if replaced < _MIN_REPLACED:
            return None
        evidence = f"{replaced:,} characters are U+FFFD (ef bf bd), which replaced other bytes"
    return CorruptFile(f"the file was transferred as text: {evidence}", hint=AS_TEXT_HINT)


def salvage_command(file: str, root: Any = None) -> str:
    """Return the command that saves the intact tensors of a file under another name.

    `root` is the tree in it, if it is known: a pickled model becomes a state dict, and other
    objects become data, so that torch loads the result.
    """
    from ckptool.symbolic.encoder import find_blockers  # only a damaged file needs it

    # The tensors of a file at an address are saved in the current folder.
    path = os.path.basename(without_query(file)) if "://" in file else file
    stem, extension = os.path.splitext(path)
    target = f"{stem}.salvaged{extension}"
    objects = [node for node in walk_everything(root) if isinstance(node, Opaque)]
    option = ""
    if any(to_model_state(node) is not None for node in objects):
        option = " --model-only"
    elif find_blockers(root):
        option = " --plain"
    return f"ckptool convert --salvage {shell(file)} {shell(target)}{option}"


def find_last_copy(source: Source, head: bytes) -> int:
    """Return the offset of the last occurrence of `head`, the beginning of the file."""
    last = 0
    overlap = len(head) - 1  # an occurrence may begin in one block and end in the next
    for start in range(0, source.size, BLOCK):
        index = source.read(start, min(BLOCK + overlap, source.size - start)).rfind(head)
        if index >= 0:
            last = start + index
    return last
