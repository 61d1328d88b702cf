"""The names of temporary files next to a file: its journal, and new content."""

from __future__ import annotations

import hashlib
import os

_NAME_BYTES = 255
"""The longest name that common file systems accept."""
_ENDING_BYTES = 40
_JOURNAL = ".ckptool-journal"
UNFINISHED = ".tmp"
"""The extension of a journal that is being written."""


def temporary_name(target: str, ending: str) -> str:
    """Return `.NAME` plus `ending` (up to 40 bytes) in the folder of `target` (links followed).

    A name that would become too long is shortened and gets a hash.
    """
    folder, name = os.path.split(target)
    encoded = os.fsencode(name)
    max_length = _NAME_BYTES - len(".") - _ENDING_BYTES
    if len(encoded) > max_length:
        hash_suffix = "-" + hashlib.sha256(encoded).hexdigest()[:12]
        name = encoded[: max_length - len(hash_suffix)].decode("utf-8", "ignore") + hash_suffix
    return os.path.join(folder, f".{name}{ending}")


def journal_path(target: str) -> str:
    """Return the path of the journal: `.NAME.ckptool-journal` next to `target` (links followed)."""
    return temporary_name(os.path.realpath(target), _JOURNAL)


def parse_journal_name(name: str) -> str | None:
    """Return the file that has the journal `name` (unless that was shortened), or None."""
    if not name.startswith(".") or not name.endswith(_JOURNAL):
        return None
    return name[1 : -len(_JOURNAL)]


def has_journal(target: str) -> bool:
    """Return True if `target` has a journal, complete or not."""
    path = journal_path(target)
    return os.path.lexists(path) or os.path.lexists(path + UNFINISHED)
