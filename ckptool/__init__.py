"""Open, explain, compare, repair and convert PyTorch checkpoints, without running them.

    with ckptool.open("model.pth") as checkpoint:          # reads the header only
        checkpoint["state_dict"]["module.fc.weight"].shape

    model.load_state_dict(ckptool.load_state_dict("model.pth"))

The names below are imported when they are first used, so that `import ckptool` costs nothing and
torch is imported only by what makes tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer
from ckptool._version import __version__

if TYPE_CHECKING:
    from ckptool.api import add_module, average, open, remap, rename, report, strip_module
    from ckptool.checkpoint import Change, Checkpoint, Details
    from ckptool.conversion import Conversion, convert
    from ckptool.diagnosis import Complaint, Diagnosis, doctor
    from ckptool.errors import (
        AmbiguousName,
        CheckpointError,
        CheckpointWarning,
        CorruptFile,
        DeviceError,
        FileBusy,
        FileDenied,
        FileMissing,
        LimitExceeded,
        MatchError,
        NameCollision,
        NoSpace,
        NotACheckpoint,
        NotFound,
        NotRepresentable,
        OutOfRange,
        TargetExists,
        TorchMissing,
        TrainingError,
        TruncatedFile,
        UnreadableFile,
        UnsupportedFormat,
        UsageError,
        WriteDenied,
        WriteError,
    )
    from ckptool.files.recovery import Recovery, recover
    from ckptool.formats.base import Problem
    from ckptool.inspection import Diff, Stats, Verdict, diff, info, list_tensors, verify
    from ckptool.inspection.scan import Scan, scan
    from ckptool.inspection.stats import stats
    from ckptool.limits import Limits
    from ckptool.loading.load import load
    from ckptool.loading.load_into import load_into
    from ckptool.loading.plan import match
    from ckptool.loading.save import save
    from ckptool.loading.state_dict import load_state_dict
    from ckptool.matching import MatchReport
    from ckptool.model import Opaque, Storage, TensorRef
    from ckptool.render.page import PageReceipt
    from ckptool.writing import Receipt

_HOMES = {
    "api": ("add_module", "average", "open", "remap", "rename", "report", "strip_module"),
    "checkpoint": ("Change", "Checkpoint", "Details"),
    "conversion": ("Conversion", "convert"),
    "errors": (
        "AmbiguousName", "CheckpointError", "CheckpointWarning", "CorruptFile", "DeviceError",
        "FileBusy", "FileDenied", "FileMissing", "LimitExceeded", "MatchError", "NameCollision",
        "NoSpace", "NotACheckpoint", "NotFound", "NotRepresentable", "OutOfRange", "TargetExists",
        "TorchMissing", "TrainingError", "TruncatedFile", "UnreadableFile", "UnsupportedFormat",
        "UsageError", "WriteDenied", "WriteError",
    ),
    "files.recovery": ("Recovery", "recover"),
    "formats.base": ("Problem",),
    "diagnosis": ("Complaint", "Diagnosis", "doctor"),
    "inspection": ("Diff", "Stats", "Verdict", "diff", "info", "list_tensors", "verify"),
    "inspection.scan": ("Scan", "scan"),
    "inspection.stats": ("stats",),
    "limits": ("Limits",),
    "loading.load": ("load",),
    "loading.load_into": ("load_into",),
    "loading.plan": ("match",),
    "loading.save": ("save",),
    "loading.state_dict": ("load_state_dict",),
    "matching": ("MatchReport",),
    "model": ("Opaque", "Storage", "TensorRef"),
    "render.page": ("PageReceipt",),
    "writing": ("Receipt",),
}  # fmt: skip

__all__ = [
    "AmbiguousName",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "Complaint",
    "Conversion",
    "CorruptFile",
    "Details",
    "DeviceError",
    "Diagnosis",
    "Diff",
    "FileBusy",
    "FileDenied",
    "FileMissing",
    "LimitExceeded",
    "Limits",
    "MatchError",
    "MatchReport",
    "NameCollision",
    "NoSpace",
    "NotACheckpoint",
    "NotFound",
    "NotRepresentable",
    "Opaque",
    "OutOfRange",
    "PageReceipt",
    "Problem",
    "Receipt",
    "Recovery",
    "Scan",
    "Stats",
    "Storage",
    "TargetExists",
    "TensorRef",
    "TorchMissing",
    "TrainingError",
    "TruncatedFile",
    "UnreadableFile",
    "UnsupportedFormat",
    "UsageError",
    "Verdict",
    "WriteDenied",
    "WriteError",
    "__version__",
    "add_module",
    "average",
    "convert",
    "diff",
    "doctor",
    "info",
    "list_tensors",
    "load",
    "load_into",
    "load_state_dict",
    "match",
    "open",
    "recover",
    "remap",
    "rename",
    "report",
    "save",
    "scan",
    "stats",
    "strip_module",
    "verify",
]

__getattr__ = importer(__name__, globals(), _HOMES)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
