"""Views that share elements, laid out anew without the elements between them that none sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

from ckptool.transforms.places import Place

__all__ = ["Cut", "cut"]

_MOST_RUNS = 1 << 16
"""Runs of elements that are told apart, those of all places together."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The runs to keep, one behind the other, and where each place is then."""

    runs: tuple[tuple[int, int], ...]
    """Start and end in the old storage, in elements."""
    placed: dict[Place, tuple[int, tuple[int, ...]]]
    """Offset and stride, in elements from the first run on."""

    @property
    def size(self) -> int:
        """Elements in all."""
        return sum(end - start for start, end in self.runs)


def cut(places: list[Place]) -> Cut | None:
    """Every element that one of the places sees, once and in its order.

    None where a view would not be regular any more (a row that crosses a column leaves the column
    steps of two lengths), where the runs are too many, or where the types differ.
    """
    if len({place.dtype for place in places}) > 1:
        return None
    if any(step < 0 for place in places for step in place.stride):
        return None
    if sum(prod(size for size, _ in _outer(place)) for place in places) > _MOST_RUNS:
        return None
    runs = _merged(sorted(run for place in places for run in _runs(place)))
    moved = _Moved(runs)
    placed = {place: moved.stride(place) for place in places}
    if not all(moved.is_regular(place, stride) for place, stride in placed.items()):
        return None
    offsets = ((place, moved.position(place.offset), stride) for place, stride in placed.items())
    return Cut(runs, {place: (offset, stride) for place, offset, stride in offsets})


def _outer(place: Place) -> list[tuple[int, int]]:
    """Size and step of the dimensions around a run of elements."""
    return [axis for axis in place.axes if axis[1] != 1]


def _starts(place: Place) -> Iterator[tuple[int, ...]]:
    """The indices of every run along the outer dimensions."""
    return product(*(range(size) for size, _ in _outer(place)))


def _runs(place: Place) -> Iterator[tuple[int, int]]:
    """Start and end of every run of elements that lie side by side."""
    length = 1 + sum(size - 1 for size, step in place.axes if step == 1)
    steps = [step for _, step in _outer(place)]
    for index in _starts(place):
        start = place.offset + sum(at * step for at, step in zip(index, steps, strict=True))
        yield start, start + length


def _merged(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted runs, those that touch as one."""
    merged = [runs[0]]
    for start, end in runs[1:]:
        first, last = merged[-1]
        if start > last:
            merged.append((start, end))
        else:
            merged[-1] = first, max(last, end)
    return tuple(merged)


class _Moved:
    """Where elements are when only the runs are left."""

    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self._starts = [start for start, _ in runs]
        self._before = list(accumulate((end - start for start, end in runs), initial=0))

    def position(self, element: int) -> int:
        """The new position of an element of a run."""
        at = bisect_right(self._starts, element) - 1
        return self._before[at] + element - self._starts[at]

    def stride(self, place: Place) -> tuple[int, ...]:
        """The strides of a place, as its first steps tell."""
        first = self.position(place.offset)
        return tuple(
            self.position(place.offset + step) - first if size > 1 else step
            for size, step in zip(place.shape, place.stride, strict=True)
        )

    def is_regular(self, place: Place, stride: tuple[int, ...]) -> bool:
        """Whether every run of the place is where the strides say."""
        new = dict(zip(place.stride, stride, strict=True))
        if any(new[old] != step for old, step in zip(place.stride, stride, strict=True)):
            return False
        steps = [new[step] for _, step in _outer(place)]
        first = self.position(place.offset)
        return all(
            self.position(start) == first + sum(map(int.__mul__, index, steps))
            for index, (start, _) in zip(_starts(place), _runs(place), strict=True)
        )
