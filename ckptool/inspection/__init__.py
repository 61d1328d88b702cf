"""Questions about a checkpoint, answered from its header: dataclasses that print nothing.

The names below are imported when they are first used: a list needs no summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.inspection.closeup import Shown, show
    from ckptool.inspection.diff_result import Changed, Diff, Renamed, Side
    from ckptool.inspection.diffing import diff
    from ckptool.inspection.folding import TreeNode, tree
    from ckptool.inspection.listing import Listing, ObjectRow, TensorRow, ValueRow, list_tensors
    from ckptool.inspection.reporting import Report, report
    from ckptool.inspection.stats import Stats, TensorStats
    from ckptool.inspection.summary import Info, SectionInfo, info
    from ckptool.inspection.verdict import Verdict
    from ckptool.inspection.verifying import verify

__all__ = [
    "Changed",
    "Diff",
    "Info",
    "Listing",
    "ObjectRow",
    "Renamed",
    "Report",
    "SectionInfo",
    "Shown",
    "Side",
    "Stats",
    "TensorRow",
    "TensorStats",
    "TreeNode",
    "ValueRow",
    "Verdict",
    "diff",
    "info",
    "list_tensors",
    "report",
    "show",
    "tree",
    "verify",
]

_HOMES = {
    "closeup": ("Shown", "show"),
    "diff_result": ("Changed", "Diff", "Renamed", "Side"),
    "diffing": ("diff",),
    "folding": ("TreeNode", "tree"),
    "listing": ("Listing", "ObjectRow", "TensorRow", "ValueRow", "list_tensors"),
    "reporting": ("Report", "report"),
    "stats": ("Stats", "TensorStats"),
    "summary": ("Info", "SectionInfo", "info"),
    "verdict": ("Verdict",),
    "verifying": ("verify",),
}

__getattr__ = importer(__name__, globals(), _HOMES)
