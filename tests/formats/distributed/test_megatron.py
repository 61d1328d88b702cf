"""Folders of Megatron-LM: the trees of all ranks side by side."""

import shutil

import pytest
import torch

import ckptool
from ckptool.errors import FileMissing, UnsupportedFormat
from tests.formats.distributed.megatron_files import NORM, QKV, whole, write_ranks


@pytest.fixture
def folder(tmp_path):
    return write_ranks(tmp_path / "iter_0000100", whole())


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "model_rng.pt"])
def test_each_rank_is_listed_and_compared(tmp_path, name):
    folder = write_ranks(tmp_path / "iter_0000100", whole(), name=name)
    with ckptool.open(folder) as checkpoint:
        assert (checkpoint.format, list(checkpoint.root)) == (
            "megatron",
            ["mp_rank_00", "mp_rank_01"],
        )
        assert checkpoint["mp_rank_01"]["model"][QKV].shape == (6, 8)
        assert checkpoint.details.notes == ("2 Megatron ranks",)
        found = checkpoint["mp_rank_01"]["model"][NORM].torch()
        alone = torch.load(folder / "mp_rank_01" / name, weights_only=False)["model"][NORM]
        assert torch.equal(found, alone)
    assert ckptool.load(folder)["mp_rank_00"]["iteration"] == 100
    assert ckptool.verify(folder).ok


def test_a_damaged_rank_is_named(folder):
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    raw = whole()[NORM].view(torch.uint8).numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(raw, bytes(len(raw)), 1))
    (problem,) = ckptool.verify(folder).problems
    assert problem.place.startswith("mp_rank_01/model_optim_rng.pt")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_missing_is_named(folder, rank):
    shutil.rmtree(folder / f"mp_rank_{rank:02d}")
    with pytest.raises(
        FileMissing, match=f"the file of rank {rank} of 2 is missing: mp_rank_{rank:02d}"
    ):
        ckptool.open(folder)


def test_ranks_of_a_pipeline_are_refused(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole(), pattern="mp_rank_00_{:03d}")
    with pytest.raises(UnsupportedFormat, match="with pipeline or expert parallelism") as caught:
        ckptool.open(folder)
    assert "mp_rank_00_000/model_optim_rng.pt" in caught.value.hint
