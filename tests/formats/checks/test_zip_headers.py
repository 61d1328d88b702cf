"""What a zip states twice: every field of every header, turned over one by one."""

import struct
import zipfile
import zlib

import pytest
import torch

from ckptool.files import ByteRange, MemorySource
from ckptool.formats.checks.zip_headers import find_header_problems
from tests.formats.zips import End, Entry, build

OWN, BOTH = (
    "its directory entry has numbers that torch does not write",
    "its own header contradicts the directory",
)
CENTRAL = {
    "made by": (4, OWN), "needed": (6, BOTH), "flags": (8, BOTH), "method": (10, BOTH),
    "time": (12, BOTH), "date": (14, BOTH), "disk": (34, "disk 1"), "internal": (36, OWN),
    "external": (40, OWN),
}  # fmt: skip
LOCAL = {
    "needed": 4, "flags": 7, "method": 8, "time": 10, "date": 12, "CRC": 14, "packed": 18,
    "size": 22,
}  # fmt: skip


def problems(data):
    return find_header_problems(ByteRange(MemorySource(bytes(data), "test.zip"), 0, len(data)))


@pytest.fixture
def saved(tmp_path):
    torch.save({"w": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "model.pth")
    return bytearray((tmp_path / "model.pth").read_bytes())


def central(data, name):
    """Offset of an entry of the directory."""
    return data.rindex(b"PK\1\2", 0, data.rindex(name))


def local(data, name):
    return data.rindex(b"PK\3\4", 0, data.index(name))


def test_nothing_is_wrong_with_what_torch_writes(saved):
    assert problems(saved) == ()


@pytest.mark.parametrize("field", CENTRAL)
def test_a_field_of_the_directory(saved, field):
    offset, word = CENTRAL[field]
    saved[central(saved, b"model/data/0") + offset] ^= 1
    (found,) = problems(saved)[:1]
    assert (found.kind, found.place) == ("header", "model/data/0")
    assert word in found.text


@pytest.mark.parametrize("field", LOCAL)
def test_a_field_of_a_records_own_header(saved, field):
    saved[local(saved, b"model/data/0") + LOCAL[field]] ^= 1
    (found, *_) = problems(saved)
    assert (found.kind, found.place) == ("header", "model/data/0")
    assert BOTH in found.text


def test_torch_takes_a_record_marked_as_a_folder_for_an_empty_one(saved, tmp_path):
    saved[central(saved, b"model/data/0") + 38] |= 0x10
    (tmp_path / "marked.pth").write_bytes(saved)
    assert not torch.equal(torch.load(tmp_path / "marked.pth")["w"], torch.arange(6.0))
    (found,) = problems(saved)
    assert "marks it as a folder" in found.text


def test_padding_and_descriptors(saved):
    start = local(saved, b"model/data/0")
    padded = bytearray(saved)
    padded[saved.index(b"ZZ", start)] = ord("X")
    assert [found.text for found in problems(padded)] == ["the padding before its bytes is damaged"]
    mark = bytearray(saved)
    mark[saved.index(b"FB", start)] ^= 1
    assert "it has an extra field that torch does not write" in problems(mark)[0].text
    longer = bytearray(saved)
    longer[saved.index(b"FB", start) + 2] += 1
    assert "the extra field of its own header is damaged" in problems(longer)[0].text
    for offset in (0, 4, 8, 12):
        described = bytearray(saved)
        described[saved.index(b"PK\7\10", start) + offset] ^= 1
        assert "data descriptor" in problems(described)[0].text


@pytest.mark.parametrize(
    ("mark", "offset", "kind", "word"),
    [
        (b"PK\6\6", 12, "end", "versions"),
        (b"PK\6\6", 14, "end", "versions"),
        (b"PK\6\7", 4, "end", "several disks"),
        (b"PK\6\7", 16, "end", "several disks"),
        (b"PK\5\6", 4, "end", "several disks"),
        (b"PK\5\6", 6, "end", "several disks"),
        (b"PK\5\6", 20, "end", "1 bytes too short"),
    ],
)
def test_the_end_records(saved, mark, offset, kind, word):
    saved[saved.rindex(mark) + offset] ^= 1
    (found,) = problems(saved)
    assert (found.kind, found.place) == (kind, "")
    assert word in found.text


def test_what_stands_behind_the_end(saved):
    (found,) = problems(saved + b"\0" * 300)
    assert found.kind == "trailing"
    assert "300 bytes" in found.text


def test_other_tools_may_state_otherwise_what_means_the_same(tmp_path):
    for options in ({}, {"compression": zipfile.ZIP_DEFLATED}):
        path = tmp_path / "python.zip"
        with zipfile.ZipFile(path, "w", **options) as archive:
            archive.comment = b"a comment"
            archive.writestr("a/data.pkl", b"x" * 1000)
            archive.writestr("a/empty", b"")
            with archive.open("a/wide", "w", force_zip64=True) as record:
                record.write(b"hello")
        assert problems(path.read_bytes()) == ()
    with path.open("wb") as file, zipfile.ZipFile(Unseekable(file), "w") as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
        with archive.open("a/wide", "w", force_zip64=True) as record:
            record.write(b"hello")
    assert problems(path.read_bytes()) == ()


class Unseekable:
    """A stream, whose sizes stand behind the bytes."""

    def __init__(self, file):
        self.write, self.flush = file.write, file.flush


def test_headers_of_another_tool_that_contradict_each_other():
    def headers(**changes):
        return problems(build([("a/version", b"3\n"), Entry("a/data.pkl", b"N.", **changes)]))

    assert headers() == ()
    assert "damaged" in headers(local_extra=b"abc")[0].text
    assert "damaged" in headers(extra=struct.pack("<2H", 7, 9) + b"x")[0].text
    assert headers(local_extra=struct.pack("<2H", 0x5455, 5) + b"12345") == ()
    assert headers(local_extra=b"FB\x04\x00\0\0\0\0") == ()
    wide = struct.pack("<2H2Q", 1, 16, 2, 3)
    assert BOTH in headers(local_extra=wide)[0].text
    assert "data descriptor" in headers(flags=8)[0].text


def test_no_zip_and_no_end_are_told_by_the_reader():
    assert problems(b"") == problems(b"PK\3\4" + bytes(100)) == ()
    whole = build([("a/data.pkl", b"N.")])
    assert problems(whole[:-30]) == ()
    assert problems(build([("a/data.pkl", b"N.")], End(offset=7))) == ()


def test_one_of_64_bits_whose_field_is_too_short_is_told_by_the_reader():
    entry = Entry("a/data/0", b"12345678", size=0xFFFFFFFF, packed_size=0xFFFFFFFF)
    assert problems(build([("a/data.pkl", b"N."), entry])) == ()


def test_the_descriptor_may_be_of_any_form():
    data = b"content"
    facts = (zlib.crc32(data), len(data), len(data))
    for signature in (b"PK\7\10", b""):
        for form in ("<3I", "<I2Q"):
            packed = data + signature + struct.pack(form, *facts)
            entry = Entry("a/b", packed, flags=8, crc=facts[0], packed_size=7, size=7)
            assert problems(build([entry])) == ()
