"""Formats: which there are, and how a file of one of them is opened."""

from ckptool.formats.base import EditableFormat, Format, NewFile, Plan, Probe, WritableFormat
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
    "EditableFormat",
    "Entry",
    "Format",
    "NewFile",
    "Plan",
    "Probe",
    "Source",
    "WritableFormat",
    "candidates",
    "editor",
    "open_checkpoint",
    "opened",
    "read_probe",
    "writer",
]
