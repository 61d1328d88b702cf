"""`map_location`, held against torch.load's."""

from importlib import import_module

import pytest
import torch

import ckptool
from ckptool.errors import DeviceError
from ckptool.tensors import materialize
from tests.tensors.judge import assert_same
from tests.tensors.refs import floats

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="expects a machine without a GPU")


def to_meta(storage, tag):
    return torch.UntypedStorage(storage.nbytes(), device="meta")


ACCEPTED = [
    "cpu", "meta", torch.device("cpu"), torch.device("meta"), {"cuda:3": "cpu"},
    {"cuda:3": "meta"}, lambda storage, tag: storage, to_meta,
]  # fmt: skip
REFUSED = [
    None, {"cuda:1": "cpu"}, "cuda:0", "cuda", "nonsense:1", torch.device("cuda"),
    lambda storage, tag: None,
]  # fmt: skip


def written(where):
    """An id that is the same in every process: a function's own text has its address."""
    return getattr(where, "__name__", str(where))


@pytest.mark.parametrize("where", ACCEPTED, ids=written)
def test_what_torch_accepts_gives_what_torch_gives(fixtures, where):
    file = fixtures / "torch-2.13.0" / "dp_full_cuda3.pth"
    theirs = torch.load(file, map_location=where, weights_only=False)
    for mmap in (False, True):
        assert_same(ckptool.load(file, map_location=where, mmap=mmap), theirs)


@pytest.mark.parametrize("where", REFUSED, ids=written)
def test_what_torch_refuses_is_refused_with_the_remedy(fixtures, where):
    file = fixtures / "torch-2.13.0" / "dp_cuda3.pth"
    with pytest.raises(RuntimeError):
        torch.load(file, map_location=where, weights_only=False)
    with pytest.raises(DeviceError) as caught:
        ckptool.load(file, map_location=where)
    assert str(file) in str(caught.value)
    assert "module.conv1.weight" in str(caught.value) or "module." in str(caught.value)
    assert "cuda:3" in str(caught.value)
    assert 'map_location="cpu"' in caught.value.hint
    assert f"ckptool remap --to cpu {file}" in caught.value.hint


def test_the_default_is_the_cpu(fixtures):
    made = ckptool.load(fixtures / "torch-2.13.0" / "dp_cuda3.pth")
    assert {tensor.device.type for tensor in made.values()} == {"cpu"}


def test_meta_reads_nothing(fixtures, monkeypatch):
    monkeypatch.setattr(import_module("ckptool.tensors.storages"), "_read_into_view", None)
    made = ckptool.load(fixtures / "torch-2.13.0" / "dp.pth", map_location="meta")
    assert {tensor.device.type for tensor in made.values()} == {"meta"}


def test_a_missing_device_is_found_out_before_anything_is_read(fixtures, monkeypatch):
    monkeypatch.setattr(import_module("ckptool.tensors.storages"), "_read_into_view", None)
    with pytest.raises(DeviceError):
        ckptool.load(fixtures / "torch-2.13.0" / "dp_cuda3.pth", map_location=None)


def test_a_function_may_give_a_typed_storage_as_older_code_does(fixtures):
    file = fixtures / "torch-2.13.0" / "dp_cuda3.pth"

    def typed(storage, tag):
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)

    assert_same(ckptool.load(file, map_location=typed), torch.load(file, map_location="cpu"))


def test_what_is_no_map_location_is_refused():
    with pytest.raises(DeviceError, match="int"):
        materialize(floats(1), map_location=3)
    with pytest.raises(DeviceError, match="returned a str, expected a storage"):
        materialize(floats(1), map_location=lambda storage, tag: "cpu")
