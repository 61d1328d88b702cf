import io
import json
import pickle
import sys
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

import ckptool
from ckptool.core.checkpoint import TORCH_REFUSES
from ckptool.core.model import Opaque, Storage, TensorRef
from ckptool.errors import (
    CorruptFile,
    LimitExceeded,
    NotRepresentable,
)
from ckptool.formats.base import Probe
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.contract import FormatContract
from tests.formats.legacy_streams import Called, Pid, dumps
from tests.formats.zips import (
    Entry,
    Sink,
    archive,
    assert_as_told,
    build,
    read,
    records_of,
    save,
    saved,
    written,
)


class TestContract(FormatContract):
    name = "torch-zip"
    sample = "torch-2.13.0/dp_full_cuda3.pth"
    is_covered = True


FILES = [
    "torch-1.4.0/zip_odd.pth", "torch-1.4.0/zip_dp_full_cuda1.pth", "torch-1.5.0/zip_odd.pth",
    "torch-1.6.0/odd.pth", "torch-1.6.0/dp_full_cuda3.pth", "torch-1.8.1/odd.pth",
    "torch-1.10.2/odd.pth", "torch-1.12.1/odd.pth", "torch-1.13.1/odd.pth",
    "torch-1.13.1/whole_dp.pth", "torch-2.0.1/odd.pth", "torch-2.2.2/odd.pth",
    "torch-2.6.0/odd.pth", "torch-2.13.0/odd.pth", "torch-2.13.0/misc.pth",
    "torch-2.13.0/whole_single.pth", "ecosystem/newdtypes.pth", "ecosystem/lightning.ckpt",
]  # fmt: skip


def repacked(records, folder="archive", **changes):
    """The records in a plain zip, some of them changed or (None) left out."""
    records = {**records, **changes}
    return build([(f"{folder}/{name}", data) for name, data in records.items() if data is not None])


@pytest.fixture
def ones():
    return records_of(saved({"w": torch.ones(4), "v": torch.arange(3)}))


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_torch_read_as_torch_reads_them(fixtures, name):
    path = fixtures / name
    oracle = json.loads(path.with_name(f"{path.name}.oracle.json").read_text())
    with read(TORCH_ZIP, path) as checkpoint:
        assert_as_told(checkpoint, oracle)
        assert checkpoint.details.dead_bytes == 0
        assert checkpoint.details.size == path.stat().st_size
        refused = any(note.startswith(TORCH_REFUSES) for note in checkpoint.details.notes)
        assert refused is name.startswith("torch-1.4.0/")  # of which no later torch finds the data


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("torch-1.4.0/zip_odd.pth", "torch 1.4"), ("torch-1.5.0/zip_odd.pth", "torch 1.5"),
        ("torch-1.6.0/odd.pth", "torch 1.6 to 1.8"), ("torch-1.8.1/odd.pth", "torch 1.6 to 1.8"),
        ("torch-1.10.2/odd.pth", "torch 1.9 to 2.0"), ("torch-1.13.1/odd.pth", "torch 1.13 or 2.0"),
        ("torch-2.2.2/odd.pth", "torch 2.1 to 2.6"), ("torch-2.13.0/odd.pth", "torch 2.7 or newer"),
    ],
)  # fmt: skip
def test_the_writer_is_told_from_the_layout(fixtures, name, writer):
    with read(TORCH_ZIP, fixtures / name) as checkpoint:
        assert checkpoint.details.writer == writer


def test_torchscript_is_not_taken_for_a_saved_file(fixtures):
    assert not TORCH_ZIP.recognize(Probe(fixtures / "torch-2.13.0/scripted.pt", DEFAULT_LIMITS))
    assert not TORCH_ZIP.recognize(Probe(fixtures / "torch-1.4.0/odd.pth", DEFAULT_LIMITS))


def test_an_unzipped_folder_reads_as_the_file_it_was(fixtures, tmp_path):
    path = fixtures / "torch-2.13.0" / "odd.pth"
    with zipfile.ZipFile(path) as source:
        source.extractall(tmp_path)
    oracle = json.loads(path.with_name("odd.pth.oracle.json").read_text())
    checkpoint = read(TORCH_ZIP, tmp_path)
    assert_as_told(checkpoint, oracle)
    assert checkpoint.details.notes == ()


def test_shared_storages_are_one_object(tmp_path):
    base = torch.arange(10.0)
    path = save(tmp_path, saved({"a": base, "b": base[2:5], "c": torch.ones(1)}))
    root = read(TORCH_ZIP, path).root
    assert root["a"].storage is root["b"].storage is not root["c"].storage


def test_big_endian_storages_read_as_little_endian_values(tmp_path):
    records = records_of(saved({"x": torch.arange(3), "z": torch.tensor([1 + 2j, 3 - 4j])}))
    data = dict(records, byteorder=b"big")
    data["data/0"] = b"".join(i.to_bytes(8, "big") for i in range(3))
    data["data/1"] = records["data/1"]
    swapped = bytearray(records["data/1"])
    for start in range(0, len(swapped), 4):
        swapped[start : start + 4] = swapped[start : start + 4][::-1]
    path = save(tmp_path, repacked(data, **{"data/1": bytes(swapped)}))
    assert sys.byteorder == "little"
    judge = torch.load(path, weights_only=True)
    checkpoint = read(TORCH_ZIP, path)
    assert checkpoint.details.byteorder == "big"
    assert checkpoint.root["x"].read() == judge["x"].numpy().tobytes()
    assert checkpoint.root["z"].read() == judge["z"].numpy().tobytes()
    rewritten = torch.load(io.BytesIO(written(TORCH_ZIP.plan(checkpoint))))
    assert torch.equal(rewritten["x"], torch.arange(3))
    assert torch.equal(rewritten["z"], torch.tensor([1 + 2j, 3 - 4j]))


def test_upper_case_names_are_found_as_torch_finds_them(tmp_path, ones):
    upper = {name.upper(): data for name, data in ones.items()}
    path = save(tmp_path, repacked(upper))
    assert torch.equal(torch.load(path)["w"], torch.ones(4))
    assert read(TORCH_ZIP, path).root["w"].read() == torch.ones(4).numpy().tobytes()


def test_compressed_records_are_read_reported_and_stored_plainly(tmp_path, ones):
    entries = [Entry(f"a/{name}", data, method=8) for name, data in ones.items()]
    path = save(tmp_path, build(entries))
    with read(TORCH_ZIP, path) as checkpoint:
        assert checkpoint.root["w"].storage.compressed
        assert any("compressed" in note for note in checkpoint.details.notes)
        data = written(TORCH_ZIP.plan(checkpoint))
    assert torch.equal(torch.load(save(tmp_path, data, "new.pth"), mmap=True)["w"], torch.ones(4))


def test_records_that_nothing_refers_to_are_reported_and_dropped(tmp_path, ones):
    path = save(tmp_path, repacked(ones, **{"data/7": bytes(100), "extra.txt": b"hello"}))
    with read(TORCH_ZIP, path) as checkpoint:
        (note,) = checkpoint.details.unreferenced
        assert "record 'data/7' is not used by the pickle" in note
        (note,) = checkpoint.details.left_behind
        assert "'extra.txt' is not part of a checkpoint" in note
        assert checkpoint.details.dead_bytes == 100
        assert checkpoint.details.storage_bytes == 100 + 16 + 24
        names = records_of(written(TORCH_ZIP.plan(checkpoint)))
    assert not {"data/7", "extra.txt"} & names.keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": None}, "no record 'version'"),
        ({"version": b"11"}, "its version is '11'"),
        ({"version": b"abc"}, "its version is 'abc'"),
    ],
)
def test_what_torch_refuses_is_read_all_the_same_and_said(tmp_path, ones, changes, said):
    path = save(tmp_path, repacked(ones, **changes))
    with pytest.raises(RuntimeError):
        torch.load(path)
    checkpoint = read(TORCH_ZIP, path)
    assert checkpoint.root["w"].shape == (4,)
    assert any(said in note for note in checkpoint.details.notes)


def test_a_zip_of_the_files_without_their_folder_is_read_and_said(tmp_path, ones):
    path = save(tmp_path, build(list(ones.items())))
    with pytest.raises(RuntimeError):
        torch.load(path)
    checkpoint = read(TORCH_ZIP, path)
    assert checkpoint.root["w"].shape == (4,)
    assert (
        "torch refuses this file because its records are not in a folder"
        in checkpoint.details.notes[0]
    )


def test_a_foreign_entry_beside_the_folder_is_said(tmp_path, ones):
    entries = [(f"m/{name}", data) for name, data in ones.items()]
    path = save(tmp_path, build([*entries, ("__MACOSX/._m", b"?")]))
    with pytest.raises(RuntimeError):
        torch.load(path)
    assert "is outside the folder 'm'" in read(TORCH_ZIP, path).details.notes[0]


def test_a_storage_without_record_is_named(tmp_path, ones):
    path = save(tmp_path, repacked(ones, **{"data/1": None}))
    with pytest.raises(CorruptFile, match="storage '1' is missing"):
        read(TORCH_ZIP, path)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_record_of_another_length_than_the_pickle_says_is_refused(tmp_path, ones, size):
    path = save(tmp_path, repacked(ones, **{"data/0": bytes(size)}))
    with pytest.raises(CorruptFile, match=f"'0' needs 16 bytes, but its record has {size}"):
        read(TORCH_ZIP, path)


@pytest.mark.parametrize("order", [b"", b"middle", b"LITTLE", b"\xff"])
def test_a_byte_order_that_is_none_is_refused(tmp_path, ones, order):
    with pytest.raises(CorruptFile, match=r"byteorder|byte order"):
        read(TORCH_ZIP, save(tmp_path, repacked(ones, byteorder=order)))


def test_a_fact_that_takes_a_book_is_refused(tmp_path, ones):
    with pytest.raises(LimitExceeded, match="'version' has 65 bytes"):
        read(TORCH_ZIP, save(tmp_path, repacked(ones, version=b"3" * 65)))


def pid_file(tmp_path, *pids, **records):
    """A file whose pickle is a list of these persistent ids."""
    pickled = dumps([Pid(*pid) for pid in pids])
    return save(tmp_path, repacked({"data.pkl": pickled, "version": b"3\n", **records}))


FLOATS = torch.FloatStorage


def test_the_same_storage_mentioned_twice_must_be_the_same(tmp_path):
    first = ("storage", FLOATS, "0", "cpu", 2)
    storage = {"data/0": bytes(8)}
    same = read(TORCH_ZIP, pid_file(tmp_path, first, first, **storage)).root
    assert same[0].storage is same[1].storage
    for other in (("storage", FLOATS, "0", "cuda:0", 2), ("storage", FLOATS, "0", "cpu", 1)):
        with pytest.raises(
            CorruptFile,
            match="storage '0' has 8 bytes on cpu when first used and",
        ):
            read(TORCH_ZIP, pid_file(tmp_path, first, other, **storage))


def test_a_persistent_id_that_breaks_a_rule_is_refused(tmp_path):
    for pid, said in [
        (("storage", FLOATS, "0", "cpu"), "4 parts"),
        (("storage", FLOATS, "0", "cpu", 2, None, None), "7 parts"),
        (("storage", dict, "0", "cpu", 2), "builtins.dict, which is not a storage class"),
        (
            ("storage", "torch.FloatStorage", "0", "cpu", 2),
            "of type str, which is not a storage class",
        ),
        (
            ("storage", FLOATS, None, "cpu", 2),
            "the key of a storage is of type NoneType, expected text",
        ),
        (("storage", FLOATS, "0", 3, 2), "device of storage '0' is of type int"),
        (("storage", FLOATS, "0", "cpu", -1), "the length of storage '0' is not an element count"),
        (
            ("storage", FLOATS, "0", "cpu", 1 << 70),
            "the length of storage '0' is not an element count",
        ),
        (
            ("storage", FLOATS, "0", "cpu", True),
            "the length of storage '0' is not an element count",
        ),
        (("storage", FLOATS, "0", "cpu", 2, ("1", 1, 2)), "reaches outside it"),
        (("storage", FLOATS, "0", "cpu", 2, ("1", 1, 1)), "has a view"),
    ]:
        with pytest.raises(CorruptFile, match=said):
            read(TORCH_ZIP, pid_file(tmp_path, pid, **{"data/0": bytes(8)}))


def test_untyped_storages_count_bytes_and_sub_byte_types_count_bytes(tmp_path):
    pids = [
        ("storage", torch.UntypedStorage, "0", "cpu", 8),
        ("storage", torch.QUInt4x2Storage, "1", "cpu", 3),
    ]
    records = {"data/0": bytes(8), "data/1": bytes(3)}
    one, two = read(TORCH_ZIP, pid_file(tmp_path, *pids, **records)).root
    assert (one.untyped, one.storage.nbytes, two.dtype, two.storage.nbytes) == (
        True, 8, "quint4x2", 3,
    )  # fmt: skip
    assert torch.quint4x2.itemsize == 1


def test_a_storage_on_the_meta_device_has_no_record_and_cannot_be_written(tmp_path):
    path = pid_file(tmp_path, ("storage", FLOATS, "0", "meta", 2))
    checkpoint = read(TORCH_ZIP, path)
    assert checkpoint.root[0].storage.data is None
    with pytest.raises(NotRepresentable, match="storage '0' is on the meta device"):
        TORCH_ZIP.plan(checkpoint)


def test_a_persistent_id_of_another_kind_is_kept_as_data(tmp_path):
    (node,) = read(TORCH_ZIP, pid_file(tmp_path, ("wheel", 7))).root
    assert isinstance(node, Opaque)
    assert (node.maker, node.args) == ("persid", (("wheel", 7),))


def test_a_tensor_that_reaches_outside_its_storage_is_refused(tmp_path):
    pid = Pid("storage", FLOATS, "0", "cpu", 2)
    args = (pid, 0, (3,), (1,), False, OrderedDict())
    pickled = dumps(Called(torch._utils._rebuild_tensor_v2, *args))
    path = save(tmp_path, repacked({"data.pkl": pickled, "data/0": bytes(8)}))
    with pytest.raises(CorruptFile, match="outside its storage"):
        read(TORCH_ZIP, path)


def test_a_call_in_the_pickle_is_data(tmp_path):
    pickled = pickle.dumps(Called(print, "boom"), 2)
    checkpoint = read(TORCH_ZIP, save(tmp_path, repacked({"data.pkl": pickled})))
    assert isinstance(checkpoint.root, Opaque)
    assert checkpoint.details.globals == ("builtins.print",)


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"garbage", b"\x80\x02}q\x00"])
def test_a_damaged_pickle_is_our_own_error(tmp_path, content):
    with pytest.raises(CorruptFile):
        read(TORCH_ZIP, save(tmp_path, repacked({"data.pkl": content})))


def test_a_pickle_that_inflates_to_more_than_allowed_is_refused(tmp_path):
    bomb = build([Entry("a/data.pkl", bytes(1_000_000), method=8)])
    path = save(tmp_path, bomb)
    with pytest.raises((LimitExceeded, CorruptFile)):
        read(TORCH_ZIP, path, Limits(max_pickle_bytes=100_000))


# Writing


def state():
    tied = torch.arange(12.0).reshape(3, 4)
    entries = {
        "a.weight": torch.nn.Parameter(torch.randn(7, 5)), "tied": tied, "tied.t": tied.t(),
        "empty": torch.empty(0, 3), "half": torch.ones(3, dtype=torch.bfloat16),
        "byte": torch.tensor([True]), "last": torch.randn(1000),
    }  # fmt: skip
    return OrderedDict(entries)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path, saved(state()), "source.pth")


@pytest.fixture
def target(source, tmp_path):
    with read(TORCH_ZIP, source) as checkpoint:
        return save(tmp_path, written(TORCH_ZIP.plan(checkpoint)), "target.pth")


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (type(other), other.dtype, other.stride()) == (
            type(tensor),
            tensor.dtype,
            tensor.stride(),
        )
        assert torch.equal(other, tensor)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculated", [False, True])
def test_torch_loads_what_is_written(source, target, mmap, calculated):
    config = torch.utils.serialization.config.load
    previous = config.calculate_storage_offsets
    try:
        config.calculate_storage_offsets = calculated
        found = torch.load(target, weights_only=True, mmap=mmap)
    finally:
        config.calculate_storage_offsets = previous
    assert_same(found, torch.load(source))
    assert found["tied"].data_ptr() == found["tied.t"].data_ptr()


def test_the_offsets_that_torch_computes_are_those_of_the_records(target):
    records = archive(target.read_bytes()).records
    found = torch.load(target, map_location="meta")
    offsets = {t.untyped_storage()._checkpoint_offset for t in found.values()}
    real = {r.data.offset for name, r in records.items() if name.startswith("data/")}
    assert offsets == real
    assert all(offset % 64 == 0 for offset in real)


def test_the_records_are_those_of_torch_in_its_order(source, target):
    theirs, ours = archive(source.read_bytes()), archive(target.read_bytes())
    del theirs.records[".data/serialization_id"]
    assert list(ours.records) == list(theirs.records)
    for name, record in theirs.records.items():
        if name != "data.pkl":
            assert ours.records[name].data.read() == record.data.read()
            assert ours.records[name].crc32 == record.crc32
    assert ours.folder == "archive"
    assert ours.dead_bytes == 0
    assert zipfile.ZipFile(target).testzip() is None


def test_bytes_with_a_known_crc_are_copied_unseen(source):
    with read(TORCH_ZIP, source) as checkpoint:
        sink = Sink()
        TORCH_ZIP.plan(checkpoint).files[0].write(sink)
    assert sink.copied == 7 * 5 * 4 + 48 + 6 + 1 + 4000


def test_bytes_without_crc_get_one(tmp_path):
    previous = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        path = save(tmp_path, saved(torch.arange(5)))
    finally:
        torch.serialization.set_crc32_options(previous)
    with read(TORCH_ZIP, path) as checkpoint:
        assert checkpoint.root.storage.crc32 is None
        data = written(TORCH_ZIP.plan(checkpoint))
    record = archive(data).records["data/0"]
    assert record.crc32 == zlib.crc32(torch.arange(5).numpy().tobytes())


def test_a_compressed_record_that_does_not_have_its_crc_is_not_passed_on(tmp_path, ones):
    entries = [Entry(f"a/{name}", data) for name, data in ones.items()]
    entries = [replace(e, method=8, crc=123) if e.name == "a/data/0" else e for e in entries]
    path, target = save(tmp_path, build(entries)), tmp_path / "out.pth"
    with pytest.raises(CorruptFile, match="data/0"):
        ckptool.convert(path, target)
    assert not target.exists()


def test_a_tensor_from_nowhere_is_written_too(source):
    with read(TORCH_ZIP, source) as checkpoint:
        part = checkpoint.root["last"].storage.data.slice(0, 8)
        storage = Storage("new", part, 8)
        tensor = TensorRef("float32", (2,), (1,), 0, storage, "cpu")
        data = written(TORCH_ZIP.plan(checkpoint.with_root([tensor])))
    (found,) = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(found, torch.load(source)["last"][:2])


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_rewritten_to_the_same_content(fixtures, tmp_path, name):
    path = fixtures / name
    oracle = json.loads(path.with_name(f"{path.name}.oracle.json").read_text())
    with read(TORCH_ZIP, path) as checkpoint:
        plan = TORCH_ZIP.plan(checkpoint)
        assert plan.tensors == sum(1 for _ in checkpoint.tensors())
        target = save(tmp_path, written(plan))
    with read(TORCH_ZIP, target) as checkpoint:
        assert_as_told(checkpoint, oracle)


def test_what_keeps_weights_only_from_loading_the_result_is_named(fixtures):
    with read(TORCH_ZIP, fixtures / "torch-2.13.0" / "misc.pth") as checkpoint:
        plan = TORCH_ZIP.plan(checkpoint)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(io.BytesIO(written(plan)), weights_only=True)
    assert "argparse.Namespace" in plan.blockers
