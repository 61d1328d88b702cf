"""`load`: real files, given what torch reads from each; objects inert; nothing runs."""

import gc
import os
import pickle
import subprocess
import sys
import weakref

import numpy
import pytest
import torch

import ckptool
from ckptool.formats import open_checkpoint
from ckptool.model import Opaque, TensorRef
from tests.loading.bits import saved
from tests.tensors.judge import Judge, assert_same

FOLDERS = ["torch-1.4.0", "torch-1.6.0", "torch-1.13.1", "torch-2.13.0", "ddp", "ecosystem"]
BY_TORCH = [
    "ddp/ddp.pth", "ddp/ddp_compiled.pth", "ddp/ddp_full.pth", "ecosystem/compiled.pth",
    "ecosystem/compiled_dp.pth", "ecosystem/dp_compiled.pth", "ecosystem/ema.pth",
    "ecosystem/newdtypes.pth", "ecosystem/special_conj.pth", "ecosystem/special_coo.pth",
    "ecosystem/special_meta.pth", "foreign/xla_2.6.pth", "tensors/views.pth",
    "tensors/views_legacy.pth", "tensors/sparse.pth", "tensors/sparse_legacy.pth",
    "tensors/bits.pth", "tensors/quantized.pth", "tensors/quantized_legacy.pth",
    "tensors/meta.pth", "tensors/ties.pth", "tensors/ties_legacy.pth", "tensors/dtypes.pth",
    "tensors/nested.pth", "tensors/jagged.pth",
] + [
    f"{folder}/{name}"
    for folder in FOLDERS[:4]
    for name in (
        "single.pth", "single_full.tar", "dp.pth", "dp_cuda0.pth", "dp_cuda3.pth", "dp_full.pth",
        "dp_full_cuda0.pth", "dp_unwrapped.pth", "odd.pth",
    )
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_TORCH)
def test_real_files_are_what_torch_reads(fixtures, name):
    theirs = torch.load(fixtures / name, map_location="cpu", weights_only=False)
    for mmap in (False, True):
        assert_same(ckptool.load(fixtures / name, mmap=mmap), theirs)


def test_an_open_checkpoint_stays_open(fixtures):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp.pth") as checkpoint:
        first = ckptool.load(checkpoint)
        assert_same(ckptool.load(checkpoint), first)


@pytest.mark.parametrize("load", [ckptool.load, ckptool.load_state_dict])
def test_map_location_may_be_given_by_position_as_to_torch(tmp_path, load):
    path = saved(tmp_path / "state.pth", {"weight": torch.ones(2)})
    assert torch.load(path, "meta")["weight"].is_meta
    assert load(path, "meta")["weight"].is_meta
    assert load(path, lambda storage, tag: storage)["weight"].tolist() == [1, 1]


def test_objects_stay_inert_and_their_tensors_are_made(fixtures):
    whole = ckptool.load(fixtures / "torch-2.13.0" / "whole_single.pth")
    assert isinstance(whole, Opaque)
    assert whole.class_name.startswith("net.")
    tensors = [value for value in walk(whole) if isinstance(value, torch.Tensor)]
    assert tensors
    assert not [value for value in walk(whole) if isinstance(value, TensorRef)]


def walk(node):
    yield node
    if isinstance(node, dict):
        inside = list(node.values())
    elif isinstance(node, (list, tuple)):
        inside = list(node)
    else:
        inside = [node.args, node.steps] if isinstance(node, Opaque) else []
    for value in inside:
        yield from walk(value)


def test_miscellaneous_values(fixtures):
    file = fixtures / "torch-2.13.0" / "misc.pth"
    theirs = torch.load(file, weights_only=False)
    ours = ckptool.load(file)
    assert list(ours) == list(theirs)
    judge = Judge()
    for key, value in theirs.items():
        if isinstance(value, numpy.generic):
            assert ours[key] == value.item()
            assert type(ours[key]) is type(value.item())
        elif isinstance(ours[key], Opaque):
            assert type(value).__qualname__ in ours[key].class_name
        else:
            judge.same(ours[key], value, key)


def test_numpy_arrays_become_tensors(tmp_path):
    tree = {
        "a": numpy.arange(6.0).reshape(2, 3), "f": numpy.asfortranarray(numpy.eye(3, 2)),
        "big": numpy.arange(3, dtype=">i4"), "b": numpy.array([True, False]),
        "zero": numpy.array(2.5), "scalar": numpy.float32(0.5), "none": numpy.zeros((0, 3)),
        "text": numpy.array(["a"]),
    }  # fmt: skip
    ours = ckptool.load(saved(tmp_path / "f.pt", tree))
    for key in ("a", "f", "big", "b", "zero", "none"):
        native = tree[key].astype(tree[key].dtype.newbyteorder("="))
        assert torch.equal(ours[key], torch.from_numpy(native))
    assert ours["scalar"] == 0.5
    assert type(ours["scalar"]) is float
    assert isinstance(ours["text"], Opaque)


def test_a_bare_pickle_of_arrays_is_made(tmp_path):
    file = tmp_path / "f.pkl"
    file.write_bytes(pickle.dumps({"model": {"w": numpy.arange(3.0)}, "author": "a"}))
    ours = ckptool.load(file)
    assert ours["author"] == "a"
    assert torch.equal(ours["model"]["w"], torch.arange(3.0, dtype=torch.float64))


def test_what_is_let_go_of_is_freed_at_once(tmp_path):
    """No reference circle of ours keeps gigabytes until the next collection."""
    file = saved(tmp_path / "f.pt", {"w": torch.nn.Parameter(torch.zeros(3))})
    gc.disable()
    try:
        made = ckptool.load(file)
        watch = weakref.ref(made["w"])
        del made
        assert watch() is None
    finally:
        gc.enable()


def test_a_wrapper_of_many_ranks_stays_a_reference_whose_part_can_be_read(fixtures):
    file = fixtures / "distributed" / "dtensor_0_of_2.pth"
    with open_checkpoint(file) as checkpoint:
        tree = ckptool.load(checkpoint)
        ref = next(value for value in walk(tree) if isinstance(value, TensorRef))
        assert ref.kind == "subclass"
        assert isinstance(ref.local.torch(), torch.Tensor)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


def test_nothing_of_the_file_is_run(tmp_path):
    target = tmp_path / "EXECUTED"
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.evil = Evil(f"touch {target}")
    tree = {
        "w": torch.zeros(2), "evil": Evil(f"touch {target}"), "p": parameter,
        "set": {Evil(f"touch {target}")},
    }  # fmt: skip
    for legacy in (False, True):
        file = tmp_path / f"{legacy}.pt"
        torch.save(tree, file, _use_new_zipfile_serialization=not legacy)
        made = ckptool.load(file)
        assert isinstance(made["evil"], Opaque)
        assert isinstance(made["p"].evil, Opaque)
        assert len(made["set"]) == 1
        with pytest.warns(ckptool.CheckpointWarning, match="without 'evil', 'set'"):
            assert torch.equal(ckptool.load_state_dict(file)["w"], torch.zeros(2))
    assert not target.exists()


def test_modules_that_a_file_names_are_not_imported(tmp_path):
    """A class, a torch submodule that is imported on demand, a device of another back end."""
    raw = b"\x80\x02}(X\x01\x00\x00\x00acantigravity\nfly\nX\x01\x00\x00\x00bctorch\nonnx\n"
    raw += b"X\x01\x00\x00\x00cctorch\ndevice\nX\x05\x00\x00\x00npu:0\x85Ru."
    file = tmp_path / "f.pkl"
    file.write_bytes(raw)
    code = (
        "import sys, torch, ckptool; before = {m for m in sys.modules if m.startswith('torch')}; "
        f"tree = ckptool.load({str(file)!r}); "
        "assert 'antigravity' not in sys.modules; "
        "assert {m for m in sys.modules if m.startswith('torch')} == before; "
        "print(sorted(type(v).__name__ for v in tree.values()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "['DeviceValue', 'Global', 'Global']", run.stderr
