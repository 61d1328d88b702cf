"""Folders of torch.distributed.checkpoint: read as torch reads them, and refused where they lie."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptool
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    LimitExceeded,
    NotFound,
    TargetExists,
    UnreadableFile,
    UnsupportedFormat,
)
from ckptool.formats import open_checkpoint
from ckptool.inspection.discovery import find_checkpoints
from ckptool.limits import DEFAULT_LIMITS
from ckptool.writing.target import make_default_target
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "dcp"
    sample = "dcp/alone-2.13.0"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path):
    """A folder that one process has saved."""
    path = tmp_path / "run"
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    state = {"model": model.state_dict(), "step": 3, "list": [1, {"a": torch.ones(2)}]}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def meshed(fixtures, tmp_path):
    """A folder by four processes, whose tensors are cut along two axes."""
    return Path(shutil.copytree(fixtures / "dcp" / "meshed-2.13.0", tmp_path / "meshed"))


def index_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def with_index(folder, change):
    index = index_of(folder)
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def moved(index, name, at, **changes):
    """Change one entry of `storage_data`."""
    for key, info in index.storage_data.items():
        if key.fqn == name and (at is None or tuple(key.offset) == at):
            for field, value in changes.items():
                setattr(info, field, value)


def test_the_tree_is_that_which_was_saved(folder):
    loaded = ckptool.load(folder)
    assert loaded.keys() == {"model", "step", "list"}
    assert (loaded["step"], loaded["list"][0]) == (3, 1)
    assert torch.equal(loaded["list"][1]["a"], torch.ones(2))


def test_a_list_reads_the_index_alone(folder):
    before = ckptool.list_tensors(folder).to_dict()
    for shard in folder.glob("*.distcp"):
        shard.write_bytes(b"")
    assert ckptool.list_tensors(folder).to_dict() == before
    with pytest.raises(
        UnreadableFile, match=r"'model\.weight': an item of the index: cannot read 1,\d+ bytes at"
    ):
        ckptool.load(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_the_folder_stands_for_it(folder, name):
    with open_checkpoint(folder / name) as checkpoint:
        assert (checkpoint.format, checkpoint.path) == ("dcp", str(folder))
        assert checkpoint["step"].find() == 3


def test_a_plain_model_is_loaded_from_the_folder(folder, tmp_path):
    model, judge = nn.Linear(3, 2), nn.Linear(3, 2)
    assert ckptool.load_into(model, folder, key="model").coverage == 1
    judge.load_state_dict(ckptool.load(folder)["model"])
    assert torch.equal(model.weight, judge.weight)


def test_a_conversion_is_what_torch_makes_of_it(meshed, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(meshed, tmp_path / "theirs.pth")
    ckptool.convert(meshed, tmp_path / "ours.pth")
    ckptool.convert(meshed, tmp_path / "ours.safetensors")
    theirs = torch.load(tmp_path / "theirs.pth")
    for name in ("ours.pth", "ours.safetensors"):
        ours = ckptool.load(tmp_path / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert ckptool.diff(meshed, tmp_path / "ours.safetensors").identical


def test_names_and_values_are_changed_on_the_way(folder, tmp_path):
    with ckptool.open(folder) as checkpoint:
        checkpoint.add_module().save(tmp_path / "wrapped.pth")
    loaded = torch.load(tmp_path / "wrapped.pth", weights_only=True)
    assert list(loaded["model"]) == ["module.weight", "module.bias"]
    assert loaded["step"] == 3


def test_bytes_that_are_not_those_that_were_written_are_found(meshed):
    assert ckptool.verify(meshed).ok
    shard = meshed / "__3_0.distcp"
    raw = shard.read_bytes()
    with open_checkpoint(meshed) as checkpoint:
        value = checkpoint["both"].read()[-4:]
    at = raw.rindex(value)
    shard.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    (problem,) = ckptool.verify(meshed).problems
    assert problem.kind == "checksum"
    assert problem.place.startswith("__3_0.distcp: both")


def place_of(index, name):
    (info,) = (info for key, info in index.storage_data.items() if key.fqn == name)
    return {"relative_path": info.relative_path, "offset": info.offset, "length": info.length}


def entry_of_both(**changes):
    """Return a fault: the index says something else of the first chunk of `both`."""
    return lambda index: moved(index, "both", (0, 0), **changes)


def size_of_both(*sizes):
    """Return a fault: the index states another shape of `both`."""
    return lambda index: setattr(index.state_dict_metadata["both"], "size", torch.Size(sizes))


def path_of_number(*path):
    """Return a fault: the index puts `number` at another path."""
    return lambda index: index.planner_data.update(number=path)


FAULTS = {
    "a file that is gone": entry_of_both(relative_path="__9_0.distcp"),
    "a file outside": entry_of_both(relative_path="../x"),
    "an absolute path": entry_of_both(relative_path="/etc/passwd"),
    "a path of no text": entry_of_both(relative_path="\ud800"),
    "descriptors of no text": entry_of_both(transform_descriptors=[[1]]),
    "a negative offset": entry_of_both(offset=-1),
    "beyond the end": entry_of_both(offset=1 << 40),
    "another chunk's bytes": lambda index: entry_of_both(**place_of(index, "number"))(index),
    "no item": lambda index: index.storage_data.pop(
        next(key for key in index.storage_data if key.fqn == "both")
    ),
    "a chunk less": lambda index: index.state_dict_metadata["both"].chunks.pop(),
    "two chunks of one place": lambda index: [
        setattr(one, "offsets", torch.Size([0, 0]))
        for one in index.state_dict_metadata["both"].chunks[1:2]
    ],
    "a larger shape": size_of_both(8, 5),
    "a shape of two sizes for one axis": size_of_both(7),
    "no number": entry_of_both(length="9"),
    "a path through a tensor": path_of_number("both", "x"),
    "a list without end": path_of_number("l", 1 << 40),
    "two things at one path": path_of_number("both"),
    "a path of objects": path_of_number(1.5),
    "no index": lambda index: setattr(index, "storage_data", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_that_lies_is_refused_with_its_name(meshed, fault):
    with_index(meshed, FAULTS[fault])
    with pytest.raises((CorruptFile, FileMissing, UnsupportedFormat)) as caught:
        ckptool.load(meshed)
    assert str(meshed) in str(caught.value)
    if fault != "no index":
        assert not ckptool.verify(meshed).ok


def test_dimensions_without_end_cost_nothing(folder):
    sizes = torch.Size([1] * 65)
    with_index(
        folder,
        lambda index: setattr(index.state_dict_metadata["model.weight"], "size", sizes),
    )
    with pytest.raises(LimitExceeded, match=r"'model.weight' has 65 dimensions"):
        ckptool.open(folder)


def test_a_class_of_the_index_is_never_made(folder):
    class Exploding:
        def __reduce__(self):
            return os.system, (f"touch {folder}/ran",)

    with_index(folder, lambda index: setattr(index.storage_meta, "modules", [Exploding()]))
    assert ckptool.load(folder)["step"] == 3
    assert not (folder / "ran").exists()


def test_what_lightning_saves_beside_the_tensors_is_part_of_the_tree(folder, tmp_path):
    torch.save({"epoch": 4, "loops": {"fit": [1]}}, folder / "meta.pt")
    loaded = ckptool.load(folder)
    assert list(loaded) == ["epoch", "loops", "model", "step", "list"]
    assert (loaded["epoch"], loaded["step"]) == (4, 3)
    ckptool.convert(folder, tmp_path / "whole.pth")
    assert torch.load(tmp_path / "whole.pth")["loops"] == {"fit": [1]}
    torch.save(torch.ones(1), folder / "meta.pt")
    assert list(ckptool.load(folder)) == ["model", "step", "list"]


def test_model_and_optimizer_in_folders_of_their_own_are_one_tree(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "processes" / "accelerate", tmp_path / "state"))
    assert list(ckptool.load(folder)) == ["model", "optimizer"]
    assert find_checkpoints(str(folder), DEFAULT_LIMITS) == [str(folder)]
    assert ckptool.verify(folder).ok
    ckptool.convert(folder, f"{tmp_path}/hf/", ckptool.Take(model_only=True))
    assert ckptool.load(tmp_path / "hf").keys() == ckptool.load(folder)["model"].keys()
    (folder / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(FileMissing, match=r"optimizer_0/\.metadata"):
        ckptool.open(folder)
    shutil.rmtree(folder / "optimizer_0")
    assert list(ckptool.load(folder)) == ["model"]
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(UnsupportedFormat, match="FSDP in accelerate"):
        ckptool.open(folder)


def test_a_folder_of_megatron_keeps_its_flat_names(fixtures, tmp_path):
    folder = fixtures / "processes" / "megatron"
    loaded = ckptool.load(folder)
    assert loaded["decoder.layers.mlp.weight"].tolist() == torch.arange(24.0).view(6, 4).tolist()
    assert loaded["norm.weight"].dtype == torch.bfloat16
    assert loaded["iteration"] == 7
    ckptool.convert(folder, f"{tmp_path}/out/", ckptool.Take(model_only=True))
    assert ckptool.load(tmp_path / "out").keys() == {"decoder.layers.mlp.weight", "norm.weight"}
    assert ckptool.verify(folder).ok


class MCoreMetadata(Metadata):
    """As Megatron before 0.15 had it: a class that no other program knows."""


def test_tensors_that_megatron_has_reshaped_are_named_and_left_out(folder):
    made = MCoreMetadata(**vars(index_of(folder)))
    reshaped = {"nd_reformulated_orig_global_shape": (6,)}
    made.mcore_data = {"model.weight": reshaped, "model.bias": {}}
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    with open_checkpoint(folder) as checkpoint:
        assert "model.weight" in str(checkpoint.details.left_behind)
    assert list(ckptool.load(folder)["model"]) == ["bias"]
    made.mcore_data = 5
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(CorruptFile, match="does not follow the format of DCP"):
        ckptool.open(folder)


def test_an_index_of_bytecheckpoint_is_called_so(folder):
    with_index(folder, lambda index: setattr(index, "all_tensor_metadata", {}))
    with pytest.raises(UnsupportedFormat, match="ByteCheckpoint"):
        ckptool.open(folder)


def test_ranks_without_a_common_index_are_all_wanted(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "dcp" / "alone-2.13.0", tmp_path / "alone"))
    assert ckptool.load(folder)["both"].tolist() == torch.arange(35.0).view(7, 5).tolist()
    (folder / "__2.metadata").unlink()
    with pytest.raises(FileMissing, match=r"the file of rank 2 of 4 is missing: __2\.metadata"):
        ckptool.load(folder)


def test_an_interrupted_save_is_called_so(folder):
    (folder / ".metadata").unlink()
    with pytest.raises(UnsupportedFormat, match="save was interrupted"):
        ckptool.open(folder)


def test_compressed_items_are_held_against_their_checksums(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "dcp" / "zstd-2.13.0", tmp_path / "zstd"))
    verdict = ckptool.verify(folder)
    assert verdict.ok
    assert verdict.summed == verdict.records > 100
    shard = folder / "__0_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[40] ^= 1
    shard.write_bytes(raw)
    assert not ckptool.verify(folder).ok


def test_zeros_that_are_packed_into_nothing_are_read_and_a_bomb_is_not(tmp_path):
    from torch.distributed.checkpoint._extension import ZStandard

    def saved(name, **state):
        writer = dcp.FileSystemWriter(tmp_path / name, _extensions=[ZStandard()])
        dcp.save(state, storage_writer=writer, no_dist=True)
        return tmp_path / name

    zeros = torch.zeros(2048, 2048)
    assert torch.equal(ckptool.load(saved("zeros", w=zeros))["w"], zeros)
    with pytest.raises(
        LimitExceeded, match="'text': 1,013 bytes inflate to more than 1,100 times their size"
    ):
        ckptool.load(saved("value", text="a" * (16 << 20)))


def test_without_zstandard_the_extra_is_named(fixtures, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedFormat, match="zstandard is not installed") as caught:
        ckptool.load(fixtures / "dcp" / "zstd-2.13.0")
    assert "pip install zstandard" in caught.value.hint


def test_many_chunks_are_read(tmp_path):
    count = 10_000
    plan = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(count)]
    shape = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([count]), plan)
    index = Metadata({"w": shape}, storage_data={})
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    info = _StorageInfo("__0_0.distcp", 0, 10)
    index.storage_data = {MetadataIndex("w", [at]): info for at in range(count)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint["w"].shape == (count,)


class Endless:
    def __reduce__(self):
        return torch.Size, ((10**4200, 10**4200),)


def test_sizes_that_no_tensor_has_are_refused(tmp_path):
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 0]))
    shape = TensorStorageMetadata(TensorProperties(torch.float32), Endless(), [chunk])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": shape}, storage_data={})))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_a_folder_is_written_as_from_pretrained_reads_it(fixtures, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run = fixtures / "dcp" / "training-2.13.0"
    ckptool.convert(run, out, ckptool.Take(key="model", model_only=True), ckptool.Cast("bfloat16"))
    model = ckptool.load(out)
    assert {one.dtype for one in model.values()} == {torch.bfloat16, torch.int64}
    ckptool.convert(
        run, f"{tmp_path}/new/", ckptool.Take(key="model", model_only=True), max_shard_size=40
    )
    assert (tmp_path / "new" / "model.safetensors.index.json").exists()
    whole = ckptool.load(tmp_path / "new")
    assert whole.keys() == model.keys()


def test_values_are_read_before_they_are_made_plain(fixtures, tmp_path):
    run = fixtures / "dcp" / "training-2.13.0"
    ckptool.convert(run, tmp_path / "plain.pth", ckptool.Plain())
    loaded = torch.load(tmp_path / "plain.pth", weights_only=True)
    assert (loaded["step"], loaded["config"]["name"]) == (3, "run")
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
    kinds = [one.kind for one in ckptool.doctor(run).complaints]
    assert "objects" not in kinds
    assert "training" not in kinds


def test_an_optimizer_is_loaded_from_the_folder(folder, tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names, state = get_state_dict(model, optimizer)
    dcp.save({"model": names, "optim": state}, checkpoint_id=tmp_path / "both", no_dist=True)
    other = nn.Linear(3, 2)
    fresh = torch.optim.Adam(other.parameters())
    ckptool.load_into(other, tmp_path / "both", key="model", optimizer=fresh)
    assert torch.equal(other.weight, model.weight)
    mine, its = fresh.state[other.weight], optimizer.state[model.weight]
    assert torch.equal(mine["exp_avg"], its["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.RMSprop])
def test_state_by_names_beside_no_groups_follows_a_change_of_names(kind, tmp_path):
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    optimizer = kind(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    of = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    dcp.save({"model": model.state_dict(), "optimizer": of}, checkpoint_id=tmp_path, no_dist=True)
    with ckptool.open(tmp_path) as checkpoint:
        tree = checkpoint.strip_module().root
    assert list(tree["optimizer"]) == list(tree["model"]) == ["weight", "bias"]
    assert list(tree["optimizer"]["bias"]) == list(of["module.bias"])


def test_numbers_called_step_and_sum_are_no_optimizer(tmp_path):
    counted = {"module.loss": {"step": 3, "sum": 1.5}}
    file = {"model": {"module.weight": torch.ones(2)}, "metrics": counted}
    torch.save(file, tmp_path / "run.pth")
    with ckptool.open(tmp_path / "run.pth") as checkpoint:
        assert checkpoint.strip_module().root["metrics"] == counted


def test_a_flattened_optimizer_is_no_model(tmp_path):
    state = {"w.weight": torch.ones(2, 2), "optimizer": {"state.w.exp_avg": torch.ones(2, 2)}}
    state["optimizer"]["param_groups.w.lr"] = 0.1
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    assert list(ckptool.load_state_dict(tmp_path / "run")) == ["w.weight"]
    dcp.save(state["optimizer"], checkpoint_id=tmp_path / "alone", no_dist=True)
    with pytest.raises(NotFound, match="no state dict of a model"):
        ckptool.load_state_dict(tmp_path / "alone")


def test_weights_at_the_root_are_the_model_beside_the_state_of_a_training(tmp_path):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {  # as torchtitan's CheckpointManager has it
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "losses": [1.0]},
        "dataloader": {"dp_rank_0": b"state", "world_size": 1},
    }
    run = tmp_path / "step-3"
    dcp.save(state, checkpoint_id=run, no_dist=True)
    receipt = ckptool.convert(
        run, f"{tmp_path}/hf/", ckptool.Take(model_only=True), ckptool.Cast("bfloat16")
    )
    written, wanted = ckptool.load(tmp_path / "hf"), model.state_dict()
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        small = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(written[name], small)
    said = " ".join(receipt.left_out)
    assert all(name in said for name in ("optimizer", "lr_scheduler", "train_state", "dataloader"))
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert ckptool.load_into(other, run).coverage == 1
    assert torch.equal(other[0].weight, model[0].weight)
    ckptool.convert(run, tmp_path / "whole.pth")
    assert torch.load(tmp_path / "whole.pth").keys() == state.keys()


def test_a_folder_that_we_are_in_has_its_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with ckptool.open(".") as checkpoint:
        assert make_default_target(checkpoint.path, "cpu") == f"{folder}.cpu.pth"


def test_a_part_of_the_source_is_no_target(folder):
    for name in ("__0_0.distcp", "new.pth"):
        with pytest.raises(TargetExists, match="is inside the source folder"):
            ckptool.convert(folder, folder / name, overwrite=True)
    assert ckptool.verify(folder).ok


def test_views_and_lazily_conjugated_numbers_are_read(tmp_path):
    numbers = torch.randn(3, dtype=torch.complex64)
    state = {"conj": numbers.conj(), "turned": torch.arange(6.0).view(2, 3).t()}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    loaded = ckptool.load(tmp_path / "run")
    assert torch.equal(loaded["conj"], numbers.conj().resolve_conj())
    assert torch.equal(loaded["turned"], state["turned"])


def test_damage_is_not_written_with_a_new_checksum(meshed, tmp_path):
    with open_checkpoint(meshed) as checkpoint:
        value = checkpoint["both"].read()[-4:]
    shard = meshed / "__3_0.distcp"
    raw = shard.read_bytes()
    at = raw.rindex(value)
    shard.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    for target in ("out.pth", "out.safetensors"):
        with pytest.raises(CorruptFile, match="a chunk is damaged"):
            ckptool.convert(meshed, tmp_path / target)
        assert not (tmp_path / target).exists()
