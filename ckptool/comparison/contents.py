"""Comparison of tensor elements: by checksum or bytes first, by value if those differ.

Renamed tensors are found by their content (`renamed`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.comparison.aligning import DiffEntry
from ckptool.core.model import Path, TensorRef
from ckptool.core.reading import Meter, RepeatedBytes
from ckptool.errors import TorchMissing, UnsupportedFormat
from ckptool.limits import Limits
from ckptool.tensors.bytewise import compare_checksums, has_same_content
from ckptool.tensors.casting import FLOATS, Caster, is_exact

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Comparer, Difference

_ATOL, _RTOL = 1e-8, 1e-5
"""The default of `torch.allclose` for the tolerance that is not given."""


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """The result of comparing the elements of two tensors."""

    equal: bool
    by_checksum: bool = False
    difference: Difference | None = None
    """The statistics, if bytes differ and values were compared."""

    @property
    def is_close(self) -> bool:
        """True if the values differ but are within the tolerance."""
        found = self.difference
        return self.equal and found is not None and found.mismatched > 0

    @property
    def in_value_only(self) -> bool:
        """True if the values are equal but not their bits: -0.0 and 0.0."""
        found = self.difference
        return self.equal and found is not None and found.mismatched == 0


class Contents:
    """Compares plain arrays of equal shapes, each pair of tied tensors once."""

    def __init__(
        self,
        *,
        quick: bool,
        atol: float | None,
        rtol: float | None,
        equal_nan: bool,
        rounded: bool = False,
        meter: Meter,
        limits: Limits,
    ) -> None:
        """Start with nothing compared; options as in `diff.diff`.

        With `rounded`, a wider tensor is rounded to the narrower dtype of the other.

        Raises:
            UsageError: a tolerance is negative or not a number.
        """
        self._quick = quick
        tolerant = atol is not None or rtol is not None
        if tolerant:
            atol, rtol = _ATOL if atol is None else atol, _RTOL if rtol is None else rtol
        self._options: dict[str, Any] = {"atol": atol, "rtol": rtol, "equal_nan": equal_nan}
        self._comparer = self._made_comparer() if tolerant else None  # it may refuse them
        self._rounded = rounded
        self._tolerant = tolerant or equal_nan or rounded
        self._meter = meter
        self._repeated = RepeatedBytes(limits)
        self._known: dict[Any, ValueComparison] = {}
        self.without_torch = False
        """True if values should be compared but torch is not installed."""

    def compare(
        self, path: Path, a: TensorRef, b: TensorRef, *, exact: bool = False
    ) -> ValueComparison:
        """Compare two plain arrays of one shape; `path` is for messages.

        With `exact`, the tolerance does not apply.

        Raises:
            LimitExceeded: strides repeat too many bytes.
            CorruptFile: bytes cannot be read.
        """
        key = _pair_key(a, b), exact
        verdict = self._known.get(key)
        if verdict is None:
            verdict = self._known[key] = self._compared(path, a, b, exact)
        return verdict

    def _compared(self, path: Path, a: TensorRef, b: TensorRef, exact: bool) -> ValueComparison:
        if self._quick:
            stated = compare_checksums(a, b)
            if stated is not None:
                return ValueComparison(stated, by_checksum=True)
        self._repeated.add(path, a)
        self._repeated.add(path, b)
        if self._rounded:
            a, b = _rounded(a, b), _rounded(b, a)
        same = a.dtype == b.dtype and has_same_content(a, b, self._meter.advance)
        if same or self._quick:
            return ValueComparison(same)
        found = self._figures(a, b, exact)
        if found is None:  # of two types it is not known whether their values are the same
            return ValueComparison(a.dtype != b.dtype and not self._rounded)
        equal = found.mismatched == 0 if exact or found.close is None else found.close
        return ValueComparison(equal, difference=found)

    def _made_comparer(self) -> Comparer:
        from ckptool.tensors.comparing import Comparer  # most comparisons find equal bytes

        return Comparer(**self._options)

    def _figures(self, a: TensorRef, b: TensorRef, exact: bool) -> Difference | None:
        if self._comparer is None:
            self._comparer = self._made_comparer()
        try:
            return self._comparer.compare(a, b, self._meter.advance)
        except TorchMissing:
            if self._tolerant and not exact:
                raise  # what is close is not known
            self.without_torch = True
        except UnsupportedFormat:  # a type of which nobody knows the numbers
            pass
        return None


def _rounded(tensor: TensorRef, other: TensorRef) -> TensorRef:
    """Return a tensor rounded to the dtype of another, as in torch, if that is narrower."""
    held, source, target = tensor.storage, tensor.dtype, other.dtype
    floating = source in FLOATS and target in FLOATS
    if held is None or source == target or not floating or not is_exact(target, source):
        return tensor
    storage = Caster(source, target, allow_overflow=True).cast(held, [("", tensor)])
    return replace(tensor, dtype=target, storage=storage)


def _pair_key(a: TensorRef, b: TensorRef) -> Any:
    return a.place or id(a), b.place or id(b)


Same = Callable[[DiffEntry, DiffEntry], bool]
"""Returns True if the elements of two tensors of one dtype and shape are equal."""
Group = tuple[list[DiffEntry], list[DiffEntry]]

_MOST_PARTS = 16
"""Most last components of a key to compare, enough to distinguish layers."""


def renamed(
    only_a: Sequence[DiffEntry],
    only_b: Sequence[DiffEntry],
    same: Same,
    meter: Meter,
    *,
    stated_only: bool,
    limits: Limits,
) -> Iterator[tuple[DiffEntry, DiffEntry]]:
    """Yield renamed tensors, in the order of A.

    Looks at each key and each content once. `same` confirms equal checksums. With `stated_only`,
    only the CRC-32 in the file is used.

    Raises:
        LimitExceeded: strides repeat too many bytes.
        CorruptFile: bytes cannot be read.
    """
    headers: dict[Any, Group] = {}
    for side, entries in enumerate((only_a, only_b)):
        for entry in entries:
            if isinstance(entry.leaf, TensorRef) and entry.leaf.has_content:
                kind = entry.leaf.dtype, entry.leaf.shape
                headers.setdefault(kind, ([], []))[side].append(entry)
    groups = [group for group in headers.values() if all(group)]
    if not stated_only:
        for group in groups:
            meter.total += min(sum(entry.leaf.nbytes for entry in side) for side in group)
            unknown = {entry.leaf.place: entry.leaf for side in group for entry in side}
            unread = (leaf for leaf in unknown.values() if _stored_crc32(leaf) is None)
            meter.total += sum(leaf.nbytes for leaf in unread)
    repeated, known = RepeatedBytes(limits), dict[Any, int]()

    def checksum_of(entry: DiffEntry) -> int | None:
        """Return the CRC-32 of the elements in row-major order, as `TensorRef.content` has them."""
        tensor: TensorRef = entry.leaf
        stated = _stored_crc32(tensor)
        if stated is not None or stated_only:
            return stated
        if tensor.place not in known:
            repeated.add(entry.path, tensor)
            found = 0
            for block in tensor.content():
                found = zlib.crc32(block, found)
                meter.advance(len(block))
            known[tensor.place] = found
        return known[tensor.place]

    for group in groups:
        contents: dict[int, Group] = {}
        for side, entries in enumerate(group):
            for entry in entries:
                checksum = checksum_of(entry)
                if checksum is not None:
                    contents.setdefault(checksum, ([], []))[side].append(entry)
        for mine, others in contents.values():
            yield from (pair for pair in _matched(mine, others) if same(*pair))


def _stored_crc32(tensor: TensorRef) -> int | None:
    """Return the stored checksum if it covers exactly this tensor."""
    storage = tensor.storage
    whole = storage is not None and storage.nbytes == tensor.nbytes and tensor.is_verbatim
    return storage.crc32 if storage is not None and whole else None


def _matched(
    mine: list[DiffEntry], others: list[DiffEntry]
) -> Iterator[tuple[DiffEntry, DiffEntry]]:
    """Pair entries of equal content: first by their last components, then the only ones left.

    A single element, or several equal ones (biases of zeros), must have equal last components.
    """
    if not mine or not others:
        return
    parts = {id(entry): _parts(entry.name) for entry in (*mine, *others)}
    longest = min(
        max(len(parts[id(entry)]) for entry in mine), max(len(parts[id(entry)]) for entry in others)
    )
    for length in range(longest, 0, -1):
        if not mine or not others:
            return
        waiting: dict[tuple[str, ...], list[DiffEntry]] = {}
        for entry in reversed(others):
            if len(parts[id(entry)]) >= length:
                waiting.setdefault(parts[id(entry)][:length], []).append(entry)
        taken: set[int] = set()
        for entry in mine:
            candidates = waiting.get(parts[id(entry)][:length])
            if candidates and len(parts[id(entry)]) >= length:
                other = candidates.pop()
                taken.update((id(entry), id(other)))
                yield entry, other
        mine = [entry for entry in mine if id(entry) not in taken]
        others = [entry for entry in others if id(entry) not in taken]
    if len(mine) == len(others) == 1 and mine[0].leaf.numel > 1:
        yield mine[0], others[0]


def _parts(name: str) -> tuple[str, ...]:
    """Return the last components of a name, the last one first."""
    return tuple(reversed(name.replace("/", ".").rsplit(".", _MOST_PARTS)[-_MOST_PARTS:]))
