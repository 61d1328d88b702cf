"""A report as columns of numbers and short words, which the script of the page draws from.

Columns and not objects: of 100,000 tensors each key would be there 100,000 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.inspection.folding import MAX_PARTS
from ckptool.inspection.values import shape_text
from ckptool.render.text import shorten
from ckptool.words import clean

if TYPE_CHECKING:
    from ckptool.inspection.diff_result import Changed, Side
    from ckptool.inspection.report import Report, ReportedTensor
    from ckptool.tensors.comparing import Difference
    from ckptool.tensors.statistics import Histogram

__all__ = [
    "DIGITS",
    "ChangeRow",
    "Names",
    "bars",
    "change_rows",
    "columns",
    "diff_columns",
    "figure",
]

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""One digit for the height of a bar, as `histogram.js` reads it."""

_EXACT = 1 << 53  # beyond this the numbers of JavaScript have holes


def figure(value: Any) -> float | int | str | None:
    """Six digits of a number; a word where JSON has no number, None where there is none."""
    if value is None or isinstance(value, complex):
        return None
    if isinstance(value, int) and abs(value) < _EXACT:
        return int(value)
    number = float(f"{value:.6g}")
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def bars(histogram: Histogram) -> str:
    """Return the heights of the bars, a digit each; above zero if there are any elements."""
    most, steps = max(histogram.counts, default=0), len(DIGITS) - 1
    return "".join(
        DIGITS[max(1, steps * count // most)] if count else DIGITS[0] for count in histogram.counts
    )


class Names:
    """The modules that names go through, numbered; 0 is the root, parents come first.

    A label begins with what joins it to its parent, `/` between the keys of a path and `.` within
    the last of them; below the root with nothing.
    """

    def __init__(self) -> None:
        """Only the root is there."""
        self._labels = [""]
        self._parents = [0]
        self._children: dict[tuple[int, str], int] = {}
        self._modules: dict[tuple[str, ...], int] = {}

    def place(self, path: Sequence[str | int]) -> tuple[int, str]:
        """Return the module that a tensor with this path belongs to, and the label of its own.

        A name of more dots than modules nest is one label.
        """
        *outer, own = map(str, path) if path else ("",)
        if "." in own and own.count(".") <= MAX_PARTS:
            inner, _, own = own.rpartition(".")
            return self._module((*outer, inner), dotted=True), clean(f".{own}")
        return self._module(tuple(outer), dotted=False), clean(f"/{own}" if outer else own)

    def columns(self, paths: Iterable[Sequence[str | int]]) -> dict[str, Any]:
        """`label` and `module` of each path, as columns."""
        placed = [self.place(path) for path in paths]
        return {
            "label": [label for _, label in placed],
            "module": [module for module, _ in placed],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the modules so far, as columns."""
        return {"label": self._labels, "parent": self._parents}

    def _module(self, keys: tuple[str, ...], *, dotted: bool) -> int:
        """Return the module at these keys; if `dotted`, the last key has parts of its own."""
        known = (*keys, "." if dotted else "/")
        if known not in self._modules:
            module = 0
            for depth, key in enumerate(keys):
                first, *rest = key.split(".") if dotted and depth == len(keys) - 1 else (key,)
                for label in (f"/{first}" if depth else first, *(f".{part}" for part in rest)):
                    module = self._child(module, label)
            self._modules[known] = module
        return self._modules[known]

    def _child(self, module: int, label: str) -> int:
        found = self._children.setdefault((module, label), len(self._labels))
        if found == len(self._labels):
            self._labels.append(clean(label))
            self._parents.append(module)
        return found


_CHANGES = ("max_rel", "max_abs", "mean_abs", "cosine", "share")
_VALUE_WIDTH = 60


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One line of the table of changes."""

    name: str
    status: str
    what: str
    """In words: `float32 -> bfloat16`."""
    change: float | None = None
    difference: Difference | None = None


def diff_columns(report: Report) -> dict[str, Any]:
    """Return the chart and the table of changes, as columns over one tree of names."""
    names = Names()
    rows = list(change_rows(report))
    chart = names.columns([bar.name.split("/") for bar in report.chart])
    changes = names.columns([row.name.split("/") for row in rows])
    return {
        "names": names.to_dict(),
        "chart": {
            **chart,
            "status": "".join(bar.status for bar in report.chart),
            "change": [figure(bar.change) for bar in report.chart],
            "structure": report.diff is not None and report.diff.structure,
        },
        "changes": {
            **changes,
            "status": "".join(row.status for row in rows),
            "what": [clean(row.what) for row in rows],
            "change": [figure(row.change) for row in rows],
            **{
                key: [figure(getattr(row.difference, key, None)) for row in rows]
                for key in _CHANGES
            },
        },
    }


def change_rows(report: Report) -> Iterator[ChangeRow]:
    """Return every change: tensors in the order of the diff, then values."""
    diff = report.diff
    if diff is None:
        return
    changes = {bar.address: bar.change for bar in report.chart}
    for row in diff.changed:
        status = row.status if row.counts else "="
        yield ChangeRow(row.name, status, _respects(row), changes.get(row.a.name), row.difference)
    for moved in diff.renamed:
        tags = "".join(f", another {word}" for word in moved.what)
        yield ChangeRow(moved.a.name, "R", f"now {moved.b.name}{tags}")
    yield from (ChangeRow(side.name, "D", _about(side)) for side in diff.only_in_a)
    yield from (ChangeRow(side.name, "A", _about(side)) for side in diff.only_in_b)
    for row in diff.values:
        yield ChangeRow(row.name, row.status if row.counts else "=", _respects(row))


def _respects(row: Changed) -> str:
    """Return in which respects an entry differs, with the old and the new."""
    a, b = row.a, row.b
    sides: dict[str, tuple[Any, Any]] = {
        "type": (a.type, b.type),
        "kind": (a.kind, b.kind),
        "dtype": (a.dtype, b.dtype),
        "shape": (shape_text(a.shape or ()), shape_text(b.shape or ())),
        "device": (a.device, b.device),
        "requires_grad": (f"requires_grad {a.requires_grad}", b.requires_grad),
    }
    if a.sort != "tensor" or b.sort != "tensor":
        sides["value"] = (_literal(a), _literal(b))
    parts = [" -> ".join(map(str, sides[word])) if word in sides else word for word in row.what]
    return ", ".join(parts) + (f" ({row.place})" if row.place else "")


def _about(side: Side) -> str:
    if side.sort != "tensor":
        return _literal(side)
    return f"{side.dtype} {shape_text(side.shape or ())}"


def _literal(side: Side) -> str:
    if side.sort == "tensor":
        return _about(side)
    text = repr(side.value) if side.sort == "value" else str(side.value)
    return shorten(text, _VALUE_WIDTH)


_FIGURES = ("minimum", "maximum", "mean", "std", "norm", "zeros", "nan", "infinite")
_WORDS: dict[str, Callable[[ReportedTensor], str]] = {
    "dtype": lambda tensor: tensor.row.dtype,
    "shape": lambda tensor: shape_text(tensor.row.shape),
    "device": lambda tensor: tensor.row.device,
    "marks": lambda tensor: ", ".join(_marks(tensor)),
    "remarks": lambda tensor: "; ".join(tensor.remarks),
}
"""Columns of few different words: each is sent once, and a number in its place."""


def columns(report: Report) -> dict[str, Any]:
    """Return what the script of the page reads: names, tensors, their values, and what differs."""
    names = Names()
    placed = names.columns([tensor.row.path for tensor in report.tensors])
    words, coded = _coded(report.tensors)
    return {
        "names": names.to_dict(),
        "words": words,
        "tensors": {
            **placed,
            **coded,
            "bytes": [tensor.row.nbytes for tensor in report.tensors],
            "elements": [tensor.row.numel for tensor in report.tensors],
            "tie": [[i, one.tie] for i, one in enumerate(report.tensors) if one.tie is not None],
        },
        "values": _values(report.tensors) if report.measured else None,
        "diff": diff_columns(report) if report.diff is not None else None,
    }


def _marks(tensor: ReportedTensor) -> Iterable[str]:
    row = tensor.row
    if row.kind != "strided":
        yield row.kind
    if row.requires_grad:
        yield "grad"
    if row.tied:
        yield "tied"
    yield from tensor.flags


def _coded(
    tensors: Sequence[ReportedTensor],
) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """Return the words of each column in order of first use, and the number of each tensor's."""
    words, coded = {}, {}
    for column, word_of in _WORDS.items():
        known: dict[str, int] = {}
        coded[column] = [known.setdefault(word_of(one), len(known)) for one in tensors]
        words[column] = list(map(clean, known))
    return words, coded


def _values(tensors: Sequence[ReportedTensor]) -> dict[str, list[Any]]:
    """Return a column for each figure, null where a tensor has none."""
    measured = [tensor.measures for tensor in tensors]
    drawn = [None if one is None else one.histogram for one in measured]
    return {
        **{key: [figure(getattr(one, key, None)) for one in measured] for key in _FIGURES},
        "low": [figure(getattr(one, "low", None)) for one in drawn],
        "high": [figure(getattr(one, "high", None)) for one in drawn],
        "bars": [None if one is None else bars(one) for one in drawn],
    }
