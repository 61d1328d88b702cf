"""The checkpoints in a folder: by their content, or by a name that only checkpoints have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

from ckptool.errors import CheckpointError
from ckptool.files import FileSource
from ckptool.formats import candidates
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import looks_like_checkpoint
from ckptool.formats.shard_index import shards_named_by
from ckptool.formats.tar_members import BLOCK, is_tar
from ckptool.limits import Limits

__all__ = ["checkpoints_in", "says_what_it_is"]

_NAMED_SO = re.compile(
    r".+\.(?:pth|pt|pth\.tar|ckpt|safetensors|pt2|ptl|(?:safetensors|bin|pth?)\.index(?:\.[^.]+)?\.json)",
    re.IGNORECASE,
)
"""Names that say what the file should be: damaged beyond recognition, it is told of."""
_INDEX = re.compile(r".+\.index(?:\.[^.]+)?\.json", re.IGNORECASE)

_Identity = tuple[int, int]


def checkpoints_in(folder: str, limits: Limits) -> list[str]:
    """The checkpoints in a folder and the folders in it, sorted by name; shards by their index.

    What begins with a dot is passed by. A file that has several names is given once, under one
    that says what it is. Links are followed, each folder is entered once.
    """
    files: dict[_Identity, str] = {}
    shards: set[_Identity] = set()
    whole = []
    for path, identity in _entries(folder, limits):
        if identity is None:
            whole.append(path)
            continue
        if _INDEX.fullmatch(path):
            shards |= _identities(os.path.dirname(path), shards_named_by(path))
        if identity not in files or says_what_it_is(path):
            files[identity] = path
    single = [
        path for identity, path in files.items() if identity not in shards and _may_be_one(path)
    ]
    return sorted((*whole, *single))


def says_what_it_is(path: str) -> bool:
    """Whether the name is one that only checkpoints have."""
    return _NAMED_SO.fullmatch(path) is not None


def _entries(folder: str, limits: Limits) -> Iterator[tuple[str, _Identity | None]]:
    """Files below a folder with what the system knows them by; None for what stands for itself.

    That is an unzipped checkpoint, and what cannot be looked at: whoever opens it says why.
    """
    entered: set[_Identity] = set()
    todo = [folder]
    while todo:
        here = todo.pop()
        identity = _identity(here)
        if identity in entered:
            continue
        entered.add(identity)
        try:
            names = sorted(os.listdir(here))
        except OSError:
            yield here, None
            continue
        if _is_unzipped(here, limits):
            yield here, None
            continue
        for path in (os.path.join(here, name) for name in names if not name.startswith(".")):
            if os.path.isdir(path):
                todo.append(path)
            elif os.path.isfile(path):
                yield path, _identity(path)
            elif os.path.islink(path) and says_what_it_is(path):
                yield path, None


def _identity(path: str) -> _Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_unzipped(folder: str, limits: Limits) -> bool:
    """Whether the folder itself holds the records of one checkpoint."""
    try:
        with closing(Probe(folder, limits)) as probe:
            archive = probe.archive
            if archive is None or os.path.realpath(archive.path) != os.path.realpath(folder):
                return False
            return any(known.recognise(probe) for known in candidates(probe))
    except CheckpointError:
        return False


def _identities(folder: str, names: Iterable[str]) -> set[_Identity]:
    """What the system knows the files of these names by, as far as they are there."""
    found = set()
    for name in names:
        with suppress(OSError):
            found.add(_identity(os.path.join(folder, name)))
    return found


def _may_be_one(path: str) -> bool:
    """Whether the name or the first bytes speak for it."""
    if says_what_it_is(path) or _INDEX.fullmatch(path):
        return True
    try:
        with closing(FileSource(path)) as source:
            head = source.read(0, min(BLOCK, source.size))
    except CheckpointError:
        return False
    return looks_like_checkpoint(head[:16]) or is_tar(head)
