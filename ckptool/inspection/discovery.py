"""The checkpoints in a folder and its subfolders.

A checkpoint is recognized by its content, or by a name that only checkpoints have. Any file can
have the extension `.bin` or `.pkl`. If it is damaged, it is found only if its full name is that of
a checkpoint, or if its content is that of a failed save or download.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from os.path import islink

from ckptool.errors import CheckpointError
from ckptool.files import FileSource
from ckptool.formats import find_candidate_formats
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Probe
from ckptool.formats.distributed.dcp import DCP
from ckptool.formats.distributed.dcp_safetensors import DCP_SAFETENSORS, is_part_file
from ckptool.formats.distributed.ranks import FSDP_RANKS, is_model_rank_file
from ckptool.formats.distributed.zero import is_step, is_step_file
from ckptool.formats.foreign.tensorflow import is_index
from ckptool.formats.identify import looks_like_checkpoint
from ckptool.formats.sharded import read_shard_names
from ckptool.formats.torch_tar import BLOCK as TAR_BLOCK, is_tar
from ckptool.limits import Limits

_SHARD_INDEX_NAME = re.compile(r".+\.index(?:\.[^.]+)?\.json", re.IGNORECASE)

_CHECKPOINT_NAMES = re.compile(
    r".+\.(?:pth|pt|pth\.tar|ckpt|safetensors|pt2|ptl|(?:safetensors|bin|pth?)\.index(?:\.[^.]+)?\.json)"
    # written by transformers, diffusers, peft and accelerate
    r"|(?:pytorch_model|pytorch_lora_weights|diffusion_pytorch_model|adapter_model|training_args"
    r"|optimizer|scheduler)(?:[-_.][^-_.]+)*\.bin"
    r"|(?:random_states|rng_state)(?:[-_.][^-_.]+)*\.(?:bin|pkl)",
    re.IGNORECASE,
)
"""Names that only checkpoints have: reported even if the content is unrecognizable."""
_AMBIGUOUS_NAMES = re.compile(r".+\.(?:bin|pkl|pickle)", re.IGNORECASE)
_LIKELY_WORD = re.compile(
    r"(?:^|[^a-z])(?:model|net|weights?|params?|state|states|optim|optimizer|scheduler|lora|adapter"
    r"|diffusion|unet|vae|ema|rng|checkpoint|ckpt|epoch|step|iter|best|last|latest|final)s?"
    r"(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in names of likely checkpoints."""
_OTHER_NAMES = re.compile(r"token|vocab|spiece|sentencepiece|ggml|gguf|openvino", re.IGNORECASE)

_LFS_POINTER = b"version https://git-lfs"
_HTML_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<!doctype html|<html|<\?xml)", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_HEAD_BYTES, _MAX_TEXT_BYTES = 4096, 64 << 10

_Identity = tuple[int, int]
"""Device and inode."""


def find_checkpoints(folder: str, limits: Limits) -> list[str]:
    """Return the checkpoints in a folder and its subfolders, sorted; shards by their index.

    Names that begin with a dot are skipped. A file with several names is returned once, by a
    checkpoint name if possible, and not by a link. Links are followed, each folder is entered once.
    """
    path_by_identity: dict[_Identity, str] = {}
    shard_identities: set[_Identity] = set()
    certain_paths = []  # folder checkpoints, and entries that cannot be read
    for path, identity in _walk_entries(folder, limits):
        if identity is None:
            certain_paths.append(path)
            continue
        if _SHARD_INDEX_NAME.fullmatch(path):
            for name in read_shard_names(path):
                with suppress(OSError):
                    shard_identities.add(_read_identity(os.path.join(os.path.dirname(path), name)))
        other = path_by_identity.get(identity)
        path_by_identity[identity] = (
            path if other is None else min(other, path, key=_name_preference)
        )
    unindexed = (
        path for identity, path in path_by_identity.items() if identity not in shard_identities
    )
    return sorted((*certain_paths, *filter(_may_be_checkpoint, unindexed)))


def _name_preference(path: str) -> tuple[bool, bool, str]:
    """Return the sort key of the names of one file, the best name first."""
    return not should_be_checkpoint(path), islink(path), path


def _walk_entries(folder: str, limits: Limits) -> Iterator[tuple[str, _Identity | None]]:
    """Yield files below a folder with device and inode, and folders to open as a whole with None.

    Entries that cannot be read are yielded with None too: opening them raises the error.
    """
    entered_folders: set[_Identity] = set()
    pending, pending_links = [folder], list[str]()
    # Links come last, so that a folder is entered under its own name.
    while pending or pending_links:
        current = pending.pop() if pending else pending_links.pop()
        identity = _read_identity(current)
        if identity in entered_folders:
            continue
        entered_folders.add(identity)
        try:
            names = sorted(os.listdir(current))
        except OSError:
            yield current, None
            continue
        is_part = _make_part_test(current, limits)
        if is_part:  # the folder is a checkpoint
            yield current, None
        for path in (os.path.join(current, name) for name in names if not name.startswith(".")):
            if is_part and is_part(path):
                continue
            if os.path.isdir(path):
                (pending_links if islink(path) else pending).append(path)
            elif os.path.isfile(path):
                yield path, _read_identity(path)
            elif islink(path) and should_be_checkpoint(path):  # a link to a missing file
                yield path, None


def _read_identity(path: str) -> _Identity:
    """Return the device and inode of a file, which all its names share."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _make_part_test(folder: str, limits: Limits) -> Callable[[str], object] | None:
    """Return a test for paths that belong to a folder checkpoint; None for other folders.

    In an unzipped checkpoint, all files belong to it.
    """
    with suppress(CheckpointError), closing(Probe(folder, limits)) as probe:
        if DCP.recognize(probe):  # accelerate gives the folders in it these names
            return re.compile(r".+\.(distcp|metadata)|.*(pytorch_model_fsdp|optimizer)_0").fullmatch
        if DCP_SAFETENSORS.recognize(probe):
            return is_part_file
        if FSDP_RANKS.recognize(probe):
            return is_model_rank_file
        if is_step(probe):
            return is_step_file
        archive = probe.compute_once(open_archive)
        # The archive may be in a subfolder; then that is the checkpoint.
        if archive.records and os.path.realpath(archive.path) == os.path.realpath(folder):
            is_unzipped = any(known.recognize(probe) for known in find_candidate_formats(probe))
            return (lambda path: True) if is_unzipped else None
    return None


def _may_be_checkpoint(path: str) -> bool:
    """Return True if the name or the first bytes are those of a checkpoint."""
    if should_be_checkpoint(path) or _SHARD_INDEX_NAME.fullmatch(path) or path.endswith(".distcp"):
        return True
    if path.endswith(".index"):
        return is_index(path)
    head, _size = _read_head(path)  # of more bytes than these checks take
    return looks_like_checkpoint(head[:16]) or is_tar(head[:TAR_BLOCK])


def _read_head(path: str) -> tuple[bytes, int]:
    """Return the first bytes of a file and its size, -1 if it cannot be read."""
    try:
        with closing(FileSource(path)) as source:
            return source.read(0, min(_HEAD_BYTES, source.size)), source.size
    except CheckpointError:
        return b"", -1


def should_be_checkpoint(path: str) -> bool:
    """Return True if a file should be a checkpoint, by its name or as the result of a failed save.

    An ambiguous name (`.bin`) needs the content of a failed save or download: no bytes, a Git LFS
    pointer or a web page. If the name has a word such as `model`, zeros, gzip and a short text
    count too. Returns False for a file with such a name that cannot be read.
    """
    name = os.path.basename(path)
    if _CHECKPOINT_NAMES.fullmatch(name):
        return True
    if not _AMBIGUOUS_NAMES.fullmatch(name):
        return False
    head, size = _read_head(path)
    if size < 0:
        return False
    if not head or head.startswith(_LFS_POINTER) or _HTML_PAGE.match(head):
        return True
    stem = name.rpartition(".")[0]
    if not _LIKELY_WORD.search(stem) or _OTHER_NAMES.search(name):
        return False
    has_only_zeros = not head.strip(b"\0")
    return has_only_zeros or head.startswith(_GZIP) or _is_short_text(head, size)


def _is_short_text(head: bytes, size: int) -> bool:
    """Return True for a short text, for example the response of a server, by its first bytes."""
    if size > _MAX_TEXT_BYTES:
        return False
    text = head.decode("utf-8", "replace")
    has_only_text = all(char.isprintable() or char.isspace() for char in text)
    # The last character may be cut off, so that it is replaced.
    return has_only_text and "\ufffd" not in text[:-1]
