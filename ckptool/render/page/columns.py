"""A report as columns of numbers and short words, which the page's script draws from.

Columns and not objects: of 100,000 tensors each key would be there 100,000 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.inspection.values import shape_text
from ckptool.render.page.changes import diff_columns
from ckptool.render.page.figures import bars, figure
from ckptool.render.page.names import Names
from ckptool.render.text import clean

if TYPE_CHECKING:
    from ckptool.inspection.reporting import Report, ReportedTensor

__all__ = ["columns"]

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
    """What the script of the page reads: names, tensors, their values, and what differs."""
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
    """The words of each column in order of first use, and the number of each tensor's."""
    words, coded = {}, {}
    for column, word_of in _WORDS.items():
        known: dict[str, int] = {}
        coded[column] = [known.setdefault(word_of(one), len(known)) for one in tensors]
        words[column] = list(map(clean, known))
    return words, coded


def _values(tensors: Sequence[ReportedTensor]) -> dict[str, list[Any]]:
    """A column for each figure, null where a tensor has none."""
    measured = [tensor.measures for tensor in tensors]
    drawn = [None if one is None else one.histogram for one in measured]
    return {
        **{key: [figure(getattr(one, key, None)) for one in measured] for key in _FIGURES},
        "low": [figure(getattr(one, "low", None)) for one in drawn],
        "high": [figure(getattr(one, "high", None)) for one in drawn],
        "bars": [None if one is None else bars(one) for one in drawn],
    }
