"""Comparison of two checkpoints: headers first, then bytes, and values if bytes differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ckptool._lazy import Result
from ckptool.comparison.aligning import Alignment, DiffEntry, Pair, align
from ckptool.comparison.contents import Contents, ValueComparison, find_renamed
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import DeviceValue, Shape, StorageRef, TensorRef
from ckptool.core.reading import Meter
from ckptool.core.tree import name_of
from ckptool.core.values import is_set, summarize, to_document, to_json_value, to_plain_value
from ckptool.errors import UsageError, without_query
from ckptool.files.source import Progress
from ckptool.formats import Source, open_or_reuse
from ckptool.inspection.equality import (
    ITSELF,
    Same,
    Unlike,
    find_first_difference,
    is_made_of_parts,
    raw_elements,
    type_name,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors.bytewise import is_floating
from ckptool.transforms.name_rules import Rule, parse_rules
from ckptool.words import counted, listed

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

_FIGURES = (
    "elements",
    "mismatched",
    "share",
    "rel_norm",
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
    """An entry in one of the two files.

    `name` is its full path there, in `Diff.only_in_a` and `only_in_b` without wrapper prefixes.
    `sort` is `tensor`, `value`, `object`, or `container`.
    """

    name: str
    sort: str
    type: str
    """`torch.Tensor` for a tensor, the Python type of a value, the class of other entries."""
    dtype: str | None = None
    """This and the next fields are only set for tensors."""
    shape: Shape | None = None
    device: str | None = None
    """Also set for a storage, and for a device."""
    requires_grad: bool | None = None
    kind: str | None = None
    nbytes: int = 0
    value: Any = None
    """The value as in JSON; a short description for an object or container."""
    container: str | None = None
    """In `Diff.only_in_a` and `only_in_b`: the outermost container, a section or another, around
    the entry that the other file does not have."""

    def to_dict(self) -> dict[str, Any]:
        """Return one side in `ckptool.diff/1`."""
        if self.sort != "tensor":
            return {"name": self.name, "type": self.type, "value": self.value}
        return to_document(self, "sort", "type", "value", "container")


@dataclass(frozen=True, slots=True)
class Changed:
    """An entry of both files that differs.

    `what` lists the differences: `type`, `kind`, `dtype`, `shape`, `value`, `quantizer`, `device`,
    `requires_grad`. `status` is `T` for one of the first four, else `M`.
    """

    name: str
    """The path in A without wrapper prefixes."""
    what: tuple[str, ...]
    a: Side
    b: Side
    difference: Difference | None = None
    """The statistics, if the values of two tensors were compared."""
    place: str | None = None
    """The place of the first difference inside an object, or a tensor made of parts."""
    counts: bool = True
    """True if it makes the files differ; only device and requires_grad may not."""
    change: tuple[str, str] | None = None
    """The content at `place` in A and in B, in a few words; None if the other fields show it."""
    is_weight: bool = False
    """True in the section of a model."""

    @property
    def is_integer(self) -> bool:
        """True for a tensor that has no floating-point numbers on either side."""
        return not any(side.dtype and is_floating(side.dtype) for side in (self.a, self.b))

    @property
    def status(self) -> str:
        """`T` or `M`."""
        return "T" if {"type", "kind", "dtype", "shape"} & set(self.what) else "M"

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.diff/1`. Missing statistics are null."""
        difference = self.difference
        tensors = self.a.sort == self.b.sort == "tensor"
        figures = {
            key: to_json_value(getattr(difference, key, None)) for key in _FIGURES if tensors
        }
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
    """A tensor that both files have under different keys."""

    a: Side
    b: Side
    what: tuple[str, ...] = ()
    """`device` and `requires_grad`, if they differ."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.diff/1`: both paths, and the dtype and shape of the tensor."""
        about = self.a.to_dict()
        return {"a": about.pop("name"), "b": self.b.name, "what": list(self.what), **about}


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Result):
    """The differences between two checkpoints.

    `changed` has tensors. Those that do not count are last. The order is: weights before others,
    other types first, floating-point numbers before integers, those without statistics first, then
    by `sort`: NaN first, then the largest change. `values` has plain values, objects and
    containers, in the order of A.
    """

    a: str
    """The given path of the first file."""
    b: str
    """The given path of the second file."""
    format_a: str
    """The format of the first file, as `Checkpoint.format`."""
    format_b: str
    """The format of the second file."""
    identical: bool
    """True if no difference counts."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """The number of entries by status, with all keys `A` `D` `M` `R` `T`, if they count."""
    only_in_a: tuple[Side, ...] = ()
    """In the order of the file, without renamed tensors."""
    only_in_b: tuple[Side, ...] = ()
    """In the order of the file, without renamed tensors."""
    renamed: tuple[Renamed, ...] = ()
    """Tensors that both files have under different keys."""
    changed: tuple[Changed, ...] = ()
    changed_in_all: int = 0
    """The length of `changed` without `max_diffs`."""
    values: tuple[Changed, ...] = ()
    tagged: int = 0
    """Entries that differ only in device or requires_grad, if these do not count."""
    common: int = 0
    """Entries that both files have."""
    equal: int = 0
    """Common entries without a difference that counts."""
    close: int = 0
    """Equal entries that differ within the tolerance."""
    by_checksum: int = 0
    """Tensors compared only by the CRC-32 in both files, without reading."""
    read: int = 0
    """Tensors whose bytes were compared."""
    elements: int = 0
    """Elements of the compared tensors, by reading or by checksum."""
    structure: bool = False
    """True if values were not compared."""
    sort: str = "rel_norm"
    """The statistic by which `changed` is sorted, one of `SORTABLE`."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    def __bool__(self) -> NoReturn:
        """Raise TypeError: it is unclear whether a difference is true."""
        raise TypeError("a Diff has no truth value; use its .identical")

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.diff/1`."""
        only = {
            "only_in_a": [side.name for side in self.only_in_a],
            "only_in_b": [side.name for side in self.only_in_b],
        }
        return {"schema": "ckptool.diff/1", **to_document(self), **only}


SORTABLE = ("rel_norm", "max_abs", "mean_abs", "max_rel", "rmse", "cosine", "share")
"""The statistics by which tensors can be sorted."""


def magnitude_key(
    difference: Difference | None, sort: str = "rel_norm"
) -> tuple[int, float, float]:
    """Return a sort key for a difference, the larger change last: by `sort`, then by `max_abs`.

    A `rel_norm` that is NaN is above all others; a missing difference is above that. Another figure
    that is NaN is infinite, and an unknown one is below all. A smaller cosine is a larger change.
    """
    if difference is None:
        return 2, math.inf, math.inf

    def to_sortable(figure: float | None) -> float:
        """Return a figure that can be compared: NaN above all others, None below."""
        if figure is None:
            return -math.inf
        return math.inf if math.isnan(figure) else figure

    main = getattr(difference, sort)
    if sort == "cosine" and main is not None:
        main = -main
    has_nan_norm = difference.rel_norm is not None and math.isnan(difference.rel_norm)
    return int(has_nan_norm), to_sortable(main), to_sortable(difference.max_abs)


TAGS = frozenset({"device", "requires_grad"})
"""Differences that count only with `strict`."""
STATUSES = "ADMRT"


@refuse_renamed_arguments(rules="use rename instead")
def diff(
    a: Source,
    b: Source,
    *,
    strict_names: bool = False,
    rename: Iterable[str | Rule] = (),
    key: Any = None,
    model_only: bool = False,
    structure: bool = False,
    quick: bool = False,
    strict: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = False,
    ignore_dtype: bool = False,
    sort: str = "rel_norm",
    max_diffs: int | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diff:
    """Compare two checkpoints of any formats.

    Keys are compared without wrapper prefixes. Tensors are compared by their bytes, and by value
    where the bytes differ. Device tags and `requires_grad` are reported and count only if `strict`.

    Args:
        a: A path, or an open checkpoint.
        b: The checkpoint to compare `a` with.
        strict_names: Compare keys with their wrapper prefixes.
        rename: `REGEX=>REPL` each: rename the keys of `a` to those of `b`.
        key: Compare only this path.
        model_only: Compare only the weights: the state dict of the model in each file.
        structure: Compare only keys, types, dtypes and shapes, without reading values.
        quick: Compare the CRC-32 and size if both files have them; compute no statistics.
        strict: Count differences of device and `requires_grad`.
        atol: With `rtol`: tensors that are close count as equal, as in `torch.allclose`.
        rtol: See `atol`; if only one is given, the other has torch's default.
        equal_nan: Count NaN as equal to NaN.
        ignore_dtype: Compare a wider floating type as the narrower type of the other side has it,
            rounded to nearest even; of other types the values must be equal.
        sort: The figure of `Difference` by which the tensors in `Diff.changed` are sorted, the
            largest change first: rel_norm, max_abs, mean_abs, max_rel, rmse, cosine or share.
        max_diffs: Keep at most this many entries of `Diff.changed`, the first ones.
        progress: Called with the bytes done and the total bytes of one side.
        limits: Limits for hostile files.

    Raises:
        UnreadableFile, LimitExceeded: a path cannot be opened, or bytes cannot be read.
        NameCollision: two entries of one file would be compared under the same key.
        NotFound: `key` is missing; with `model_only` no model, or several
            (`AmbiguousName`).
        UsageError: a text is not a rule, `sort` is unknown, or arguments exclude each other.
    """
    name_rules = parse_rules(rename)
    needs_values = ignore_dtype or equal_nan or atol is not None or rtol is not None
    _check_options(structure, quick, sort, max_diffs, needs_values=needs_values)
    meter = Meter(progress)
    contents = Contents(
        quick=quick, atol=atol, rtol=rtol, equal_nan=equal_nan, rounded=ignore_dtype, meter=meter,
        limits=limits,
    )  # fmt: skip
    with open_or_reuse(a) as checkpoint_a, open_or_reuse(b) as checkpoint_b:
        whole_a, whole_b = checkpoint_a.with_late_values(), checkpoint_b.with_late_values()
        aligned = align(
            whole_a,
            whole_b,
            strict_names=strict_names,
            rules=name_rules,
            key=key,
            model_only=model_only,
        )
        run = _Comparison(aligned, contents, meter, structure, quick, strict, ignore_dtype, limits)
        if progress is not None and not (structure or quick):
            meter.total = _count_compared_bytes(aligned.pairs)
        run.compare()
        if not structure:
            run.find_renamed()
        meter.finish()
        return run.make_result(whole_a, whole_b, sort, max_diffs)


def _check_options(
    structure: bool, quick: bool, sort: str, max_diffs: int | None, *, needs_values: bool
) -> None:
    """Refuse options of `diff` that exclude each other, or have a wrong value.

    Raises:
        UsageError: if one does.
    """
    if structure and quick:
        raise UsageError(
            "--structure and --quick cannot be combined",
            hint="--structure compares no values, --quick compares checksums",
        )
    if needs_values and (structure or quick):
        raise UsageError(
            "a tolerance and --ignore-dtype need values, which --structure and --quick do not read",
            hint="leave one of them out",
        )
    if max_diffs is not None and max_diffs < 0:
        raise UsageError(f"max_diffs is {max_diffs}, expected 0 or more")
    if sort not in SORTABLE:
        raise UsageError(f"cannot sort by {sort!r}; choose one of {listed(SORTABLE)}")


@dataclass(frozen=True, slots=True)
class _Elements:
    """The result of comparing the elements of two tensors; empty if they were not compared."""

    equal: bool = True
    verdict: ValueComparison | None = None
    close: bool = False
    """True if the values differ but are within the tolerance."""
    unlike: Unlike | None = None
    """The place of the first difference in a tensor made of parts."""


@dataclass
class _Comparison:
    """One comparison: the pairs, the options of `diff`, and the differences so far."""

    aligned: Alignment
    contents: Contents
    meter: Meter
    structure: bool
    quick: bool
    strict: bool
    ignore_dtype: bool
    limits: Limits
    changed: list[Changed] = field(default_factory=list)
    """The pairs that differ and have a tensor."""
    values: list[Changed] = field(default_factory=list)
    """The other pairs that differ."""
    renamed: list[Renamed] = field(default_factory=list)
    counts_by_kind: Counter[str] = field(default_factory=Counter)
    """By status of `STATUSES`, and by name of a count in `Diff`."""
    listed_ids: set[int] = field(default_factory=set)
    """Identities of the tensors that are separate entries."""
    renamed_ids: set[int] = field(default_factory=set)
    """Identities of the renamed entries."""

    def compare(self) -> None:
        """Compare every pair, of tensors and of other entries."""
        # First of all, because objects may contain tensors that are entries of their own.
        for pair in self.aligned.pairs:
            self.listed_ids.update(
                id(entry.leaf) for entry in (pair.a, pair.b) if isinstance(entry.leaf, TensorRef)
            )
        for pair in self.aligned.pairs:
            if isinstance(pair.a.leaf, TensorRef) and isinstance(pair.b.leaf, TensorRef):
                self._compare_tensors(pair, pair.a.leaf, pair.b.leaf)
            else:
                self._compare_others(pair)

    def _compare_tensors(self, pair: Pair, a: TensorRef, b: TensorRef) -> None:
        """Compare two tensors by header and elements, and keep the differences.

        With `structure`, only headers are compared. With `ignore_dtype`, a different dtype is no
        difference if the elements were compared.
        """
        differences = _compare_headers(a, b)
        if self.structure:
            result = self._compare_quantizers(a, b)
        else:
            result = self._compare_elements(pair, a, b)
        if self.ignore_dtype and result.verdict is not None and "dtype" in differences:
            differences.remove("dtype")
            self.counts_by_kind["of_other_types"] += 1
        if result.verdict is not None:
            self.counts_by_kind["elements"] += a.numel
            self.counts_by_kind["by_checksum" if result.verdict.by_checksum else "read"] += 1
            self.counts_by_kind["in_value_only"] += (
                result.verdict.is_equal_in_value_only and a.dtype == b.dtype
            )
        if not result.equal:
            # The scales of a quantized tensor are its part `quantizer`.
            place = result.unlike.place if result.unlike else ""
            differences.append("quantizer" if place.startswith("quantizer/") else "value")
        self._add_result(pair, differences + _compare_tags(a, b), result)

    def _compare_quantizers(self, a: TensorRef, b: TensorRef) -> _Elements:
        """Compare the quantizers of two tensors by their headers; nothing for other tensors."""
        if not a.kind == b.kind == "quantized" or (a.dtype, a.shape) != (b.dtype, b.shape):
            return _Elements()
        difference = find_first_difference(a, b, devices=False, limits=self.limits)
        return _Elements(equal=difference is None, unlike=difference)

    def _compare_elements(self, pair: Pair, a: TensorRef, b: TensorRef) -> _Elements:
        """Compare elements by the rule of their kind; not at all if the shapes differ."""
        if a.shape != b.shape:
            return _Elements()
        is_same_kind = a.kind == b.kind and a.dtype == b.dtype
        if is_same_kind and is_made_of_parts(a) and is_made_of_parts(b):
            return self._compare_parts(pair, a, b)
        # The checksums of a quick comparison say nothing about the elements of different dtypes.
        if not (a.has_content and b.has_content) or (self.quick and a.dtype != b.dtype):
            return _Elements()
        verdict = self.contents.compare(pair.a.path, a, b)
        return _Elements(verdict.equal, verdict, verdict.is_close)

    def _compare_parts(self, pair: Pair, a: TensorRef, b: TensorRef) -> _Elements:
        """Compare two tensors that are made of others; the figures are of the last compared part.

        That is the part that differs, unless the difference is not in the elements of an array.
        """
        verdicts: list[ValueComparison] = []
        has_equal_elements = self._make_element_comparer(pair, verdicts)
        difference = find_first_difference(
            a, b, has_equal_elements, devices=False, limits=self.limits
        )
        last = verdicts[-1] if verdicts else None
        if difference is not None and last is not None and last.equal:
            last = None  # the difference is elsewhere, for example in the class
        is_close = difference is None and any(verdict.is_close for verdict in verdicts)
        return _Elements(difference is None, last, is_close, difference)

    def _make_element_comparer(self, pair: Pair, verdicts: list[ValueComparison]) -> Same:
        """Return a function that compares arrays inside a pair, and keeps their verdicts."""

        def are_equal(tensor_a: TensorRef, tensor_b: TensorRef, exact: bool) -> bool:
            """Compare two arrays, and keep the verdict for the message."""
            verdicts.append(self.contents.compare(pair.a.path, tensor_a, tensor_b, exact=exact))
            return verdicts[-1].equal

        return are_equal

    def _compare_others(self, pair: Pair) -> None:
        """Keep how and where two entries differ that are not both tensors.

        Differences in values are looked for first, then those in devices only.
        """
        a, b = pair.a.leaf, pair.b.leaf
        verdicts: list[ValueComparison] = []
        differences: list[str] = []
        difference = None
        if type_name(a) != type_name(b):
            differences = ["type"]
        elif isinstance(a, DeviceValue):
            differences = ["device"] if a.tag != b.tag else []
        elif not self.structure:
            for word, has_equal_elements in (
                ("value", self._make_element_comparer(pair, verdicts)),
                ("device", None),
            ):
                difference = find_first_difference(
                    # Other objects' items are entries of their own, and are compared as such.
                    a, b, has_equal_elements, items=is_set(a), devices=word == "device",
                    listed=self.listed_ids, limits=self.limits,
                )  # fmt: skip
                if difference is not None:
                    differences = [word]
                    break
        close = any(verdict.is_close for verdict in verdicts)
        self._add_result(pair, differences, _Elements(close=close, unlike=difference))

    def _add_result(self, pair: Pair, differences: list[str], result: _Elements) -> None:
        """Count a pair, and keep it if it differs.

        Without `strict`, a pair that differs only in device and `requires_grad` (`TAGS`) counts as
        equal, and also as "tagged", so that the output can mention it.
        """
        counts = self.strict or not TAGS.issuperset(differences)
        if not differences or not counts:
            self.counts_by_kind["equal"] += 1
            self.counts_by_kind["close"] += result.close
        if not differences:
            return
        first = result.unlike
        has_place = first is not None and first.place != ITSELF  # inside the entry, not all of it
        row = Changed(
            pair.name,
            what=tuple(differences),
            a=_make_side(pair.a),
            b=_make_side(pair.b),
            difference=None if result.verdict is None else result.verdict.difference,
            place=first.place if first is not None and has_place else None,
            counts=counts,
            change=None if first is None else first.change,
            is_weight=pair.a.is_weight,
        )
        self.counts_by_kind[row.status if counts else "tagged"] += 1
        has_tensor = "tensor" in (row.a.sort, row.b.sort)
        (self.changed if has_tensor else self.values).append(row)

    def find_renamed(self) -> None:
        """Find renamed tensors among the entries of only one side, and note them as renamed.

        With `quick`, only the CRC-32 in the files decides if tensors are equal.
        """

        def are_equal(entry_a: DiffEntry, entry_b: DiffEntry) -> bool:
            """Return True if the elements of two tensors are equal."""
            return self.contents.compare(entry_a.path, entry_a.leaf, entry_b.leaf).equal

        unpaired, quick = (self.aligned.only_a, self.aligned.only_b), self.quick
        for entry, partner in find_renamed(
            *unpaired, are_equal, self.meter, stated_only=quick, limits=self.limits
        ):
            self.renamed_ids.update((id(entry), id(partner)))
            differences = tuple(
                _compare_headers(entry.leaf, partner.leaf) + _compare_tags(entry.leaf, partner.leaf)
            )
            self.renamed.append(
                Renamed(
                    _make_side(entry, entry.name), _make_side(partner, partner.name), differences
                )
            )

    def make_result(self, a: Checkpoint, b: Checkpoint, sort: str, max_diffs: int | None) -> Diff:
        """Return the result of the comparison."""
        only_a, only_b = (
            tuple(
                _make_side(entry, entry.name)
                for entry in entries
                if id(entry) not in self.renamed_ids
            )
            for entries in (self.aligned.only_a, self.aligned.only_b)
        )
        self.counts_by_kind.update({"A": len(only_b), "D": len(only_a), "R": len(self.renamed)})
        counts = {status: self.counts_by_kind[status] for status in STATUSES}
        return Diff(
            a=without_query(a.path),
            b=without_query(b.path),
            format_a=a.format,
            format_b=b.format,
            identical=not any(counts.values()),
            only_in_a=only_a,
            only_in_b=only_b,
            changed=tuple(
                sorted(self.changed, key=lambda row: _change_sort_key(row, sort))[:max_diffs]
            ),
            values=tuple(self.values),
            renamed=tuple(self.renamed),
            changed_in_all=len(self.changed),
            counts=counts,
            tagged=self.counts_by_kind["tagged"],
            common=len(self.aligned.pairs),
            equal=self.counts_by_kind["equal"],
            close=self.counts_by_kind["close"],
            by_checksum=self.counts_by_kind["by_checksum"],
            read=self.counts_by_kind["read"],
            elements=self.counts_by_kind["elements"],
            structure=self.structure,
            sort=sort,
            notes=(*self.aligned.notes, *self._describe_limits()),
        )

    def _describe_limits(self) -> Iterable[str]:
        """Yield notes on comparisons: without torch, across dtypes, with zeros of other signs."""
        if self.contents.without_torch:
            yield (
                "torch is not installed, so values are not compared: "
                "tensors with different bytes count as different"
            )
        other_dtypes = self.counts_by_kind["of_other_types"]
        if other_dtypes:
            yield f"{counted(other_dtypes, 'tensor')} compared regardless of dtype"
        zero_signs = self.counts_by_kind["in_value_only"]
        if zero_signs:
            verb = "differs" if zero_signs == 1 else "differ"
            yield f"{counted(zero_signs, 'tensor')} {verb} in bits but not in value (-0.0 and 0.0)"


def _count_compared_bytes(pairs: Iterable[Pair]) -> int:
    """Return the bytes of the tensors of A to compare, tied ones once."""
    sizes: dict[Any, int] = {}  # by the places of both tensors in their files
    for pair in pairs:
        a, b = pair.a.leaf, pair.b.leaf
        if isinstance(a, TensorRef) and isinstance(b, TensorRef) and a.shape == b.shape:
            elements_a, elements_b = raw_elements(a), raw_elements(b)
            if elements_a is not None and elements_b is not None:
                sizes[elements_a.place, elements_b.place] = elements_a.nbytes
    return sum(sizes.values())


def _compare_headers(a: TensorRef, b: TensorRef) -> list[str]:
    """Return the fields among kind, dtype and shape that differ."""
    return [name for name in ("kind", "dtype", "shape") if getattr(a, name) != getattr(b, name)]


def _compare_tags(a: TensorRef, b: TensorRef) -> list[str]:
    """Return the fields among device and requires_grad that differ."""
    return [name for name in ("device", "requires_grad") if getattr(a, name) != getattr(b, name)]


def _change_sort_key(row: Changed, sort: str) -> tuple[Any, ...]:
    """Return the sort key of a row of `Diff.changed`, in the order that `Diff` describes.

    Rows that count, weights, other types and floating-point numbers come first, then the largest
    change: its figures are negated.
    """
    group = not row.counts, not row.is_weight, row.status != "T", row.is_integer
    return *group, *(-figure for figure in magnitude_key(row.difference, sort))


def _make_side(entry: DiffEntry, name: str | None = None) -> Side:
    """Return an entry of the result, under its full path unless a name is given."""
    leaf = entry.leaf
    shown = name_of(entry.path) if name is None else name
    if isinstance(leaf, TensorRef):
        return Side(
            shown,
            "tensor",
            type_name(leaf),
            leaf.dtype,
            leaf.shape,
            leaf.device,
            leaf.requires_grad,
            leaf.kind,
            leaf.nbytes,
            container=entry.container,
        )
    if plain := to_plain_value(leaf):
        _type, value = plain
        content = to_json_value(value)
        return Side(shown, "value", type_name(leaf), value=content, container=entry.container)
    sort = "container" if isinstance(leaf, (dict, list, tuple)) else "object"
    device = leaf.storage.device if isinstance(leaf, StorageRef) else None
    if isinstance(leaf, DeviceValue):
        device = leaf.tag
    summary, outer = summarize(leaf), entry.container
    return Side(shown, sort, type_name(leaf), device=device, value=summary, container=outer)
