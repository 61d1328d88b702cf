import hashlib
import io
import json
import pickle
import struct
import warnings
from functools import partial

import pytest
import torch

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, Storage, StorageRef, TensorRef
from ckptool.errors import (
    CorruptFile,
    LimitExceeded,
    NotRepresentable,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.files import ByteRange, FileSource, MemorySource
from ckptool.formats.base import Probe
from ckptool.formats.legacy_stream import NestedStreams
from ckptool.formats.torch_legacy import TORCH_LEGACY
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.contract import FormatContract
from tests.formats.legacy_streams import Called, Pid, floats, stream, tensor
from tests.formats.zips import read as read_as, values, written


class TestContract(FormatContract):
    name = "torch-legacy"
    sample = "torch-2.13.0/dp_legacy.pth"


read = partial(read_as, TORCH_LEGACY)


@pytest.fixture
def saved(tmp_path):
    def save(obj, **options):
        path = tmp_path / "saved.pth"
        torch.save(obj, path, _use_new_zipfile_serialization=False, **options)
        return path

    return save


# Reading


LEGACY = [
    "torch-1.4.0/dp.pth", "torch-1.4.0/dp_full_cuda3.pth", "torch-1.4.0/odd.pth",
    "torch-1.4.0/whole_dp.pth", "torch-1.13.1/dp_legacy.pth", "torch-2.13.0/dp_legacy.pth",
]  # fmt: skip


@pytest.mark.parametrize("name", LEGACY)
def test_a_fixture_reads_as_torch_reads_it(fixtures, name):
    oracle = json.loads((fixtures / f"{name}.oracle.json").read_text())
    with read(fixtures / name) as checkpoint:
        found = {path: ref for path, ref in checkpoint.tensors() if ref.kind != "numpy"}
        assert list(found) == [tuple(entry["path"]) for entry in oracle["tensors"]]
        for entry in oracle["tensors"]:
            ref = found[tuple(entry["path"])]
            assert (ref.dtype, list(ref.shape)) == (entry["dtype"], entry["shape"])
            if "sha256" in entry:
                assert ref.device == entry["device"]
                assert hashlib.sha256(ref.read()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(saved, protocol):
    weight = torch.arange(6.0)
    path = saved({"w": weight, "view": weight[2:4], "step": 3}, pickle_protocol=protocol)
    with read(path) as checkpoint:
        assert checkpoint.root["step"] == 3
        assert values(checkpoint.root["w"]) == [0, 1, 2, 3, 4, 5]
        assert values(checkpoint.root["view"]) == [2, 3]
        assert checkpoint.root["w"].storage is checkpoint.root["view"].storage
        assert checkpoint.details.protocol == (protocol if protocol > 1 else 0)  # 1 is not stated
        assert checkpoint.details.storage_bytes == 24


def test_a_stream_without_tensors(saved):
    with read(saved({"step": 3})) as checkpoint:
        assert checkpoint.root == {"step": 3}
        assert checkpoint.details.dead_bytes == 0


def test_an_empty_storage_and_one_of_no_type(saved):
    path = saved(
        [torch.zeros(0, 3), torch.arange(3).to(torch.uint16), torch.ones(2).untyped_storage()]
    )
    with read(path) as checkpoint:
        empty, unsigned, untyped = checkpoint.root
        assert empty.shape == (0, 3)
        assert unsigned.read() == bytes([0, 0, 1, 0, 2, 0])
        assert isinstance(untyped, StorageRef)
        assert untyped.untyped
        assert untyped.storage.data.read() == struct.pack("<2f", 1, 1)


def test_a_nested_tensor_has_its_shape_though_it_lies_behind_the_pickle(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        path = saved({"n": ragged})
    with read(path) as checkpoint:
        assert checkpoint.root["n"].shape == (2, None, 3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)


def test_a_module_is_data_and_its_source_text_a_note(saved):
    with read(saved(Net())) as checkpoint:
        assert isinstance(checkpoint.root, Opaque)
        assert checkpoint.root.class_name.endswith("Net")
        (note,) = checkpoint.details.left_behind
        assert "source code of" in note
        assert "Net" in note


@pytest.mark.parametrize("offset", [0, 3])
def test_a_view_of_a_storage_is_the_part_that_it_looks_at(file, offset):
    pid = ("storage", torch.FloatStorage, "root", "cpu", 5)
    obj = {
        "root": tensor(Pid(*pid, None), (5,)),
        "view": tensor(Pid(*pid, ("part", offset, 2)), (2,)),
        "again": tensor(Pid(*pid, ("part", offset, 2)), (1,), offset=1),
    }
    path = file(stream(obj, ["root"], [floats(0, 1, 2, 3, 4)]))
    expected = torch.load(path, weights_only=False)
    with read(path) as checkpoint:
        for name, wanted in expected.items():
            assert values(checkpoint.root[name]) == wanted.tolist()
        assert checkpoint.root["view"].storage is checkpoint.root["again"].storage
        assert checkpoint.root["view"].storage.nbytes == 8


def test_keys_in_any_order(file):
    obj = [
        tensor(Pid("storage", torch.FloatStorage, key, "cuda:1", 1, None), (1,)) for key in "abc"
    ]
    path = file(stream(obj, ["c", "a", "b"], [floats(3), floats(1), floats(2)]))
    with read(path) as checkpoint:
        assert [values(ref) for ref in checkpoint.root] == [[1], [2], [3]]
        assert checkpoint.devices == {"cuda:1": 3}


@pytest.fixture
def bytes_read(monkeypatch):
    lengths = []
    read_file = FileSource.read

    def counted(source, offset, length):
        lengths.append(length)
        return read_file(source, offset, length)

    monkeypatch.setattr(FileSource, "read", counted)
    return lengths


COUNT = 1 << 28
LARGE = [tensor(Pid("storage", torch.FloatStorage, key, "cpu", COUNT, None), (1,)) for key in "ab"]


def write_large(path, start):
    """A stream of two storages of a GiB each, which take no room on disk."""
    second = len(start) + 4 * COUNT
    with open(path, "wb") as file:
        file.write(start)
        file.seek(second)
        file.write(struct.pack("<q", COUNT))
        file.truncate(second + 8 + 4 * COUNT)
    return second


def test_only_the_pickles_and_the_counts_are_read(tmp_path, bytes_read):
    path = tmp_path / "large.pth"
    second = write_large(path, stream(LARGE, ["a", "b"], [(COUNT, b"")]))
    with read(path) as checkpoint:
        assert checkpoint.root[1].storage.data.offset == second + 8
    assert sum(bytes_read) < 4 << 20


def test_a_large_file_with_a_damaged_pickle_is_not_read_to_its_end(tmp_path, bytes_read):
    path = tmp_path / "large.pth"
    whole = stream(LARGE, ["a", "b"], [(COUNT, b"")])
    write_large(path, whole.replace(b"_rebuild_tensor_v2\nq", b"_rebuild_tensor_v2\n\xff"))
    with pytest.raises(
        CorruptFile, match=r"the pickle is damaged at byte 39: cannot run opcode b'\\xff' \(no such"
    ):
        read(path)
    assert sum(bytes_read) < 4 << 20


# What follows the stream


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (
            stream({}, [], []),
            "88 bytes after the end of the checkpoint at offset 102 (not read): another torch.save",
        ),
        (b"PK\x03\x04abc", "other bytes"),
        (bytes(100), "other bytes"),
        (b"abc", "other bytes"),
    ],
)
def test_what_follows_the_stream_is_a_note(file, behind, words):
    whole = stream({"step": 1}, [], [])
    with read(file(whole + behind)) as checkpoint:
        assert checkpoint.root == {"step": 1}
        assert checkpoint.details.dead_bytes == len(behind)
        (note,) = checkpoint.details.left_behind
        assert words in note
        assert f"offset {len(whole)}" in note


# Damage


ONE = Pid("storage", torch.FloatStorage, "one", "cpu", 4, None)
TWO = Pid("storage", torch.LongStorage, "two", "cpu", 2, None)
PAIR = [tensor(ONE, (4,)), tensor(TWO, (2,))]
FOUR = floats(1, 2, 3, 4)
LONGS = (2, struct.pack("<2q", 5, 6))


def test_a_stream_that_is_cut_names_the_storage_and_what_is_missing_in_all(file):
    whole = stream(PAIR, ["one", "two"], [FOUR, LONGS])
    with pytest.raises(
        TruncatedFile, match=r"storage 'one' \(1 of 2\): 28 of [\d,]+ bytes"
    ) as error:
        read(file(whole[:-28]))
    assert error.value.hint
    with pytest.raises(TruncatedFile, match=r"storage 'two' \(2 of 2\): 20 of [\d,]+ bytes"):
        read(file(whole[:-20]))


@pytest.mark.parametrize("count", [-4669315570785868528, -1, 0, 3, 5, 1 << 62])
def test_a_count_that_is_not_the_pickles_is_damage(file, count):
    with pytest.raises(CorruptFile, match="'one' should have 4 elements") as error:
        read(file(stream(PAIR, ["one", "two"], [(count, FOUR[1]), LONGS])))
    assert f"{count:,}" in str(error.value)
    assert "several processes" in error.value.hint


def test_a_key_list_that_is_not_the_pickles_is_damage(file):
    for keys, words in [
        (["one", "one"], "once: 'one', 'two'"), (["one"], "once: 'two'"),
        (["one", "two", "three"], "once: 'three'"), (["one", ["two"]], "storages after the pickle"),
        (["one", None], "storages after the pickle"), ("one", "storages after the pickle"),
        (7, "storages after the pickle"), ({"one": 1}, "storages after the pickle"),
    ]:  # fmt: skip
        with pytest.raises(CorruptFile, match=words):
            read(file(stream(PAIR, keys, [FOUR, LONGS])))


@pytest.mark.parametrize("keys", [None, {}, [None]])
def test_a_storage_without_a_name_needs_a_list_as_well(file, keys):
    unnamed = Pid("storage", torch.FloatStorage, "", "cpu", 4, None)
    with pytest.raises(CorruptFile, match="storages after the pickle"):
        read(file(stream({"w": tensor(unnamed, (4,))}, keys, [FOUR])))


def test_a_persistent_id_that_cannot_be_is_damage(file):
    for pid in [
        ("storage", torch.FloatStorage, "one", "cpu", -1, None),
        ("storage", torch.FloatStorage, "one", "cpu", 1 << 70, None),
        ("storage", torch.FloatStorage, "one", "cpu", "4", None),
        ("storage", torch.FloatStorage, "one", "cpu", 4, ("v", 3, 2)),
        ("storage", torch.FloatStorage, "one", "cpu", 4, ("v", -1, 2)),
        ("storage", torch.FloatStorage, "one", "cpu", 4, 5),
        ("storage", torch.nn.Linear, "one", "cpu", 4, None), ("storage", torch.FloatStorage, "one"),
        ("storage",), ("module", 1), ("elsewhere", 2), (), 7,
    ]:  # fmt: skip
        odd = Pid()
        odd.pid = pid
        with pytest.raises(CorruptFile):
            read(file(stream([tensor(odd, (1,))], ["one"], [FOUR])))


def test_two_sizes_of_one_storage_are_damage(file):
    other = Pid("storage", torch.FloatStorage, "one", "cpu", 3, None)
    with pytest.raises(
        CorruptFile, match="storage 'one' has 16 bytes when first used and 12 later"
    ):
        read(file(stream([tensor(ONE, (4,)), tensor(other, (3,))], ["one"], [FOUR])))


def test_a_tensor_outside_its_storage_is_damage(file):
    with pytest.raises(CorruptFile, match="outside its storage"):
        read(file(stream([tensor(ONE, (5,))], ["one"], [FOUR])))


@pytest.mark.parametrize("version", [1000, 1002, "1001", None])
def test_another_version_is_named(file, version):
    with pytest.raises(UnsupportedFormat, match=f"version {version!r}, expected 1001"):
        read(file(stream({}, [], [], version=version)))


def test_another_magic_number_is_another_format(file):
    probe = Probe(file(stream({}, [], [], magic=0x1950A86A20F9469CFC6D)), DEFAULT_LIMITS)
    assert not TORCH_LEGACY.recognize(probe)
    probe.close()


# Streams inside a pickle


def load_from_bytes(data, file="outer.pkl", limits=DEFAULT_LIMITS):
    return NestedStreams(file, limits, len(data)).load(data)


def nested_bytes(obj):
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def test_a_stream_in_memory():
    found = load_from_bytes(nested_bytes(torch.arange(3)))
    assert isinstance(found, TensorRef)
    assert values(found) == [0, 1, 2]
    assert found.storage.data.source.name == "outer.pkl"


def test_bytes_that_are_no_stream_are_damage():
    with pytest.raises(CorruptFile, match="a legacy torch stream does not begin as expected"):
        load_from_bytes(b"abc")


def called(data, times):
    return [Called(torch.storage._load_from_bytes, data) for _ in range(times)]


def test_streams_nested_too_deep_are_refused():
    data = nested_bytes(torch.arange(3))
    limits = Limits(max_nested_pickles=3)
    for _ in range(2):
        data = stream(called(data, 1), [], [])
    assert load_from_bytes(data, limits=limits)
    with pytest.raises(LimitExceeded, match="nested too deep"):
        load_from_bytes(stream(called(data, 1), [], []), limits=limits)


def test_a_stream_mentioned_again_and_again_is_refused():
    data = stream([], [], [])
    for _ in range(2):
        data = stream(called(data, 60), [], [])
    with pytest.raises(
        LimitExceeded, match="pickles in the pickle are nested too deeply or used too often"
    ):
        load_from_bytes(data)


# Writing


def rewritten(checkpoint):
    plan = TORCH_LEGACY.plan(checkpoint)
    assert plan.format == "torch-legacy"
    return written(plan)


def test_what_is_written_loads_in_torch_and_equals_the_source(saved):
    weight = torch.arange(6.0).reshape(2, 3)
    source = {
        "state_dict": {
            "w": weight.t(), "tied": weight, "half": weight.half(), "n": torch.tensor(7),
        },
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 2),
        "p": torch.nn.Parameter(torch.ones(2)),
        "lr": 0.5,
    }  # fmt: skip
    with read(saved(source)) as checkpoint:
        data = rewritten(checkpoint)
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert list(found) == list(source)
    assert found["lr"] == 0.5
    assert isinstance(found["p"], torch.nn.Parameter)
    for name, tensor_ in source["state_dict"].items():
        assert torch.equal(found["state_dict"][name], tensor_)
        assert found["state_dict"][name].stride() == tensor_.stride()
    assert torch.equal(found["mask"], source["mask"])
    assert found["empty"].shape == (0, 2)
    tied = found["state_dict"]["tied"]
    assert tied.data_ptr() == found["state_dict"]["w"].data_ptr()


@pytest.mark.parametrize("name", LEGACY)
def test_a_fixture_that_is_rewritten_reads_the_same(fixtures, file, name):
    with read(fixtures / name) as checkpoint:
        data = rewritten(checkpoint)
        before = [(path, ref.dtype, ref.shape, ref.device) for path, ref in checkpoint.tensors()]
        content = [ref.read() for _, ref in checkpoint.tensors() if ref.has_content]
    with read(file(data)) as again:
        assert before == [(path, ref.dtype, ref.shape, ref.device) for path, ref in again.tensors()]
        assert content == [ref.read() for _, ref in again.tensors() if ref.has_content]
        assert again.details.protocol == 2
        assert again.details.dead_bytes == 0


def over(storage, dtype, shape):
    stride = [1]
    ref = TensorRef(dtype, shape, tuple(stride), 0, storage, storage.device)
    return Checkpoint({"w": ref}, "torch-zip", "source.pth")


def test_big_endian_storages_are_turned_round():
    source = MemorySource(struct.pack(">3d", 1, 2, 3), "source.pth")
    storage = Storage("0", ByteRange(source, 0, 24), 24, byteorder="big")
    found = torch.load(io.BytesIO(rewritten(over(storage, "float64", (3,)))), weights_only=True)
    assert found["w"].tolist() == [1, 2, 3]


def test_big_endian_complex_numbers_are_turned_round_by_halves():
    source = MemorySource(struct.pack(">4f", 1, 2, 3, 4), "source.pth")
    storage = Storage("0", ByteRange(source, 0, 16), 16, byteorder="big")
    found = torch.load(io.BytesIO(rewritten(over(storage, "complex64", (2,)))), weights_only=True)
    assert found["w"].tolist() == [1 + 2j, 3 + 4j]


def test_a_storage_without_bytes_cannot_be_written():
    with pytest.raises(NotRepresentable, match="meta device") as error:
        TORCH_LEGACY.plan(over(Storage("0", None, 12, "meta"), "float32", (3,)))
    assert "torch-zip" in error.value.hint


def test_what_torch_itself_cannot_load_from_a_stream_is_not_written():
    source = MemorySource(bytes(6), "source.pth")
    short = Storage("0", ByteRange(source, 0, 6), 6)
    with pytest.raises(
        NotRepresentable,
        match=r"no torch version can load 'w' \(dtype uint16\) from a legacy stream",
    ):
        TORCH_LEGACY.plan(over(short, "uint16", (3,)))
    untyped = Checkpoint({"s": StorageRef(short, "uint8", untyped=True)}, "torch-zip", "source.pth")
    with pytest.raises(NotRepresentable, match="an untyped storage"):
        TORCH_LEGACY.plan(untyped)


def test_the_pickles_of_a_rewrite_are_those_that_old_torch_knows(saved):
    with read(saved({"w": torch.ones(2)})) as checkpoint:
        data = io.BytesIO(rewritten(checkpoint))
    assert pickle.load(data) == 0x1950A86A20F9469CFC6C
    assert pickle.load(data) == 1001
    assert pickle.load(data)["little_endian"] is True
