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
"""The largest size of an axis."""

_TOKEN = re.compile(r"\s*(?:(\.\.\.|[A-Za-z_]\w*'*|[0-9]{1,18}|[()+,]|->)|(\S))", re.ASCII)


class Product(NamedTuple):
    """Axes of which the last one changes fastest."""

    factors: tuple[Expression, ...]


class Sum(NamedTuple):
    """Parts that follow each other along an axis."""

    terms: tuple[Expression, ...]


Expression: TypeAlias = "str | Product | Sum"
"""An axis (a name, with a `'` for another one of its size; a number; `...`), or several."""
Dimensions: TypeAlias = "tuple[Expression, ...]"
"""The dimensions of one tensor."""
Shape: TypeAlias = "tuple[int, ...]"


class Misfit(Exception):
    """A shape does not fit an equation; the caller completes the sentence with the tensor."""

    def __init__(self, text: str, tensor: int | None = None, axes: Iterable[str] = ()) -> None:
        """Take the reason, the index of the tensor on the left side, and axes that need a size."""
        super().__init__(text)
        self.text, self.tensor, self.axes = text, tensor, tuple(axes)


class PartAxis(NamedTuple):
    """An axis of a part: its size, and the step between its elements in one dimension."""

    size: int
    dimension: int
    """The index of the tensor's dimension in which the axis is."""
    step: int


class Part(NamedTuple):
    """One part of a tensor: a summand of its sums, as in `(a + b) c`."""

    starts: tuple[int, ...]
    """The first index in each dimension."""
    axes: Mapping[str, PartAxis]
    """By name."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(axis.size for axis in self.axes.values())

    @property
    def is_padding(self) -> bool:
        """True if an axis marks the part as padding, by a leading underscore."""
        return any(name.startswith("_") for name in self.axes)


@dataclass(frozen=True)
class Equation:
    """A parsed equation."""

    left: tuple[Dimensions, ...]
    right: tuple[Dimensions, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Equation:
        """Parse an equation.

        Raises:
            UsageError: the text is not an equation, or a part has no partner.
        """
        parser = _Parser(text)
        left = parser.parse_side("->")
        right = parser.parse_side("")
        equation = cls(left, right, " ".join(text.split()))
        for tensor in (*left, *right):
            if tensor.count("...") > 1:
                raise parser.error("a tensor has several '...'")
            if prod(map(_count_parts, tensor)) > _MAX_PARTS:
                raise parser.error(f"a tensor has more than {_MAX_PARTS} parts")
        return equation

    def invert(self) -> Equation:
        """Return the inverse equation."""
        left, right = self.text.split("->")
        return Equation(self.right, self.left, f"{right.strip()} -> {left.strip()}")

    @property
    def axes(self) -> frozenset[str]:
        """The names of all axes."""
        return frozenset().union(*map(list_axes, (*self.left, *self.right)))

    @cached_property
    def left_axes(self) -> frozenset[str]:
        """The names of the axes on the left."""
        return frozenset().union(*map(list_axes, self.left))

    @cached_property
    def right_axes(self) -> frozenset[str]:
        """The names of the axes on the right."""
        return frozenset().union(*map(list_axes, self.right))

    def expand_ellipsis(self, dimensions: Sequence[int]) -> Equation:
        """Return the equation with axes `~0`, `~1`, ... for `...`.

        `dimensions` are the numbers of dimensions of the tensors on the left, from which the number
        of these axes follows. It is the same for all tensors.

        Raises:
            Misfit: if a tensor has another number of dimensions.
        """
        n_ellipsis: int | None = None
        for index, (tensor, count) in enumerate(zip(self.left, dimensions, strict=True)):
            n_here = count - (len(tensor) - tensor.count("..."))  # dimensions left for `...`
            if n_here < 0 or ("..." not in tensor and n_here > 0):
                expected = _format_dimensions(tensor)
                text = f"it has {count} dimensions, but the equation has {expected!r}"
                raise Misfit(text, index)
            if "..." in tensor:
                if n_ellipsis not in (None, n_here):
                    raise Misfit("'...' has a different number of dimensions here", index)
                n_ellipsis = n_here
        axes = tuple(f"~{number}" for number in range(n_ellipsis or 0))
        return Equation(
            tuple(_replace_ellipsis(tensor, axes) for tensor in self.left),
            tuple(_replace_ellipsis(tensor, axes) for tensor in self.right),
            self.text,
        )

    def solve(self, shapes: Sequence[Shape], sizes: dict[str, int]) -> None:
        """Add the sizes of all axes to the known `sizes`, by the shapes of the left side.

        A dimension with one unknown axis defines it, so the dimensions are tried again until none
        defines another.

        Raises:
            Misfit: if a shape does not divide, or nothing defines the size of an axis.
        """
        unsolved = [
            (expression, size, index)
            for index, (tensor, shape) in enumerate(zip(self.left, shapes, strict=True))
            for expression, size in zip(tensor, shape, strict=True)
        ]
        while unsolved:
            still_unsolved = [row for row in unsolved if not _solve_dimension(*row, sizes)]
            if len(still_unsolved) == len(unsolved):
                break
            unsolved = still_unsolved
        expressions = [
            *(expression for expression, _, _ in unsolved),
            *(expression for tensor in self.right for expression in tensor),
        ]
        if unknown := dict.fromkeys(
            name for expression in expressions for name in _list_unknown(expression, sizes)
        ):
            text = f"the size of {listed(unknown)} is unknown"
            first_tensor = next((index for _, _, index in unsolved), None)
            raise Misfit(text, first_tensor, unknown)

    def list_left_parts(self, sizes: Mapping[str, int]) -> list[list[Part]]:
        """Return the parts of each tensor on the left."""
        return [_list_parts(dimensions, sizes) for dimensions in self.left]

    def list_right_parts(self, sizes: Mapping[str, int]) -> list[list[Part]]:
        """Return the parts of each tensor on the right."""
        return [_list_parts(dimensions, sizes) for dimensions in self.right]

    def compute_right_shapes(self, sizes: Mapping[str, int]) -> list[Shape]:
        """Return the shape of each tensor on the right."""
        return [
            tuple(compute_size(expression, sizes) for expression in dimensions)
            for dimensions in self.right
        ]


class _Parser:
    """A recursive descent parser of equations."""

    def __init__(self, text: str) -> None:
        """Split the text into tokens."""
        self._text = text
        # A longer text has too many words, or too much space between them.
        matches = list(_TOKEN.finditer(text)) if len(text) <= 20 * _MAX_TOKENS else []
        if not matches or len(matches) > _MAX_TOKENS:
            raise self.error(f"it has no axes, or more than {_MAX_TOKENS} words")
        # Group 1 of `_TOKEN` is a word, group 2 a character that is not allowed.
        if unknown := next((match[2] for match in matches if match[2]), None):
            raise self.error(f"{printable(unknown)!r} is not allowed in an equation")
        self._tokens = [match[1] for match in reversed(matches)]
        """The remaining tokens, the next one last."""

    def error(self, reason: str) -> UsageError:
        """Return the error for a reason, with the text of the equation."""
        hint = "write axes as in (h half 2) i -> (h 2 half) i"
        return UsageError(f"the equation {printable(self._text)!r} is wrong: {reason}", hint=hint)

    def parse_side(self, end: str) -> tuple[Dimensions, ...]:
        """Parse the tensors of one side, and the token `end` after them."""
        tensors: list[Dimensions] = []
        while True:
            tensors.append(self._parse_items(("+", ")", ",", "->"), depth=0))
            stop = self._tokens.pop() if self._tokens else ""
            if stop == end:
                return tuple(tensors)
            if stop != ",":
                raise self.error(f"unexpected {stop or 'end'!r}")

    def _parse_items(self, stops: tuple[str, ...], depth: int) -> tuple[Expression, ...]:
        """Parse expressions up to one of the tokens `stops`, which stays.

        The tokens are in reverse: the next one is the last of the list.
        """
        items: list[Expression] = []
        while self._tokens and self._tokens[-1] not in stops:
            token = self._tokens.pop()
            if token == "(":
                items.append(self._parse_group(depth + 1))
            elif token == "..." and depth:
                raise self.error("'...' is inside parentheses")
            else:
                items.append(token)
        return tuple(items)

    def _parse_group(self, depth: int) -> Expression:
        """Parse the rest of a parenthesis: one expression, or a sum."""
        if depth > _MAX_DEPTH:
            raise self.error(f"parentheses are nested more than {_MAX_DEPTH} deep")
        terms: list[Expression] = []
        while True:
            items = self._parse_items(("+", ")", ",", "->"), depth)
            if not items:
                raise self.error("parentheses or a summand are empty")
            terms.append(items[0] if len(items) == 1 else Product(items))
            stop = self._tokens.pop() if self._tokens else ""
            if stop == ")":
                return terms[0] if len(terms) == 1 else Sum(tuple(terms))
            if stop != "+":
                raise self.error(f"a parenthesis is not closed before {stop or 'end'!r}")


def _children(expression: Expression) -> tuple[Expression, ...]:
    """Return the factors or terms of an expression."""
    if isinstance(expression, str):
        return ()
    return expression.terms if isinstance(expression, Sum) else expression.factors


def _count_parts(expression: Expression) -> int:
    """Count the parts of an expression: each term of a sum is a part."""
    if isinstance(expression, Sum):
        return sum(map(_count_parts, expression.terms))
    return prod(map(_count_parts, _children(expression)))


def list_axes(expressions: Iterable[Expression]) -> dict[str, None]:
    """Return the names of the axes in the expressions, in their order; `d'` counts as `d`."""
    names: dict[str, None] = {}
    for expression in expressions:
        if not isinstance(expression, str):
            names |= list_axes(_children(expression))
        elif expression != "..." and not expression.isdigit():
            names[expression.rstrip("'")] = None
    return names


def _replace_ellipsis(dimensions: Dimensions, axes: tuple[str, ...]) -> Dimensions:
    """Return the dimensions with these axes in place of `...`."""
    if "..." not in dimensions:
        return dimensions
    index = dimensions.index("...")
    return (*dimensions[:index], *axes, *dimensions[index + 1 :])


def compute_size(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Return the size of an expression of known axes; `d'` has the size of `d`."""
    if isinstance(expression, str):
        return int(expression) if expression.isdigit() else sizes[expression.rstrip("'")]
    children = [compute_size(child, sizes) for child in _children(expression)]
    return sum(children) if isinstance(expression, Sum) else prod(children)


def _list_unknown(expression: Expression, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the axes in an expression without a known size."""
    return [name for name in list_axes((expression,)) if name not in sizes]


def _solve_dimension(expression: Expression, size: int, tensor: int, sizes: dict[str, int]) -> bool:
    """Check the size of a dimension, or compute its only unknown axis, which is added to `sizes`.

    Returns False if several axes are unknown. `tensor` is the index of the tensor, for errors.

    Raises:
        Misfit: if the dimension has another size, or is not divisible.
    """
    unknown = _list_unknown(expression, sizes)
    if len(unknown) > 1:
        return False
    notation = _format_dimensions((expression,))
    if unknown:
        [name] = unknown
        # The size grows linearly with the unknown axis: low + axis * step.
        low = compute_size(expression, {**sizes, name: 0})
        step = compute_size(expression, {**sizes, name: 1}) - low
        if step <= 0 or size < low or (size - low) % step:
            raise Misfit(f"{size:,} is not divisible into {notation}", tensor)
        sizes[name] = (size - low) // step
    if (computed := compute_size(expression, sizes)) != size:
        raise Misfit(f"a dimension is {size:,}, but {notation} is {computed:,}", tensor)
    return True


def _list_parts(dimensions: Dimensions, sizes: Mapping[str, int]) -> list[Part]:
    """Return the parts of a tensor in the order of its elements.

    A part is one combination of the terms of sums, one term for each dimension.
    """
    parts_by_dimension = []
    for index, expression in enumerate(dimensions):
        parts_of_dimension, _size = _split_dimension(expression, sizes, index)
        parts_by_dimension.append(parts_of_dimension)
    parts = []
    for dimension_parts in product(*parts_by_dimension):
        axes: dict[str, PartAxis] = {}
        for _, more_axes in dimension_parts:
            _add_axes(axes, more_axes)
        parts.append(Part(tuple(start for start, _ in dimension_parts), axes))
    return parts


_DimensionPart: TypeAlias = "tuple[int, dict[str, PartAxis]]"
"""The start of a part along one dimension, and its axes by name."""


def _split_dimension(
    expression: Expression, sizes: Mapping[str, int], dimension: int
) -> tuple[list[_DimensionPart], int]:
    """Return the parts along one dimension, each with its start and axes, and their total size.

    A sum puts the parts of its terms one after the other. A product combines each part of one
    factor with each of the next, and multiplies the steps of outer factors by the inner size.
    """
    if isinstance(expression, str):
        size = compute_size(expression, sizes)
        axes = {} if expression == "1" else {expression: PartAxis(size, dimension, step=1)}
        return [(0, axes)], size
    children = [_split_dimension(child, sizes, dimension) for child in _children(expression)]
    combined_parts: list[_DimensionPart] = []
    if isinstance(expression, Sum):
        offset = 0
        for parts, size in children:
            combined_parts += [(offset + start, part_axes) for start, part_axes in parts]
            offset += size
        return combined_parts, offset
    inner_parts: list[_DimensionPart]
    inner_parts, inner_size = [(0, {})], 1  # of the factors so far, from the last
    for parts, size in reversed(children):
        combined_parts = []
        for (start, outer_axes), (inner_start, inner_axes) in product(parts, inner_parts):
            combined_axes = {
                name: axis._replace(step=axis.step * inner_size)
                for name, axis in outer_axes.items()
            }
            _add_axes(combined_axes, inner_axes)
            combined_parts.append((start * inner_size + inner_start, combined_axes))
        inner_parts, inner_size = combined_parts, inner_size * size
    return inner_parts, inner_size


def _add_axes(axes: dict[str, PartAxis], more: Mapping[str, PartAxis]) -> None:
    """Add axes to a part.

    Raises:
        Misfit: if it has one of them.
    """
    if twice := axes.keys() & more.keys():
        raise Misfit(f"axis {listed(sorted(twice))} occurs twice in one part")
    axes.update(more)


def pair_parts(
    left: Sequence[Sequence[Part]],
    right: Sequence[Sequence[Part]],
    left_key_axes: Sequence[frozenset[str]],
    right_key_axes: Sequence[frozenset[str]],
) -> Iterator[tuple[int, Part, int, Part]]:
    """Yield each part on the right with its source on the left.

    Yields the index of the tensor and the part on the left, then the index and the part on the
    right. Parts match if they have the same axes; of several, in order. Padding on the right has
    no source, and padding on the left may be unused. If a variable of a tensor's key is an axis on
    the other side, it counts as an axis of its parts (`left_key_axes`, `right_key_axes`).

    Raises:
        Misfit: if a part has no partner.
    """
    unpaired: dict[frozenset[str], list[tuple[int, Part]]] = {}  # those on the left, by their axes
    for index, parts in enumerate(left):
        for part in parts:
            unpaired.setdefault(left_key_axes[index].union(part.axes), []).append((index, part))
    for index, parts in enumerate(right):
        for part in parts:
            if part.is_padding:
                continue
            axes = right_key_axes[index].union(part.axes)
            if not unpaired.get(axes):
                raise Misfit(
                    f"a part on the right has {_describe_axes(axes)}, but no part on the left"
                )
            left_index, partner = unpaired[axes].pop(0)
            yield left_index, partner, index, part
    for axes, unused in unpaired.items():
        if any(not part.is_padding for _, part in unused):
            raise Misfit(f"a part on the left has {_describe_axes(axes)}, but no part on the right")


def _describe_axes(names: Iterable[str]) -> str:
    """Return a phrase that lists the axes."""
    shown = sorted(name for name in names if not name.startswith("~"))
    return f"the axes {listed(shown)}" if shown else "no axes"


def _format_dimensions(dimensions: Iterable[Expression]) -> str:
    """Return dimensions in the notation of equations, such as `(2 + per d) i`."""
    words = []
    for expression in dimensions:
        if isinstance(expression, Sum):
            terms = (
                _format_dimensions(_children(term))
                if isinstance(term, Product)
                else _format_dimensions((term,))
                for term in expression.terms
            )
            words.append(f"({' + '.join(terms)})")
        elif isinstance(expression, str):
            # `expand_ellipsis` has replaced `...` with axes `~0`, `~1`, and so on.
            words.append("..." if expression.startswith("~") else expression)
        else:  # a product
            words.append(f"({_format_dimensions(_children(expression))})")
    return " ".join(words)
