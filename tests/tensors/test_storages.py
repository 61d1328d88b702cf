"""Storages: byte order, casts, mapping, compressed records, large reads."""

import struct
import zipfile
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import TruncatedFile, UnsupportedFormat, UsageError
from ckptool.formats import open_checkpoint
from ckptool.model import Storage, TensorRef
from ckptool.tensors import Materialiser, materialise
from tests.tensors.judge import assert_same
from tests.tensors.refs import floats, storage, tensor
from tests.tensors.samples import SAMPLES

MODULE = import_module("ckptool.tensors.materialise")  # the room has a function of that name

MAPS = Path("/proc/self/maps")


def saved(path, tree):
    torch.save(tree, path)
    return path


def mapped_files():
    """The files that this process maps, as the system tells."""
    lines = MAPS.read_text().splitlines()
    return {line[line.index("/") :] for line in lines if "/" in line}


def test_big_endian_bytes_are_turned():
    for (dtype, layout, values), mmap in product(
        [
            ("float32", ">3f", (1.0, -2.5, 3.0)),
            ("int64", ">3q", (1, -2, 1 << 40)),
            ("int16", ">3h", (1, -2, 300)),
            ("uint8", ">3B", (1, 2, 3)),
            ("float64", ">3d", (1.0, 1e300, 0.0)),
        ],
        [False, True],
    ):
        ref = tensor(struct.pack(layout, *values), dtype, (3,), byteorder="big")
        assert materialise(ref, mmap=mmap).tolist() == list(values), (dtype, mmap)


def test_big_endian_complex_numbers_are_turned_by_halves():
    ref = tensor(struct.pack(">4f", 1, 2, 3, 4), "complex64", (2,), byteorder="big")
    assert materialise(ref).tolist() == [1 + 2j, 3 + 4j]


def test_big_endian_views_share_their_storage():
    whole = tensor(struct.pack(">4f", 0, 1, 2, 3), "float32", (4,), byteorder="big")
    part = whole[2:]
    maker = Materialiser([whole, part])
    maker.tensor(whole)[2] = 9
    assert maker.tensor(part).tolist() == [9, 3]


def test_a_file_of_a_big_endian_machine(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.arange(4.0), "n": torch.arange(3)})
    turned = tmp_path / "big.pt"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(turned, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("byteorder"):
                content = b"big"
            elif "/data/" in name:
                size = 4 if name.endswith("0") else 8
                content = b"".join(
                    content[at : at + size][::-1] for at in range(0, len(content), size)
                )
            if not name.endswith(".format_version"):
                target.writestr(name, content)
    for mmap in (False, True):
        assert_same(ckptool.load(turned, mmap=mmap), torch.load(turned))


@pytest.mark.parametrize("mmap", [False, True])
def test_compressed_records_are_inflated(tmp_path, mmap):
    """Where torch with mmap gives garbage."""
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(1000), "v": torch.arange(1000.0)[500:]})
    packed = tmp_path / "packed.pt"
    with (
        zipfile.ZipFile(file) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    made = ckptool.load(packed, mmap=mmap)
    assert torch.equal(made["w"], torch.zeros(1000))
    assert torch.equal(made["v"], torch.arange(500.0, 1000.0))


@pytest.mark.skipif(not MAPS.exists(), reason="the system has no such list")
@pytest.mark.parametrize("legacy", [False, True])
def test_mmap_maps_the_file_and_never_writes_to_it(tmp_path, legacy):
    file = tmp_path / "f.pt"
    tree = {"w": torch.arange(5000.0), "n": torch.arange(3)}
    torch.save(tree, file, _use_new_zipfile_serialization=not legacy)
    before = file.read_bytes()
    assert str(file) not in mapped_files()
    made = ckptool.load(file, mmap=True)
    assert str(file) in mapped_files()
    assert_same(made, tree)
    made["w"].mul_(2)
    assert made["w"][3] == 6
    assert file.read_bytes() == before
    del made
    assert str(file) not in mapped_files()


def test_mapping_outlives_the_open_file(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.arange(5.0)})
    with open_checkpoint(file) as checkpoint:
        made = checkpoint["w"].torch(mmap=True)
    file.unlink()
    assert made.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_cut_short_after_it_was_opened(tmp_path, mmap):
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(100_000)})
    with open_checkpoint(file) as checkpoint:
        ref = checkpoint["w"]
        with open(file, "r+b") as same:
            same.truncate(5000)
        with pytest.raises(TruncatedFile):
            ref.torch(mmap=mmap)


def test_large_reads_are_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "_SHARED_READ", 100)
    tree = {"odd": torch.arange(100_001, dtype=torch.uint8), "even": torch.arange(4000.0)}
    assert_same(ckptool.load(saved(tmp_path / "f.pt", tree)), tree)


def test_an_error_in_the_second_thread_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "_SHARED_READ", 100)
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(100_000)})
    with open_checkpoint(file) as checkpoint:
        ref = checkpoint["w"]
        with open(file, "r+b") as same:
            same.truncate(300_000)
        with pytest.raises(TruncatedFile):
            ref.torch()


def test_casts_keep_ties_and_views_and_leave_integers_alone(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "w": base, "t": base.t(), "row": base[1], "n": torch.arange(3), "b": torch.tensor([True]),
        "c": torch.ones(2, dtype=torch.complex64), "p": torch.nn.Parameter(base.clone()),
        "f8": torch.ones(2).to(torch.float8_e4m3fn), "h": torch.ones(2, dtype=torch.float16),
    }  # fmt: skip
    file = saved(tmp_path / "f.pt", tree)
    with open_checkpoint(file) as checkpoint:
        maker = Materialiser(checkpoint.root, dtype=torch.bfloat16)
        made = {name: maker.tensor(checkpoint[name]) for name in tree}
    for name, tensor_ in made.items():
        theirs = tree[name]
        assert type(tensor_) is type(theirs)
        assert tensor_.dtype is (torch.bfloat16 if theirs.is_floating_point() else theirs.dtype)
        assert (tensor_.shape, tensor_.stride()) == (theirs.shape, theirs.stride())
        assert torch.equal(tensor_, theirs.to(tensor_.dtype))
    made["w"][1, 2] = -1
    assert made["t"][2, 1] == made["row"][2] == -1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_casts_reach_the_values_of_sparse_tensors_but_not_scales(tmp_path):
    tree = {"s": SAMPLES["sparse"]()["csr"], "q": SAMPLES["quantized"]()["channel"]}
    with open_checkpoint(saved(tmp_path / "f.pt", tree)) as checkpoint:
        maker = Materialiser(checkpoint.root, dtype="torch.float16")
        sparse, quantized = maker.tensor(checkpoint["s"]), maker.tensor(checkpoint["q"])
    assert sparse.dtype is torch.float16
    assert torch.equal(sparse.to_dense().float(), tree["s"].to_dense())
    assert quantized.q_per_channel_scales().dtype is torch.float64
    assert torch.equal(quantized.dequantize(), tree["q"].dequantize())


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float23", "nn", 3])
def test_only_floating_types_can_be_asked_for(dtype):
    with pytest.raises(UsageError, match="not a floating element type"):
        materialise(floats(1), dtype=dtype)


def test_a_type_that_torch_cannot_cast_is_named(monkeypatch):
    ref = tensor(bytes(4), "float4_e2m1fn_x2", (4,))
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("needs the type")
    with pytest.raises(UnsupportedFormat, match="float4_e2m1fn_x2"):
        Materialiser(ref, dtype="float32").tensor(ref, "w")


def test_a_type_that_torch_lacks_is_named(monkeypatch):
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(UnsupportedFormat, match="uint16") as caught:
        materialise(tensor(bytes(4), "uint16", (2,)))
    assert "upgrade" in caught.value.hint


def test_no_memory_is_said_as_such(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    maker = Materialiser(ref := floats(1, 2))
    monkeypatch.setattr(MODULE, "_moved", lambda made, target: made)
    monkeypatch.setattr(torch, "UntypedStorage", refuse)
    with pytest.raises(MemoryError, match="8 bytes"):
        maker.tensor(ref)


def test_a_storage_on_meta_has_no_bytes():
    nowhere = Storage("0", None, 8, "meta")
    made = materialise(TensorRef("float32", (2,), (1,), 0, nowhere, "meta"))
    assert (made.device.type, made.shape) == ("meta", (2,))


def test_types_that_look_at_one_storage_share_it():
    held = storage(struct.pack("<4f", 0, 1, 2, 3))
    one = TensorRef("float32", (4,), (1,), 0, held, "cpu")
    other = TensorRef("uint8", (16,), (1,), 0, held, "cpu")
    maker = Materialiser([one, other])
    maker.tensor(other).zero_()
    assert maker.tensor(one).tolist() == [0, 0, 0, 0]
