"""Match the keys of a state dict with those of a model, by keys, shapes and dtypes; no torch."""

from ckptool.matching.judging import (
    Allowance as Allowance,
    Allowed as Allowed,
    Judgement as Judgement,
    MatchFinding as MatchFinding,
)
from ckptool.matching.match import Match as Match, match_keys as match_keys
from ckptool.matching.report import (
    EXTRA as EXTRA,
    Ambiguity as Ambiguity,
    DtypeChange as DtypeChange,
    MatchReport as MatchReport,
    Mismatch as Mismatch,
    OptimizerReport as OptimizerReport,
    Overlap as Overlap,
    Renaming as Renaming,
    Slot as Slot,
    Slots as Slots,
    slots_of as slots_of,
)
