"""Rest for the garbage collector, where a million objects are made that all live."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile; around a block, or as a decorator.

    Searching a tree, or all of torch, for what is dead takes longer than what is done, and finds
    nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
