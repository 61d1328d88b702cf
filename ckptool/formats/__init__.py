"""Formats: which there are, and how a file of one of them is opened."""

from ckptool.formats.base import EditableFormat, EditPlan, Format, Probe, WritableFormat, WritePlan
from ckptool.formats.opening import Source, open_checkpoint, opened, read_probe
from ckptool.formats.registry import (
    REGISTRY,
    SHARD_FORMATS,
    WRITABLE,
    Entry,
    candidates,
    editor,
    writer,
)

__all__ = [
    "REGISTRY",
    "SHARD_FORMATS",
    "WRITABLE",
    "EditPlan",
    "EditableFormat",
    "Entry",
    "Format",
    "Probe",
    "Source",
    "WritableFormat",
    "WritePlan",
    "candidates",
    "editor",
    "open_checkpoint",
    "opened",
    "read_probe",
    "writer",
]
