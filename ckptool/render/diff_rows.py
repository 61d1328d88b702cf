"""What `diff` found, as rows: entries that differ alike folded by repeated layers, in words."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.inspection.diff_result import Changed, Renamed, Side
from ckptool.inspection.diffing import TAGS
from ckptool.inspection.values import shape_text
from ckptool.patterns import Family, families, numbered
from ckptool.render.text import clean, number, shorten

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

__all__ = [
    "FIGURES",
    "Row",
    "changed_rows",
    "figures",
    "folded",
    "only_rows",
    "renamed_rows",
    "share",
]

_SHORT = 40  # characters of a value where it is one of two on a line
_SMALL = 0.001

FIGURES = ("max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")


@dataclass(frozen=True, slots=True)
class Row:
    """`count` entries that differ alike; of each figure the worst of theirs."""

    status: str
    label: str
    count: int
    what: str = ""
    a: str = ""
    b: str = ""
    figures: Difference | None = None


def changed_rows(
    found: Sequence[Changed], *, whole: bool, fold: bool, tags: bool = False
) -> list[Row]:
    """Entries of both files, those without figures first, then by the largest relative change.

    `whole` texts are not shortened; with `fold` repeated layers are one row. With `tags` a row says
    in which device and requires_grad it differs, too.
    """
    rows = []
    for family in folded(((row.name, _alike(row, whole, tags)) for row in found), fold=fold):
        members = [found[n] for n in family.numbers]
        what, a, b, _ = _alike(members[0], whole, tags)
        worst = _worst([row.difference for row in members if row.difference is not None])
        status, label = members[0].status, _label(family.label)
        rows.append(Row(status, label, len(members), what, a, b, worst))
    return sorted(rows, key=lambda row: _size(row.figures), reverse=True)


def folded(names: Iterable[tuple[str, Hashable]], *, fold: bool) -> list[Family]:
    """As `families`, or without `fold` each name by itself."""
    if fold:
        return families(names)
    return [Family(name, (name,), (number,)) for number, (name, _) in enumerate(names)]


def only_rows(status: str, sides: Sequence[Side], *, whole: bool, fold: bool) -> list[Row]:
    """Entries of one file alone: what they are stands in `a` (status D) or in `b` (status A)."""
    rows = []
    for family in folded(((side.name, _words(side, whole)) for side in sides), fold=fold):
        words = _words(sides[family.numbers[0]], whole)
        a, b = (words, "") if status == "D" else ("", words)
        rows.append(Row(status, _label(family.label), len(family.names), "", a, b))
    return rows


def renamed_rows(found: Sequence[Renamed], *, fold: bool) -> list[Row]:
    """Tensors under another name: `label` is A's, `b` that of B, `what` says what it is."""
    rows = []
    names = [(row.a.name, (_renaming(n, row), _words(row.a, True))) for n, row in enumerate(found)]
    for name in folded(names, fold=fold):
        (other, *_) = families((found[n].b.name, None) for n in name.numbers)
        what = _words(found[name.numbers[0]].a, True)
        label = _label(name.label)
        rows.append(Row("R", label, len(name.names), what, label, _label(other.label)))
    return rows


def _worst(found: Sequence[Difference]) -> Difference | None:
    """The figures of tensors, each that of the tensor that differs most in it; None for none.

    NaN and infinities are those of all, and the elements those of the tensor of which the largest
    share differs.
    """
    if not found:
        return None

    def largest(name: str) -> float | None:
        known = [figure for one in found if (figure := getattr(one, name)) is not None]
        return max(known, key=_or_beyond, default=None)

    most = max(found, key=lambda one: one.share)
    return replace(
        most,
        max_abs=largest("max_abs"),
        mean_abs=largest("mean_abs"),
        max_rel=largest("max_rel"),
        rmse=largest("rmse"),
        cosine=min((one.cosine for one in found if one.cosine is not None), default=None),
        nan_a=sum(one.nan_a for one in found),
        nan_b=sum(one.nan_b for one in found),
        inf_a=sum(one.inf_a for one in found),
        inf_b=sum(one.inf_b for one in found),
    )


def figures(found: Difference | None, *, whole: bool) -> list[str]:
    """The cells below `FIGURES`; `whole` numbers have six digits, others three."""
    if found is None:
        return [""] * len(FIGURES)

    def said(figure: float | None, digits: str = ".3g") -> str:
        return "" if figure is None else number(figure) if whole else format(figure, digits)

    odd = [
        f"{name} {before:,} -> {after:,}"
        for name, before, after in (
            ("NaN", found.nan_a, found.nan_b),
            ("Inf", found.inf_a, found.inf_b),
        )
        if before or after
    ]
    return [
        said(found.max_abs),
        said(found.mean_abs),
        said(found.max_rel),
        said(found.rmse),
        said(found.cosine, ".6f"),
        share(found.mismatched, found.elements),
        ", ".join(odd),
    ]


def share(part: int, whole: int) -> str:
    """`12.3%`; never `0%` of something, nor `100%` of less than all."""
    if part in (0, whole):
        return "100%" if part else "0%"
    ratio = part / whole
    if ratio < _SMALL:
        return "<0.1%"
    return f"{100 * ratio:.1f}%" if ratio <= 1 - _SMALL else ">99.9%"


def _label(name: str) -> str:
    return clean(name) or "(the whole file)"


def _size(found: Difference | None) -> tuple[int, float, float]:
    """Something to sort by: no figures are beyond all, then other numbers of NaN and infinities."""
    if found is None:
        return 2, math.inf, math.inf
    odd = (found.nan_a, found.inf_a) != (found.nan_b, found.inf_b)
    return int(odd), _or_beyond(found.max_rel), _or_beyond(found.max_abs)


def _or_beyond(figure: float | None) -> float:
    """A figure to sort by: NaN is beyond all others, none below them."""
    if figure is None:
        return -1.0
    return math.inf if math.isnan(figure) else figure


def _renaming(number: int, row: Renamed) -> Hashable:
    """Equal for entries whose two names change in step; each of the others is its own."""
    (_, before), (texts, after) = numbered(row.a.name), numbered(row.b.name)
    return texts if before == after else number


def _alike(row: Changed, whole: bool, tags: bool) -> tuple[str, str, str, Hashable]:
    """What a row says beside its name and numbers: only entries alike in it are folded."""
    kept = [aspect for aspect in row.what if tags or aspect not in TAGS]
    place = (row.place or "").removeprefix("quantizer/")
    what = ", ".join(kept) + (f" at {clean(place)}" if place else "")
    a, b = (" ".join(_said(side, kept, row, whole)) for side in (row.a, row.b))
    if row.change is not None and (row.place or "tensor" in (row.a.sort, row.b.sort)):
        a, b = (f"{a} {clean(text)}".strip() for a, text in zip((a, b), row.change, strict=True))
    found = row.difference
    odd = found and tuple(map(bool, (found.nan_a, found.nan_b, found.inf_a, found.inf_b)))
    return what, a, b, odd


def _said(side: Side, aspects: Sequence[str], row: Changed, whole: bool) -> Iterator[str]:
    """The aspects of one side in which the two differ."""
    for aspect in aspects:
        if aspect == "shape" and side.shape is not None:
            yield shape_text(side.shape)
        elif aspect in ("value", "quantizer"):
            if side.sort != "tensor":
                yield _literal(side, whole)
        elif aspect == "type":
            yield _typed(side, whole, alone=aspects == ["type"])
        elif side.sort == "tensor" or side.device is not None:
            yield clean(str(getattr(side, aspect)))


def _words(side: Side, whole: bool) -> str:
    """What an entry of one file alone is."""
    if side.sort == "tensor":
        return f"{side.dtype} {shape_text(side.shape or ())}"
    return "None" if side.value is None else _typed(side, whole)


def _typed(side: Side, whole: bool, *, alone: bool = True) -> str:
    """The type of an entry, with its value where that is told nowhere else."""
    kind = clean(side.type)
    if side.sort == "tensor":
        return f"{kind} {side.dtype} {shape_text(side.shape or ())}" if alone else kind
    literal = _literal(side, whole)
    if side.sort != "value" and literal.startswith(kind):  # `dict of 3`
        return literal
    return f"{kind} {literal}" if alone else kind


def _literal(side: Side, whole: bool) -> str:
    """A value as Python writes it; the words for anything else."""
    value: Any = side.value
    if not isinstance(value, str):
        return str(value)
    short = value if whole else shorten(value, _SHORT)
    text = repr(short) if side.type == "str" else short
    return clean(text if whole else shorten(text, _SHORT))
