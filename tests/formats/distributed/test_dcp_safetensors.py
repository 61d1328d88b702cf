"""Folders that torch's Hugging Face writer made: joined by offsets, and refused where they lie."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CorruptFile, FileMissing, UnsupportedFormat
from ckptool.formats import open_checkpoint
from ckptool.inspection.discovery import find_checkpoints
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "dcp-safetensors"
    sample = "dcp/hugging-2.13.0"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAME = "shard-{rank:05d}-model-{file:05d}-of-00002.safetensors"


@pytest.fixture
def folder(fixtures, tmp_path):
    """Eight files by four ranks, two each."""
    return Path(shutil.copytree(fixtures / "dcp" / "hugging-2.13.0", tmp_path / "run"))


def changed(folder, rank, file, change):
    """Change the tensors and the offsets of one file."""
    path = folder / NAME.format(rank=rank, file=file)
    tensors = load_file(path)
    with safe_open(path, "pt") as one:
        places = json.loads(one.metadata()["DCP_SHARDING_INFO"])
    text = change(tensors, places)
    save_file(tensors, path, {"DCP_SHARDING_INFO": text or json.dumps(places)})


def test_it_is_read_as_torch_reads_it(folder, tmp_path):
    ours = ckptool.load(folder)
    theirs = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    ckptool.convert(folder, f"{tmp_path}/out/", ckptool.Cast("bfloat16"), max_shard_size=100)
    written = ckptool.load(tmp_path / "out")
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor)
        small = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(written[name], small)
        assert written[name].dtype == small.dtype


def test_what_torch_put_together_is_read_and_not_its_parts(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "dcp" / "consolidated-2.13.0", tmp_path / "run"))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "safetensors-sharded"
    whole, parts = ckptool.load(folder), ckptool.load(folder / "sharded")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())
    for whole in folder.glob("model*"):
        whole.unlink()
    with pytest.raises(UnsupportedFormat, match="with parts that are not joined") as caught:
        ckptool.open(folder)
    assert f"{folder}/sharded" in caught.value.hint


def test_one_file_opens_alone_and_names_its_folder(folder):
    part = folder / NAME.format(rank=1, file=1)
    with open_checkpoint(part) as checkpoint:
        assert checkpoint["both"].shape == (4, 3)
    (note,) = ckptool.verify(part).notes
    assert note.endswith(f"to join all ranks: {folder}")


def test_the_files_are_looked_at_as_one_checkpoint(folder):
    shutil.copy(folder / NAME.format(rank=1, file=1), folder / "other.safetensors")
    found = find_checkpoints(str(folder.parent), DEFAULT_LIMITS)
    assert found == [str(folder), str(folder / "other.safetensors")]
    assert ckptool.verify(folder).shards == 8


def placed(value):
    """Return a fault: the header says this of the place of `both`."""
    return lambda _, places: places.update(both=value)


def with_part(change, *offsets):
    """Return a fault: another part of `both`, and perhaps another place."""

    def fault(tensors, places):
        tensors.update(both=change(tensors["both"]))
        if offsets:
            places.update(both={"saved_offsets": [*offsets]})

    return fault


BEGINS, DIFFER = (
    "where its part of 'both' begins",
    "tensor 'both': its dtype or dimensions differ between files",
)
FAULTS = {
    "parts that overlap": ("chunks at .* overlap", placed({"saved_offsets": [3, 3]})),
    "a part that is missing": (
        r"2 of 35 elements are in no chunk", with_part(lambda both: both[1:].clone(), 5, 3)
    ),
    "other dimensions": (DIFFER, with_part(lambda _: torch.ones(6), 0)),
    "another type": (DIFFER, with_part(lambda both: both.double())),
    "a negative offset": (r"\[-1, 3\]", placed({"saved_offsets": [-1, 3]})),
    "an offset that is true": (r"\[True, 3\]", placed({"saved_offsets": [True, 3]})),
    "offsets of another tensor": (BEGINS, placed({"saved_offsets": [4]})),
    "no offsets": (BEGINS, lambda _, places: places.pop("both") and ""),
    "a text in the place of offsets": (BEGINS, placed("4, 3")),
    "a list in the place of all": ("where its part of", lambda _, __: "[1]"),
    "no JSON": ("DCP_SHARDING_INFO is not JSON", lambda _, __: "{both"),
    "JSON without end": ("nested too deeply", lambda _, __: "[" * 100_000),
    "a name twice": ("has the key 'both' twice", lambda _, __: '{"both": 1, "both": 2}'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_offsets_that_lie_are_refused_with_the_name(folder, fault):
    why, change = FAULTS[fault]
    changed(folder, 4, 1, change)
    with pytest.raises(CorruptFile, match=why) as caught:
        ckptool.open(folder)
    assert str(folder) in str(caught.value)
    assert not ckptool.verify(folder).ok


def test_files_that_all_ranks_lack_are_missed(folder):
    for rank in range(1, 5):
        (folder / NAME.format(rank=rank, file=2)).unlink()
    with pytest.raises(FileMissing, match=r"shard-\*-model-00002-of-00002\.safetensors"):
        ckptool.open(folder)


def test_another_file_under_the_name_of_a_part_is_refused(folder):
    torch.save({"both": torch.ones(3, 2)}, folder / NAME.format(rank=4, file=1))
    with pytest.raises(UnsupportedFormat, match="is torch-zip, expected safetensors"):
        ckptool.open(folder)
