"""What is written comes out in order, whatever way each piece takes."""

import os
import zlib

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import TruncatedFile, WriteError
from ckptool.files import ByteRange, FileSource, MemorySource, atomic
from ckptool.files.atomic import FileOutput

CONTENT = bytes((i * 31 + i // 256) % 256 for i in range(1 << 17))


@pytest.fixture(scope="module")
def ranges(tmp_path_factory):
    """The same bytes in a file and in memory."""
    path = tmp_path_factory.mktemp("output") / "source"
    path.write_bytes(CONTENT)
    source = FileSource(path)
    yield source, MemorySource(CONTENT, "memory")
    source.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("output") / "target"
    with open(path, "w+b", buffering=0) as file:
        yield file


pieces = st.lists(
    st.tuples(
        st.sampled_from(["write", "copy", "copy_with_crc", "stream"]),
        st.booleans(),
        st.integers(0, 1000),
        st.sampled_from([0, 1, 100, 5000, 65_536, 65_537, 100_000]),
    ),
    max_size=12,
)


def put(out, source, kind, start, length):
    """One piece by one way; its CRC-32 where that way tells it."""
    data = ByteRange(source, start, length)
    if kind == "write":
        return out.write(data.read())
    if kind == "copy":
        return out.copy(data)
    if kind == "copy_with_crc":
        return out.copy_with_crc(data)
    return out.write_blocks(data.iterate_blocks(777))


@pytest.mark.parametrize("block", [4096, 1 << 22])
@given(todo=pieces)
def test_pieces_in_order(ranges, target, block, todo):
    expected = b"".join(CONTENT[start : start + length] for _, _, start, length in todo)
    target.truncate(0)
    out = FileOutput(target.fileno(), len(expected))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "BLOCK", block)
        for kind, in_memory, start, length in todo:
            before = out.tell()
            crc = put(out, ranges[in_memory], kind, start, length)
            assert out.tell() == before + length
            assert crc in (None, zlib.crc32(CONTENT[start : start + length]))
        out.finish()
    target.seek(0)
    assert target.read() == expected


@pytest.mark.parametrize("kind", ["write", "copy", "copy_with_crc", "stream"])
def test_more_than_planned_is_refused(ranges, target, kind):
    for length in (101, 70_000):
        out = FileOutput(target.fileno(), 100)
        with pytest.raises(WriteError, match="wrote more than the expected 100 bytes"):
            put(out, ranges[0], kind, 0, length)


def test_less_than_planned_is_refused(target):
    out = FileOutput(target.fileno(), 100)
    out.write(b"x" * 99)
    with pytest.raises(WriteError, match="wrote 99 bytes, expected 100"):
        out.finish()


def test_progress_ends_with_all(ranges, target, monkeypatch):
    monkeypatch.setattr(atomic, "STEP", 30_000)
    told = []
    out = FileOutput(target.fileno(), 100_200, lambda *now: told.append(now))
    out.write(b"x" * 100)
    out.copy(ByteRange(ranges[0], 0, 100_000))
    out.write(b"x" * 100)
    out.finish()
    assert told == [(done, 100_200) for done in (30_100, 60_100, 90_100, 100_200)]


@pytest.mark.parametrize("kind", ["copy", "copy_with_crc", "stream"])
def test_a_source_that_becomes_shorter(tmp_path, target, kind):
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    source = FileSource(path)
    os.truncate(path, 80_000)
    with pytest.raises(TruncatedFile, match="ended at 80,000"):
        put(FileOutput(target.fileno(), 1 << 20), source, kind, 0, 100_000)
    source.close()
