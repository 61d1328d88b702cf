"""Which name of a state dict is which of a model. Names, shapes and dtypes alone; no torch.

`refusal` is imported when something does not fit.
"""

from typing import TYPE_CHECKING

from ckptool._lazy import importer
from ckptool.matching.allowance import Allowance, Allowed
from ckptool.matching.match import Match, matched
from ckptool.matching.report import (
    Ambiguity,
    Cast,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Overlap,
    Renaming,
)
from ckptool.matching.slots import EXTRA, Slot, Slots, slots_of

if TYPE_CHECKING:
    from ckptool.matching.refusal import Judgement, Problem

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

_HOMES = {"refusal": ("Judgement", "Problem")}

__getattr__ = importer(__name__, globals(), _HOMES)
