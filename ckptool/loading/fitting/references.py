"""What names are to fit: a reference file by its header alone, a model, a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import NotFound
from ckptool.loading.fitting.likes import target_like
from ckptool.loading.fitting.models import Target
from ckptool.loading.load import opened
from ckptool.matching import slots_of
from ckptool.statedict import model_state_dict

if TYPE_CHECKING:
    import torch

__all__ = ["reference"]


def reference(
    like: str | os.PathLike[str] | Checkpoint | torch.nn.Module | Mapping[str, Any],
    *,
    key: Any = None,
) -> Target:
    """What `like` wants, as `likes.target_like`; of a file without torch.

    `key` is the state dict that is meant, where there are several.

    Raises:
        UnreadableFile: the file cannot be opened as a checkpoint.
        AmbiguousName, NotFound: it has several state dicts and no `key`, or none.
        TorchMissing: it is no file, and torch is not installed.
        UsageError: it is none of these.
    """
    if isinstance(like, (str, os.PathLike, Checkpoint)):
        return _of_file(like, key)
    return target_like(like, key=key)


def _of_file(like: str | os.PathLike[str] | Checkpoint, key: Any) -> Target:
    with opened(like) as checkpoint:
        try:
            section = model_state_dict(checkpoint, key)
        except NotFound as error:
            told = f"the reference: {error.message}"
            remedy = error.remedy and error.remedy.with_names({"key": "like_key"})
            raise type(error)(told, file=error.file, hint=remedy or error.hint) from error
        held = getattr(section.node, "metadata", None)
        metadata = held if isinstance(held, dict) else None
        return Target(checkpoint.path, slots_of(section), metadata=metadata)
