"""Which name of a state dict is which of a model. Names, shapes and dtypes alone; no torch.

What is for an optimizer, and for what does not fit, is imported when it is first used.
"""

from typing import TYPE_CHECKING

from ckptool._lazy import importer
from ckptool.matching.allowance import Allowance, Allowed
from ckptool.matching.matched import Match, matched
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch, Overlap, Renaming
from ckptool.matching.slots import EXTRA, Slot, Slots, slots_of

if TYPE_CHECKING:
    from ckptool.matching.judging import Judgement, Problem
    from ckptool.matching.optimizer_report import OptimizerReport

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

_HOMES = {"judging": ("Judgement", "Problem"), "optimizer_report": ("OptimizerReport",)}

__getattr__ = importer(__name__, globals(), _HOMES)
