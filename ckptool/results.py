"""Every public class that is no error: what the functions of `ckptool` return and take.

They print as their pages on the command line do, and have one line as their `repr`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.comparison.diff import Diff
    from ckptool.conversion import Conversion
    from ckptool.core.checkpoint import Change, Checkpoint, Details
    from ckptool.core.finding import Finding
    from ckptool.core.model import Opaque, Storage, TensorRef
    from ckptool.diagnosis import Complaint, Diagnosis
    from ckptool.files.recovery import Recovery
    from ckptool.inspection.examining import Verdict
    from ckptool.inspection.info import Info
    from ckptool.inspection.listing import Listing
    from ckptool.inspection.scan import Scan
    from ckptool.inspection.stats import Stats
    from ckptool.limits import Limits
    from ckptool.matching import MatchReport
    from ckptool.render.page import PageReceipt
    from ckptool.writing import Receipt

__all__ = [
    "Change", "Checkpoint", "Complaint", "Conversion", "Details", "Diagnosis", "Diff", "Finding",
    "Info", "Limits", "Listing", "MatchReport", "Opaque", "PageReceipt", "Receipt", "Recovery",
    "Scan", "Stats", "Storage", "TensorRef", "Verdict",
]  # fmt: skip

_HOMES = {
    "core.checkpoint": ("Change", "Checkpoint", "Details"),
    "conversion": ("Conversion",),
    "diagnosis": ("Complaint", "Diagnosis"),
    "files.recovery": ("Recovery",),
    "core.finding": ("Finding",),
    "comparison.diff": ("Diff",),
    "inspection.examining": ("Verdict",),
    "inspection.info": ("Info",),
    "inspection.listing": ("Listing",),
    "inspection.stats": ("Stats",),
    "inspection.scan": ("Scan",),
    "limits": ("Limits",),
    "matching": ("MatchReport",),
    "core.model": ("Opaque", "Storage", "TensorRef"),
    "render.page": ("PageReceipt",),
    "writing": ("Receipt",),
}

__getattr__ = importer("ckptool", globals(), _HOMES)
