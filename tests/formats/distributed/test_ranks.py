"""Folders of rank files: joined as torch cuts tensors, and refused where ranks do not fit."""

import random
import shutil
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from ckptool.errors import CorruptFile, FileMissing, UnsupportedFormat
from ckptool.formats import open_checkpoint
from ckptool.formats.distributed.placements import find_owned_rows
from ckptool.inspection.discovery import find_checkpoints
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.contract import FormatContract
from tests.formats.zips import resaved


class TestContract(FormatContract):
    name = "fsdp-ranks"
    sample = "ranks/fsdp2-2.13.0"
    is_covered = True


def cut(tensor, mesh, placements, place):
    """Return what torch gives to the rank at one place of a mesh."""
    for ranks, placement, at in zip(mesh, placements, place, strict=True):
        if not isinstance(placement, Replicate):
            tensor = placement._split_tensor(tensor, ranks, with_padding=False)[0][at]
    return tensor.contiguous()


def any_placement(rng, dimensions):
    axis = rng.randrange(dimensions)
    strided = _StridedShard(axis, split_factor=rng.randint(1, 4))
    return rng.choice([Replicate(), Shard(axis), Shard(axis), strided, strided])


def step_of(placement):
    state = {
        name: getattr(placement, name)
        for name in ("dim", "split_factor")
        if hasattr(placement, name)
    }
    return type(placement).__qualname__, state


@pytest.mark.parametrize("mesh", [(1,), (2,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_the_rows_of_a_rank_are_those_that_torch_gives_it(mesh):
    rng = random.Random(str(mesh))
    for _ in range(150):
        shape = [rng.randint(0, 9) for _ in range(rng.randint(1, 3))]
        whole = torch.arange(prod(shape)).view(shape)
        placements = [any_placement(rng, len(shape)) for _ in mesh]
        for place in product(*map(range, mesh)):
            rows = find_owned_rows(shape, zip(map(step_of, placements), mesh, place, strict=True))
            ours = whole
            for axis, runs in enumerate(rows):
                held = [row for start, stop in runs for row in range(start, stop)]
                ours = ours.index_select(axis, torch.tensor(held, dtype=torch.long))
            assert torch.equal(ours, cut(whole, mesh, placements, place)), (shape, placements)


def test_rows_of_a_strided_shard_are_pieces_of_each_part():
    steps = [(("_StridedShard", {"dim": 0, "split_factor": 2}), 2, 0)]
    assert find_owned_rows((8, 3), steps) == (((0, 2), (4, 6)), ((0, 3),))
    uneven = [(("_StridedShard", {"dim": 0, "split_factor": 2}), 2, 1)]
    assert find_owned_rows((5,), uneven) == (((2, 3), (4, 5)),)


@pytest.fixture
def folder(fixtures, tmp_path):
    """A model of FSDP2 by two ranks, with buffers that each has."""
    return Path(shutil.copytree(fixtures / "ranks" / "fsdp2-2.13.0", tmp_path / "run"))


def file(folder, rank, world=2):
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def changed(folder, rank, change):
    """Change the dict that a rank's file holds."""
    resaved(file(folder, rank), change)
    return folder


def test_a_plain_model_is_loaded_from_the_folder(folder):
    model = nn.Linear(5, 9)
    assert ckptool.load_into(model, folder, rename=["^up=>"], strict=False).coverage == 1
    assert torch.equal(model.weight, ckptool.load(folder)["up.weight"])


def test_a_list_reads_no_tensor(folder):
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.format, checkpoint.path) == ("fsdp-ranks", str(folder))
        raw = checkpoint["up.weight"].read()
        assert checkpoint["up.weight"].shape == (9, 5)
    before = ckptool.list_tensors(folder).to_dict()
    data = file(folder, 0).read_bytes()
    file(folder, 0).write_bytes(data.replace(raw[:60], bytes(60)))
    assert ckptool.list_tensors(folder).to_dict() == before


def test_bytes_that_are_not_those_that_were_written_are_found(folder):
    assert ckptool.verify(folder).ok
    with open_checkpoint(folder) as checkpoint:
        raw = checkpoint["up.weight"].read()[-24:]
    data = file(folder, 1).read_bytes()
    file(folder, 1).write_bytes(data.replace(raw, b"\xff" + raw[1:]))
    (problem,) = ckptool.verify(folder).problems
    assert problem.kind == "checksum"
    assert problem.place.startswith(f"{file(folder, 1).name}: ")


def test_a_rank_that_is_missing_is_named(folder):
    file(folder, 0).unlink()
    with pytest.raises(
        FileMissing, match=r"the file of rank 0 of 2 is missing: model_world_size_2_rank_0\.pt"
    ):
        ckptool.open(folder)


def test_a_rank_too_many_is_named(folder):
    shutil.copy(file(folder, 0), file(folder, 2))
    with pytest.raises(CorruptFile, match="has the files of 3 ranks, but 2 ranks saved it"):
        ckptool.open(folder)


def test_two_sets_are_not_mixed(folder):
    shutil.copy(file(folder, 0), file(folder, 0, world=1))
    with pytest.raises(UnsupportedFormat, match="2 sets of rank files"):
        ckptool.open(folder)


FAULTS = {
    "another shape": lambda state: state.update(**{"norm.running_mean": torch.ones(3)}),
    "another type": lambda state: state.update(**{"norm.running_mean": torch.ones(5).double()}),
    "another kind of value": lambda state: state.update({"norm.num_batches_tracked": 4}),
    "a key less": lambda state: state.pop("norm.bias"),
    "a key more": lambda state: state.update(more=1),
    "a plain tensor": lambda state: state.update({"up.weight": torch.ones(9, 5)}),
    "a shorter part": lambda state: setattr(state["up.weight"], "_local_tensor", torch.ones(3, 5)),
    "a part of another type": lambda state: setattr(
        state["up.weight"], "_local_tensor", torch.ones(4, 5).double()
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_do_not_fit_are_refused_with_the_name(folder, fault):
    changed(folder, 1, FAULTS[fault])
    with pytest.raises(CorruptFile) as caught:
        ckptool.open(folder)
    assert str(folder) in str(caught.value)
    assert "different saves" in caught.value.hint
    assert not ckptool.verify(folder).ok


def test_the_file_of_one_rank_under_the_name_of_another_is_refused(folder):
    shutil.copy(file(folder, 0), file(folder, 1))
    with pytest.raises(
        CorruptFile, match=r"'embed\.weight': the file of rank 1 was saved by rank 0"
    ):
        ckptool.open(folder)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("_StridedShard", "more than 4,096 pieces"),
        ("Partial", "its placement Partial is not supported: a sum is pending"),
        ("torch.distributed._tensor.placement_types._Partial", "a sum is pending"),
        ("Ragged", "its placement Ragged is not supported"),
    ],
)
def test_placements_that_are_not_read_are_refused(name, why):
    steps = [((name, {"dim": axis, "split_factor": 100}), 2, 0) for axis in range(2)]
    with pytest.raises(UnsupportedFormat, match=why):
        find_owned_rows((1 << 40, 1 << 40), steps)


def test_flat_parameters_are_refused_in_one_sentence(fixtures):
    with pytest.raises(
        UnsupportedFormat, match="is a flat FSDP parameter, without the names and shapes"
    ) as caught:
        ckptool.open(fixtures / "ranks" / "flat-2.13.0")
    assert "FULL_STATE_DICT" in caught.value.hint


def test_files_without_parts_are_not_taken_for_replicas(tmp_path):
    for rank in range(2):
        torch.save({"w": torch.ones(4)}, tmp_path / f"model_final.rank_{rank}.pth")
    with pytest.raises(
        UnsupportedFormat,
        match="has rank files that do not state which part of a tensor they contain",
    ):
        ckptool.open(tmp_path)


def test_another_file_under_the_name_of_a_rank_is_refused(folder):
    file(folder, 1).write_bytes(b"{}")
    with pytest.raises(ckptool.UnreadableFile, match=file(folder, 1).name):
        ckptool.open(folder)


def test_a_shard_of_a_sharded_tensor_that_is_gone_is_missed(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "ranks" / "fsdp1-2.13.0", tmp_path / "run"))
    (folder / "pytorch_model_fsdp_rank1.bin").unlink()
    with pytest.raises(CorruptFile, match=r"'embed\.weight': 15 of 35 elements are in no chunk"):
        ckptool.open(folder)


def test_one_file_opens_alone_and_names_its_folder(fixtures):
    folder = fixtures / "ranks" / "fsdp1-2.13.0"
    (note,) = ckptool.verify(folder / "pytorch_model_fsdp_rank0.bin").notes
    assert note.endswith(f"to join all ranks: {folder}")
    with open_checkpoint(folder / "pytorch_model_fsdp_rank0.bin") as checkpoint:
        assert checkpoint.format == "torch-zip"


def test_the_files_of_the_optimizer_are_left_behind(fixtures, tmp_path):
    receipt = ckptool.convert(fixtures / "ranks" / "fsdp2-2.13.0", tmp_path / "out.pth")
    assert "optim_world_size_2_rank_0.pt" in str(receipt.to_dict())


@pytest.fixture
def both(folder, fixtures):
    """The model and the optimizer of one save, in one folder."""
    for path in (fixtures / "ranks" / "optim-2.13.0").iterdir():
        shutil.copy(path, folder)
    return folder


def test_a_pattern_opens_the_set_that_it_matches(both, tmp_path):
    shutil.copy(file(both, 0), both / "model_world_size_1_rank_0.pt")
    with pytest.raises(UnsupportedFormat, match="2 sets of rank files") as caught:
        ckptool.open(both)
    assert f"{both}/model_world_size_1_rank_*.pt" in caught.value.hint
    with open_checkpoint(both / "model_world_size_2_rank_*.pt") as checkpoint:
        assert (checkpoint.format, checkpoint.path) == ("fsdp-ranks", str(both))
    model = nn.Linear(5, 9)
    source = both / "model_world_size_2_rank_*.pt"
    ckptool.load_into(model, source, rename=["^up=>"], strict=False)
    assert torch.equal(model.weight, ckptool.load(source)["up.weight"])
    assert ckptool.verify(source).shards == 2


def test_an_optimizer_is_joined_by_its_own_names(both):
    assert "embed.weight" in ckptool.load(both)
    loaded = ckptool.load(both / "optim_world_size_2_rank_*.pt")
    assert loaded.keys() == {"state", "param_groups"}
    assert loaded["state"][0]["exp_avg"].shape == (9, 5)
    assert len(find_checkpoints(str(both), DEFAULT_LIMITS)) == 3


def test_a_pattern_that_matches_nothing_is_no_file(folder):
    with pytest.raises(FileMissing, match=r"has no file none_\*\.pt"):
        ckptool.open(folder / "none_*.pt")
    with pytest.raises(FileMissing):
        ckptool.open(folder / "none" / "*.pt")


def test_a_file_with_a_star_in_its_name_is_that_file(folder):
    starred = shutil.copy(file(folder, 0), folder / "rank_*.pt")
    with open_checkpoint(starred) as checkpoint:
        assert checkpoint.format == "torch-zip"


def test_copies_that_differ_are_told(fixtures, tmp_path):
    folder = shutil.copytree(fixtures / "ranks/hsdp-2.13.0", tmp_path / "run")
    path = folder / "model_world_size_4_rank_2.pt"
    state = torch.load(path, weights_only=False)
    state["up.weight"]._local_tensor.add_(1)
    state["norm.running_mean"].add_(1)
    torch.save(state, path)
    told = "different copies in the files of other ranks: 'up.weight', 'norm.running_mean'"
    with ckptool.open(folder) as checkpoint:
        assert checkpoint.details.left_behind == (told,)
    assert ckptool.verify(folder).notes == (told,)
    assert not ckptool.verify(fixtures / "ranks/hsdp-2.13.0").notes


def test_the_files_that_a_shell_lists_are_the_set(fixtures, tmp_path):
    folder = fixtures / "ranks" / "fsdp1-2.13.0"
    files = sorted(folder.glob("*.bin"))
    whole = tmp_path / "whole.pth"
    ckptool.convert(folder, whole)
    ckptool.convert(files[::-1], tmp_path / "listed.pth")
    assert ckptool.diff(tmp_path / "listed.pth", whole).identical
    with pytest.raises(
        FileMissing, match="belongs to the same set of rank files and was not given:"
    ):
        ckptool.convert(files[:1], tmp_path / "one.pth")
