"""A model built where nothing is allocated, as far as that one says what the real one would."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import memory_of
from ckptool.tensors import require_torch

if TYPE_CHECKING:
    import torch

__all__ = ["on_meta"]


def on_meta(make: Callable[[], Any]) -> Any:
    """What is made on the meta device; None where that does not work, for whatever reason.

    None, too, of a model whose tensors look at some of each other's memory: whether what they are
    given agrees can be seen only where it lies somewhere.

    Raises:
        TorchMissing: torch is not installed.
    """
    require_torch()
    import torch

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are copied to nowhere
            made = make()
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever the caller's code raises, it is its own
        return None
    return None if isinstance(made, torch.nn.Module) and _overlaps(made) else made


def _overlaps(model: torch.nn.Module) -> bool:
    """Whether some storage is seen in several ways."""
    places = {*map(memory_of, chain(model.parameters(), model.buffers()))} - {None}
    return len({place.storage for place in places if place is not None}) < len(places)
