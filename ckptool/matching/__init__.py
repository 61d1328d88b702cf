"""Which name of a state dict is which of a model. Names, shapes and dtypes alone; no torch.

The words for what does not fit are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ckptool._lazy import importer
from ckptool.matching.allowance import Allowance, Allowed
from ckptool.matching.matched import Match, matched
from ckptool.matching.report import (
    Ambiguity,
    Cast,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Renaming,
)
from ckptool.matching.slots import EXTRA, Slot, Slots, slots_of

if TYPE_CHECKING:
    from ckptool.matching.judging import Judgement, Problem

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
    "Problem",
    "Renaming",
    "Slot",
    "Slots",
    "matched",
    "slots_of",
]

__getattr__ = importer(__name__, globals(), {"judging": ("Judgement", "Problem")})
