"""What names are to fit, however the caller gives it: a model, a state dict, shapes, a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import NotFound, UsageError
from ckptool.loading.fitting.models import Target, target_of
from ckptool.loading.fitting.states import Source, stated
from ckptool.loading.live.slots import live_slots
from ckptool.matching import EXTRA, Slot, Slots
from ckptool.statedict import is_extra_state
from ckptool.tensors import require_torch
from ckptool.words import printable

__all__ = ["target_like"]


_REFERENCE = "the reference"
"""What messages call what has no name."""
_WHOLE = frozenset((int,))
_LONGEST = 60
"""Of a value that is shown."""
_SHAPES = "of a dict of shapes all are tuples of sizes: {'weight': (4, 3)}"
_HINT = "a model, a state dict, a dict of shapes, names, or the path of a file"


def target_like(like: Any, *, key: Any = None) -> Target:
    """What `like` wants; `key` chooses the state dict where it holds several.

    A model on any device; a state dict, or a dict of name to shape; a file or an open checkpoint,
    of which the header alone is read, without torch; names alone.

    Raises:
        TorchMissing: it is no file, and torch is not installed.
        UnreadableFile: the file cannot be opened as a checkpoint.
        AmbiguousName, NotFound: it holds several state dicts and no `key`, or none.
        UsageError: it is none of these.
    """
    if isinstance(like, (str, os.PathLike, Checkpoint)):
        return _of_source(like, key)
    require_torch()
    import torch

    if isinstance(like, torch.nn.Module):
        return target_of(like)
    if isinstance(like, Mapping) and _are_shapes(like.values()):
        return Target(_REFERENCE, _of_shapes(like))
    if isinstance(like, Mapping) and key is None and _is_flat(like):
        return Target(_REFERENCE, live_slots(like), metadata=getattr(like, "_metadata", None))
    if isinstance(like, Mapping):
        return _of_source(like, key)
    if isinstance(like, Iterable) and not isinstance(like, (bytes, torch.Tensor)):
        return Target(_REFERENCE, _of_names(like))
    raise UsageError(f"names cannot be made to fit a {type(like).__name__}", hint=_HINT)


def _of_source(like: Source, key: Any) -> Target:
    """What the one state dict in it has; where there is none or several, that is told of it."""
    try:
        with stated(like, key=key) as state:
            return Target(state.file or _REFERENCE, state.slots, metadata=state.metadata)
    except NotFound as error:
        error.message = f"{_REFERENCE}: {error.message}"
        if error.remedy is not None:
            error.advise(error.remedy.with_names({"key": "like_key"}))
        elif isinstance(like, Mapping) and error.hint is None:
            odd = [name for name, value in like.items() if not _are_shapes([value])][:1]
            told = f": {printable(repr(odd[0]))} has {_kind(like[odd[0]])}" if odd else ""
            error.message = f"{_REFERENCE} is neither a state dict nor a dict of shapes{told}"
            error.advise(_SHAPES)
        raise


def _kind(value: Any) -> str:
    """`None`, `a str`, `(3, None)`."""
    if value is None or isinstance(value, (tuple, list, int, float)):
        return printable(repr(value))[:_LONGEST]
    return f"a {type(value).__name__}"


def _is_flat(like: Mapping[Any, Any]) -> bool:
    """Whether it is a state dict of tensors alone."""
    import torch

    return all(
        isinstance(value, torch.Tensor) and isinstance(name, str) for name, value in like.items()
    )


def _are_shapes(values: Iterable[Any]) -> bool:
    shapes = [value for value in values if not isinstance(value, Slot)]
    if not all(isinstance(shape, (tuple, list)) for shape in shapes):
        return False
    sizes = list(chain.from_iterable(shapes))
    return _WHOLE.issuperset(map(type, sizes)) and min(sizes, default=0) >= 0


def _of_shapes(shapes: Mapping[Any, Any]) -> Slots:
    """One slot for each shape, whichever names have it."""
    made: dict[Any, Slot] = {}
    slots: Slots = {}
    for name, shape in shapes.items():
        if isinstance(shape, Slot):
            slots[name] = shape
            continue
        if is_extra_state(name):
            slots[name] = EXTRA
            continue
        sizes = tuple(shape)
        slot = made.get(sizes)
        slots[name] = made.setdefault(sizes, Slot(sizes)) if slot is None else slot
    _check(slots)
    return slots


def _of_names(names: Iterable[Any]) -> Slots:
    names = list(names)
    _check(names)
    return dict.fromkeys(names, Slot())


def _check(names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"names are text, and one is a {type(name).__name__}", hint=_HINT)
