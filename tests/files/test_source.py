"""Reading at an offset: from files, from memory, from compressed records, and past the end."""

import copy
import os
import pickle
import zlib

import pytest

import ckptool
from ckptool.errors import (
    CorruptFile,
    FileMissing,
    TruncatedFile,
    UnreadableFile,
    UsageError,
)
from ckptool.files import ByteRange, FileSource, InflatedSource, MemorySource, source

CONTENT = bytes((i * 31 + i // 256) % 256 for i in range(100_000))


def file_source(folder, content=CONTENT):
    path = folder / "source"
    path.write_bytes(content)
    return FileSource(path)


def deflated(content):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def inflated_source(content, size=None, packed=None):
    packed = deflated(content) if packed is None else packed
    memory = MemorySource(packed, "archive")
    return InflatedSource(ByteRange(memory, 0, len(packed)), len(content) if size is None else size)


@pytest.fixture(params=["file", "memory", "inflated"])
def opened(request, tmp_path):
    """Every kind of source over the same content."""
    if request.param == "file":
        made = file_source(tmp_path)
        yield made
        made.close()
    elif request.param == "memory":
        yield MemorySource(CONTENT, "memory")
    else:
        yield inflated_source(CONTENT)


def test_reads_anywhere_and_backwards(opened):
    assert opened.size == len(CONTENT)
    for offset, length in [(0, 10), (99_000, 1000), (5, 70_000), (100_000, 0), (0, 100_000)]:
        assert opened.read(offset, length) == CONTENT[offset : offset + length]
        buffer = bytearray(length)
        opened.read_into(offset, memoryview(buffer))
        assert buffer == CONTENT[offset : offset + length]


def test_reads_outside_are_refused(opened):
    for offset, length in [(99_999, 2), (100_001, 0), (-1, 1), (0, 100_001)]:
        with pytest.raises(TruncatedFile):
            opened.read(offset, length)


def test_ranges_of_ranges(opened):
    whole = ByteRange(opened, 10, 50_000)
    part = whole.slice(100, 1000)
    assert part.read() == CONTENT[110:1110]
    assert part.read(10, 20) == CONTENT[120:140]
    assert b"".join(part.iterate_blocks(7)) == CONTENT[110:1110]
    with pytest.raises(TruncatedFile):
        whole.slice(49_999, 2)
    with pytest.raises(
        TruncatedFile, match="cannot read 100,000 bytes at offset 1: the file ends at 100,000, 1"
    ):
        ByteRange(opened, 1, len(CONTENT))


def test_a_system_without_pread(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread", raising=False)
    monkeypatch.delattr(os, "preadv", raising=False)
    test_reads_anywhere_and_backwards(file_source(tmp_path))


def test_no_such_file(tmp_path):
    with pytest.raises(FileMissing, match="no such file"):
        FileSource(tmp_path / "missing")


def test_what_is_no_regular_file(tmp_path):
    with pytest.raises(UnreadableFile):
        FileSource(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFile, match="not a regular file"):
        FileSource(tmp_path / "pipe")


def test_a_file_that_becomes_shorter(tmp_path):
    opened = file_source(tmp_path)
    os.truncate(opened.path, 10)
    with pytest.raises(TruncatedFile, match="ended at 10 while it was read; it had 100,000"):
        opened.read(0, 20)
    opened.close()


def test_a_file_that_nobody_writes_to_has_not_changed(tmp_path):
    opened = file_source(tmp_path)
    opened.read(0, 10)
    os.rename(opened.path, tmp_path / "elsewhere")
    assert opened.describe_change() is None
    opened.check_unchanged()
    opened.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONTENT[::-1], "content was rewritten"),
        (CONTENT + b"x", "size was 100,000 and is now 100,001"),
    ],
)
def test_a_file_that_is_written_to(tmp_path, content, words):
    opened = file_source(tmp_path)
    before = os.stat(opened.path).st_mtime_ns
    with open(opened.path, "r+b") as file:
        file.write(content)
    os.utime(opened.path, ns=(before + 1, before + 1))  # the clock of a file system may be coarse
    with pytest.raises(UnreadableFile, match=f"changed while it was read: .*{words}"):
        opened.check_unchanged()
    opened.close()


def test_a_file_that_has_been_closed(tmp_path):
    opened = file_source(tmp_path)
    opened.close()
    opened.close()
    with pytest.raises(UsageError, match="closed"):
        opened.read(0, 1)


def test_a_disk_that_fails(tmp_path, monkeypatch):
    def fail(fd, wanted, offset):
        raise OSError(5, "Input/output error")

    opened = file_source(tmp_path)
    monkeypatch.setattr(source, "_read_once", fail)
    with pytest.raises(UnreadableFile, match=r"cannot be read at 7 \(Input/output error\)"):
        opened.read(7, 1)
    opened.close()


def test_a_compressed_record_that_ends_too_early():
    packed = deflated(CONTENT)
    for damaged, size in ((packed[:-50], len(CONTENT)), (packed, len(CONTENT) + 1)):
        with pytest.raises(CorruptFile, match="ends too early"):
            inflated_source(CONTENT, size=size, packed=damaged).read(0, size)


def test_a_compressed_record_that_is_damaged():
    with pytest.raises(CorruptFile, match="damaged"):
        inflated_source(CONTENT, packed=b"\xff" * 100).read(0, 10)


def test_a_name_of_a_repository_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileMissing) as caught:
        FileSource("Qwen/Qwen2.5-7B")
    assert caught.value.hint == "for a Hugging Face repository, use hf://Qwen/Qwen2.5-7B"
    with pytest.raises(FileMissing) as caught:
        FileSource("runs/model.pth")
    assert caught.value.hint is None


def test_a_link_whose_target_is_gone_says_where_it_led(tmp_path):
    (tmp_path / "model.pth").symlink_to(tmp_path / "blobs" / "0af")
    with pytest.raises(FileMissing, match=r"is a link to .*/blobs/0af, which does not exist"):
        FileSource(tmp_path / "model.pth")


@pytest.fixture
def model(tmp_path, fixtures):
    path = tmp_path / "model.pth"
    path.write_bytes((fixtures / "torch-2.13.0" / "dp.pth").read_bytes())
    return path


def test_a_pickled_tensor_reads_its_own_file_whatever_has_the_descriptor_now(model, tmp_path):
    with ckptool.open(model) as checkpoint:
        ref = checkpoint["module.conv1.weight"]
        wanted, data = ref.read(), pickle.dumps(ref)
    other = os.open(os.devnull, os.O_RDONLY)  # takes the number that has become free
    assert pickle.loads(data).read() == wanted
    os.close(other)


def test_a_copy_closes_its_own_descriptor(model):
    with ckptool.open(model) as checkpoint:
        again = copy.deepcopy(checkpoint)
        again.close()
        assert checkpoint["module.fc.bias"].read()


def test_a_file_that_has_changed_since_is_refused(model):
    with ckptool.open(model) as checkpoint:
        data = pickle.dumps(checkpoint["module.fc.bias"])
    model.write_bytes(b"something else")
    with pytest.raises(ckptool.UnreadableFile, match="has changed since it was opened"):
        pickle.loads(data)
