"""Which name of a state dict is which of a model. Names, shapes and dtypes alone; no torch."""

from ckptool.matching.judging import Allowance, Allowed, Judgement, Problem
from ckptool.matching.match import Match, matched
from ckptool.matching.report import (
    EXTRA,
    Ambiguity,
    Cast,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Overlap,
    Renaming,
    Slot,
    Slots,
    slots_of,
)

__all__ = [
    "EXTRA",
    "Allowance",
    "Allowed",
    "Ambiguity",
    "Cast",
    "Judgement",
    "Match",
    "MatchReport",
    "Mismatch",
    "OptimizerReport",
    "Overlap",
    "Problem",
    "Renaming",
    "Slot",
    "Slots",
    "matched",
    "slots_of",
]
