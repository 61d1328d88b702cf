"""What is whole of damaged files: all of that, and nothing else."""

import argparse
import re
import shlex
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CheckpointError, CorruptFile, NotFound, TruncatedFile, UsageError
from ckptool.formats import open_checkpoint

COUNT = 8


def weights():
    torch.manual_seed(0)
    return {f"l{i}.w": torch.randn(20 + i, 25) for i in range(COUNT)}


def run():
    model = weights()
    state = {i: {"exp_avg": tensor * 2} for i, tensor in enumerate(model.values())}
    groups = [{"lr": 0.1, "params": list(state)}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    torch.save(weights(), folder / "zip.pth")
    torch.save(weights(), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(weights(), folder / "one.safetensors")
    torch.save(run(), folder / "run.pth")
    return folder


def salvaged(path, target):
    """What torch reads of the result; the change that tells of it."""
    receipt = ckptool.convert(path, target, ckptool.Salvage(), overwrite=True)
    (told,) = (one for one in receipt.changes if one.kind == "salvage")
    load = load_file if target.suffix == ".safetensors" else torch.load
    return load(target), told


def damaged(files, tmp_path, name, change):
    path = tmp_path / f"damaged-{name}"
    path.write_bytes(change(bytearray((files / name).read_bytes())))
    return path


NAMES = ["zip.pth", "legacy.pth", "one.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_is_whole(files, tmp_path, name):
    found, told = salvaged(files / name, tmp_path / name)
    assert told.count == 0
    assert told.text.startswith("all 8 tensors are intact")
    assert ("no checksums" in told.text) == (name != "zip.pth")
    assert found.keys() == weights().keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_of_a_file_that_is_cut_short_all_that_comes_before_is_taken(files, tmp_path, name, share):
    size = (files / name).stat().st_size
    cut = damaged(files, tmp_path, name, lambda raw: raw[: int(size * share)])
    with pytest.raises(TruncatedFile) as refused:
        ckptool.open(cut)
    assert "--salvage" in refused.value.hint
    found, told = salvaged(cut, tmp_path / name)
    assert told.count == COUNT - len(found)
    assert len(found) >= COUNT * share - 3
    assert all(torch.equal(found[key], weights()[key]) for key in found)


def test_a_record_with_another_checksum_is_left_out(files, tmp_path):
    place = (files / "zip.pth").read_bytes().find(weights()["l3.w"].numpy().tobytes())

    def change(raw):
        raw[place + 100] ^= 1
        return raw

    found, told = salvaged(damaged(files, tmp_path, "zip.pth", change), tmp_path / "new.pth")
    assert found.keys() == weights().keys() - {"l3.w"}
    assert told.text == "salvaged 7 of 8 tensors; 1 damaged"
    assert all(torch.equal(found[key], weights()[key]) for key in found)


@pytest.mark.parametrize("what", ["directory", "header", "end"])
def test_a_damaged_directory_or_header_costs_no_more_than_it_must(files, tmp_path, what):
    with zipfile.ZipFile(files / "zip.pth") as archive:
        header = next(one for one in archive.infolist() if one.filename.endswith("data/2"))
        start = archive.start_dir

    def change(raw):
        at = {"directory": start + 1, "header": header.header_offset, "end": len(raw) - 22}[what]
        raw[at : at + 4] = b"\0\0\0\0"
        return raw

    found, told = salvaged(damaged(files, tmp_path, "zip.pth", change), tmp_path / "new.pth")
    assert told.count == (1 if what == "header" else 0)
    assert ("l2.w" in found) == (what != "header")


def test_values_stay_and_an_optimizer_that_lost_a_part_goes_whole(files, tmp_path):
    model = (files / "run.pth").read_bytes().find(weights()["l6.w"].numpy().tobytes())
    moment = (files / "run.pth").read_bytes().find((weights()["l6.w"] * 2).numpy().tobytes())
    for place, kept in ((model, {"model", "optimizer", "epoch"}), (moment, {"model", "epoch"})):

        def change(raw, at=place):
            raw[at] ^= 1
            return raw

        found, _ = salvaged(damaged(files, tmp_path, "run.pth", change), tmp_path / "new.pth")
        assert found.keys() == kept
        assert len(found["model"]) == (7 if place == model else 8)
        assert found["epoch"] == 3


def test_without_a_whole_pickle_or_tensor_there_is_nothing(files, tmp_path):
    def pickle(raw):
        raw[raw.find(b"l3.w")] ^= 1
        return raw

    target = tmp_path / "new.pth"
    with pytest.raises(CorruptFile, match=r"record 'data.pkl' is damaged"):
        salvaged(damaged(files, tmp_path, "zip.pth", pickle), target)
    with pytest.raises(CheckpointError):
        salvaged(damaged(files, tmp_path, "zip.pth", lambda raw: raw[:300]), target)
    first = (files / "zip.pth").read_bytes().find(weights()["l0.w"].numpy().tobytes())
    with pytest.raises(NotFound, match="no tensor is intact"):
        salvaged(damaged(files, tmp_path, "zip.pth", lambda raw: raw[: first + 50]), target)
    assert not target.exists()


def test_sets_and_open_checkpoints_are_refused(files, tmp_path):
    ckptool.convert(files / "zip.pth", f"{tmp_path}/set/", max_shard_size="4KB")
    with pytest.raises(UsageError, match="cannot be salvaged"):
        ckptool.convert(tmp_path / "set", tmp_path / "new.pth", ckptool.Salvage())
    with (
        ckptool.open(files / "zip.pth") as opened,
        pytest.raises(UsageError, match="an open checkpoint"),
    ):
        ckptool.convert(opened, tmp_path / "new.pth", ckptool.Salvage())


@given(st.sampled_from(NAMES), st.data())
def test_whatever_is_cut_or_turned_nothing_wrong_is_called_whole(files, name, data):
    raw = bytearray((files / name).read_bytes())
    if data.draw(st.booleans()) or name != "zip.pth":
        del raw[data.draw(st.integers(0, len(raw))) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = files / f"drawn-{name}"
    path.write_bytes(raw)
    target = files / f"new-{name}"
    try:
        found, told = salvaged(path, target)
    except CheckpointError:
        return
    assert told.count == COUNT - len(found)
    assert all(torch.equal(found[key], weights()[key]) for key in found)


def test_without_checksums_only_lengths_tell(tmp_path):
    """An empty tensor has a checksum all the same: that of nothing."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights() | {"none": torch.empty(0)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    _, told = salvaged(tmp_path / "a.pth", tmp_path / "new.pth")
    assert "only lengths were checked" in told.text


def test_a_directory_that_names_an_unknown_method_is_damaged(files, tmp_path):
    def change(raw):
        entry = raw.rfind(b"PK\x01\x02")
        raw[entry + 10] ^= 64
        return raw

    found, told = salvaged(damaged(files, tmp_path, "zip.pth", change), tmp_path / "new.pth")
    assert (told.count, found.keys()) == (0, weights().keys())


def test_before_a_wrong_count_of_a_legacy_stream_the_length_is_wrong(files, tmp_path):
    raw = (files / "legacy.pth").read_bytes()
    places = {raw.find(one.numpy().tobytes()): name for name, one in weights().items()}
    order = [places[place] for place in sorted(places)]
    place = sorted(places)[3]

    def change(raw):
        del raw[place + 40 : place + 50]
        return raw

    found, told = salvaged(damaged(files, tmp_path, "legacy.pth", change), tmp_path / "new.pth")
    assert sorted(found) == sorted(order[:3])
    assert told.count == COUNT - 3
    assert all(torch.equal(found[key], weights()[key]) for key in found)


def test_a_file_whose_tensors_are_no_tensors_any_more_is_not_whole(tmp_path):
    torch.save({"w": torch.ones(100)}, tmp_path / "f", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(raw.replace(b"_rebuild_tensor_v2", b"_reXuild_tensor_v2"))
    with pytest.raises(NotFound, match="no tensor is intact"):
        ckptool.convert(tmp_path / "f", tmp_path / "out.pth", ckptool.Salvage())
    assert not (tmp_path / "out.pth").exists()


def test_a_part_of_a_tensor_that_is_lost_is_the_whole_tensor(tmp_path):
    state = {"one": torch.ones(9), "two": torch.tensor([7.5, 0, 8.5]).to_sparse()}
    torch.save(state, tmp_path / "a.pth")
    raw = bytearray((tmp_path / "a.pth").read_bytes())
    raw[raw.find(state["two"].values().numpy().tobytes())] ^= 1
    (tmp_path / "a.pth").write_bytes(raw)
    found, told = salvaged(tmp_path / "a.pth", tmp_path / "new.pth")
    assert (list(found), told.count) == (["one"], 1)


def test_a_pickled_module_is_salvaged_as_a_state_dict(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    torch.save({"model": model, "epoch": 3}, tmp_path / "a.pth")
    raw = (tmp_path / "a.pth").read_bytes()
    place = raw.find(model[1].weight.detach().numpy().tobytes())
    (tmp_path / "a.pth").write_bytes(raw[: place + 100])
    with pytest.raises(
        UsageError, match=r"model is an object of class torch\.nn\.modules\.container\.Sequential,"
    ) as refused:
        ckptool.convert(tmp_path / "a.pth", tmp_path / "new.pth", ckptool.Salvage())
    assert "--model-only" in refused.value.hint
    receipt = ckptool.convert(
        tmp_path / "a.pth", tmp_path / "new.pth", ckptool.Salvage(), ckptool.Take(model_only=True)
    )
    assert any(one.text == "salvaged 2 of 4 tensors; 2 damaged" for one in receipt.changes)
    found = torch.load(tmp_path / "new.pth")
    assert list(found) == ["0.weight", "0.bias"]
    assert torch.equal(found["0.weight"], model[0].weight)


@pytest.fixture(scope="module")
def net():
    return torch.nn.Sequential(*(torch.nn.Linear(20, 20, bias=False) for _ in range(COUNT)))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError) as caught:
        ckptool.open(path)
    return caught.value.hint


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda net: net.state_dict(), ""),
        (lambda net: {"net": net, "epoch": 3}, " --model-only"),
        (lambda net: {"net": net.state_dict(), "args": argparse.Namespace(lr=1)}, " --plain"),
    ],
    ids=["state dict", "module", "objects"],
)
def test_the_command_in_the_hint_writes_a_file_that_torch_loads(
    tmp_path, net, make, option, legacy
):
    path = tmp_path / "model.pth"
    torch.save(make(net), path, _use_new_zipfile_serialization=not legacy)
    hint = cut(path, path.stat().st_size - 5000)
    command = re.search(r"ckptool (convert --salvage .*)", hint)[1]
    target = f"{tmp_path}/model.salvaged.pth"
    assert command.endswith(target + option)
    assert main(shlex.split(command)) == 1  # some tensors are lost
    made = torch.load(target, weights_only=True)
    assert 1 <= len(made["net"] if option == " --plain" else made) < COUNT


def test_no_command_where_no_tensor_is_whole(tmp_path, net):
    path = tmp_path / "model.pth"
    torch.save(net.state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("model/data.pkl").file_size
    assert "--salvage" not in cut(path, size + 400)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["model.npz", "__0_0.distcp", "model.pt"])
def test_no_command_for_formats_that_cannot_be_salvaged(tmp_path, net, name):
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez(path, w=np.ones((100, 100)))
    elif name.endswith(".pt"):
        torch.jit.save(torch.jit.script(net), path)
    else:
        torch.distributed.checkpoint.save(net.state_dict(), checkpoint_id=tmp_path / "all")
        (tmp_path / "all" / name).rename(path)
    assert "--salvage" not in cut(path, path.stat().st_size * 2 // 3)


def test_one_file_of_another_format_is_no_set(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, w=np.ones(3))
    with pytest.raises(UsageError) as caught:
        open_checkpoint(path, salvage=True)
    assert "remove --salvage" in caught.value.hint
    index = tmp_path / "model.safetensors.index.json"
    torch.save(weights(), tmp_path / "a.pth")
    ckptool.convert(tmp_path / "a.pth", index, max_shard_size=4000)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(index, salvage=True)
    assert caught.value.hint == "salvage its shards one by one"
