"""Formats: which there are, and how a file of one of them is opened."""

from ckptool.formats.base import EditableFormat, Format, NewFile, Plan, Probe, WritableFormat
from ckptool.formats.opening import Source, open_checkpoint, opened, read_probe
from ckptool.formats.registry import (
    REGISTRY,
    TORCH_ENDINGS,
    WRITABLE,
    Entry,
    candidates,
    format_of,
    shard_of,
    writer,
)

__all__ = [
    "REGISTRY",
    "TORCH_ENDINGS",
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
    "format_of",
    "open_checkpoint",
    "opened",
    "read_probe",
    "shard_of",
    "writer",
]
