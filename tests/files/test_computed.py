"""Bytes computed when they are read, by code, from parts, from a view; and jobs of threads."""

import itertools
import os
import threading
import tracemalloc
import zlib
from contextlib import closing

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import TruncatedFile
from ckptool.files import ByteRange, FileSource, InflatedSource, MemorySource
from ckptool.files.computed import (
    MIN_AHEAD_BYTES,
    ComputedSource,
    ReadAhead,
    gather_view,
    join_ranges,
)
from ckptool.files.source import BLOCK
from ckptool.files.strided import iterate_row_major
from ckptool.files.threads import run_in_order


def counting(size):
    def fill(offset, buffer):
        buffer[:] = bytes(range(offset, offset + len(buffer)))

    return ComputedSource("model.pth", size, fill)


def test_a_range_of_it_reads_as_any_other():
    data = ByteRange(counting(100), 10, 50)
    assert data.read(5, 3) == bytes([15, 16, 17])
    assert b"".join(data.iterate_blocks(7)) == bytes(range(10, 60))


def test_a_buffer_is_filled():
    buffer = bytearray(4)
    counting(100).read_into(96, memoryview(buffer))
    assert buffer == bytes([96, 97, 98, 99])


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, -1), (99, 2), (101, 0)])
def test_what_lies_outside_is_refused(offset, length):
    with pytest.raises(TruncatedFile, match=r"model\.pth"):
        counting(100).read(offset, length)


def patterned(size, calls, parallel=True):
    """A long source that notes what is computed, and whether by the thread that reads."""

    def fill(offset, buffer):
        calls.append((threading.current_thread() is threading.main_thread(), offset, len(buffer)))
        buffer[:] = bytes(at % 251 for at in range(offset, offset + len(buffer)))

    return ComputedSource("model.pth", size, fill, ahead=ReadAhead() if parallel else None)


def test_the_next_blocks_are_computed_by_other_threads():
    calls, block, size = [], MIN_AHEAD_BYTES, 4 * MIN_AHEAD_BYTES + 7
    data = ByteRange(patterned(size, calls), 0, size)
    assert b"".join(data.iterate_blocks(block)) == bytes(at % 251 for at in range(size))
    assert sorted(calls, key=lambda call: call[1]) == [
        (True, 0, block),
        *((False, at * block, block) for at in (1, 2, 3)),
        (True, 4 * block, 7),
    ]


def test_what_may_be_computed_by_one_thread_only_is():
    calls, size = [], 4 * MIN_AHEAD_BYTES
    data = ByteRange(patterned(size, calls, parallel=False), 0, size)
    assert b"".join(data.iterate_blocks(MIN_AHEAD_BYTES)) == bytes(at % 251 for at in range(size))
    assert calls == [(True, at * MIN_AHEAD_BYTES, MIN_AHEAD_BYTES) for at in range(4)]


def test_what_was_computed_ahead_in_vain_does_no_harm():
    source = patterned(4 * MIN_AHEAD_BYTES, [])
    source.read(0, MIN_AHEAD_BYTES)
    for start, length in (
        (3 * MIN_AHEAD_BYTES, 5),
        (MIN_AHEAD_BYTES, 3),
        (0, MIN_AHEAD_BYTES),
        (MIN_AHEAD_BYTES, MIN_AHEAD_BYTES),
        (0, 1),
    ):
        wanted = bytes(at % 251 for at in range(start, start + length))
        assert source.read(start, length) == wanted


def test_an_error_ahead_is_raised_where_its_block_is_read():
    def fill(offset, buffer):
        if offset:
            raise ValueError("beyond the first block")

    source = ComputedSource("model.pth", 4 * MIN_AHEAD_BYTES, fill, ahead=ReadAhead())
    source.read(0, MIN_AHEAD_BYTES)
    with pytest.raises(ValueError, match="beyond"):
        source.read(MIN_AHEAD_BYTES, MIN_AHEAD_BYTES)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="files are read by one thread here")
def test_plain_bytes_may_be_read_by_several_threads(tmp_path):
    (tmp_path / "f").write_bytes(bytes(10))
    with closing(FileSource(tmp_path / "f")) as file:
        assert file.is_shared
        packed = zlib.compress(bytes(1000))[2:-4]
        inflated = InflatedSource(ByteRange(MemorySource(packed, "f"), 0, len(packed)), 1000)
        assert not inflated.is_shared
        assert not counting(10).is_shared


def test_the_sources_that_come_next_are_computed_too():
    calls, ahead, sources = [], ReadAhead(), []
    for size in (MIN_AHEAD_BYTES, 10, MIN_AHEAD_BYTES + 1, MIN_AHEAD_BYTES):
        fill = patterned(size, calls).fill
        sources.append(ComputedSource("model.pth", size, fill, ahead=ahead))
    for source in sources:
        assert source.read(0, source.size) == bytes(at % 251 for at in range(source.size))
    assert sorted(calls) == [
        (False, 0, MIN_AHEAD_BYTES), (False, 0, MIN_AHEAD_BYTES + 1),
        (True, 0, 10), (True, 0, MIN_AHEAD_BYTES),
    ]  # fmt: skip


def test_nothing_is_computed_twice_where_a_source_ends_within_a_block():
    calls, ahead, sources = [], ReadAhead(), []
    sizes = (
        2 * BLOCK + 3 * MIN_AHEAD_BYTES,
        BLOCK + MIN_AHEAD_BYTES,
        5,
        3 * BLOCK,
        2 * MIN_AHEAD_BYTES,
    )
    for number, size in enumerate(sizes):

        def fill(offset, buffer, name=number):
            calls.append((name, offset, len(buffer)))
            buffer[:] = bytes(len(buffer))

        sources.append(ComputedSource("model.pth", size, fill, ahead=ahead))
    for source in sources:
        for _ in ByteRange(source, 0, source.size).iterate_blocks():
            pass
    wanted = [
        (name, offset, min(BLOCK, source.size - offset))
        for name, source in enumerate(sources)
        for offset in range(0, source.size, BLOCK)
    ]
    assert sorted(calls) == wanted


def test_sources_that_are_read_in_another_order_are_right_and_looked_at_alone():
    calls, ahead = [], ReadAhead()
    fill = patterned(MIN_AHEAD_BYTES, calls).fill
    sources = [ComputedSource("model.pth", MIN_AHEAD_BYTES, fill, ahead=ahead) for _ in range(40)]
    wanted = bytes(at % 251 for at in range(MIN_AHEAD_BYTES))
    for source in reversed(sources):
        assert source.read(0, MIN_AHEAD_BYTES) == wanted
    assert len(calls) < 50


CONTENT = bytes(range(256)) * 16
SOURCE = MemorySource(CONTENT, "model.pth")


@st.composite
def views(draw):
    itemsize = draw(st.sampled_from([1, 2, 4, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    stride = tuple(draw(st.integers(0, 20)) for _ in shape)
    offset = draw(st.integers(0, 9))
    return {"itemsize": itemsize, "shape": shape, "stride": stride, "offset": offset}


@given(views(), st.lists(st.tuples(st.integers(0, 1024), st.integers(0, 1024))))
def test_any_run_of_a_view_is_that_of_its_elements_in_order(view, reads):
    data = ByteRange(SOURCE, 0, len(CONTENT))
    whole = b"".join(iterate_row_major(data, **view))
    found = gather_view(data, **view)
    assert found.length == len(whole)
    for start, length in reads:
        start = min(start, len(whole))
        length = min(length, len(whole) - start)
        assert found.read(start, length) == whole[start : start + length]
    assert b"".join(found.iterate_blocks(3)) == whole


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 50)), min_size=1),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_any_run_of_what_is_joined_is_that_of_the_parts_put_together(parts, start, length):
    whole = b"".join(CONTENT[offset : offset + size] for offset, size in parts)
    data = join_ranges([ByteRange(SOURCE, *part) for part in parts])
    start = min(start, len(whole))
    length = min(length, len(whole) - start)
    assert data.length == len(whole)
    assert data.read(start, length) == whole[start : start + length]
    assert b"".join(data.iterate_blocks(7)) == whole


def test_parts_that_follow_each_other_are_one_run_of_their_source():
    data = join_ranges(
        [ByteRange(SOURCE, 10, 5), ByteRange(SOURCE, 15, 20), ByteRange(SOURCE, 35, 1)]
    )
    assert data == ByteRange(SOURCE, 10, 26)


def test_reading_outside_of_what_is_joined_is_an_error_and_its_name_is_that_of_the_file():
    data = join_ranges([ByteRange(SOURCE, 0, 4), ByteRange(SOURCE, 100, 6)])
    assert data.source.name == "model.pth"
    for offset, length in ((-1, 2), (0, -1), (9, 2)):
        with pytest.raises(TruncatedFile, match=r"the file has 10"):
            data.source.read(offset, length)


def test_results_come_in_the_order_of_the_jobs():
    assert list(run_in_order(lambda number: number * number, range(100))) == [
        n * n for n in range(100)
    ]
    assert list(run_in_order(str, [])) == []


def test_jobs_without_end_are_begun_as_their_results_are_wanted():
    begun = []
    results = run_in_order(begun.append, itertools.count())
    for _ in range(50):
        next(results)
    results.close()
    assert 50 <= len(begun) < 100


def test_an_error_ends_it_and_what_has_not_begun_is_dropped():
    begun = []

    def work(number):
        begun.append(number)
        if number == 20:
            raise ZeroDivisionError
        return number

    results = run_in_order(work, range(10_000))
    assert list(itertools.islice(results, 20)) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(begun) < 100


def test_a_view_that_was_read_to_its_end_holds_none_of_it():
    data = ByteRange(MemorySource(bytes(4 << 20), "memory"), 0, 4 << 20)
    views = [
        gather_view(data, itemsize=4, shape=(1024, 512), stride=(1024, 1), offset=512 * (at % 2))
        for at in range(16)
    ]
    tracemalloc.start()
    try:
        for view in views:
            assert sum(map(len, view.iterate_reused())) == 2 << 20
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20
