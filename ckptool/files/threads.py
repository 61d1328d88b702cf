"""Divide work among threads, with results in the order of the jobs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

THREADS = min(2, os.cpu_count() or 1)
"""Threads of one pass over bytes: a third would wait for memory."""
_AHEAD = 4
"""Jobs per thread that are started ahead: a terabyte has millions of jobs."""


def run_in_order(
    work: Callable[[_Job], _Result], jobs: Iterable[_Job], threads: int = THREADS
) -> Iterator[_Result]:
    """Yield the result of `work` for each job, in order, computed by some threads.

    Jobs that have not started are dropped when one raises or when the caller stops.
    """
    from concurrent.futures import ThreadPoolExecutor  # imports logging: milliseconds

    with ThreadPoolExecutor(threads) as pool:
        started: deque[Future[_Result]] = deque()
        try:
            for job in jobs:
                started.append(pool.submit(work, job))
                if len(started) > _AHEAD * threads:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
