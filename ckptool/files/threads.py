"""Work divided among threads: the results come in the order of the jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["THREADS", "in_order"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

THREADS = min(2, os.cpu_count() or 1)
"""Threads of one pass over bytes: a third has to wait for memory."""


def in_order(
    work: Callable[[_Job], _Result], jobs: Iterable[_Job], threads: int = THREADS
) -> Iterator[_Result]:
    """Yield the result of `work` for each job, in order; so many threads compute them.

    Jobs that no thread has begun are dropped when one raises, or when the caller asks for no more.
    """
    from concurrent.futures import ThreadPoolExecutor  # brings logging: milliseconds of every start

    with ThreadPoolExecutor(threads) as pool:
        try:
            yield from pool.map(work, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
