"""Questions about a checkpoint, answered from its header: dataclasses that print nothing.

The names below are imported when they are first used: a list needs no summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.inspection.closeup import Shown, show
    from ckptool.inspection.folding import TreeNode, tree
    from ckptool.inspection.listing import Listing, ObjectRow, TensorRow, ValueRow, list_tensors
    from ckptool.inspection.summary import Info, SectionInfo, info

__all__ = [
    "Info",
    "Listing",
    "ObjectRow",
    "SectionInfo",
    "Shown",
    "TensorRow",
    "TreeNode",
    "ValueRow",
    "info",
    "list_tensors",
    "show",
    "tree",
]

_HOMES = {
    "closeup": ("Shown", "show"),
    "folding": ("TreeNode", "tree"),
    "listing": ("Listing", "ObjectRow", "TensorRow", "ValueRow", "list_tensors"),
    "summary": ("Info", "SectionInfo", "info"),
}

__getattr__ = importer(__name__, globals(), _HOMES)
