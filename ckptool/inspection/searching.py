"""The checkpoints in a folder: by their content, or by a name that only checkpoints have.

`.bin` and `.pkl` are names that any file may have. A damaged file of such a name is reported if its
whole name is a checkpoint's, or if its content is what a failed save or download leaves behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress

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
    """The checkpoints in a folder and the folders in it, sorted by name; shards by their index.

    What begins with a dot is passed by. A file that has several names is given once: under one
    that says what it should be, of these under its own and not that of a link. Links are followed,
    each folder is entered once.
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
        known = files.get(identity)
        files[identity] = path if known is None else min(known, path, key=_worth)
    single = [
        path for identity, path in files.items() if identity not in shards and _may_be_one(path)
    ]
    return sorted((*whole, *single))


def _worth(path: str) -> tuple[bool, bool, str]:
    """The less, the better a name of a file is."""
    return not should_be_one(path), os.path.islink(path), path


def _entries(folder: str, limits: Limits) -> Iterator[tuple[str, _Identity | None]]:
    """Files below a folder with what the system knows them by; None for what stands for itself.

    That is an unzipped checkpoint, and what cannot be looked at: whoever opens it says why.
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
        if is_part or _is_unzipped(here, limits):
            yield here, None
            if not is_part:
                continue
        for path in (os.path.join(here, name) for name in names if not name.startswith(".")):
            if is_part and is_part(path):
                continue
            if os.path.isdir(path):
                (linked if os.path.islink(path) else todo).append(path)
            elif os.path.isfile(path):
                yield path, _identity(path)
            elif os.path.islink(path) and should_be_one(path):
                yield path, None


def _identity(path: str) -> _Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _part_of(folder: str, limits: Limits) -> Callable[[str], object] | None:
    """Return what tells the files of a folder that is one checkpoint; None of any other folder."""
    with suppress(CheckpointError), closing(Probe(folder, limits)) as probe:
        if DCP.recognise(probe):
            return re.compile(r".+\.(distcp|metadata)|.*(pytorch_model_fsdp|optimizer)_0").fullmatch
        if DCP_SAFETENSORS.recognise(probe):
            return is_part_file
        if FSDP_RANKS.recognise(probe):
            return of_model
        if is_step(probe):
            return is_part
    return None


def _is_unzipped(folder: str, limits: Limits) -> bool:
    """Whether the folder itself holds the records of one checkpoint."""
    try:
        with closing(Probe(folder, limits)) as probe:
            archive = probe.ask(open_archive)
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
    """Whether a file is to be a checkpoint, whatever it is: by its name, or as the remains of one.

    A file that cannot be read is none: whoever opens it says why.
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
    """Whether it is a short text: a server's answer in the place of the file."""
    if size > _MOST_TEXT:
        return False
    text = head.decode("utf-8", "replace")
    return all(char.isprintable() or char.isspace() for char in text) and "\ufffd" not in text[:-1]
