"""Questions about a checkpoint, answered from its header: dataclasses that print nothing.

The names below are imported when they are first used: a list needs no summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.inspection.diff_result import Diff
    from ckptool.inspection.folding import tree
    from ckptool.inspection.listing import Listing, list_tensors
    from ckptool.inspection.reporting import report
    from ckptool.inspection.stats import Stats
    from ckptool.inspection.summary import Info, info
    from ckptool.inspection.verdict import Verdict
    from ckptool.inspection.verifying import verify

__all__ = [
    "Diff", "Info", "Listing", "Stats", "Verdict", "info", "list_tensors", "report", "tree",
    "verify",
]  # fmt: skip

_HOMES = {
    "diff_result": ("Diff",),
    "folding": ("tree",),
    "listing": ("Listing", "list_tensors"),
    "reporting": ("report",),
    "stats": ("Stats",),
    "summary": ("Info", "info"),
    "verdict": ("Verdict",),
    "verifying": ("verify",),
}

__getattr__ = importer(__name__, globals(), _HOMES)
