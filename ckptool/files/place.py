"""Find the place of a path: this machine or another one."""

from __future__ import annotations

import os
import re

from ckptool.files.local import Place

_HERE = Place()
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]+::)*[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is an address on another machine."""
    return _ADDRESS.match(os.fsdecode(path)) is not None


def place_of(path: str | os.PathLike[str]) -> Place:
    """Return the place of a path."""
    if not is_address(path):
        return _HERE
    from ckptool.files.remote import get_remote_place  # not needed for local files

    return get_remote_place()
