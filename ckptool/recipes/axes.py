"""Equations of axes: `(g (per + 1 + 1) d) i -> (g per d) i, (g d) i, (g d) i`.

The notation is that of einops, with the `+` of einx. Each summand makes a part of its tensor. A
part on the left goes to the part on the right with the same axes, in order among equals. So an
equation moves elements and never computes any, and its inverse is the two sides exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from ckptool.errors import UsageError
from ckptool.words import listed, printable

_MAX_TOKENS = 400
_MAX_DEPTH = 8
_MAX_PARTS = 256
MAX_SIZE = 1 << 62
"""Of one axis."""

_TOKEN = re.compile(r"\s*(?:(\.\.\.|[A-Za-z_]\w*'*|[0-9]{1,18}|[()+,]|->)|(\S))", re.ASCII)


class Product(NamedTuple):
    """Axes of which the last one runs fastest."""

    factors: tuple[Expression, ...]


class Sum(NamedTuple):
    """Parts that follow each other along an axis."""

    terms: tuple[Expression, ...]


Expression: TypeAlias = "str | Product | Sum"
"""An axis (a name, with a `'` for another one of its size; a number; `...`), or several."""
Dimensions: TypeAlias = "tuple[Expression, ...]"
Shape: TypeAlias = "tuple[int, ...]"


class Misfit(Exception):
    """A shape does not fit an equation, whose sentence the one who knows the tensor completes."""

    def __init__(self, text: str, tensor: int | None = None, axes: Iterable[str] = ()) -> None:
        """Take what is wrong, with which tensor of the left side, and the axes to be given."""
        super().__init__(text)
        self.text, self.tensor, self.axes = text, tensor, tuple(axes)


class Part(NamedTuple):
    """One part of a tensor: where it starts in each dimension, and its axes."""

    starts: tuple[int, ...]
    axes: Mapping[str, tuple[int, int, int]]
    """By name: the size, the dimension, and the step in that dimension."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(size for size, _, _ in self.axes.values())

    @property
    def is_padding(self) -> bool:
        """Whether an axis says that it counts for nothing."""
        return any(name.startswith("_") for name in self.axes)


@dataclass(frozen=True)
class Equation:
    """An equation that has been read."""

    left: tuple[Dimensions, ...]
    right: tuple[Dimensions, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Equation:
        """Return the equation of a text.

        Raises:
            UsageError: the text is not an equation, or a part has no partner.
        """
        parser = _Parser(text)
        left = parser.side("->")
        right = parser.side("")
        made = cls(left, right, " ".join(text.split()))
        for one in (*left, *right):
            if one.count("...") > 1:
                raise parser.error("a tensor has several '...'")
            if prod(map(_count_parts, one)) > _MAX_PARTS:
                raise parser.error(f"a tensor has more than {_MAX_PARTS} parts")
        return made

    def reversed(self) -> Equation:
        """Return the equation that undoes this one."""
        left, right = self.text.split("->")
        return Equation(self.right, self.left, f"{right.strip()} -> {left.strip()}")

    @property
    def axes(self) -> frozenset[str]:
        """The names of all axes."""
        return frozenset().union(*map(axes_of, (*self.left, *self.right)))

    @cached_property
    def left_axes(self) -> frozenset[str]:
        """The names of the axes on the left."""
        return frozenset().union(*map(axes_of, self.left))

    @cached_property
    def right_axes(self) -> frozenset[str]:
        """The names of the axes on the right."""
        return frozenset().union(*map(axes_of, self.right))

    def spread(self, dimensions: Sequence[int]) -> Equation:
        """Return the equation with axes `~0`, `~1`, ... for `...`, by the dimensions of the left.

        Raises:
            Misfit: a tensor has another number of dimensions.
        """
        rest: int | None = None
        for at, (one, count) in enumerate(zip(self.left, dimensions, strict=True)):
            more = count - len(one) + 1
            if more < 0 or ("..." not in one and more != 1):
                text = f"it has {count} dimensions, but the equation has {_words(one)!r}"
                raise Misfit(text, at)
            if "..." in one:
                if rest not in (None, more):
                    raise Misfit("'...' has a different number of dimensions here", at)
                rest = more
        axes = tuple(f"~{number}" for number in range(rest or 0))
        return Equation(
            tuple(_spread(one, axes) for one in self.left),
            tuple(_spread(one, axes) for one in self.right),
            self.text,
        )

    def solve(self, shapes: Sequence[Shape], sizes: dict[str, int]) -> None:
        """Add the sizes of all axes to those that are known, by the shapes of the left side.

        Raises:
            Misfit: a shape does not divide, or nothing decides the size of an axis.
        """
        todo = [
            (expression, size, at)
            for at, (one, shape) in enumerate(zip(self.left, shapes, strict=True))
            for expression, size in zip(one, shape, strict=True)
        ]
        while todo:
            later = [one for one in todo if not _settle(*one, sizes)]
            if len(later) == len(todo):
                break
            todo = later
        open_axes = [*(one for one, _, _ in todo), *(one for side in self.right for one in side)]
        if free := dict.fromkeys(name for one in open_axes for name in _unknown(one, sizes)):
            text = f"the size of {listed(free)} is unknown"
            raise Misfit(text, todo[0][2] if todo else None, free)

    def left_parts(self, sizes: Mapping[str, int]) -> list[list[Part]]:
        """Return the parts of each tensor on the left."""
        return [_parts(one, sizes) for one in self.left]

    def right_parts(self, sizes: Mapping[str, int]) -> list[list[Part]]:
        """Return the parts of each tensor on the right."""
        return [_parts(one, sizes) for one in self.right]

    def right_shapes(self, sizes: Mapping[str, int]) -> list[Shape]:
        """Return the shape of each tensor on the right."""
        return [tuple(size_of(expression, sizes) for expression in one) for one in self.right]


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        found = list(_TOKEN.finditer(text)) if len(text) <= 20 * _MAX_TOKENS else []
        if not found or len(found) > _MAX_TOKENS:
            raise self.error(f"it has no axes, or more than {_MAX_TOKENS} words")
        if odd := next((one[2] for one in found if one[2]), None):
            raise self.error(f"{printable(odd)!r} is not allowed in an equation")
        self._tokens = [one[1] for one in reversed(found)]

    def error(self, what: str) -> UsageError:
        """Return the error about this equation."""
        hint = "write axes as in (h half 2) i -> (h 2 half) i"
        return UsageError(f"the equation {printable(self._text)!r} is wrong: {what}", hint=hint)

    def side(self, end: str) -> tuple[Dimensions, ...]:
        """Read the tensors of one side, and the `end` after them."""
        tensors: list[Dimensions] = []
        while True:
            tensors.append(self._items(("+", ")", ",", "->"), 0))
            stop = self._tokens.pop() if self._tokens else ""
            if stop == end:
                return tuple(tensors)
            if stop != ",":
                raise self.error(f"unexpected {stop or 'end'!r}")

    def _items(self, stops: tuple[str, ...], depth: int) -> tuple[Expression, ...]:
        items: list[Expression] = []
        while self._tokens and self._tokens[-1] not in stops:
            token = self._tokens.pop()
            if token == "(":
                items.append(self._group(depth + 1))
            elif token == "..." and depth:
                raise self.error("'...' is inside parentheses")
            else:
                items.append(token)
        return tuple(items)

    def _group(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise self.error(f"parentheses are nested more than {_MAX_DEPTH} deep")
        terms: list[Expression] = []
        while True:
            items = self._items(("+", ")", ",", "->"), depth)
            if not items:
                raise self.error("parentheses or a summand are empty")
            terms.append(items[0] if len(items) == 1 else Product(items))
            stop = self._tokens.pop() if self._tokens else ""
            if stop == ")":
                return terms[0] if len(terms) == 1 else Sum(tuple(terms))
            if stop != "+":
                raise self.error(f"a parenthesis is not closed before {stop or 'end'!r}")


def _inside(expression: Expression) -> tuple[Expression, ...]:
    return () if isinstance(expression, str) else expression[0]


def _count_parts(expression: Expression) -> int:
    if isinstance(expression, Sum):
        return sum(map(_count_parts, expression.terms))
    return prod(map(_count_parts, _inside(expression)))


def axes_of(dimensions: Iterable[Expression]) -> dict[str, None]:
    """Return the names of all axes in some dimensions, in the order in which they are written."""
    found: dict[str, None] = {}
    for one in dimensions:
        if not isinstance(one, str):
            found |= axes_of(_inside(one))
        elif one != "..." and not one.isdigit():
            found[one.rstrip("'")] = None
    return found


def _spread(dimensions: Dimensions, rest: tuple[str, ...]) -> Dimensions:
    if "..." not in dimensions:
        return dimensions
    at = dimensions.index("...")
    return (*dimensions[:at], *rest, *dimensions[at + 1 :])


def size_of(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Return the size of an expression all of whose axes are known."""
    if isinstance(expression, str):
        return int(expression) if expression.isdigit() else sizes[expression.rstrip("'")]
    every = [size_of(one, sizes) for one in _inside(expression)]
    return sum(every) if isinstance(expression, Sum) else prod(every)


def _unknown(expression: Expression, sizes: Mapping[str, int]) -> list[str]:
    return [name for name in axes_of((expression,)) if name not in sizes]


def _settle(expression: Expression, size: int, tensor: int, sizes: dict[str, int]) -> bool:
    """Compare a dimension with its axes, or find the only unknown one; False: there are several."""
    free = _unknown(expression, sizes)
    if len(free) > 1:
        return False
    words = _words((expression,))
    if free:
        [name] = free
        low = size_of(expression, {**sizes, name: 0})
        step = size_of(expression, {**sizes, name: 1}) - low
        if step <= 0 or size < low or (size - low) % step:
            raise Misfit(f"{size:,} is not divisible into {words}", tensor)
        sizes[name] = (size - low) // step
    if (found := size_of(expression, sizes)) != size:
        raise Misfit(f"a dimension is {size:,}, but {words} is {found:,}", tensor)
    return True


def _parts(dimensions: Dimensions, sizes: Mapping[str, int]) -> list[Part]:
    """Return the parts of a tensor in the order of its elements."""
    every = [_parts_of(one, sizes, at)[0] for at, one in enumerate(dimensions)]
    made = []
    for combined in product(*every):
        axes: dict[str, tuple[int, int, int]] = {}
        for _, own in combined:
            _add(axes, own)
        made.append(Part(tuple(start for start, _ in combined), axes))
    return made


_Alternative: TypeAlias = "tuple[int, dict[str, tuple[int, int, int]]]"


def _parts_of(
    expression: Expression, sizes: Mapping[str, int], dimension: int
) -> tuple[list[_Alternative], int]:
    """Return the parts along one dimension, each with its start and axes, and the size of all."""
    if isinstance(expression, str):
        size = size_of(expression, sizes)
        return [(0, {} if expression == "1" else {expression: (size, dimension, 1)})], size
    every = [_parts_of(one, sizes, dimension) for one in _inside(expression)]
    if isinstance(expression, Sum):
        made: list[_Alternative] = []
        before = 0
        for parts, size in every:
            made += [(before + start, axes) for start, axes in parts]
            before += size
        return made, before
    made, total = [(0, {})], 1
    for parts, size in reversed(every):
        outer = []
        for (start, axes), (inner_start, inner) in product(parts, made):
            combined = {name: (n, at, step * total) for name, (n, at, step) in axes.items()}
            _add(combined, inner)
            outer.append((start * total + inner_start, combined))
        made, total = outer, total * size
    return made, total


def _add(axes: dict[str, tuple[int, int, int]], more: Mapping[str, tuple[int, int, int]]) -> None:
    if twice := axes.keys() & more.keys():
        raise Misfit(f"axis {listed(sorted(twice))} occurs twice in one part")
    axes.update(more)


def pairs(
    left: Sequence[Sequence[Part]],
    right: Sequence[Sequence[Part]],
    left_names: Sequence[frozenset[str]],
    right_names: Sequence[frozenset[str]],
) -> Iterator[tuple[int, Part, int, Part]]:
    """Yield each part on the right with its partner on the left, and their tensors' positions.

    `left_names` and `right_names` are the variables of each tensor's key that are axes on the other
    side: they count as axes of its parts.

    Raises:
        Misfit: a part has no partner.
    """
    sources: dict[frozenset[str], list[tuple[int, Part]]] = {}
    for at, parts in enumerate(left):
        for part in parts:
            sources.setdefault(left_names[at].union(part.axes), []).append((at, part))
    for at, parts in enumerate(right):
        for part in parts:
            if part.is_padding:
                continue
            axes = right_names[at].union(part.axes)
            if not sources.get(axes):
                raise Misfit(f"a part on the right has {_axes(axes)}, but no part on the left")
            source, partner = sources[axes].pop(0)
            yield source, partner, at, part
    for axes, others in sources.items():
        if any(not part.is_padding for _, part in others):
            raise Misfit(f"a part on the left has {_axes(axes)}, but no part on the right")


def _axes(names: Iterable[str]) -> str:
    found = sorted(name for name in names if not name.startswith("~"))
    return f"the axes {listed(found)}" if found else "no axes"


def _words(dimensions: Iterable[Expression]) -> str:
    """Return dimensions as they are written."""
    made = []
    for one in dimensions:
        if isinstance(one, Sum):
            terms = (_words(_inside(t)) if isinstance(t, Product) else _words((t,)) for t in one[0])
            made.append(f"({' + '.join(terms)})")
        elif isinstance(one, str):
            made.append("..." if one.startswith("~") else one)
        else:
            made.append(f"({_words(_inside(one))})")
    return " ".join(made)
