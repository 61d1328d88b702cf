"""Which tensor an element of a storage belongs to, and which elements have been met already."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptool.model import TensorRef

__all__ = ["Grid", "Owners", "Piece", "Spans"]


class Spans:
    """Positions that were met, as disjoint runs in order."""

    def __init__(self) -> None:
        """None was met yet."""
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Meet the positions from `start` up to `stop`; the runs of them that are new."""
        if start >= stop:
            return []
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        fresh, at = [], start
        for known, end in zip(self._starts[low:high], self._stops[low:high], strict=True):
            if at < known:
                fresh.append((at, known))
            at = max(at, end)
        if at < stop:
            fresh.append((at, stop))
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]
        return fresh


@dataclass(frozen=True, slots=True)
class Grid:
    """The elements of a view with holes: steps and sizes, the widest step first."""

    first: int
    axes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one tensor: from `start` up to `stop`; of a view with holes those on `grid`.

    Those on a grid `before` are another tensor's.
    """

    name: str
    start: int
    stop: int
    grid: Grid | None = None
    before: tuple[Grid, ...] = ()


class Owners:
    """The tensors over one storage, each with the elements that are counted as its own.

    What several look at belongs to the first of them, and to one without holes before one with
    holes. A view whose steps overlap is taken to have all from its first element to its last.
    """

    def __init__(self, views: Iterable[tuple[str, TensorRef]]) -> None:
        """Divide a storage among `views`, all of one element type, by their names."""
        taken = Spans()
        self._dense: list[Piece] = []
        self._holed: list[tuple[str, int, int, Grid]] = []
        for name, view in views:
            start, stop, grid = _extent(view)
            if grid is None:
                self._dense.extend(Piece(name, *run) for run in taken.add(start, stop))
            else:
                self._holed.append((name, start, stop, grid))
        self._dense.sort(key=lambda piece: piece.start)
        self._starts = [piece.start for piece in self._dense]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the elements from `start` up to `stop` belongs to whom, disjoint."""
        at = start
        for piece in self._dense[max(bisect_right(self._starts, start) - 1, 0) :]:
            if piece.start >= stop:
                break
            low, high = max(piece.start, at), min(piece.stop, stop)
            if low < high:
                yield from self._between(at, low)
                yield Piece(piece.name, low, high)
                at = high
        yield from self._between(at, stop)

    def extent(self, name: str) -> tuple[int, int]:
        """The first element of a tensor's own, and the one after the last."""
        own = [(piece.start, piece.stop) for piece in self._dense if piece.name == name]
        own += [(start, stop) for holed, start, stop, _ in self._holed if holed == name]
        return min(start for start, _ in own), max(stop for _, stop in own)

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        """Elements that no tensor without holes has."""
        before: list[Grid] = []
        for name, first, last, grid in self._holed:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield Piece(name, low, high, grid, tuple(before))
                before.append(grid)


def _extent(view: TensorRef) -> tuple[int, int, Grid | None]:
    """A tensor's first element in its storage, the one after its last, and its grid, if any."""
    sizes = [size or 0 for size in view.shape]
    if 0 in sizes:
        return view.offset, view.offset, None
    pairs = zip(view.stride, sizes, strict=True)
    axes = sorted((step, size) for step, size in pairs if step > 0 and size > 1)
    span, gaps, nested = 1, False, True
    for step, size in axes:
        gaps, nested = gaps or step > span, nested and step >= span
        span += (size - 1) * step
    grid = Grid(view.offset, tuple(reversed(axes))) if gaps and nested else None
    return view.offset, view.offset + span, grid
