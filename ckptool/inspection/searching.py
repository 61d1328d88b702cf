"""The checkpoints in a folder: by their content, or by a name that only checkpoints have.

`.bin` and `.pkl` are names that any file may have. A damaged file of such a name is reported if its
whole name is a checkpoint's, or if its content is what a failed save or download leaves behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from os.path import islink

from ckptool.errors import CheckpointError
from ckptool.files import FileSource
from ckptool.formats import candidates
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Probe
from ckptool.formats.dcp import DCP
from ckptool.formats.dcp_safetensors import DCP_SAFETENSORS, is_part_file
from ckptool.formats.identify import looks_like_checkpoint
from ckptool.formats.ranks import FSDP_RANKS, of_model
from ckptool.formats.sharded import shards_named_by
from ckptool.formats.tensorflow import is_index
from ckptool.formats.torch_tar import BLOCK, is_tar
from ckptool.formats.zero import is_part, is_step
from ckptool.limits import Limits

__all__ = ["checkpoints_in", "should_be_one"]

_INDEX = re.compile(r".+\.index(?:\.[^.]+)?\.json", re.IGNORECASE)

_NAMED_SO = re.compile(
    r".+\.(?:pth|pt|pth\.tar|ckpt|safetensors|pt2|ptl|(?:safetensors|bin|pth?)\.index(?:\.[^.]+)?\.json)"
    # what transformers, diffusers, peft and accelerate write
    r"|(?:pytorch_model|pytorch_lora_weights|diffusion_pytorch_model|adapter_model|training_args"
    r"|optimizer|scheduler)(?:[-_.][^-_.]+)*\.bin"
    r"|(?:random_states|rng_state)(?:[-_.][^-_.]+)*\.(?:bin|pkl)",
    re.IGNORECASE,
)
"""Names that only checkpoints have: damaged beyond recognition, they are told of."""
_ANYTHING = re.compile(r".+\.(?:bin|pkl|pickle)", re.IGNORECASE)
_LIKELY = re.compile(
    r"(?:^|[^a-z])(?:model|net|weights?|params?|state|states|optim|optimizer|scheduler|lora|adapter"
    r"|diffusion|unet|vae|ema|rng|checkpoint|ckpt|epoch|step|iter|best|last|latest|final)s?"
    r"(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in names that are likely a checkpoint's."""
_OTHERS = re.compile(r"token|vocab|spiece|sentencepiece|ggml|gguf|openvino", re.IGNORECASE)

_POINTER = b"version https://git-lfs"
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<!doctype html|<html|<\?xml)", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_HEAD, _MOST_TEXT = 4096, 64 << 10

_Identity = tuple[int, int]


def checkpoints_in(folder: str, limits: Limits) -> list[str]:
    """Return the checkpoints in a folder and its subfolders, sorted; shards by their index.

    Names that begin with a dot are skipped. A file with several names is returned once: by a
    checkpoint's name, and by its own rather than a link's. Links are followed, each folder is
    entered once.
    """
    files: dict[_Identity, str] = {}
    shards: set[_Identity] = set()
    whole = []
    for path, identity in _entries(folder, limits):
        if identity is None:
            whole.append(path)
            continue
        if _INDEX.fullmatch(path):
            for name in shards_named_by(path):
                with suppress(OSError):
                    shards.add(_identity(os.path.join(os.path.dirname(path), name)))
        known = files.get(identity)
        files[identity] = path if known is None else min(known, path, key=_worth)
    single = (path for identity, path in files.items() if identity not in shards)
    return sorted((*whole, *filter(_may_be_one, single)))


def _worth(path: str) -> tuple[bool, bool, str]:
    """Return the sort key of a file's names: the best one first."""
    return not should_be_one(path), islink(path), path


def _entries(folder: str, limits: Limits) -> Iterator[tuple[str, _Identity | None]]:
    """Yield files below a folder with device and inode, and folders to open as a whole with None.

    None also stands for what cannot be looked at: whoever opens it says why.
    """
    entered: set[_Identity] = set()
    todo, linked = [folder], list[str]()
    while todo or linked:  # first where folders are, then where links to them are
        here = todo.pop() if todo else linked.pop()
        identity = _identity(here)
        if identity in entered:
            continue
        entered.add(identity)
        try:
            names = sorted(os.listdir(here))
        except OSError:
            yield here, None
            continue
        is_part = _part_of(here, limits)
        if is_part:
            yield here, None
        for path in (os.path.join(here, name) for name in names if not name.startswith(".")):
            if is_part and is_part(path):
                continue
            if os.path.isdir(path):
                (linked if islink(path) else todo).append(path)
            elif os.path.isfile(path):
                yield path, _identity(path)
            elif islink(path) and should_be_one(path):
                yield path, None


def _identity(path: str) -> _Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _part_of(folder: str, limits: Limits) -> Callable[[str], object] | None:
    """Return the test for a part of a folder that is one checkpoint; None for another folder."""
    with suppress(CheckpointError), closing(Probe(folder, limits)) as probe:
        if DCP.recognise(probe):
            return re.compile(r".+\.(distcp|metadata)|.*(pytorch_model_fsdp|optimizer)_0").fullmatch
        if DCP_SAFETENSORS.recognise(probe):
            return is_part_file
        if FSDP_RANKS.recognise(probe):
            return of_model
        if is_step(probe):
            return is_part
        archive = probe.ask(open_archive)
        if archive is not None and os.path.realpath(archive.path) == os.path.realpath(folder):
            is_unzipped = any(known.recognise(probe) for known in candidates(probe))
            return (lambda path: True) if is_unzipped else None
    return None


def _may_be_one(path: str) -> bool:
    """Return True if the name or the first bytes are a checkpoint's."""
    if should_be_one(path) or _INDEX.fullmatch(path) or path.endswith(".distcp"):
        return True
    if path.endswith(".index"):
        return is_index(path)
    try:
        with closing(FileSource(path)) as source:
            head = source.read(0, min(BLOCK, source.size))
    except CheckpointError:
        return False
    return looks_like_checkpoint(head[:16]) or is_tar(head)


def should_be_one(path: str) -> bool:
    """Return True if a file should be a checkpoint: by its name, or as the rest of a failed save.

    False for a file that cannot be read.
    """
    name = os.path.basename(path)
    if _NAMED_SO.fullmatch(name):
        return True
    if not _ANYTHING.fullmatch(name):
        return False
    try:
        with closing(FileSource(path)) as source:
            head, size = source.read(0, min(_HEAD, source.size)), source.size
    except CheckpointError:
        return False
    if not head or head.startswith(_POINTER) or _PAGE.match(head):
        return True
    likely = _LIKELY.search(name.rpartition(".")[0]) and not _OTHERS.search(name)
    return bool(likely) and (
        not head.strip(b"\0") or head.startswith(_GZIP) or _is_note(head, size)
    )


def _is_note(head: bytes, size: int) -> bool:
    """Return True for a short text: a server's answer in the place of the file."""
    if size > _MOST_TEXT:
        return False
    text = head.decode("utf-8", "replace")
    return all(char.isprintable() or char.isspace() for char in text) and "\ufffd" not in text[:-1]
