"""Bytes: ranged reads, kernel copies, atomic replacement. The only place with platform calls."""

from ckptool.files.inflated import InflatedSource
from ckptool.files.source import ByteRange, FileSource, FolderFile, MemorySource, Source

__all__ = ["ByteRange", "FileSource", "FolderFile", "InflatedSource", "MemorySource", "Source"]
