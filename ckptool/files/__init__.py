"""Bytes: ranged reads, kernel copies, atomic replacement. The only place with platform calls."""

from ckptool.files.source import ByteRange, FileSource, InflatedSource, MemorySource, Source

__all__ = ["ByteRange", "FileSource", "InflatedSource", "MemorySource", "Source"]
