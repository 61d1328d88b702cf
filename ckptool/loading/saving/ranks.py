"""The processes of a distributed run: one writes, all wait, and a failure is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptool.errors import CheckpointError, WriteError

__all__ = ["Ranks", "gathered"]

_Result = TypeVar("_Result")


class Ranks:
    """All processes of the default group of `torch.distributed`; this one, where there is none.

    Every process makes the same calls in the same order.
    """

    def __init__(self) -> None:
        """Look at what has been initialised."""
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        self._count = dist.get_world_size() if running else 1
        self._own = dist.get_rank() if running else 0

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes."""
        return self._own == 0

    def each(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives in this process, once it has ended well in all of them.

        Raises:
            WriteError: it failed in another one.
        """
        if self._count == 1:
            return work()
        try:
            result = work()
        except BaseException as error:
            self._told(_for_others(error, self._own))
            raise
        for failure in self._told(None):
            if failure is not None:
                raise failure
        return result

    def first(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives in the process that writes, handed to all of them.

        Raises:
            WriteError: it failed there; an error of ckptool's own is raised as it is.
        """
        if self._count == 1:
            return work()
        if self.writes:
            try:
                result = work()
            except BaseException as error:
                self._heard((None, _for_others(error, 0)))
                raise
            self._heard((result, None))
            return result
        received, failure = self._heard(None)
        if failure is not None:
            raise failure
        done: _Result = received
        return done

    def _told(self, failure: CheckpointError | None) -> list[CheckpointError | None]:
        """The failures of all processes."""
        return gathered(failure)

    def _heard(self, outcome: Any) -> Any:
        """The outcome of the process that writes."""
        import torch.distributed as dist

        box = [outcome]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def gathered(own: _Result, group: Any = None) -> list[_Result]:
    """What each process of a group gives; None: of the default group. All of them call it."""
    import torch.distributed as dist

    given = [own] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    return given


def _for_others(error: BaseException, rank: int) -> CheckpointError:
    """An error as the other processes raise it: one that they can be sent."""
    if isinstance(error, CheckpointError):
        return error
    return WriteError(f"rank {rank} failed: {type(error).__name__}: {error}")
