"""Names that say what a file should be, and what a failed save or download leaves under others.

`.bin` and `.pkl` are names that anything may have: what is damaged beyond recognition there is told
of where the whole name is one of a checkpoint's parts, or where the content is the remains of one.
"""

from __future__ import annotations

import os
import re
from contextlib import closing

from ckptool.errors import CheckpointError
from ckptool.files import FileSource

__all__ = ["should_be_one"]

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
