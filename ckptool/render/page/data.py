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
from ckptool.render.figures import draw_histogram
from ckptool.words import clean

if TYPE_CHECKING:
    from ckptool.comparison.diff import Diff
    from ckptool.comparison.report import Bar, Report
    from ckptool.inspection.stats import TensorStats

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""One digit for the height of a bar, as `histogram.js` reads it."""

_MAX_EXACT_INTEGER = 1 << 53  # beyond this the numbers of JavaScript have holes


def to_json_number(value: Any) -> float | int | str | None:
    """Return an integer, six digits of a float, or a word for infinity or NaN; None if complex."""
    if value is None or isinstance(value, complex):
        return None
    if isinstance(value, int) and abs(value) < _MAX_EXACT_INTEGER:
        return int(value)
    number = float(f"{value:.6g}")
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT_INTEGER else number


class Names:
    """The modules in names, numbered in order of first use; the root is 0.

    A label begins with its separator from the parent: `/` between the keys of a path, `.` within
    the last key, and none below the root.
    """

    def __init__(self) -> None:
        """Start with the root."""
        self._labels = [""]
        """The label of each module, by its number."""
        self._parents = [0]
        """The number of the parent of each module, by its number."""
        self._children: dict[tuple[int, str], int] = {}
        """The number of a module, by its parent and label."""
        self._modules: dict[tuple[str, ...], int] = {}
        """The number of a module, by its keys and the separator of the last one."""

    def locate(self, path: Sequence[str | int]) -> tuple[int, str]:
        """Return the number of the module of a tensor with this path, and the tensor's own label.

        Modules are added. A key with too many dots (`MAX_PARTS`) is one label.
        """
        *outer, label = map(str, path) if path else ("",)
        if "." in label and label.count(".") <= MAX_PARTS:
            inner, _, label = label.rpartition(".")
            return self._find_module((*outer, inner), dotted=True), clean(f".{label}")
        return self._find_module(tuple(outer), dotted=False), clean(f"/{label}" if outer else label)

    def to_columns(self, paths: Iterable[Sequence[str | int]]) -> dict[str, Any]:
        """Return `label` and `module` of each path, as columns."""
        placed = [self.locate(path) for path in paths]
        return {
            "label": [label for _, label in placed],
            "module": [module for module, _ in placed],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the modules so far, as columns."""
        return {"label": self._labels, "parent": self._parents}

    def _find_module(self, keys: tuple[str, ...], *, dotted: bool) -> int:
        """Return the module at these keys, added with its parents if it is new.

        If `dotted`, the last key is split at its dots into nested modules.
        """
        # Split or not, the same keys are different modules.
        cache_key = (*keys, "." if dotted else "/")
        if cache_key not in self._modules:
            module = 0
            for depth, key in enumerate(keys):
                head, *tail = key.split(".") if dotted and depth == len(keys) - 1 else (key,)
                for label in (f"/{head}" if depth else head, *(f".{part}" for part in tail)):
                    module = self._find_child(module, label)
            self._modules[cache_key] = module
        return self._modules[cache_key]

    def _find_child(self, module: int, label: str) -> int:
        """Return the number of a child module, which is added if it is new."""
        number = self._children.setdefault((module, label), len(self._labels))
        if number == len(self._labels):
            self._labels.append(clean(label))
            self._parents.append(module)
        return number


_CHANGE_FIGURES = ("rel_norm", "max_rel", "max_abs", "mean_abs", "cosine", "share")


def diff_columns(report: Report, diff: Diff) -> dict[str, Any]:
    """Return the chart and the table of changes, as columns over one tree of names."""
    names = Names()
    rows = list(diff_rows(diff))
    chart = names.to_columns([_path_of_entry(report, bar) for bar in report.chart])
    changes = names.to_columns([_path_of_entry(report, row) for row in rows])
    return {
        "names": names.to_dict(),
        "chart": {
            **chart,
            "status": "".join(bar.status for bar in report.chart),
            "change": [to_json_number(bar.change) for bar in report.chart],
            "structure": diff.structure,
        },
        "changes": {
            **changes,
            "status": "".join(row.status for row in rows),
            "what": [clean(describe_difference(row)) for row in rows],
            **{
                key: [to_json_number(getattr(row.figures, key, None)) for row in rows]
                for key in _CHANGE_FIGURES
            },
        },
    }


def _path_of_entry(report: Report, entry: Bar | Row) -> Sequence[str]:
    """Return the parts of a name, of optimizer state with the name of the parameter."""
    file = report.other if entry.status == "A" and report.other else report.file
    return file.name_parameter(entry.name.split("/"))


def describe_difference(row: Row) -> str:
    """Return the difference in words: `dtype: float32 -> bfloat16`, `value: 3 -> 4`."""
    if row.status == "R":
        return f"{row.what}, now {row.b}"
    return ": ".join(filter(None, (row.what, " -> ".join(filter(None, (row.a, row.b))))))


_FIGURES = ("minimum", "maximum", "mean", "std", "norm", "zeros", "nan", "infinite")
_WORD_COLUMNS: dict[str, Callable[[TensorStats], str]] = {
    "dtype": lambda tensor: tensor.row.dtype,
    "shape": lambda tensor: format_shape(tensor.row.shape),
    "device": lambda tensor: tensor.row.device,
    "marks": lambda tensor: ", ".join(_list_marks(tensor)),
    "remarks": lambda tensor: "; ".join(filter(None, (*tensor.remarks, tensor.reason))),
}
"""Columns of few different words, each of which is stored once and referred to by a number."""


def collect_columns(report: Report) -> dict[str, Any]:
    """Return the names, tensors, figures and differences for the script of the page."""
    names = Names()
    # In each tied tensor, `tie` is the name of the first one with the same elements.
    number_by_name: dict[str, int] = {}
    for number, tensor in enumerate(report.tensors):
        number_by_name.setdefault(tensor.name, number)
    paths = [report.file.name_parameter(tensor.row.path) for tensor in report.tensors]
    name_columns = names.to_columns(paths)
    words, word_numbers = _encode_words(report.tensors)
    return {
        "names": names.to_dict(),
        "words": words,
        "tensors": {
            **name_columns,
            **word_numbers,
            "bytes": [tensor.row.nbytes for tensor in report.tensors],
            "elements": [tensor.row.numel for tensor in report.tensors],
            "tie": [
                [number, number_by_name[tensor.tie]]
                for number, tensor in enumerate(report.tensors)
                if tensor.tie is not None
            ],
            "path": [  # in the file, if the shown path has the name of a parameter instead
                [number, clean(tensor.name)]
                for number, (tensor, path) in enumerate(zip(report.tensors, paths, strict=True))
                if path != tuple(map(str, tensor.row.path))
            ],
        },
        "values": _figure_columns(report.tensors) if report.measured else None,
        "diff": None if report.diff is None else diff_columns(report, report.diff),
    }


def _list_marks(tensor: TensorStats) -> Iterable[str]:
    """Yield the kind of a special tensor, `grad`, `tied`, and its flags."""
    row = tensor.row
    if row.kind != "strided":
        yield row.kind
    if row.requires_grad:
        yield "grad"
    if row.tied:
        yield "tied"
    yield from tensor.flags


def _encode_words(
    tensors: Sequence[TensorStats],
) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """Return the distinct words of each column, and for each tensor the number of its word."""
    words, columns = {}, {}
    for column, word_of in _WORD_COLUMNS.items():
        numbers: dict[str, int] = {}
        columns[column] = [numbers.setdefault(word_of(tensor), len(numbers)) for tensor in tensors]
        words[column] = list(map(clean, numbers))
    return words, columns


def _figure_columns(tensors: Sequence[TensorStats]) -> dict[str, list[Any]]:
    """Return a column for each figure, null where a tensor has none."""
    measured = [tensor.measures for tensor in tensors]
    histograms = [None if measures is None else measures.histogram for measures in measured]
    return {
        **{
            key: [to_json_number(getattr(measures, key, None)) for measures in measured]
            for key in _FIGURES
        },
        "low": [to_json_number(getattr(histogram, "low", None)) for histogram in histograms],
        "high": [to_json_number(getattr(histogram, "high", None)) for histogram in histograms],
        "fullest": [
            None if histogram is None else max(histogram.counts) for histogram in histograms
        ],
        "bars": [
            None if histogram is None else draw_histogram(histogram.counts, DIGITS)
            for histogram in histograms
        ],
    }
