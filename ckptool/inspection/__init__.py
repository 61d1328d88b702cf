"""Questions about a checkpoint, answered from its header: dataclasses that print nothing.

The names below are imported when they are first used: a list needs no summary.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptool.inspection' has no attribute {name!r}")
    value = getattr(import_module(f"ckptool.inspection.{home}"), name)
    globals()[name] = value
    return value
