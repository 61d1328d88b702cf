"""CRC-32 by threads: as zlib has it, whatever the runs."""

import random
import zlib

import pytest

from ckptool.errors import CorruptFile, TruncatedFile
from ckptool.files import ByteRange, FileSource, InflatedSource, MemorySource, checksums


def deflated(data, size=None):
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = compressor.compress(data) + compressor.flush()
    source = MemorySource(packed, "test")
    whole = ByteRange(source, 0, len(packed))
    inflated = InflatedSource(whole, len(data) if size is None else size)
    return ByteRange(inflated, 0, inflated.size)


@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["threads", "here"])
@pytest.mark.parametrize("piece", [1, 1000, 32 << 20])
def test_every_run_in_order(tmp_path, monkeypatch, piece, worth):
    monkeypatch.setattr(checksums, "_PIECE", piece)
    monkeypatch.setattr(checksums, "_BLOCK", 256)
    monkeypatch.setattr(checksums, "_WORTH", worth)
    data = random.Random(0).randbytes(3000)
    (tmp_path / "data").write_bytes(data)
    source = FileSource(tmp_path / "data")
    spans = [(0, 3000), (7, 0), (10, 999), (500, 1), (0, 0), (1, 2500)]
    runs = [ByteRange(source, start, length) for start, length in spans]
    told = []
    found = list(checksums.crc32s([*runs, deflated(data)], told.append))
    wanted = [zlib.crc32(data[start : start + length]) for start, length in spans]
    assert found == [*wanted, zlib.crc32(data)]
    assert sum(told) == sum(length for _, length in spans) + len(data)
    source.close()


def test_no_run_at_all():
    assert list(checksums.crc32s([])) == []


def test_what_cannot_be_inflated_is_told_in_its_place():
    good = deflated(b"good" * 100)
    first, error, last = checksums.crc32s([good, deflated(b"short", size=400), deflated(b"")])
    assert (first, last) == (zlib.crc32(b"good" * 100), 0)
    assert isinstance(error, CorruptFile)


def test_a_file_that_shrinks_is_told(tmp_path):
    (tmp_path / "data").write_bytes(bytes(1000))
    source = FileSource(tmp_path / "data")
    (tmp_path / "data").write_bytes(b"")
    (error,) = checksums.crc32s([ByteRange(source, 0, 1000)])
    assert isinstance(error, TruncatedFile)
    source.close()
