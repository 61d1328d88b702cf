import io
import os
import struct
import zipfile
import zlib

import pytest

from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.formats.archive import open_archive, read_json, read_text
from ckptool.formats.base import Probe
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.zips import End, Entry, archive, build, save


def opened(path, limits=DEFAULT_LIMITS):
    return open_archive(Probe(path, limits))


def test_records_are_read_without_the_folder(tmp_path):
    found = opened(save(tmp_path, build([("x/data.pkl", b"12"), ("x/data/0", b"345")])))
    assert found.folder == "x"
    assert {name: (record.data.read(), record.crc32) for name, record in found.records.items()} == {
        "data.pkl": (b"12", zlib.crc32(b"12")),
        "data/0": (b"345", zlib.crc32(b"345")),
    }
    assert list(found.records) == ["data.pkl", "data/0"]


@pytest.mark.parametrize("content", [b"", b"P", b"PK\5\6" + bytes(18), b"\x80\x02.", b"text"])
def test_what_does_not_begin_as_a_zip_is_none(tmp_path, content):
    assert not opened(save(tmp_path, content)).records


def test_every_record_of_a_real_file_reads_as_zipfile_reads_it(fixtures):
    path = fixtures / "torch-2.13.0" / "scripted.pt"
    found = opened(path)
    with zipfile.ZipFile(path) as judge:
        expected = {name.split("/", 1)[1]: judge.read(name) for name in judge.namelist()}
    assert {name: record.data.read() for name, record in found.records.items()} == expected
    assert any(record.compressed for record in found.records.values())
    assert found.dead_bytes == 0


def test_a_crc_of_zero_means_none_was_computed_unless_the_record_is_empty():
    records = archive(build([Entry("a/x", b"abc", crc=0), Entry("a/y", b"")])).records
    assert records["x"].crc32 is None
    assert records["y"].crc32 == 0


def test_an_entry_of_a_folder_is_no_record():
    assert list(archive(build([("a/", b""), ("a/data.pkl", b"x")])).records) == ["data.pkl"]


def test_the_folder_is_the_one_that_holds_the_pickle():
    found = archive(build([("__MACOSX/._x", b"?"), ("m/data.pkl", b"x"), ("m/version", b"3")]))
    assert found.folder == "m"
    assert found.notes == (
        "torch refuses this file because '__MACOSX/._x' is outside the folder 'm'",
    )


def test_without_a_pickle_the_folder_is_that_of_the_first_entry_as_for_torch():
    found = archive(build([("a/one", b"1"), ("b/two", b"2"), ("b/three", b"3")]))
    assert (found.folder, list(found.records)) == ("a", ["one"])
    assert "'b/two', 'b/three' are outside" in found.notes[0]


def test_records_without_a_folder_keep_their_names():
    found = archive(build([("config.json", b"{}"), ("sub/x", b"1")]))
    assert (found.folder, list(found.records)) == ("", ["config.json", "sub/x"])


def test_an_empty_zip_has_no_records():
    assert archive(build([])).records == {}


@pytest.mark.parametrize("second", ["a/data/0", "a/DATA/0", "A/data/0"])
def test_two_records_of_one_name_are_refused_and_both_named(second):
    data = build([("a/data/0", b"x"), (second, b"y")])
    with pytest.raises(CorruptFile, match="'a/data/0' at offset 0 and '" + second):
        archive(data)


def test_a_record_that_is_not_where_the_directory_says_is_refused_and_named():
    inner = build([("a/y", b"data")])[: 30 + 3 + 4]
    for entries, said in [
        (
            [Entry("a/x", inner), Entry("a/y", b"data", header=33)],
            "'a/x' and 'a/y' overlap at offset 33",
        ),
        ([Entry("a/x", b"data"), Entry("a/y", b"data", header=0)], "overlap"),
        (
            [Entry("a/x", b"data", packed_size=50, size=50)],
            r"record 'a/x' \(50 bytes at offset 0\) overlaps the zip directory at 37",
        ),
        *(([Entry("a/x", b"data", header=at)], "'a/x'") for at in (36, 90, 100_000, 0xFFFFFFFE)),
        (
            [Entry("a/x", b"data", local_name="a/y")],
            "record 'a/x' is not at offset 0, where the zip directory places it",
        ),
        ([Entry("a/x", b"data", local_name="a/x" + "y" * 60_000)], "record 'a/x' is not at offset"),
    ]:
        with pytest.raises(CorruptFile, match=said):
            archive(build(entries))


def test_dead_bytes_are_those_that_no_record_accounts_for():
    live, dead = ("a/x", b"data"), Entry("a/old", b"old data", hidden=True)
    assert archive(build([live])).dead_bytes == 0
    assert archive(build([dead, live])).dead_bytes == 30 + len("a/old") + len("old data")
    assert archive(build([live], End(comment=b"hello"))).dead_bytes == 0


def test_a_data_descriptor_is_not_dead():
    buffer = io.BytesIO()

    class Stream(io.RawIOBase):
        def write(self, data):
            return buffer.write(data)

        def writable(self):
            return True

    with zipfile.ZipFile(Stream(), "w") as writer:
        writer.writestr("a/x", b"data")
        writer.writestr("a/y", b"more")
    found = archive(buffer.getvalue())
    assert found.dead_bytes == 0
    assert found.records["y"].data.read() == b"more"


def test_a_deflated_record_reads_as_what_it_inflates_to():
    content = os.urandom(1000) * 20
    record = archive(build([Entry("a/x", content, method=8)])).records["x"]
    assert record.compressed
    assert record.data.read() == content
    assert record.data.read(15_000, 7) == content[15_000:15_007]
    assert record.data.read(3, 7) == content[3:10]


@pytest.mark.parametrize(("size", "said"), [(50, "more than the 50"), (150, "ends too early")])
def test_a_deflated_record_that_lies_about_its_size_is_an_error_when_read(size, said):
    record = archive(build([Entry("a/x", bytes(100), method=8, size=size)])).records["x"]
    with pytest.raises(CorruptFile, match=said):
        record.data.read()


def test_a_damaged_deflated_record_is_an_error_when_read():
    data = bytearray(build([Entry("a/x", os.urandom(100), method=8)]))
    data[33] = 0xFF
    with pytest.raises(CorruptFile, match="damaged"):
        archive(bytes(data)).records["x"].data.read()


def test_a_record_that_claims_to_inflate_beyond_what_deflate_can_is_refused():
    entry = Entry("a/x", bytes(1000), method=8, size=1 << 31)
    with pytest.raises(
        LimitExceeded, match="record 'a/x' of 11 bytes inflates to 2,147,483,648, more than 1,100"
    ):
        archive(build([entry]))


def test_a_truncated_file_says_how_much_it_has_and_that_its_end_is_missing(fixtures, tmp_path):
    data = (fixtures / "torch-2.13.0" / "single.pth").read_bytes()
    for length in (100, 2000, len(data) - 22):
        with pytest.raises(TruncatedFile, match=f"it has {length:,} bytes") as caught:
            opened(save(tmp_path, data[:length]))
        if length == 2000:
            assert "the zip directory at its end is missing" in str(caught.value)
            assert "are missing" in str(caught.value)
            assert "download" in caught.value.hint


@pytest.fixture
def unzipped(fixtures, tmp_path):
    with zipfile.ZipFile(fixtures / "torch-2.13.0" / "single.pth") as source:
        source.extractall(tmp_path / "out")
    return tmp_path / "out"


def test_an_unzipped_folder_is_an_archive(unzipped, fixtures):
    zipped = opened(fixtures / "torch-2.13.0" / "single.pth")
    for folder in (unzipped, unzipped / zipped.folder):
        found = opened(folder)
        assert {n: r.data.read() for n, r in found.records.items()} == {
            n: r.data.read() for n, r in zipped.records.items()
        }
        assert found.sources == ()


def test_many_files_of_a_folder_do_not_keep_descriptors(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data.pkl").write_bytes(b"N.")
    for index in range(2000):
        (tmp_path / "data" / str(index)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    records = opened(tmp_path).records
    buffer = bytearray(1)
    for record in records.values():
        record.data.read_into(memoryview(buffer))
    assert len(records) == 2001
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_changed_since_the_folder_was_listed_is_an_error(unzipped):
    found = opened(unzipped)
    record = found.records["data/0"]
    with open(record.data.source.name, "ab") as file:
        file.write(b"more")
    with pytest.raises(TruncatedFile, match="when the folder was listed"):
        record.data.read()


@pytest.mark.parametrize("names", [[], ["a", "b"], ["a"]])
def test_any_other_folder_is_none(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    assert not opened(tmp_path).records


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_pipes_and_linked_folders_of_a_folder_are_not_entered(tmp_path):
    (tmp_path / "data.pkl").write_bytes(b"N.")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert list(opened(tmp_path).records) == ["data.pkl"]


def test_a_folder_with_more_files_than_allowed_is_refused(unzipped):
    with pytest.raises(LimitExceeded, match="the folder has 4 files, more than the limit of 3"):
        opened(unzipped, Limits(max_records=3))


def record_with(content):
    return archive(build([("a/x", content)])).records["x"]


def test_json_of_a_record():
    assert read_json(record_with(b'{"a": 1}'), DEFAULT_LIMITS) == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_json_that_is_none_is_corrupt(content):
    with pytest.raises(CorruptFile, match=r"record 'x' is (not|nested)"):
        read_json(record_with(content), DEFAULT_LIMITS)


def test_text_longer_than_allowed_is_refused():
    with pytest.raises(LimitExceeded, match="record 'x' has 9 bytes, more than the limit of 8"):
        read_text(record_with(b"123456789"), 8)


def test_payloads_behind_local_extra_fields_are_found():
    extra = struct.pack("<2s H", b"FB", 13) + b"Z" * 13
    found = archive(build([Entry("a/x", b"data", local_extra=extra)]))
    assert found.records["x"].data.read() == b"data"
    assert found.records["x"].data.offset == 30 + 3 + 17
    assert found.dead_bytes == 0
