"""Who wrote a file, where the model's own class can read it: `from_pretrained`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptool.loading.fitting.models import innermost
from ckptool.loading.fitting.states import State
from ckptool.matching import Match

if TYPE_CHECKING:
    import torch

__all__ = ["with_maker"]

_CONFIG = "config.json"
"""What `save_pretrained` of transformers, diffusers and the Hub's mixin puts beside the tensors."""


def with_maker(match: Match, state: State, model: torch.nn.Module | None) -> Match:
    """The match, with what reads the file of `state` as those do who wrote it.

    Names that are left on both sides may be what a class makes others of when it loads itself.
    """
    report = match.report
    if model is None or match.again is None or not (report.missing_keys and report.unexpected_keys):
        return match
    kind = type(innermost(model))
    folder = state.folder or os.path.dirname(state.file) or "."
    if not state.file or not callable(getattr(kind, "from_pretrained", None)):
        return match
    if not os.path.isfile(os.path.join(folder, _CONFIG)):
        return match
    maker = f"{kind.__name__}.from_pretrained({folder!r}) converts what its save_pretrained wrote"
    return match._replace(again=match.again._replace(maker=maker))
