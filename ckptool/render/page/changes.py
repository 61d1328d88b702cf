"""What differs between two files, as columns for the chart and the table of changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.inspection.values import shape_text
from ckptool.render.page.figures import figure
from ckptool.render.page.names import Names
from ckptool.render.text import clean, shorten

if TYPE_CHECKING:
    from ckptool.inspection.diff_result import Changed, Side
    from ckptool.inspection.reporting import Report
    from ckptool.tensors.comparing import Difference

__all__ = ["ChangeRow", "change_rows", "diff_columns"]

_FIGURES = ("max_rel", "max_abs", "mean_abs", "cosine", "share")
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
    """The chart and the table of changes, as columns over one tree of names."""
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
                for key in _FIGURES
            },
        },
    }


def change_rows(report: Report) -> Iterator[ChangeRow]:
    """Every change: those of tensors in the order of the diff, then those of values."""
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
    """In which respects it differs, with what was and what is."""
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
