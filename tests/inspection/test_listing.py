"""Rows of a listing: what is listed as what, ties, storages, hashes, globs, limits."""

import hashlib
import json

import pytest
import torch

from ckptool.core.model import DeviceValue, Global, Opaque, OrderedMap, Size
from ckptool.errors import AmbiguousName, LimitExceeded, NotFound
from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import list_tensors
from ckptool.limits import Limits
from tests.inspection.handmade import checkpoint, floats, storage, tensor


@pytest.fixture
def saved(tmp_path):
    """Save what torch makes, list what ckptool reads."""

    def list_saved(root, **options):
        path = tmp_path / "model.pth"
        torch.save(root, path)
        with open_checkpoint(path) as opened:
            return list_tensors(opened, **options)

    return list_saved


def by_name(listing):
    return {row.name: row for row in listing.tensors}


def test_a_row_says_what_torch_says(saved):
    weight = torch.arange(12.0).reshape(3, 4).t()
    row = saved({"model": {"fc.weight": torch.nn.Parameter(weight)}}).tensors[0]
    assert row.path == ("model", "fc.weight")
    assert row.name == "model/fc.weight"
    assert (row.dtype, row.shape, row.stride) == ("float32", (4, 3), (1, 4))
    assert (row.device, row.nbytes, row.kind, row.numel) == ("cpu", 48, "strided", 12)
    assert row.requires_grad is True
    assert row.sha256 is None


def test_the_hash_is_of_the_elements_in_row_major_order(saved):
    for made in [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(20, dtype=torch.int64)[3:17:2],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.ones(1).expand(5, 3),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
    ]:
        content = made.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        wanted = hashlib.sha256(bytes(content.tolist())).hexdigest()
        assert saved({"x": made}, hash=True).tensors[0].sha256 == wanted, made


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_sparse_and_quantized_tensors_have_no_hash(saved):
    sparse = torch.eye(2).to_sparse()
    find_quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    rows = by_name(saved({"sparse": sparse, "quantised": find_quantized}, hash=True))
    assert rows["sparse"].kind == "sparse_coo"
    assert rows["quantised"].kind == "quantized"
    assert {row.sha256 for row in rows.values()} == {None}


def test_ties_share_a_storage_and_are_marked(saved):
    weight = torch.randn(4, 4)
    rows = by_name(saved({"a": weight, "b": weight, "row": weight[1], "other": torch.ones(2)}))
    assert rows["a"].storage == rows["b"].storage == rows["row"].storage != rows["other"].storage
    assert {name for name, row in rows.items() if row.tied} == {"a", "b"}


def test_a_conjugated_view_is_no_tie(saved):
    number = torch.randn(2, dtype=torch.complex64)
    rows = saved({"a": number, "b": number.conj()}, hash=True).tensors
    assert not any(row.tied for row in rows)
    assert rows[0].sha256 != rows[1].sha256


def test_storages_with_one_key_get_different_names():
    root = {"a": tensor(floats(1.0), [1]), "b": tensor(floats(2.0), [1])}
    rows = list_tensors(checkpoint(root)).tensors
    assert [row.storage for row in rows] == ["0", "0#2"]


def test_values_are_what_json_can_hold():
    root = {
        "epoch": 3, "best": float("nan"), "lr": float("-inf"), "on": True, "none": None,
        "text": "ä", "z": 1 + 2j, "huge": 1 << 2000, "size": Size((2, 3)),
    }  # fmt: skip
    listing = list_tensors(checkpoint(root))
    assert {row.name: (row.type, row.value) for row in listing.values} == {
        "epoch": ("int", 3),
        "best": ("float", "nan"),
        "lr": ("float", "-inf"),
        "on": ("bool", True),
        "none": ("NoneType", None),
        "text": ("str", "ä"),
        "z": ("complex", "(1+2j)"),
        "huge": ("int", 1 << 2000),
        "size/0": ("int", 2),
        "size/1": ("int", 3),
    }
    assert json.loads(json.dumps(listing.to_dict(), allow_nan=False))["schema"] == "ckptool.list/1"


def test_sets_bytes_dtypes_devices_and_classes_are_objects():
    root = {
        "bytes": b"x",
        "array": bytearray(b"y"),
        "device": DeviceValue("cuda:1"),
        "dtype": Global("torch", "float32"),
        "class": Global("net", "Net"),
        "args": Opaque(Global("argparse", "Namespace")),
    }
    listing = list_tensors(checkpoint(root))
    assert listing.values == ()
    assert [(row.name, row.class_name) for row in listing.objects] == [
        ("bytes", "builtins.bytes"),
        ("array", "builtins.bytearray"),
        ("device", "torch.device"),
        ("dtype", "torch.dtype"),
        ("class", "net.Net"),
        ("args", "argparse.Namespace"),
    ]


def test_objects_in_a_few_words_where_those_say_more_than_the_class():
    root = {
        "bytes": b"x" * 100,
        "device": DeviceValue("cuda:1"),
        "dtype": Global("torch", "float32"),
        "class": Global("net", "Net"),
        "args": Opaque(Global("argparse", "Namespace")),
    }
    words = [row.summary for row in list_tensors(checkpoint(root)).objects]
    assert words == [f"b'{'x' * 55}...", "cuda:1", "torch.float32", "", ""]


def test_an_object_that_is_a_plain_value_is_listed_as_one():
    scalar = Opaque(Global("numpy", "scalar"), plain=("float64", 0.93))
    (row,) = list_tensors(checkpoint({"best": scalar})).values
    assert row.to_dict() == {"path": ("best",), "name": "best", "type": "float64", "value": 0.93}


def test_keys_that_json_lacks_are_their_repr():
    root = {True: 1, 2.5: 2, b"k": 3, None: 4, 7: 5, "s": 6, (1, "a"): 7}
    paths = [row.path for row in list_tensors(checkpoint(root)).values]
    assert paths == [("True",), ("2.5",), ("b'k'",), ("None",), (7,), ("s",), ("(1, 'a')",)]


def test_an_object_as_a_key_is_not_spelled_out():
    key = Global("net", "Net")
    (row,) = list_tensors(checkpoint({key: 1})).values
    assert row.path == ("net.Net",)


def test_globs_choose_by_own_name_or_by_whole_name():
    layer = OrderedMap({"fc.weight": tensor(floats(1.0), [1]), "fc.bias": tensor(floats(2.0), [1])})
    root = {"model": layer, "ema": layer, "epoch": 3}
    made = checkpoint(root)

    def names(**options):
        listing = list_tensors(made, **options)
        return [row.name for row in (*listing.tensors, *listing.values)]

    assert names(include=["*.weight"]) == ["model/fc.weight", "ema/fc.weight"]
    assert names(include=["model/*"]) == ["model/fc.weight", "model/fc.bias"]
    assert names(include=["*.weight", "epoch"], exclude=["ema/*"]) == ["model/fc.weight", "epoch"]
    assert names(exclude=["*"]) == []


def test_the_document_has_the_keys_of_the_schema():
    made = checkpoint({"w": tensor(floats(1.0), [1]), "epoch": 1, "raw": b""})
    plain, hashed = (list_tensors(made, hash=flag).to_dict() for flag in (False, True))
    assert list(plain) == ["schema", "file", "format", "tensors", "values", "objects"]
    assert list(plain["tensors"][0]) == [
        "path", "name", "dtype", "shape", "stride", "device", "nbytes", "kind", "storage",
        "requires_grad",
    ]  # fmt: skip
    assert list(hashed["tensors"][0]) == [*plain["tensors"][0], "sha256"]
    assert list(plain["values"][0]) == ["path", "name", "type", "value"]
    assert list(plain["objects"][0]) == ["path", "name", "class"]


def test_progress_reaches_the_total_ties_counted_once():
    shared = tensor(floats(1.0, 2.0), [2])
    seen = []
    list_tensors(
        checkpoint({"a": shared, "b": shared}),
        hash=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (8, 8)


def test_a_few_bytes_that_claim_to_be_exabytes_are_not_hashed():
    endless = tensor(storage(b"\0" * 4), [1 << 60], stride=[0])
    made = checkpoint({"x": endless})
    assert list_tensors(made).tensors[0].nbytes == 1 << 62
    with pytest.raises(LimitExceeded, match="'x' spreads 4 stored bytes"):
        list_tensors(made, hash=True)


def test_repetition_adds_up_over_tensors():
    root = {str(n): tensor(storage(b"\0" * 4), [n], stride=[0]) for n in range(1, 40)}
    limits = Limits(max_repeated_bytes=1000)
    with pytest.raises(LimitExceeded, match="repeated bytes"):
        list_tensors(checkpoint(root), hash=True, limits=limits)


def test_a_listing_is_the_same_every_time(saved):
    numpy = pytest.importorskip("numpy")
    root = {"a": numpy.arange(3), "b": numpy.arange(4)}
    rows = saved(root).tensors
    assert [row.kind for row in rows] == ["numpy", "numpy"]
    assert [row.storage for row in rows] == ["numpy", "numpy#2"]


def test_a_listing_is_a_list_of_its_tensors(saved):
    listing = saved({"model": {"a": torch.ones(1), "b": torch.ones(2)}, "epoch": 3})
    assert [row.name for row in listing] == ["model/a", "model/b"]
    assert len(listing) == 2
    assert listing[-1] is listing["model/b"] is listing.tensors[1]
    assert listing[:1] == listing.tensors[:1]
    assert "model/a" in listing
    assert listing[0] in listing
    assert "epoch" not in listing
    with pytest.raises(NotFound, match="'a'"):
        listing["a"]
    with pytest.raises(IndexError):
        listing[2]


def test_a_name_that_two_tensors_have_is_refused():
    weight = tensor(floats(1.0), [1])
    listing = list_tensors(checkpoint({"a": {"b": weight}, "a/b": weight}))
    with pytest.raises(AmbiguousName, match="'a/b'"):
        listing["a/b"]
