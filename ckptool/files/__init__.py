"""Bytes: ranged reads, kernel copies, atomic replacement. The only place with platform calls."""

from ckptool.files.inflated import InflatedSource as InflatedSource
from ckptool.files.source import (
    ByteRange as ByteRange,
    FileSource as FileSource,
    FolderFile as FolderFile,
    MemorySource as MemorySource,
    Source as Source,
)
