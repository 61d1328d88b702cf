import io
import zipfile
import zlib

import pytest
import torch
import torch.utils.serialization

from ckptool.errors import WriteError
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Probe
from ckptool.formats.zip_writer import NewRecord, literal_record, plan_zip
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.zips import Holes, Sink, archive, saved, written

GIB = 1 << 30


def again(data, alignment=64):
    """The same records laid out by our own writer."""
    found = archive(data)
    ordered = sorted(found.records.values(), key=lambda record: record.header_offset)
    records = [literal_record(record.name, record.data.read()) for record in ordered]
    return written(plan_zip(found.folder, records, alignment))


@pytest.mark.parametrize(
    "name",
    [
        "torch-1.6.0/dp_full.pth", "torch-1.13.1/odd.pth", "torch-2.2.2/odd.pth",
        "torch-2.13.0/misc.pth", "torch-2.13.0/odd.pth", "ddp/ddp_full.pth",
    ],
)  # fmt: skip
def test_the_layout_is_that_of_torch_byte_for_byte(fixtures, name):
    data = (fixtures / name).read_bytes()
    assert again(data) == data


def test_many_small_records_are_laid_out_as_torch_does(tmp_path):
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "many.pth"))
    writer.write_record("data.pkl", b"N.", 2)
    for number in range(66_000):
        writer.write_record(f"data/{number}", b"abcdefgh", number % 3 * 4)
    writer.write_end_of_file()
    data = (tmp_path / "many.pth").read_bytes()
    assert again(data) == data


def test_another_alignment_is_kept():
    previous = torch.utils.serialization.config.save.storage_alignment
    try:
        torch.utils.serialization.config.save.storage_alignment = 4096
        data = saved({"x": torch.ones(3), "y": torch.ones(5)})
    finally:
        torch.utils.serialization.config.save.storage_alignment = previous
    assert again(data, 4096) == data


def test_records_beyond_4_gib_are_laid_out_as_torch_does(tmp_path):
    # Torch leaves holes where the storages would be, so that no disk is taken.
    theirs, ours = tmp_path / "theirs.pth", tmp_path / "ours.pth"
    sizes = [3, 4 * GIB + 8, 0, 5, GIB]
    with torch.serialization.skip_data():
        torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], theirs)
    source = Probe(theirs, DEFAULT_LIMITS)
    found = source.compute_once(open_archive)
    records = [
        NewRecord(
            name, record.data.length, lambda output, size=record.data.length: output.skip(size)
        )
        if name.startswith("data/")
        else literal_record(name, record.data.read())
        for name, record in found.records.items()
    ]
    plan = plan_zip(found.folder, records, 64)
    with open(ours, "wb") as file:
        plan.write(Holes(file))
    assert plan.size == ours.stat().st_size == theirs.stat().st_size
    mine = Probe(ours, DEFAULT_LIMITS)
    assert [
        (name, record.data.offset, record.data.length, record.header_offset)
        for name, record in mine.compute_once(open_archive).records.items()
    ] == [
        (name, record.data.offset, record.data.length, record.header_offset)
        for name, record in found.records.items()
    ]
    assert found.dead_bytes == 0
    ends = [record.data.offset + record.data.length for record in found.records.values()]
    starts = [0, *ends]
    for start, record in zip(starts, [*found.records.values(), None], strict=True):
        stop = record.data.offset if record else source.source.size
        length = stop - start
        assert mine.source.read(start, length) == source.source.read(start, length)
    source.close()
    mine.close()


def test_a_nested_archive_is_written_relative_to_its_own_start():
    inner = plan_zip("x", [literal_record("a", b"12345")], 64)

    sink = Sink()
    sink.write(b"something before")
    inner.write(sink)
    found = archive(bytes(sink.data[16:]))
    assert found.records["a"].data.read() == b"12345"


def test_the_result_satisfies_zipfile():
    data = written(
        plan_zip("archive", [literal_record("a", b"12345"), literal_record("b/c", b"")], 64)
    )
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        assert judge.testzip() is None
        assert judge.read("archive/a") == b"12345"
        assert judge.namelist() == ["archive/a", "archive/b/c"]


def test_a_record_that_turns_out_shorter_is_an_error():
    def write(output):
        output.write(b"123")
        return zlib.crc32(b"123")

    with pytest.raises(WriteError, match="record 'a' has 3 bytes, expected 5"):
        written(plan_zip("archive", [NewRecord("a", 5, write)], 64))


def test_an_empty_folder_is_a_zip_all_the_same():
    assert zipfile.ZipFile(io.BytesIO(written(plan_zip("archive", [], 64)))).namelist() == []


def test_a_probe_reads_what_was_written(tmp_path):
    path = tmp_path / "out.pth"
    path.write_bytes(written(plan_zip("f", [literal_record("data.pkl", b"N.")], 64)))
    probe = Probe(path, DEFAULT_LIMITS)
    assert probe.compute_once(open_archive) is not None
    assert probe.compute_once(open_archive).records["data.pkl"].data.offset == 64
    probe.close()
