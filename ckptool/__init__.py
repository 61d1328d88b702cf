"""Open, explain, compare, repair and convert PyTorch checkpoints, without running them.

    with ckptool.open("model.pth") as checkpoint:          # reads the header only
        checkpoint["state_dict"]["module.fc.weight"].shape

    model.load_state_dict(ckptool.load_state_dict("model.pth"))

Everything is imported when it is first used, torch only by functions that make tensors
(`TorchMissing` if it is not installed). Classes are in `ckptool.results` and `ckptool.errors`, and
available here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool._lazy import make_importer
from ckptool._version import __version__

if TYPE_CHECKING:
    from ckptool.api import (
        add_module,
        average,
        merge_lora,
        open,
        remap,
        rename,
        report,
        strip_module,
    )
    from ckptool.comparison.diff import diff
    from ckptool.conversion import convert
    from ckptool.diagnosis import doctor
    from ckptool.diagnosis.info import info
    from ckptool.errors import *  # noqa: F403
    from ckptool.files.recovery import recover
    from ckptool.inspection.listing import list_tensors
    from ckptool.inspection.scan import scan
    from ckptool.inspection.stats import stats
    from ckptool.inspection.verify import verify
    from ckptool.loading.load import load, load_state_dict
    from ckptool.loading.load_into import load_into
    from ckptool.loading.plan import match
    from ckptool.loading.save import save
    from ckptool.results import *  # noqa: F403

_HOMES = {
    "api": (
        "add_module",
        "average",
        "merge_lora",
        "open",
        "remap",
        "rename",
        "report",
        "strip_module",
    ),
    "conversion": ("convert",),
    "diagnosis": ("doctor",),
    "errors": ("errors",),
    "files.recovery": ("recover",),
    "diagnosis.info": ("info",),
    "inspection.listing": ("list_tensors",),
    "inspection.verify": ("verify",),
    "comparison.diff": ("diff",),
    "inspection.scan": ("scan",),
    "inspection.stats": ("stats",),
    "loading.load": ("load", "load_state_dict"),
    "loading.load_into": ("load_into",),
    "loading.plan": ("match",),
    "loading.save": ("save",),
    "results": ("results",),
}

__all__ = [
    "__version__", "add_module", "average", "convert", "diff", "doctor", "info", "list_tensors",
    "load", "load_into", "load_state_dict", "match", "merge_lora", "open", "recover", "remap",
    "rename", "report", "save", "scan", "stats", "strip_module", "verify",
]  # fmt: skip

_import_name = make_importer(__name__, globals(), _HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a function, an error, or another class."""
    if not name[0].isupper():
        return _import_name(name)
    from ckptool import errors, results

    return getattr(errors if name in errors.__all__ else results, name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
