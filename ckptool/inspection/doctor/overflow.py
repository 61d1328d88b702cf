"""Complaints that take the values beside a reference: numbers that its types do not have."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.errors import CheckpointError
from ckptool.inspection.doctor.comparison import Paired, compared
from ckptool.inspection.doctor.complaint import Complaint, Found, names_of
from ckptool.inspection.doctor.patient import Patient
from ckptool.tensors.narrowing import narrows, out_of_range
from ckptool.words import counted, listed

__all__ = ["overflow"]


def overflow(patient: Patient) -> Iterator[Found]:
    """Tensors that lose numbers when they are copied into the reference's types; they are read."""
    comparison = compared(patient)
    pairs = comparison.pairs if comparison is not None else ()
    found = [(pair, count) for pair in pairs if (count := _lost(pair))]
    if not found:
        return
    kinds = dict.fromkeys(f"{pair.mine.dtype} for {pair.wanted.dtype}" for pair, _ in found)
    pair, count = found[0]
    yield Found(
        Complaint(
            "overflow",
            "misleads",
            f"{counted(len(found), 'tensor')} with numbers that the reference's type has not "
            f"({listed(kinds, most=4)}): {counted(count, 'element')} of {pair.name}",
            names_of(pair.name for pair, _ in found),
            "load_state_dict casts them without a word: a floating number that is too large "
            "becomes inf, an integer another one",
            remedy="load it into a model of the file's types, or of bfloat16, which has the range "
            "of float32",
        )
    )


def _lost(pair: Paired) -> int:
    """How many elements; 0 of what cannot be read, which is told elsewhere."""
    if not pair.mine.has_content or not narrows(pair.mine.dtype, pair.wanted.dtype):
        return 0
    try:
        return out_of_range(pair.mine, pair.wanted.dtype)
    except CheckpointError:
        return 0
