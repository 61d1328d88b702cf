"""Comparison of tensor elements: by checksum or bytes first, by value if those differ.

Renamed tensors are found by their content (`find_renamed`).
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
        difference = self.difference
        return self.equal and difference is not None and difference.mismatched > 0

    @property
    def is_equal_in_value_only(self) -> bool:
        """True if the values are equal but not their bits: -0.0 and 0.0."""
        difference = self.difference
        return self.equal and difference is not None and difference.mismatched == 0


class Contents:
    """Compares the elements of plain arrays of equal shapes, each pair of tied tensors once."""

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
        """Start without comparisons; options as in `diff.diff`.

        With `rounded`, a wider tensor is rounded to the narrower dtype of the other.

        Raises:
            UsageError: a tolerance is negative or not a number.
        """
        self._quick = quick
        has_tolerance = atol is not None or rtol is not None
        if has_tolerance:
            atol, rtol = _ATOL if atol is None else atol, _RTOL if rtol is None else rtol
        self._options: dict[str, Any] = {"atol": atol, "rtol": rtol, "equal_nan": equal_nan}
        # The comparer refuses bad tolerances; without one, most comparisons do not need torch.
        self._comparer = self._make_comparer() if has_tolerance else None
        self._round_wider = rounded
        self._needs_values = has_tolerance or equal_nan or rounded
        """True if different bytes may count as equal, so that torch is needed to decide."""
        self._meter = meter
        self._repeated = RepeatedBytes(limits)
        self._result_by_pair: dict[Any, ValueComparison] = {}
        """The results so far, which tied tensors share."""
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
        result = self._result_by_pair.get(key)
        if result is None:
            result = self._result_by_pair[key] = self._compare_elements(path, a, b, exact)
        return result

    def _compare_elements(
        self, path: Path, a: TensorRef, b: TensorRef, exact: bool
    ) -> ValueComparison:
        """Compare by bytes, then by value if the bytes differ.

        A quick comparison begins with stored checksums, and compares no values. If asked for, the
        wider tensor is rounded to the dtype of the other before.
        """
        if self._quick:
            has_equal_checksum = compare_checksums(a, b)
            if has_equal_checksum is not None:
                return ValueComparison(has_equal_checksum, by_checksum=True)
        self._repeated.add(path, a)
        self._repeated.add(path, b)
        if self._round_wider:
            a, b = _round_to_narrower(a, b), _round_to_narrower(b, a)
        has_equal_bytes = a.dtype == b.dtype and has_same_content(a, b, self._meter.advance)
        if has_equal_bytes or self._quick:
            return ValueComparison(has_equal_bytes)
        difference = self._compute_difference(a, b, exact)
        if difference is None:
            # The values of two dtypes are unknown then; that the dtypes differ is reported anyway.
            return ValueComparison(a.dtype != b.dtype and not self._round_wider)
        has_tolerance = difference.close is not None
        is_equal = difference.close if has_tolerance and not exact else difference.mismatched == 0
        return ValueComparison(bool(is_equal), difference=difference)

    def _make_comparer(self) -> Comparer:
        """Return the comparer of values, which imports torch."""
        from ckptool.tensors.comparing import Comparer  # most comparisons find equal bytes

        return Comparer(**self._options)

    def _compute_difference(self, a: TensorRef, b: TensorRef, exact: bool) -> Difference | None:
        """Return the differences of the values; None without torch or for an unknown dtype.

        Without torch, the error is raised if different bytes could be accepted as equal. With
        `exact`, they never are.
        """
        if self._comparer is None:
            self._comparer = self._make_comparer()
        try:
            return self._comparer.compare(a, b, self._meter.advance)
        except TorchMissing:
            if self._needs_values and not exact:
                raise
            self.without_torch = True
        except UnsupportedFormat:  # a dtype without known values
            pass
        return None


def _round_to_narrower(tensor: TensorRef, other: TensorRef) -> TensorRef:
    """Return a tensor rounded to the dtype of another, as in torch, if that is narrower.

    That is, if both are floating-point and every value of the other dtype is one of this dtype too.
    Otherwise it is returned unchanged. The rounding happens when the elements are read.
    """
    stored, source, target = tensor.storage, tensor.dtype, other.dtype
    is_floating = source in FLOATS and target in FLOATS
    if stored is None or source == target or not is_floating or not is_exact(target, source):
        return tensor
    storage = Caster(source, target, allow_overflow=True).cast(stored, [("", tensor)])
    return replace(tensor, dtype=target, storage=storage)


def _pair_key(a: TensorRef, b: TensorRef) -> Any:
    """Return a key that pairs of tied tensors share."""
    return a.place or id(a), b.place or id(b)


Same = Callable[[DiffEntry, DiffEntry], bool]
"""Returns True if the elements of two tensors of one dtype and shape are equal."""
Group = tuple[list[DiffEntry], list[DiffEntry]]
"""Entries of A and of B."""

_MAX_COMPONENTS = 16
"""Most last components of a key to compare, enough to distinguish layers."""


def find_renamed(
    only_a: Sequence[DiffEntry],
    only_b: Sequence[DiffEntry],
    have_equal_elements: Same,
    meter: Meter,
    *,
    stated_only: bool,
    limits: Limits,
) -> Iterator[tuple[DiffEntry, DiffEntry]]:
    """Yield renamed tensors, each pair with A's entry first, in the order of A.

    Looks at each key and each content once. `have_equal_elements` confirms equal checksums.
    With `stated_only`, only the CRC-32 in the file is used.

    Raises:
        LimitExceeded: strides repeat too many bytes.
        CorruptFile: bytes cannot be read.
    """
    groups_by_header: dict[Any, Group] = {}  # by dtype and shape
    for side, entries in enumerate((only_a, only_b)):
        for entry in entries:
            if isinstance(entry.leaf, TensorRef) and entry.leaf.has_content:
                header = entry.leaf.dtype, entry.leaf.shape
                groups_by_header.setdefault(header, ([], []))[side].append(entry)
    groups = [group for group in groups_by_header.values() if all(group)]  # both sides have some
    if not stated_only:
        meter.total += sum(map(_count_bytes_to_read, groups))
    repeated, crc32s = RepeatedBytes(limits), dict[Any, int]()

    def compute_crc32(entry: DiffEntry) -> int | None:
        """Return the CRC-32 of the elements in row-major order; None if it may not be computed."""
        tensor: TensorRef = entry.leaf
        stated = _read_stored_crc32(tensor)
        if stated is not None or stated_only:
            return stated  # with `stated_only`, None if the file has none
        if tensor.place not in crc32s:  # tied tensors have one place
            repeated.add(entry.path, tensor)
            crc32 = 0
            for block in tensor.content():
                crc32 = zlib.crc32(block, crc32)
                meter.advance(len(block))
            crc32s[tensor.place] = crc32
        return crc32s[tensor.place]

    for group in groups:
        entries_by_crc32: dict[int, Group] = {}
        for side, entries in enumerate(group):
            for entry in entries:
                checksum = compute_crc32(entry)
                if checksum is not None:
                    entries_by_crc32.setdefault(checksum, ([], []))[side].append(entry)
        for entries_a, entries_b in entries_by_crc32.values():
            yield from (
                pair
                for pair in _pair_equal_contents(entries_a, entries_b)
                if have_equal_elements(*pair)
            )


def _count_bytes_to_read(group: Group) -> int:
    """Return the most bytes to read for checksums that are not stored, and to compare pairs.

    The pairs are counted with the bytes of one side: at most those of the smaller one.
    """
    tensors = {entry.leaf.place: entry.leaf for side in group for entry in side}
    unstated = (tensor for tensor in tensors.values() if _read_stored_crc32(tensor) is None)
    compared_bytes: int = min(sum(entry.leaf.nbytes for entry in side) for side in group)
    checksum_bytes: int = sum(tensor.nbytes for tensor in unstated)
    return compared_bytes + checksum_bytes


def _read_stored_crc32(tensor: TensorRef) -> int | None:
    """Return the stored checksum if it covers exactly this tensor."""
    storage = tensor.storage
    is_whole = storage is not None and storage.nbytes == tensor.nbytes and tensor.is_verbatim
    return storage.crc32 if storage is not None and is_whole else None


def _pair_equal_contents(
    entries_a: list[DiffEntry], entries_b: list[DiffEntry]
) -> Iterator[tuple[DiffEntry, DiffEntry]]:
    """Yield pairs of entries with equal content, those with the most equal last components first.

    If one entry of each side is left, they are a pair too, unless they are single elements: these
    are often equal by chance. So are several entries that are left, such as biases of zeros, which
    get no pair without a common last component.
    """
    if not entries_a or not entries_b:
        return
    components = {id(entry): _split_reversed(entry.name) for entry in (*entries_a, *entries_b)}
    longest = min(
        max(len(components[id(entry)]) for entry in entries_a),
        max(len(components[id(entry)]) for entry in entries_b),
    )
    for length in range(longest, 0, -1):
        if not entries_a or not entries_b:
            return
        candidates_by_end: dict[tuple[str, ...], list[DiffEntry]] = {}
        for entry in reversed(entries_b):  # so that `pop` returns the first one
            end = components[id(entry)][:length]
            if len(end) == length:
                candidates_by_end.setdefault(end, []).append(entry)
        paired_ids: set[int] = set()
        for entry in entries_a:
            if candidates := candidates_by_end.get(components[id(entry)][:length]):
                partner = candidates.pop()
                paired_ids.update((id(entry), id(partner)))
                yield entry, partner
        entries_a = [entry for entry in entries_a if id(entry) not in paired_ids]
        entries_b = [entry for entry in entries_b if id(entry) not in paired_ids]
    if len(entries_a) == len(entries_b) == 1 and entries_a[0].leaf.numel > 1:
        yield entries_a[0], entries_b[0]


def _split_reversed(name: str) -> tuple[str, ...]:
    """Return the last components of a name, the last one first."""
    return tuple(reversed(name.replace("/", ".").rsplit(".", _MAX_COMPONENTS)[-_MAX_COMPONENTS:]))
