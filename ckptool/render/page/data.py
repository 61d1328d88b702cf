"""A report as columns of numbers and short words, for the script of the page.

Objects would repeat each key for each of 100,000 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.core.values import format_shape
from ckptool.inspection.listing import MAX_PARTS
from ckptool.render.diff import Row, diff_rows
from ckptool.render.figures import bars
from ckptool.words import clean

if TYPE_CHECKING:
    from ckptool.comparison.diff import Diff
    from ckptool.comparison.report import Bar, Report
    from ckptool.inspection.stats import TensorStats

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""One digit for the height of a bar, as `histogram.js` reads it."""

_EXACT = 1 << 53  # beyond this the numbers of JavaScript have holes


def figure(value: Any) -> float | int | str | None:
    """Return six digits of a number, or a word if JSON has no such number."""
    if value is None or isinstance(value, complex):
        return None
    if isinstance(value, int) and abs(value) < _EXACT:
        return int(value)
    number = float(f"{value:.6g}")
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


class Names:
    """The modules in names, numbered from the root, which is 0, parents first.

    A label begins with what joins it to its parent, `/` between the keys of a path and `.` within
    the last of them; below the root with nothing.
    """

    def __init__(self) -> None:
        """Make the root."""
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
        """Return `label` and `module` of each path, as columns."""
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


_CHANGES = ("rel_norm", "max_rel", "max_abs", "mean_abs", "cosine", "share")


def diff_columns(report: Report, diff: Diff) -> dict[str, Any]:
    """Return the chart and the table of changes, as columns over one tree of names."""
    names = Names()
    rows = list(diff_rows(diff))
    chart = names.columns([_named(report, bar) for bar in report.chart])
    changes = names.columns([_named(report, row) for row in rows])
    return {
        "names": names.to_dict(),
        "chart": {
            **chart,
            "status": "".join(bar.status for bar in report.chart),
            "change": [figure(bar.change) for bar in report.chart],
            "structure": diff.structure,
        },
        "changes": {
            **changes,
            "status": "".join(row.status for row in rows),
            "what": [clean(in_words(row)) for row in rows],
            **{key: [figure(getattr(row.figures, key, None)) for row in rows] for key in _CHANGES},
        },
    }


def _named(report: Report, entry: Bar | Row) -> Sequence[str]:
    """Return the parts of a name, of optimizer state with the name of the parameter."""
    file = report.other if entry.status == "A" and report.other else report.file
    return file.name_parameter(entry.name.split("/"))


def in_words(row: Row) -> str:
    """Return what differs: `dtype: float32 -> bfloat16`, `value: 3 -> 4`."""
    if row.status == "R":
        return f"{row.what}, now {row.b}"
    return ": ".join(filter(None, (row.what, " -> ".join(filter(None, (row.a, row.b))))))


_FIGURES = ("minimum", "maximum", "mean", "std", "norm", "zeros", "nan", "infinite")
_WORDS: dict[str, Callable[[TensorStats], str]] = {
    "dtype": lambda tensor: tensor.row.dtype,
    "shape": lambda tensor: format_shape(tensor.row.shape),
    "device": lambda tensor: tensor.row.device,
    "marks": lambda tensor: ", ".join(_marks(tensor)),
    "remarks": lambda tensor: "; ".join(filter(None, (*tensor.remarks, tensor.reason))),
}
"""Columns of few different words, each of which is stored once and referred to by a number."""


def columns(report: Report) -> dict[str, Any]:
    """Return the names, tensors, figures and differences for the script of the page."""
    names = Names()
    first = {one.name: i for i, one in reversed([*enumerate(report.tensors)])}
    paths = [report.file.name_parameter(tensor.row.path) for tensor in report.tensors]
    placed = names.columns(paths)
    words, coded = _coded(report.tensors)
    return {
        "names": names.to_dict(),
        "words": words,
        "tensors": {
            **placed,
            **coded,
            "bytes": [tensor.row.nbytes for tensor in report.tensors],
            "elements": [tensor.row.numel for tensor in report.tensors],
            "tie": [
                [i, first[one.tie]] for i, one in enumerate(report.tensors) if one.tie is not None
            ],
            "path": [
                [i, clean(one.name)]
                for i, (one, path) in enumerate(zip(report.tensors, paths, strict=True))
                if path != tuple(map(str, one.row.path))
            ],
        },
        "values": _values(report.tensors) if report.measured else None,
        "diff": None if report.diff is None else diff_columns(report, report.diff),
    }


def _marks(tensor: TensorStats) -> Iterable[str]:
    row = tensor.row
    if row.kind != "strided":
        yield row.kind
    if row.requires_grad:
        yield "grad"
    if row.tied:
        yield "tied"
    yield from tensor.flags


def _coded(
    tensors: Sequence[TensorStats],
) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """Return the words of each column in order of first use, and the number of each tensor's."""
    words, coded = {}, {}
    for column, word_of in _WORDS.items():
        known: dict[str, int] = {}
        coded[column] = [known.setdefault(word_of(one), len(known)) for one in tensors]
        words[column] = list(map(clean, known))
    return words, coded


def _values(tensors: Sequence[TensorStats]) -> dict[str, list[Any]]:
    """Return a column for each figure, null where a tensor has none."""
    measured = [tensor.measures for tensor in tensors]
    histograms = [None if one is None else one.histogram for one in measured]
    return {
        **{key: [figure(getattr(one, key, None)) for one in measured] for key in _FIGURES},
        "low": [figure(getattr(one, "low", None)) for one in histograms],
        "high": [figure(getattr(one, "high", None)) for one in histograms],
        "fullest": [None if one is None else max(one.counts) for one in histograms],
        "bars": [None if one is None else bars(one.counts, DIGITS) for one in histograms],
    }
