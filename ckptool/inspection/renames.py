"""Tensors that both checkpoints have under names that do not correspond, found by their content."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptool.inspection.diff_contents import Meter
from ckptool.inspection.diff_regions import Entry
from ckptool.inspection.listing import RepeatedBytes
from ckptool.limits import Limits
from ckptool.model import TensorRef

__all__ = ["Renames"]

Same = Callable[[Entry, Entry], bool]
"""Whether the elements of two tensors of one dtype and shape are equal."""
Group = tuple[list[Entry], list[Entry]]

_MOST_PARTS = 16
"""Last components of a name that are looked at: no more tell two layers apart."""


class Renames:
    """A search among what only one side has; it costs one look at each name and each content."""

    def __init__(
        self, only_a: Sequence[Entry], only_b: Sequence[Entry], *, stated_only: bool, limits: Limits
    ) -> None:
        """Group by header. `stated_only`: a content is known by the CRC-32 that the file states."""
        self._stated_only = stated_only
        self._repeated = RepeatedBytes(limits)
        self._checksums: dict[Any, int] = {}
        groups: dict[Any, Group] = {}
        for side, entries in enumerate((only_a, only_b)):
            for entry in entries:
                if isinstance(entry.leaf, TensorRef) and entry.leaf.has_content:
                    kind = entry.leaf.dtype, entry.leaf.shape
                    groups.setdefault(kind, ([], []))[side].append(entry)
        self._groups = [group for group in groups.values() if all(group)]

    def expected(self) -> int:
        """Bytes that `found` may read: for checksums, and to confirm what they say."""
        if self._stated_only:
            return 0
        total = 0
        for group in self._groups:
            total += min(sum(entry.leaf.nbytes for entry in side) for side in group)
            unknown = {entry.leaf.place: entry.leaf for side in group for entry in side}
            total += sum(leaf.nbytes for leaf in unknown.values() if _stated(leaf) is None)
        return total

    def found(self, same: Same, meter: Meter) -> list[tuple[Entry, Entry]]:
        """Return the pairs, in the order of A. `same` confirms what checksums say.

        Raises:
            LimitExceeded: strides repeat more bytes than real ones do.
            CorruptFile: bytes that cannot be read.
        """
        pairs: list[tuple[Entry, Entry]] = []
        for group in self._groups:
            contents: dict[int, Group] = {}
            for side, entries in enumerate(group):
                for entry in entries:
                    checksum = self._checksum(entry, meter)
                    if checksum is not None:
                        contents.setdefault(checksum, ([], []))[side].append(entry)
            for mine, others in contents.values():
                pairs.extend(pair for pair in _matched(mine, others) if same(*pair))
        return pairs

    def _checksum(self, entry: Entry, meter: Meter) -> int | None:
        """Return the CRC-32 of the elements in row-major order, as `TensorRef.content` has them."""
        tensor: TensorRef = entry.leaf
        stated = _stated(tensor)
        if stated is not None or self._stated_only:
            return stated
        key = tensor.place
        if key not in self._checksums:
            self._repeated.add(entry.path, tensor)
            meter.begin(tensor.nbytes)
            checksum = 0
            for block in tensor.content():
                checksum = zlib.crc32(block, checksum)
                meter.told(len(block))
            meter.end()
            self._checksums[key] = checksum
        return self._checksums[key]


def _stated(tensor: TensorRef) -> int | None:
    """Return what the file states of just these elements."""
    storage = tensor.storage
    whole = storage is not None and storage.nbytes == tensor.nbytes and tensor.is_verbatim
    return storage.crc32 if storage is not None and whole else None


def _matched(mine: list[Entry], others: list[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Entries of one content paired: those whose names end alike first, then the only ones left.

    A single element says too little: its name must end alike. So must that of several which are
    all alike (biases of zeros).
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
        waiting: dict[tuple[str, ...], list[Entry]] = {}
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
