"""How old gradients get where several are computed at once, and when no more may be begun."""

from __future__ import annotations

__all__ = ["InFlight"]


class InFlight:
    """The steps that are handed out and not applied yet.

    The age of a gradient is the number of updates between the weights that it was computed with
    and those that it is applied to (Q. Ho et al.: More effective distributed ML via a stale
    synchronous parallel parameter server, 2013, bounds the same for whole workers).

    Attributes:
        applied: Updates so far.
    """

    def __init__(self, limit: int) -> None:
        """No gradient is to be older than `limit` when it is applied."""
        self._limit = limit
        self._began: dict[int, int] = {}
        self.applied = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._began)

    @property
    def has_room(self) -> bool:
        """Whether one more keeps the limit, in whatever order they arrive.

        At worst the oldest is the last: all the others, and the new one, are applied before it.
        """
        if not self._began:
            return True
        return self.applied - min(self._began.values()) + len(self._began) <= self._limit

    def begin(self, number: int) -> None:
        """Step `number` is handed out with the weights of now."""
        self._began[number] = self.applied

    def end(self, number: int) -> int:
        """The gradient of step `number` is applied; its age."""
        age = self.applied - self._began.pop(number)
        self.applied += 1
        return age
