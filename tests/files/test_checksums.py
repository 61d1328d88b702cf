"""Checksums of bytes that are read in parts, or by threads."""

import itertools
import random
import zlib

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import CorruptFile, TruncatedFile
from ckptool.files import ByteRange, FileSource, InflatedSource, MemorySource, checksums
from ckptool.files.checksums import CheckedRange, combine_crc32, compute_crc32cs, crc32c

CONTENT = bytes(range(256)) * 5
CRC = zlib.crc32(CONTENT)


class Damaged(Exception):
    """What is raised where the bytes are not the right ones."""


def checked(crc32=CRC):
    source = MemorySource(CONTENT, "m.pth")
    return CheckedRange(ByteRange(source, 0, len(CONTENT)), crc32, Damaged)


def parts(length):
    return [(at, len(CONTENT[at : at + length]), zlib.crc32(CONTENT[at : at + length]))
            for at in range(0, len(CONTENT), length)]  # fmt: skip


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_combine_to_that_of_both(first, second):
    found = combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1, 100, 256, 5000])
def test_parts_are_met_in_any_order_and_more_than_once(length):
    every = parts(length) * 2
    random.Random(length).shuffle(every)
    right, wrong = checked(), checked(1)
    for part in every:
        right.add_part(*part)
    assert right.is_known
    with pytest.raises(Damaged):
        list(itertools.starmap(wrong.add_part, every))
    assert not wrong.is_known


def test_nothing_is_said_before_all_was_met():
    wrong = checked(1)
    for part in parts(100)[1:]:
        wrong.add_part(*part)
    assert not wrong.is_known


def test_all_can_be_read_at_once():
    right = checked()
    right.check()
    assert right.is_known
    with pytest.raises(Damaged):
        checked(1).check()


def test_where_no_checksum_is_known_nothing_is_wrong():
    unknown = checked(None)
    assert unknown.is_known
    unknown.add_part(0, len(CONTENT), 1)
    unknown.check()


def test_sums_of_castagnoli_by_the_examples_of_rfc_3720():
    known = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, b"": 0}
    assert {data: crc32c(data) for data in known} == known
    assert crc32c(b"456789", crc32c(b"123")) == known[b"123456789"]
    told = []
    runs = [ByteRange(MemorySource(data, "a"), 0, len(data)) for data in known]
    assert list(compute_crc32cs(runs, told.append)) == list(known.values())
    assert sum(told) == sum(map(len, known))


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
    monkeypatch.setattr(checksums, "_JOB_BYTES", piece)
    monkeypatch.setattr(checksums, "_READ_BYTES", 256)
    monkeypatch.setattr(checksums, "_MIN_THREADED_BYTES", worth)
    data = random.Random(0).randbytes(3000)
    (tmp_path / "data").write_bytes(data)
    source = FileSource(tmp_path / "data")
    spans = [(0, 3000), (7, 0), (10, 999), (500, 1), (0, 0), (1, 2500)]
    runs = [ByteRange(source, start, length) for start, length in spans]
    told = []
    found = list(checksums.compute_crc32s([*runs, deflated(data)], told.append))
    wanted = [zlib.crc32(data[start : start + length]) for start, length in spans]
    assert found == [*wanted, zlib.crc32(data)]
    assert sum(told) == sum(length for _, length in spans) + len(data)
    source.close()


def test_no_run_at_all():
    assert list(checksums.compute_crc32s([])) == []


def test_what_cannot_be_inflated_is_told_in_its_place():
    good = deflated(b"good" * 100)
    first, error, last = checksums.compute_crc32s(
        [good, deflated(b"short", size=400), deflated(b"")]
    )
    assert (first, last) == (zlib.crc32(b"good" * 100), 0)
    assert isinstance(error, CorruptFile)


def test_a_file_that_shrinks_is_told(tmp_path):
    (tmp_path / "data").write_bytes(bytes(1000))
    source = FileSource(tmp_path / "data")
    (tmp_path / "data").write_bytes(b"")
    (error,) = checksums.compute_crc32s([ByteRange(source, 0, 1000)])
    assert isinstance(error, TruncatedFile)
    source.close()
