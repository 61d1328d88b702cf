"""Work on a long run divided among threads, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

__all__ = ["Told", "Worker", "in_turns"]

Told = Callable[[int], None]
"""Is told how many more bytes of one side are done, by the thread that asked for the work."""
Worker = Callable[[int, int], bool]
"""Does what lies from the one position up to the other; False: the rest need not be done."""


def in_turns(length: int, step: int, workers: Sequence[Worker], told: Told | None = None) -> bool:
    """Have all positions below `length` worked on, and `told` of them; whether no worker said no.

    Each worker has a thread, the first the caller's, and takes the next step when it is done with
    its last: all are busy until the end, and a file is read nearly from front to back. An error in
    one stops all of them.
    """
    steps = _Steps(length, step)
    if len(workers) == 1 or length <= step:
        _work(workers[0], steps, told)
        return not steps.stopped
    from concurrent.futures import ThreadPoolExecutor  # brings logging: milliseconds of every start

    with ThreadPoolExecutor(len(workers) - 1) as pool:
        others = [pool.submit(_work, worker, steps) for worker in workers[1:]]
        _work(workers[0], steps, told)
    for other in others:
        other.result()
    steps.tell(told)
    return not steps.stopped


class _Steps:
    """The steps that nobody has taken yet."""

    def __init__(self, length: int, step: int) -> None:
        self.stopped = False
        self._length = length
        self._step = step
        self._position = 0
        """Where the next step begins."""
        self._told = 0
        self._lock = Lock()

    def take(self) -> tuple[int, int] | None:
        """The next step, from and to; None: there is no more to do."""
        with self._lock:
            start = self._position
            if self.stopped or start >= self._length:
                return None
            self._position = min(start + self._step, self._length)
            return start, self._position

    def tell(self, told: Told | None) -> None:
        """Tell of what was taken since the last time."""
        if told is not None and not self.stopped and self._position > self._told:
            told(self._position - self._told)
            self._told = self._position


def _work(worker: Worker, steps: _Steps, told: Told | None = None) -> None:
    """Take steps as long as there are some."""
    finished = False
    try:
        while step := steps.take():
            if not worker(*step):
                return
            steps.tell(told)
        finished = True
    finally:
        steps.stopped = steps.stopped or not finished
