"""Processes that take each step together: all of them come to its end, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ckptool import errors
from ckptool.errors import CheckpointError, warn

__all__ = ["Ranks", "default_group", "sendable"]

_Result = TypeVar("_Result")
_Failures = dict[int, CheckpointError | str]
"""By global rank."""


class Ranks:
    """The processes of some groups, or this one alone.

    Every process makes the same calls in the same order. What is told goes through each group in
    turn: what one group has heard is told in the next.
    """

    def __init__(
        self, groups: Sequence[Any], *, error: type[CheckpointError], undone: str, call: str
    ) -> None:
        """`groups` of `torch.distributed`, None being the default one; empty: nobody is asked.

        `error` is raised where a foreign one came from another process; `undone` says of this one
        what a failure means, and `call` what all of them call.
        """
        self._groups = tuple(groups)
        self._error, self._undone, self._call = error, undone, call
        self._is_lost = False

    @property
    def own(self) -> int:
        """Which process this is, 0 where it is alone."""
        return _rank() if self._groups else 0

    @contextmanager
    def reached(self, undone: str = "") -> Iterator[None]:
        """What is done inside ends well in every process; else it raises in every one.

        `undone` says of this step what a failure in another process means here.

        Raises:
            CheckpointError: it failed in another one, which is named, or that one did not come.
        """
        if not self._groups:
            yield
            return
        try:
            yield
        except BaseException as error:
            self._last_words(error)
            raise
        undone = undone or self._undone
        for rank, failure in sorted(self._told({}, undone).items()):
            raise self._elsewhere(rank, failure, undone)

    def first(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives in rank 0, which alone does it, handed to all of them.

        Where it is done, and another process is not there to hear of it, rank 0 warns.

        Raises:
            CheckpointError: as `reached`.
        """
        done: _Result | None = None
        try:
            with self.reached():
                if self.own == 0:
                    done = work()
            return self.all(done)[0]  # type: ignore[return-value]
        except CheckpointError as error:
            if done is None or not self._is_lost:
                raise
            warn(f"{self._call} has done its work, but {error.message.partition(', as ')[2]}")
            return done

    def all(self, own: _Result) -> list[_Result]:
        """What each process gives, in the order of their ranks; of the first group.

        Raises:
            CheckpointError: another one did not come.
        """
        if not self._groups:
            return [own]
        return self._gathered(own, self._groups[0], self._undone)

    def _told(self, failures: _Failures, undone: str) -> _Failures:
        """The failures of all ranks."""
        for group in self._groups:
            for heard in self._gathered(failures, group, undone):
                failures = {**failures, **heard}
        return failures

    def _last_words(self, error: BaseException) -> None:
        """Have the others know of a failure here; who is not there to hear it changes nothing."""
        try:
            self._told({_rank(): sendable(error)}, self._undone)
        except CheckpointError:
            return

    def _gathered(self, own: _Result, group: Any, undone: str) -> list[_Result]:
        import torch.distributed as dist

        given: list[Any] = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(given, (self._call, own), group=group)
        except RuntimeError as error:  # whatever the backend says of a connection
            self._is_lost = True
            said = str(error).strip().partition("\n")[0]
            raise self._error(
                f"{undone}, as another rank did not answer rank {_rank()}: {said}",
                hint=self._hint,
            ) from error
        calls = {place: heard[0] for place, heard in enumerate(given) if _is_told(heard)}
        for place in range(len(given)):
            if calls.get(place) != self._call:
                rank = place if group is None else dist.get_global_rank(group, place)
                where = calls.get(place, "something else")
                self._is_lost = True
                raise self._error(
                    f"{undone}, as rank {rank} is in {where}, and rank {_rank()} in {self._call}",
                    hint=self._hint,
                )
        return [told for _, told in given]

    @property
    def _hint(self) -> str:
        return f"every rank of the run calls {self._call}, not one of them alone"

    def _elsewhere(self, rank: int, failure: CheckpointError | str, undone: str) -> CheckpointError:
        """The error of another process as this one raises it."""
        told = f"{undone}, as it failed in rank {rank}: {failure}"
        if isinstance(failure, str):
            return self._error(told)
        failure.message, failure.args = told, (told,)
        return failure


def _is_told(heard: Any) -> bool:
    """Whether it is what is told here: a process may be in a collective of its own."""
    return isinstance(heard, tuple) and len(heard) == 2 and isinstance(heard[0], str)


def default_group() -> list[Any]:
    """The groups that are all processes of the run; none where there is no other."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    return [None] if running and dist.get_world_size() > 1 else []


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def sendable(error: BaseException) -> CheckpointError | str:
    """An error as the other processes can have it: a foreign one may not survive the way."""
    if isinstance(error, CheckpointError) and type(error).__module__ == errors.__name__:
        return error
    return f"{type(error).__name__}: {error}".removesuffix(": ")
