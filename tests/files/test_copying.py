"""Copies by the kernel, and what stands in where the kernel refuses."""

import errno
import os

import pytest

from ckptool.errors import TruncatedFile, UsageError
from ckptool.files import FileSource, system
from ckptool.files.system import copy_bytes, write_at

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    opened = FileSource(path)
    yield opened
    opened.close()


@pytest.fixture
def target(tmp_path):
    fd = os.open(tmp_path / "target", os.O_CREAT | os.O_RDWR | getattr(os, "O_BINARY", 0))
    yield fd
    os.close(fd)


def content(fd):
    os.lseek(fd, 0, os.SEEK_SET)
    return os.read(fd, 1 << 20)


def refusing(number):
    def way(source, offset, target, position, length):
        raise OSError(number, os.strerror(number))

    return way


def moving_nothing(source, offset, target, position, length):
    return 0


def moving_little(source, offset, target, position, length):
    os.lseek(target, position, os.SEEK_SET)
    return os.write(target, os.pread(source, min(length, 100), offset))


@pytest.mark.parametrize("way", [*system.KERNEL_COPIES, None], ids=lambda way: way and way.__name__)
def test_a_range_lands_at_its_place(source, target, monkeypatch, way):
    monkeypatch.setattr(system, "KERNEL_COPIES", (way,) if way else ())
    write_at(target, b"before", 0)
    copy_bytes(source, 100, target, 6, 5000)
    assert content(target) == b"before" + CONTENT[100:5100]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_refusal_gives_place_to_the_next_way(source, target, monkeypatch, number):
    monkeypatch.setattr(system, "KERNEL_COPIES", (refusing(number), refusing(number)))
    copy_bytes(source, 0, target, 0, len(CONTENT))
    assert content(target) == CONTENT


def test_a_full_disk_is_no_refusal(source, target, monkeypatch):
    monkeypatch.setattr(system, "KERNEL_COPIES", (refusing(errno.ENOSPC),))
    with pytest.raises(OSError, match="No space"):
        copy_bytes(source, 0, target, 0, len(CONTENT))


def test_a_call_that_moves_nothing_is_not_asked_again(source, target, monkeypatch):
    monkeypatch.setattr(system, "KERNEL_COPIES", (moving_nothing,))
    copy_bytes(source, 3, target, 0, 1000)
    assert content(target) == CONTENT[3:1003]


def test_calls_that_move_less_than_asked_are_repeated(source, target, monkeypatch):
    monkeypatch.setattr(system, "KERNEL_COPIES", (moving_little,))
    copy_bytes(source, 0, target, 0, len(CONTENT))
    assert content(target) == CONTENT


def test_no_call_is_asked_for_more_than_the_kernel_moves(source, target, monkeypatch):
    asked = []

    def way(source, offset, target, position, length):
        asked.append(length)
        return length

    monkeypatch.setattr(system, "KERNEL_COPIES", (way,))
    copy_bytes(source, 0, target, 0, 5 << 30)
    assert asked == [1 << 30] * 5


@pytest.mark.parametrize("ways", [system.KERNEL_COPIES, ()])
def test_a_source_that_becomes_shorter(source, target, monkeypatch, ways):
    monkeypatch.setattr(system, "KERNEL_COPIES", ways)
    os.truncate(source.path, 1000)
    with pytest.raises(TruncatedFile, match=r"ended at 1,000 while it was read; it had 16,384"):
        copy_bytes(source, 0, target, 0, len(CONTENT))


def test_a_source_that_has_been_closed(source, target):
    source.close()
    with pytest.raises(UsageError, match="has been closed"):
        copy_bytes(source, 0, target, 0, 10)
