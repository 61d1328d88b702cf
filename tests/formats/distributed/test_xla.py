"""Files of PyTorch/XLA: tensors beside the file, and parameters joined from the files of ranks."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CorruptFile, FileMissing
from ckptool.formats import open_checkpoint
from tests.formats.contract import FormatContract
from tests.formats.zips import resaved


class TestContractOfFsdp(FormatContract):
    name = "xla-fsdp"
    sample = "xla/flat-2.9.0"


class TestContractOfXser(FormatContract):
    name = "xla-xser"
    sample = "xla/xser-2.9.0.pth"


FSDP = ["flat", "rows", "runs"]


@pytest.fixture
def xser(fixtures, tmp_path):
    """A checkpoint of a training, its tensors in the folder beside it."""
    source = fixtures / "xla/xser-2.9.0.pth"
    shutil.copytree(f"{source}.tensors", tmp_path / "model.pth.tensors")
    return shutil.copy(source, tmp_path / "model.pth")


@pytest.fixture(params=FSDP)
def folder(request, fixtures, tmp_path):
    """Two ranks of torch_xla's FSDP."""
    return shutil.copytree(fixtures / f"xla/{request.param}-2.9.0", tmp_path / "run")


def rank(folder, number):
    return folder / f"run_rank-{number:08d}-of-00000002.pth"


def test_tensors_beside_the_file_are_its_own(xser, tmp_path):
    state = ckptool.load_state_dict(xser)
    assert state["conv.weight"].shape == (5, 3, 3, 3)
    assert main(["convert", str(xser), str(tmp_path / "m.safetensors"), "--key", "model"]) == 0
    assert load_file(tmp_path / "m.safetensors")["fc.bias"].equal(state["fc.bias"])
    assert main(["remap", "--to", "cpu", str(xser), "-o", str(tmp_path / "all.pth")]) == 0
    whole = torch.load(tmp_path / "all.pth")
    assert whole["epoch"] == 3
    assert whole["half"].equal(torch.arange(3, dtype=torch.bfloat16))
    assert whole["optimizer"]["state"][0]["momentum_buffer"].eq(1).all()


def test_a_tensor_that_is_not_there_or_none(xser, tmp_path):
    file = tmp_path / "model.pth.tensors/tensor_0.pt"
    torch.save({"a": 1}, file)
    with pytest.raises(CorruptFile, match=r"tensor_0.pt: does not contain a tensor"):
        open_checkpoint(xser)
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(CorruptFile, match=r"tensor_0.pt"):
        open_checkpoint(xser)
    file.unlink()
    with pytest.raises(FileMissing, match=r"tensor_0.pt: is missing"):
        open_checkpoint(xser)


def flipped(path, value):
    raw = path.read_bytes()
    at = raw.index(value.numpy().tobytes())
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_verify_finds_a_bit_in_any_of_the_files(xser, folder, tmp_path):
    assert ckptool.verify(folder).ok
    tensor = tmp_path / "model.pth.tensors/tensor_0.pt"
    flipped(tensor, torch.load(tensor))
    flipped(rank(folder, 1), next(iter(torch.load(rank(folder, 1))["model"].values())))
    for path, name in ((xser, tensor.name), (folder, rank(folder, 1).name)):
        (problem,) = ckptool.verify(path).problems
        assert problem.kind == "checksum"
        assert problem.place.startswith(name)


def test_verify_and_doctor_of_a_file_with_tensors_beside_it(xser, capfd):
    assert main(["verify", str(xser)]) == 0
    assert main(["doctor", str(xser)]) == 1
    assert "torch_xla" in capfd.readouterr().out


def test_a_file_without_references_is_no_such_file(xser, tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "model.pth")
    with open_checkpoint(tmp_path / "model.pth") as checkpoint:
        assert checkpoint.format == "torch-zip"


def test_the_weights_of_all_ranks_load_into_the_bare_model(folder):
    net = torch.nn.Module()
    net.conv, net.bn = torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5)
    net.fc, net.head = torch.nn.Linear(7, 3), torch.nn.Linear(3, 2, bias=False)
    report = ckptool.load_into(net, folder)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    torch.manual_seed(1)
    assert net.conv.weight.equal(torch.nn.Conv2d(3, 5, 3).weight)  # as the script made it


def test_the_optimizer_of_one_rank_is_left_out_and_said(folder):
    resaved(rank(folder, 0), lambda one: one.update(optimizer={"state": {0: torch.ones(2)}}))
    with open_checkpoint(folder) as checkpoint:
        assert list(checkpoint.root) == ["model", "epoch"]
        assert "optimizer" in checkpoint.details.notes[1]


def test_ranks_that_are_missing_or_of_another_save(folder):
    kept = rank(folder, 1).read_bytes()
    rank(folder, 1).unlink()
    with pytest.raises(FileMissing, match="the file of rank 1 of 2 is missing: rank-1-of-2"):
        open_checkpoint(folder)
    rank(folder, 1).write_bytes(kept)
    resaved(rank(folder, 1), lambda one: one["shard_metadata"].update(rank=7))
    with pytest.raises(FileMissing, match="rank 1 of 2"):
        open_checkpoint(folder)
    rank(folder, 1).write_bytes(kept)
    resaved(rank(folder, 1), lambda one: one["shard_metadata"].update(world_size=3))
    with pytest.raises(CorruptFile, match="the world size is 2"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["model"].update({next(iter(one["model"])): torch.ones(1)}),
        lambda one: one["model"].update({next(iter(one["model"])): "text"}),
        lambda one: one["model"].update({next(iter(one["model"])): torch.ones(9).half()}),
        lambda one: one["model"].clear(),
    ],
)
def test_parts_that_do_not_make_a_parameter(folder, change):
    resaved(rank(folder, 1), change)
    with pytest.raises(CorruptFile):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "books",
    [
        {"world_size": "two"},
        {"shard_info": []},
        {"flatten_info": None},
        {"shard_info": {"": {"a": 1}}, "world_size": 2},
    ],
)
def test_books_that_say_nonsense(folder, books):
    resaved(rank(folder, 0), lambda one: one["shard_metadata"].update(books))
    with pytest.raises(CorruptFile):
        open_checkpoint(folder)


def test_a_folder_of_such_names_and_other_content(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "rank-0-of-1.pth")
    with pytest.raises(ckptool.CheckpointError, match="rank-0-of-1"):
        open_checkpoint(tmp_path)
