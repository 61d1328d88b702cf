"""Tensors: whatever torch.save writes is made again as torch.load makes it."""

import sys
from itertools import product

import pytest
import torch

import ckptool
from ckptool.errors import TorchMissing
from ckptool.formats import open_checkpoint
from ckptool.tensors import Materialiser, materialise
from tests.tensors.judge import assert_same
from tests.tensors.samples import DTYPES, SAMPLES, of_dtype

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
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
        made = materialise(checkpoint["row"])
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
        maker = Materialiser(checkpoint.root)
        assert maker.tensor(checkpoint["w"]) is maker.tensor(checkpoint["w"])


def test_a_subclass_with_a_storage_becomes_a_plain_tensor_with_its_attributes(tmp_path):
    class Labelled(torch.Tensor):
        pass

    Labelled.__module__, Labelled.__qualname__ = "tests.tensors.test_materialise", "Labelled"
    globals()["Labelled"] = Labelled
    tensor = torch.arange(3.0).as_subclass(Labelled)
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
    said = "tensor 'p' is returned without its attributes backward, __torch_function__"
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
            materialise(checkpoint["w"])
    assert "without torch: " in str(caught.value)
    assert caught.value.hint == "pip install torch"
