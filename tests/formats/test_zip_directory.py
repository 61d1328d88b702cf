import io
import struct
import zipfile
from contextlib import suppress

import pytest

from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange, MemorySource
from ckptool.formats.archive import find_end, read_directory, read_raw_entries
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.zips import FAR, End, Entry, archive, build

PLAIN = [("a/one", b"1"), ("a/two", b"22"), ("a/empty", b"")]


def whole(data):
    return ByteRange(MemorySource(data, "test.zip"), 0, len(data))


def entries_of(data, limits=DEFAULT_LIMITS):
    source = whole(data)
    end = find_end(source)
    assert end is not None
    return read_directory(source, end, limits)


def test_a_directory_is_read_as_zipfile_reads_it(fixtures):
    data = (fixtures / "torch-2.13.0" / "scripted.pt").read_bytes()
    judge = zipfile.ZipFile(io.BytesIO(data)).infolist()
    found = entries_of(data)
    assert [(e.name, e.method, e.crc32, e.packed, e.size, e.header) for e in found] == [
        (i.filename, i.compress_type, i.CRC, i.compress_size, i.file_size, i.header_offset)
        for i in judge
    ]


def test_more_than_65535_records_are_read():
    entries = [Entry(f"a/{index}") for index in range(66_000)]
    data = build(entries, End(entries=0xFFFF, zip64={"entries": 66_000}))
    assert [entry.name for entry in entries_of(data)] == [entry.name for entry in entries]


def test_sizes_and_offset_of_a_zip64_field_replace_those_that_do_not_fit():
    field = struct.pack("<2H", 0x9999, 2) + b"xx" + struct.pack("<2H3Q", 1, 24, 3, 3, 0)
    data = build([Entry("a/b", b"abc", size=FAR, packed_size=FAR, header=FAR, extra=field)])
    (entry,) = entries_of(data)
    assert (entry.size, entry.packed, entry.header) == (3, 3, 0)


def test_only_the_fields_that_do_not_fit_are_in_the_zip64_field():
    field = struct.pack("<2HQ", 1, 8, 0)
    (entry,) = entries_of(build([Entry("a/b", b"abc", header=FAR, extra=field)]))
    assert (entry.size, entry.header) == (3, 0)


def test_a_file_without_end_record_has_none():
    assert find_end(whole(b"PK\3\4" + bytes(100))) is None
    assert find_end(whole(b"PK\5\6")) is None


def test_bytes_behind_the_end_record_are_tolerated_up_to_64_kib():
    data = build(PLAIN)
    assert len(entries_of(data + b"j" * 400)) == 3
    assert find_end(whole(data + b"j" * 70_000)) is None


def test_the_longest_comment_is_no_obstacle():
    assert len(entries_of(build(PLAIN, End(comment=b"c" * 0xFFFF)))) == 3


def test_an_end_record_in_the_comment_is_the_one_that_counts_and_must_be_true():
    fake = build([("b/x", b"")])[-22:]
    with pytest.raises(CorruptFile):
        entries_of(build(PLAIN, End(comment=fake)))


def test_an_end_record_that_lies_is_refused():
    for end, said in [
        (End(entries=5), "a zip directory of 155 bytes cannot have 5 records"),
        (End(entries=2), "the zip directory has more than the stated 2 entries"),
        (End(on_disk=1), "1 on this disk"),
        (End(disk=2), "several disks"),
        (End(offset=10), "foreign bytes precede"),
        (End(offset=10_000), "does not end at its end record"),
        (End(length=10_000), "does not end at its end record"),
        (End(length=139), "does not end at its end record"),
        (End(zip64={"at": 5}), "foreign bytes precede"),
        (End(zip64={"at": 1 << 60}), "cannot be at offset"),
        (End(zip64={"entries": 4, "on_disk": 4}), "disagree: 3 and 4"),
        (End(zip64={"on_disk": 4}), "several disks"),
        (End(zip64={"disks": 2}), "cannot be at"),
        (End(zip64={"length": 1 << 62}), "disagree"),
        (End(zip64={"signature": b"PK\6\5"}), "no zip64 end record"),
    ]:
        with pytest.raises(CorruptFile, match=said):
            entries_of(build(PLAIN, end))


def test_an_entry_that_breaks_a_rule_is_refused():
    for entry, error, said in [
        (
            Entry("a/b", b"abc", size=4),
            CorruptFile,
            "record 'a/b' is stored in 3 bytes, expected 4",
        ),
        (Entry("a/b", b"abc", flags=1), UnsupportedFormat, "'a/b' is encrypted"),
        (Entry("a/b", b"abc", flags=1 << 13), UnsupportedFormat, "encrypted"),
        (Entry("a/b", b"abc", flags=1 << 5), UnsupportedFormat, "a patch"),
        (Entry("a/b", b"abc", method=14), UnsupportedFormat, r"cannot read \(LZMA\)"),
        (Entry("a/b", b"abc", method=77), UnsupportedFormat, r"cannot read \(77\)"),
        (Entry("a/b", b"abc", disk=3), CorruptFile, "another disk"),
        (Entry("a/b", b"abc", header=FAR), CorruptFile, None),
        (
            Entry("a/b", b"abc", header=FAR, extra=struct.pack("<2HI", 1, 4, 7)),
            CorruptFile,
            "zip64 field of record 'a/b' is too short",
        ),
    ]:
        with pytest.raises(error, match=said):
            archive(build([entry]))


def test_a_damaged_directory_names_the_entry():
    data = build(PLAIN)
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    with pytest.raises(CorruptFile, match="the zip directory is damaged at entry 1"):
        entries_of(data[:second] + b"XX" + data[second + 2 :])


def test_more_records_than_allowed_are_refused():
    with pytest.raises(LimitExceeded, match="the zip has 3 records, more than the limit of 2"):
        entries_of(build(PLAIN), Limits(max_records=2))


@pytest.mark.parametrize("end", [End(), End(zip64={"disks": 1})])
def test_archives_one_behind_another_are_told_apart_from_damage(end):
    with pytest.raises(
        UnsupportedFormat,
        match=r"the file is a series of zip archives, for example a shard \(`\.distcp`\)",
    ):
        archive(build(PLAIN[:1]) + build(PLAIN, end))


@pytest.mark.parametrize("end", [End(), End(zip64={"disks": 1})])
def test_bytes_before_a_zip_are_named(end):
    with pytest.raises(CorruptFile, match="7 foreign bytes precede the zip"):
        archive(b"foreign" + build(PLAIN, end))


def test_bytes_between_the_directory_and_its_end_are_refused():
    with pytest.raises(CorruptFile, match="does not end at its end record"):
        archive(build(PLAIN, gap=b"gap"))


def test_an_entry_that_claims_a_longer_name_than_the_directory_has_is_refused():
    data = bytearray(build(PLAIN))
    first = data.index(b"PK\1\2")
    data[first + 28 : first + 30] = b"\xff\xff"
    with pytest.raises(CorruptFile, match="the zip directory ends within entry 0"):
        archive(bytes(data))


def test_every_flipped_byte_gives_records_or_our_own_error():
    data = build([Entry("a/data.pkl", b"x" * 40), Entry("a/z", b"y" * 300, method=8)])
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        with suppress(CheckpointError):
            assert archive(bytes(broken)).size == len(data)


def test_raw_entries_are_the_directory_byte_for_byte(fixtures):
    entries = [Entry("a/one", b"1", extra=b"\x99\x99\x02\0hi"), Entry("a/two", b"22")]
    wide = (fixtures / "archives" / "zip64.pth").read_bytes()
    for data in (build(entries, End(comment=b"bye")), wide, build([])):
        source = whole(data)
        end = find_end(source)
        raw = read_raw_entries(source, end)
        assert b"".join(part for _, part in raw) == source.read(end.offset, end.length)
        for (name, part), entry in zip(
            raw, read_directory(source, end, DEFAULT_LIMITS), strict=True
        ):
            assert part.startswith(b"PK\1\2")
            assert entry.raw_name == name
            assert name in part
