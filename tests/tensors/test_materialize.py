"""Tensors and storages: whatever torch.save writes is made again as torch.load makes it."""

import struct
import sys
import zipfile
from collections import OrderedDict
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.core.model import Storage, TensorRef
from ckptool.errors import (
    CheckpointWarning,
    CorruptFile,
    DeviceError,
    TorchMissing,
    TruncatedFile,
    UnsupportedFormat,
    UsageError,
)
from ckptool.formats import open_checkpoint
from ckptool.tensors import Materializer, materialize, require_torch, set_attributes
from ckptool.tensors.storages import describe_name
from tests.tensors.judge import assert_same
from tests.tensors.refs import composed, floats, ints, storage, tensor, torch_global
from tests.tensors.samples import DTYPES, SAMPLES, of_dtype

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
# What torch itself cannot read back as it was: sizes are read before their bytes are there, an
# untyped storage becomes a typed one, or has no dtype.
NOT_BY_TORCH = {("nested", True), ("storages", False), ("storages", True)}


def saved(path, tree, *, legacy=False):
    torch.save(tree, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_what_torch_saves_is_made_as_torch_loads_it(tmp_path, sample, legacy):
    tree = SAMPLES[sample]()
    file = saved(tmp_path / "f.pt", tree, legacy=legacy)
    if (sample, legacy) not in NOT_BY_TORCH:
        tree = torch.load(file, weights_only=False)
    for mmap in (False, True):
        assert_same(ckptool.load(file, mmap=mmap), tree)


def test_every_dtype(tmp_path):
    for mmap, name in product([False, True], DTYPES):
        tensor = of_dtype(name)
        if tensor is None:
            pytest.skip(f"torch {torch.__version__} has no {name}")
        file = saved(tmp_path / "f.pt", {"t": tensor, "view": tensor[1:]})
        assert_same(ckptool.load(file, mmap=mmap), torch.load(file, weights_only=False))


def test_a_tensor_ref_makes_itself(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.arange(6.0).reshape(2, 3)})
    with open_checkpoint(file) as checkpoint:
        ref = checkpoint["w"]
        assert torch.equal(ref.torch(), torch.arange(6.0).reshape(2, 3))
        assert torch.equal(ref[1, 1:].torch(), torch.tensor([4.0, 5.0]))
        assert ref.torch(dtype="float16").dtype is torch.float16
        assert ref.torch(map_location="meta").device.type == "meta"


def test_a_small_view_reads_its_own_bytes_only(tmp_path):
    file = saved(tmp_path / "f.pt", {"row": torch.arange(1000.0).reshape(100, 10)[50]})
    with open_checkpoint(file) as checkpoint:
        made = materialize(checkpoint["row"])
    assert torch.equal(made, torch.arange(500.0, 510.0))
    assert made.untyped_storage().nbytes() < 200


def test_views_of_one_storage_share_what_they_reach(tmp_path):
    base = torch.arange(1000.0)
    file = saved(tmp_path / "f.pt", {"a": base[100:200], "b": base[150:300]})
    made = ckptool.load(file)
    made["a"][60] = -1
    assert made["b"][10] == -1
    assert made["a"].untyped_storage().nbytes() < 1000


def test_a_ref_is_one_tensor(tmp_path):
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(2)})
    with open_checkpoint(file) as checkpoint:
        maker = Materializer(checkpoint.root)
        assert maker.make_tensor(checkpoint["w"]) is maker.make_tensor(checkpoint["w"])


def test_a_subclass_with_a_storage_becomes_a_plain_tensor_with_its_attributes(tmp_path):
    class Labeled(torch.Tensor):
        pass

    Labeled.__module__, Labeled.__qualname__ = "tests.tensors.test_materialize", "Labelled"
    globals()["Labelled"] = Labeled
    tensor = torch.arange(3.0).as_subclass(Labeled)
    tensor.label = "cat"
    made = ckptool.load(saved(tmp_path / "f.pt", {"t": tensor}))["t"]
    assert type(made) is torch.Tensor
    assert made.label == "cat"
    assert torch.equal(made, torch.arange(3.0))


def test_attributes_of_the_file_never_replace_those_of_the_class(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.harmless = 1
    parameter.__dict__["backward"] = "mine"
    parameter.__dict__["__torch_function__"] = "mine"
    file = saved(tmp_path / "f.pt", {"p": parameter})
    said = "left out attributes of tensor 'p'"
    with pytest.warns(ckptool.CheckpointWarning, match=said) as caught:
        made = ckptool.load(file)["p"]
    assert [warning.filename for warning in caught] == [__file__]
    assert made.harmless == 1
    assert callable(made.backward)
    assert "__torch_function__" not in vars(made)


def test_torch_missing_is_one_sentence_with_the_command(tmp_path, monkeypatch):
    file = saved(tmp_path / "f.pt", {"w": torch.zeros(2)})
    with open_checkpoint(file) as checkpoint:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(TorchMissing) as caught:
            materialize(checkpoint["w"])
    assert "tensors need torch, which cannot be imported: " in str(caught.value)
    assert caught.value.hint == "pip install torch"


def test_attributes_are_set_unless_the_class_has_them():
    made = OrderedDict(a=1)
    given = {"_metadata": 1, "keys": 2, "__class__": dict, 3: 4, "__reduce__": 5}
    with pytest.warns(
        CheckpointWarning,
        match="left out attributes of the root .*: keys, __class__, 3, __reduce__",
    ):
        set_attributes(made, given, "the root")
    assert vars(made) == {"_metadata": 1}
    assert list(made.keys()) == ["a"]
    assert type(made) is OrderedDict


def test_torch_is_there():
    assert require_torch() is None


@pytest.mark.parametrize(
    ("name", "shown"), [("fc.weight", "tensor 'fc.weight'"), ("", "the tensor")]
)
def test_how_a_tensor_is_called(name, shown):
    assert describe_name(name) == shown


def test_a_name_cannot_reach_the_terminal():
    assert "\x1b" not in describe_name("a\x1b[2Jb")


def test_the_default_device_of_the_user_changes_no_figures(tmp_path):
    a, b = {"w": torch.rand(30, 20)}, {"w": torch.rand(30, 20)}
    torch.save(a, tmp_path / "a.pth")
    torch.save(b, tmp_path / "b.pth")
    small, scale = a["w"].to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    torch.save({"l.weight": small, "l.weight_scale_inv": scale}, tmp_path / "q.pth")
    for device in ("cpu", "meta"):
        with torch.device(device):
            (row,) = ckptool.stats(tmp_path / "a.pth").tensors
            (value,) = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth").changed
            ckptool.convert(
                tmp_path / "a.pth", tmp_path / f"cast-{device}.pth", ckptool.Cast("bfloat16")
            )
            ckptool.convert(
                tmp_path / "q.pth", tmp_path / f"q-{device}.pth", ckptool.Cast(dequantize="float32")
            )
            ckptool.average([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / f"{device}.pth")
        assert row.measures.maximum == a["w"].max()
        assert value.difference.max_abs == pytest.approx((a["w"] - b["w"]).abs().max().item())
        assert torch.equal(torch.load(tmp_path / f"{device}.pth")["w"], (a["w"] + b["w"]) / 2)
        assert torch.equal(torch.load(tmp_path / f"cast-{device}.pth")["w"], a["w"].bfloat16())
        assert torch.equal(torch.load(tmp_path / f"q-{device}.pth")["l.weight"], small.float() / 2)


MODULE = import_module("ckptool.tensors.storages")

MAPS = Path("/proc/self/maps")


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
        assert materialize(ref, mmap=mmap).tolist() == list(values), (dtype, mmap)


def test_big_endian_complex_numbers_are_turned_by_halves():
    ref = tensor(struct.pack(">4f", 1, 2, 3, 4), "complex64", (2,), byteorder="big")
    assert materialize(ref).tolist() == [1 + 2j, 3 + 4j]


def test_big_endian_views_share_their_storage():
    whole = tensor(struct.pack(">4f", 0, 1, 2, 3), "float32", (4,), byteorder="big")
    part = whole[2:]
    maker = Materializer([whole, part])
    maker.make_tensor(whole)[2] = 9
    assert maker.make_tensor(part).tolist() == [9, 3]


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
    monkeypatch.setattr(MODULE, "_MIN_SHARED_READ_BYTES", 100)
    tree = {"odd": torch.arange(100_001, dtype=torch.uint8), "even": torch.arange(4000.0)}
    assert_same(ckptool.load(saved(tmp_path / "f.pt", tree)), tree)


def test_an_error_in_the_second_thread_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "_MIN_SHARED_READ_BYTES", 100)
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
        maker = Materializer(checkpoint.root, dtype=torch.bfloat16)
        made = {name: maker.make_tensor(checkpoint[name]) for name in tree}
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
        maker = Materializer(checkpoint.root, dtype="torch.float16")
        sparse, quantized = maker.make_tensor(checkpoint["s"]), maker.make_tensor(checkpoint["q"])
    assert sparse.dtype is torch.float16
    assert torch.equal(sparse.to_dense().float(), tree["s"].to_dense())
    assert quantized.q_per_channel_scales().dtype is torch.float64
    assert torch.equal(quantized.dequantize(), tree["q"].dequantize())


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float23", "nn", 3])
def test_only_floating_types_can_be_asked_for(dtype):
    with pytest.raises(UsageError, match="not a floating-point dtype"):
        materialize(floats(1), dtype=dtype)


def test_a_type_that_torch_cannot_cast_is_named(monkeypatch):
    ref = tensor(bytes(4), "float4_e2m1fn_x2", (4,))
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("needs the type")
    with pytest.raises(UnsupportedFormat, match="float4_e2m1fn_x2"):
        Materializer(ref, dtype="float32").make_tensor(ref, "w")


def test_a_type_that_torch_lacks_is_named(monkeypatch):
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(UnsupportedFormat, match="uint16") as caught:
        materialize(tensor(bytes(4), "uint16", (2,)))
    assert "upgrade" in caught.value.hint


def test_no_memory_is_said_as_such(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    maker = Materializer(ref := floats(1, 2))
    monkeypatch.setattr(MODULE, "_move_storage", lambda made, target: made)
    monkeypatch.setattr(torch, "UntypedStorage", refuse)
    with pytest.raises(MemoryError, match="8 bytes"):
        maker.make_tensor(ref)


def test_a_storage_on_meta_has_no_bytes():
    nowhere = Storage("0", None, 8, "meta")
    made = materialize(TensorRef("float32", (2,), (1,), 0, nowhere, "meta"))
    assert (made.device.type, made.shape) == ("meta", (2,))


def test_types_that_look_at_one_storage_share_it():
    held = storage(struct.pack("<4f", 0, 1, 2, 3))
    one = TensorRef("float32", (4,), (1,), 0, held, "cpu")
    other = TensorRef("uint8", (16,), (1,), 0, held, "cpu")
    maker = Materializer([one, other])
    maker.make_tensor(other).zero_()
    assert maker.make_tensor(one).tolist() == [0, 0, 0, 0]


def quantized(quantizer, shape=(2, 3)):
    return tensor(bytes(6), "qint8", shape, kind="quantized", parts={"quantizer": quantizer})


PER_CHANNEL = torch_global("per_channel_affine")


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], 5)), "axis 5"),
        (quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], "0")), "axis '0'"),
        (quantized((PER_CHANNEL, [0.1], [0], 0)), "1 scales for 2 channels"),
        (quantized((PER_CHANNEL, floats(1, 2, 3), ints(0, 0), 0)), "3 scales"),
        (quantized((torch_global("nonsense"), 1)), "scheme nonsense"),
        (quantized((torch_global("per_tensor_affine"), 0.1)), "not enough values"),
        (
            composed(
                "sparse_coo", (2, 2), {"indices": ints(0, 9, shape=(2, 1)), "values": floats(1)}
            ),
            "inconsistent with indices",
        ),
        (
            composed(
                "sparse_csr",
                (2, 2),
                {
                    "compressed_indices": ints(0, 1, 1),
                    "plain_indices": ints(7),
                    "values": floats(1),
                },
            ),
            "col_indices < ncols",
        ),
    ],
)
def test_parts_that_do_not_fit(ref, reason):
    with pytest.raises(CorruptFile, match=reason) as caught:
        materialize(ref)
    assert "made.pt" in str(caught.value)


def nested(sizes, strides, offsets, buffer=None):
    parts = {"sizes": sizes, "strides": strides, "offsets": offsets}
    parts["buffer"] = buffer if buffer is not None else floats(*range(6))
    return composed("nested", (2, None), parts)


def test_a_nested_tensor_inside_its_buffer_is_made():
    ref = nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2))
    assert [part.tolist() for part in materialize(ref).unbind()] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 3)), "element 6 of 6"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 9, shape=(2, 1)), ints(0, 0)), "element 27"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(-1, 2)), "negative"),
        (nested(ints(2, -4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2)), "negative"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, shape=(1, 1)), ints(0, 2)), "are inconsistent"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0)), "are inconsistent"),
        (nested(floats(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2)), "not int64"),
        (
            nested(
                ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2),
                buffer=floats(*range(6), shape=(2, 3)),
            ),
            "its buffer is not contiguous",
        ),
    ],
)  # fmt: skip
def test_a_nested_tensor_may_not_leave_its_buffer(ref, reason):
    with pytest.raises(CorruptFile, match=reason):
        materialize(ref)


def jagged(offsets, *, lengths=None, ragged=1):
    values = floats(*range(8), shape=(4, 2))
    state = {"values": values, "offsets": offsets, "lengths": lengths, "_ragged_idx": ragged}
    return composed("nested", (2, None, 2), {"state": state})


def test_a_jagged_tensor_inside_its_values_is_made():
    assert [len(part) for part in materialize(jagged(ints(0, 1, 4))).unbind()] == [1, 3]


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (jagged(ints(0, 1, 5)), "its offsets exceed the 4 rows of its values"),
        (jagged(ints(0, 5, 4)), "its offsets exceed the 4 rows of its values"),
        (jagged(ints(-1, 1, 4)), "its offsets exceed the 4 rows of its values"),
        (jagged(ints(0, 1, 4), ragged=3), "ragged dimension 3"),
        (jagged(ints(0, 1, 4), ragged="x"), "ragged dimension 'x'"),
        (jagged(ints(0, 2, 4), lengths=ints(1, 3)), "its offsets exceed the 4 rows of its values"),
        (jagged(ints(0, 2, 4), lengths=ints(1)), "lengths do not fit"),
        (jagged(ints(0, 2, 4), lengths=ints(1, -1)), "lengths do not fit"),
    ],
)
def test_a_jagged_tensor_may_not_leave_its_values(ref, reason):
    with pytest.raises(CorruptFile, match=reason):
        materialize(ref)


def test_scales_as_lists_are_those_of_old_files():
    made = materialize(quantized((PER_CHANNEL, [0.5, 2.0], [0, 1], 0)))
    assert made.q_per_channel_scales().tolist() == [0.5, 2.0]
    assert made.q_per_channel_zero_points().tolist() == [0, 1]


def test_a_zero_stride_costs_no_memory():
    """Four bytes that claim to be a tensor of 2**60 elements, quantized or not."""
    plain = tensor(bytes(4), "float32", (1 << 60,), stride=(0,))
    assert materialize(plain).shape == (1 << 60,)
    scale = (torch_global("per_tensor_affine"), 0.1, 0)
    ref = tensor(
        bytes(1), "qint8", (1 << 60,), stride=(0,), kind="quantized", parts={"quantizer": scale}
    )
    assert materialize(ref).shape == (1 << 60,)


def test_negative_strides_and_gradients_of_integers_are_refused():
    with pytest.raises(CorruptFile, match="stride"):
        materialize(tensor(bytes(8), "float32", (2,), stride=(-1,), offset=1))
    with pytest.raises(CorruptFile, match="floating"):
        materialize(tensor(bytes(8), "int32", (2,), requires_grad=True))


def test_what_torch_cannot_put_on_meta_says_so():
    ref = quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], 0))
    with pytest.raises(DeviceError, match="quantized") as caught:
        materialize(ref, map_location="meta")
    assert "cpu" in caught.value.hint


def test_sparse_on_meta_keeps_its_shape():
    parts = {"indices": ints(0, 1, shape=(2, 1)), "values": floats(1)}
    made = materialize(composed("sparse_coo", (2, 2), parts), map_location="meta")
    assert (made.layout, made.shape, made.device.type) == (torch.sparse_coo, (2, 2), "meta")


def test_a_torch_without_jagged_tensors_says_so(monkeypatch):
    monkeypatch.delattr(torch.nested, "nested_tensor_from_jagged")
    with pytest.raises(UnsupportedFormat, match="jagged") as caught:
        materialize(jagged(ints(0, 1, 4)))
    assert "upgrade" in caught.value.hint
