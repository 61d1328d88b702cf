"""All public classes except errors: results and arguments of the functions, and the steps.

Results print like their pages on the command line, and have a `repr` of one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import make_importer

if TYPE_CHECKING:
    from ckptool.comparison.diff import Diff
    from ckptool.conversion.fit import Fit
    from ckptool.core.checkpoint import Change, Checkpoint, Details
    from ckptool.core.finding import Finding
    from ckptool.core.model import Opaque, Storage, TensorRef
    from ckptool.diagnosis import Complaint, Diagnosis
    from ckptool.diagnosis.info import Info
    from ckptool.files.recovery import Recovery
    from ckptool.inspection.listing import Listing
    from ckptool.inspection.scan import Scan
    from ckptool.inspection.stats import Stats
    from ckptool.inspection.verify import Verdict
    from ckptool.limits import Limits
    from ckptool.loading.inert import InertObject
    from ckptool.matching import MatchReport
    from ckptool.recipes import Relayout
    from ckptool.recipes.reshaping import Reshape
    from ckptool.render.page import PageReceipt
    from ckptool.transforms import (
        Cast,
        Compact,
        Drop,
        Flatten,
        Masters,
        Move,
        Nest,
        Overlay,
        Plain,
        Remap,
        Rename,
        Salvage,
        Set,
        Step,
        Strip,
        Take,
        Untie,
        Wrap,
    )  # fmt: skip
    from ckptool.writing import Receipt

__all__ = [
    "Cast", "Change", "Checkpoint", "Compact", "Complaint", "Details", "Diagnosis", "Diff",
    "Drop", "Finding", "Fit", "Flatten", "InertObject", "Info", "Limits", "Listing", "Masters",
    "MatchReport", "Move", "Nest", "Opaque", "Overlay", "PageReceipt", "Plain", "Receipt",
    "Recovery", "Relayout", "Remap", "Rename", "Reshape", "Salvage", "Scan", "Set", "Stats", "Step",
    "Storage", "Strip", "Take", "TensorRef", "Untie", "Verdict", "Wrap",
]  # fmt: skip

_HOMES = {
    "core.checkpoint": ("Change", "Checkpoint", "Details"),
    "conversion.fit": ("Fit",),
    "diagnosis": ("Complaint", "Diagnosis"),
    "files.recovery": ("Recovery",),
    "core.finding": ("Finding",),
    "comparison.diff": ("Diff",),
    "inspection.verify": ("Verdict",),
    "diagnosis.info": ("Info",),
    "inspection.listing": ("Listing",),
    "inspection.stats": ("Stats",),
    "inspection.scan": ("Scan",),
    "limits": ("Limits",),
    "matching": ("MatchReport",),
    "core.model": ("Opaque", "Storage", "TensorRef"),
    "loading.inert": ("InertObject",),
    "recipes": ("Relayout",),
    "recipes.reshaping": ("Reshape",),
    "render.page": ("PageReceipt",),
    "transforms": (
        "Cast",
        "Compact",
        "Drop",
        "Flatten",
        "Masters",
        "Move",
        "Nest",
        "Overlay",
        "Plain",
        "Remap",
        "Rename",
        "Salvage",
        "Set",
        "Step",
        "Strip",
        "Take",
        "Untie",
        "Wrap",
    ),
    "writing": ("Receipt",),
}

__getattr__ = make_importer("ckptool", globals(), _HOMES)
