"""Questions about a checkpoint, answered from its header: dataclasses that print nothing."""

from ckptool.inspection.info import Info, SectionInfo, info
from ckptool.inspection.listing import Listing, ObjectRow, TensorRow, ValueRow, list_tensors
from ckptool.inspection.show import Shown, show
from ckptool.inspection.tree import TreeNode, tree

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
