"""What `diff` finds: dataclasses for the screen, and the document `ckptool.diff/1`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ckptool._lazy import Result
from ckptool.inspection.values import documented, json_value
from ckptool.model import Shape

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

__all__ = ["Changed", "Diff", "Renamed", "Side", "magnitude"]

_FIGURES = (
    "elements",
    "mismatched",
    "share",
    "max_abs",
    "mean_abs",
    "max_rel",
    "rmse",
    "cosine",
    "nan_a",
    "nan_b",
    "inf_a",
    "inf_b",
)
"""The fields of a `Difference` that the document has."""


@dataclass(frozen=True, slots=True)
class Side:
    """An entry as one of the two files has it.

    `name` is its whole address there; in `Diff.only_in_a` and `only_in_b` it is that of the screen:
    wrapper components are off. `sort` is `tensor`, `value`, `object`, or `container`.
    """

    name: str
    sort: str
    type: str
    """Of a tensor `torch.Tensor`; the Python type of a value, the class of anything else."""
    dtype: str | None = None
    """This and what follows: of a tensor only."""
    shape: Shape | None = None
    device: str | None = None
    requires_grad: bool | None = None
    kind: str | None = None
    nbytes: int = 0
    value: Any = None
    """Of a value: itself, as JSON holds it; of an object or container: a few words."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `ckptool.diff/1` tells of one side."""
        if self.sort != "tensor":
            return {"name": self.name, "type": self.type, "value": self.value}
        return documented(self, "sort", "type", "value")


@dataclass(frozen=True, slots=True)
class Changed:
    """An entry of both files that differs.

    `what` is in which respects: `type`, `kind`, `dtype`, `shape`, `value`, `quantizer`, `device`,
    `requires_grad`. `status` is `T` where it is another type of thing (the first four), else `M`.
    """

    name: str
    """As the screen has it: the address in A without wrapper components."""
    what: tuple[str, ...]
    a: Side
    b: Side
    difference: Difference | None = None
    """The figures, where the values of two tensors were compared."""
    place: str | None = None
    """Where inside an object, or a tensor made of parts, the first difference lies."""
    counts: bool = True
    """Whether it makes the files differ: device and requires_grad alone do only when asked."""
    change: tuple[str, str] | None = None
    """What stands at `place` in A and in B, in a few words; None where figures tell, or a side."""

    @property
    def status(self) -> str:
        """`T` or `M`."""
        return "T" if {"type", "kind", "dtype", "shape"} & set(self.what) else "M"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `ckptool.diff/1` has it; figures are null where there are none."""
        found = self.difference
        tensors = self.a.sort == self.b.sort == "tensor"
        figures = {key: json_value(getattr(found, key, None)) for key in _FIGURES if tensors}
        return {
            "name": self.name,
            "status": self.status,
            "what": list(self.what),
            "counts": self.counts,
            **figures,
            "place": self.place,
            "change": self.change,
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Renamed:
    """A tensor that both files have, under names that do not correspond."""

    a: Side
    b: Side
    what: tuple[str, ...] = ()
    """`device` and `requires_grad`, where they differ."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `ckptool.diff/1` has it: the two names, and what the tensor is."""
        about = self.a.to_dict()
        return {"a": about.pop("name"), "b": self.b.name, "what": list(self.what), **about}


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Result):
    """Two checkpoints compared.

    `changed` has tensors: those of another type first, then those that became NaN or infinite, then
    by the largest relative change, those that do not count last. `values` has plain values, objects
    and containers, in the order of A.
    """

    a: str
    """The first file, as it was given."""
    b: str
    """The second."""
    format_a: str
    """What it is, as `Checkpoint.format`."""
    format_b: str
    """The same of the second."""
    identical: bool
    """Whether nothing differs that counts."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Entries by status `A` `D` `M` `R` `T`, all five keys, without those that do not count."""
    only_in_a: tuple[Side, ...] = ()
    """In the order of the file, what was renamed left out."""
    only_in_b: tuple[Side, ...] = ()
    """The same, in the order of B."""
    renamed: tuple[Renamed, ...] = ()
    """Tensors that both have, under names that do not correspond."""
    changed: tuple[Changed, ...] = ()
    changed_in_all: int = 0
    """How many `changed` would have without `max_diffs`."""
    values: tuple[Changed, ...] = ()
    tagged: int = 0
    """Entries that differ only in device or requires_grad, and so do not count."""
    common: int = 0
    """Entries that both have."""
    equal: int = 0
    """Of those, the ones that do not differ in what counts."""
    close: int = 0
    """Of the equal ones, those that are so only within the tolerance."""
    by_checksum: int = 0
    """Tensors taken as equal or different by the CRC-32 that both files state, without reading."""
    read: int = 0
    """Tensors whose bytes were compared."""
    elements: int = 0
    """Elements of the tensors whose values were compared, by reading or by checksum."""
    structure: bool = False
    """Whether values were left alone."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user."""

    def __bool__(self) -> NoReturn:
        """Refuse to guess whether differences are true, or their absence."""
        raise TypeError("a Diff is neither true nor false; ask for its .identical")

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.diff/1`."""
        only = {
            "only_in_a": [side.name for side in self.only_in_a],
            "only_in_b": [side.name for side in self.only_in_b],
        }
        return {"schema": "ckptool.diff/1", **documented(self), **only}


def magnitude(found: Difference | None) -> tuple[int, float, float]:
    """Return a sort key for figures: by the relative change, then by the absolute one.

    Figures whose numbers of NaN or infinities differ are above all others; no figures are above
    those. A change that is NaN is infinite, and a change that is unknown is below 0.
    """
    if found is None:
        return 2, math.inf, math.inf
    odd = (found.nan_a, found.inf_a) != (found.nan_b, found.inf_b)
    changes = [-1.0 if one is None else one for one in (found.max_rel, found.max_abs)]
    relative, absolute = (math.inf if math.isnan(one) else one for one in changes)
    return int(odd), relative, absolute
