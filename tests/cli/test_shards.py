"""Shards on the command line: every verb takes an index or its folder as one checkpoint."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

import ckptool as ckptool_library
from tests.conftest import FIXTURES
from tests.formats.shards import loaded

HUB = FIXTURES / "shards" / "hub_safetensors"
WRAPPED = FIXTURES / "shards" / "hub_parallel"
INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["folder", "index"])
def hub(request, tmp_path):
    """A copy of a set by the hub's writer, with ties; its folder, or its index."""
    folder = shutil.copytree(HUB, tmp_path / "hub")
    return folder if request.param == "folder" else folder / INDEX


def test_list_is_of_all_shards(ckptool, hub):
    document = ckptool("list", hub, "--json", "--hash").document
    folder = hub if hub.is_dir() else hub.parent
    assert (document["file"], document["format"]) == (str(folder / INDEX), "safetensors-sharded")
    names = [row["name"] for row in document["tensors"]]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert names == [*weight_map, "head.weight", "layers.0.weight", "layers.0.bias"]
    by_name = {row["name"]: row for row in document["tensors"]}
    assert by_name["head.weight"]["storage"] == by_name["embed.weight"]["storage"]
    assert len({row["storage"] for row in document["tensors"]}) == len(weight_map)
    assert "18 tensors" in ckptool("list", hub).out


def test_storages_of_one_key_in_several_shards_are_several(ckptool):
    rows = ckptool("list", FIXTURES / "shards" / "hub_bin", "--json").document["tensors"]
    assert len(rows) - len({row["storage"] for row in rows}) == 3  # its ties


def test_info_tells_of_the_set(ckptool, hub):
    document = ckptool("info", hub, "--json").document
    assert document["writer"] == "safetensors, in 7 shards"
    assert document["size"] == sum(path.stat().st_size for path in HUB.iterdir())
    assert document["weights_only"] is False
    assert "index of shards" in document["weights_only_blockers"][0]
    assert (document["storage_bytes"], document["reachable_bytes"]) == (152, 152)
    assert ["embed.weight", "head.weight"] in document["ties"]
    assert [section["tensors"] for section in document["sections"]] == [18]
    assert ckptool("info", WRAPPED, "--json").document["sections"][0]["wrappers"] == ["module"]


def test_the_command_that_info_proposes_makes_one_file_that_loads(ckptool, tmp_path):
    folder = shutil.copytree(WRAPPED, tmp_path / "set")
    command = ckptool("info", folder, "--json").document["commands"]["cpu"].split()
    assert ckptool(*command[1:]).code == 0
    found = torch.load(folder / "pytorch_model.fixed.pth", weights_only=True)
    shards = loaded(WRAPPED / "pytorch_model.bin.index.json")
    assert [f"module.{name}" for name in found] == list(shards)
    assert all(found[name.removeprefix("module.")].equal(shards[name]) for name in shards)


def test_show_finds_a_tensor_in_its_shard(ckptool, hub):
    assert "float32 [1] on cpu" in ckptool("show", hub, "scales.0").out
    assert ckptool("show", hub, "nothing").code == 2


def test_convert_makes_one_file_of_them(ckptool, hub, tmp_path):
    done = ckptool("convert", hub, tmp_path / "one.safetensors", "--strict")
    assert done.code == 0, done.err
    found = load_file(tmp_path / "one.safetensors")
    shards = loaded(HUB / INDEX)
    assert found.keys() == shards.keys()
    assert all(found[name].equal(shards[name]) for name in shards)
    again = ckptool("list", tmp_path / "one.safetensors", "--json", "--hash").document
    first = ckptool("list", hub, "--json", "--hash").document
    assert again["tensors"] == first["tensors"]


@pytest.mark.parametrize(
    "verb",
    [
        ("strip-module",),
        ("add-module",),
        ("remap", "--to", "cuda:0"),
    ],
    ids=" ".join,
)
def test_a_verb_that_changes_wants_to_be_told_where(ckptool, hub, tmp_path, verb):
    before = sorted(tmp_path.rglob("*"))
    done = ckptool(*verb, hub)
    assert done.code == 2
    assert "is a sharded checkpoint and needs a target" in done.err
    assert "hint: -o model.safetensors" in done.err
    assert sorted(tmp_path.rglob("*")) == before
    assert ckptool(*verb, hub, "-o", tmp_path / "out.pth").code == 0
    assert len(torch.load(tmp_path / "out.pth", map_location="cpu")) == 18


def test_a_format_of_one_file_is_answer_enough(ckptool, tmp_path):
    folder = shutil.copytree(WRAPPED, tmp_path / "set")
    done = ckptool("strip-module", folder, "--format", "safetensors")
    assert done.code == 0, done.err
    names = load_file(tmp_path / "set.stripped.safetensors").keys()
    assert "conv1.weight" in names
    index = folder / "pytorch_model.bin.index.json"
    assert ckptool("strip-module", index, "--format", "torch-zip").code == 0
    assert "conv1.weight" in torch.load(folder / "pytorch_model.stripped.pth")


def test_a_shard_is_not_overwritten_by_what_is_made_of_it(ckptool, hub):
    folder = hub if hub.is_dir() else hub.parent
    shard = folder / "model-00002-of-00007.safetensors"
    done = ckptool("convert", hub, shard, "--force")
    assert done.code == 2
    assert "is the source itself" in done.err
    assert shard.read_bytes() == (HUB / shard.name).read_bytes()


def test_a_contradiction_is_an_error_with_a_hint(ckptool, tmp_path):
    folder = shutil.copytree(HUB, tmp_path / "set")
    (folder / "model-00003-of-00007.safetensors").unlink()
    done = ckptool("list", folder)
    assert done.code == 2
    assert "does not have 'model-00003-of-00007.safetensors'" in done.err
    assert "1 of 7 shards is missing" in done.err
    assert "hint: copy or download the missing shards" in done.err


@pytest.mark.parametrize("target", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_as_target_makes_shards(ckptool, hub, tmp_path, target):
    done = ckptool("convert", hub, tmp_path / "out" / target, "--json")
    assert done.code == 0, done.err
    assert done.document["format"] == ("torch" if "bin" in target else "safetensors") + "-sharded"
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) == 2
    assert "-00001-of-00001." in files[0]
    found = loaded(tmp_path / "out" / target)
    assert all(found[name].equal(tensor) for name, tensor in loaded(HUB / INDEX).items())
    rows = [
        [[row[field] for field in ("name", "dtype", "shape", "sha256")] for row in one["tensors"]]
        for one in (
            ckptool("list", path, "--json", "--hash").document for path in (hub, tmp_path / "out")
        )
    ]
    assert rows[0] == rows[1]
    again = ckptool("convert", hub, tmp_path / "out" / target)
    assert again.code == 2
    assert "already exists" in again.err


@pytest.mark.parametrize(
    ("target", "size"),
    [
        (INDEX, "40B"),
        ("model.safetensors", "40"),
        ("pytorch_model.bin.index.json", "40B"),
        ("pytorch_model.bin", "0.04KB"),
    ],
)
def test_shards_are_written_and_read_again(ckptool, tmp_path, target, size):
    path = tmp_path / "out" / target
    done = ckptool("convert", HUB, path, "--max-shard-size", size, "--json")
    assert done.code == 0, done.err
    files = [one["file"] for one in done.document["files"]]
    index = tmp_path / "out" / target.replace(".index.json", "")
    assert files[-1] == f"{index}.index.json"
    assert sorted(files) == sorted(map(str, (tmp_path / "out").iterdir()))
    found = loaded(tmp_path / "out" / f"{index.name}.index.json")
    assert all(found[name].equal(tensor) for name, tensor in loaded(HUB / INDEX).items())
    first = ckptool("list", HUB, "--json", "--hash").document
    again = ckptool("list", tmp_path / "out", "--json", "--hash").document
    kept = ("name", "dtype", "shape", "sha256")
    rows = [
        [{field: row[field] for field in kept} for row in one["tensors"]] for one in (first, again)
    ]
    assert rows[0] == rows[1]


def test_a_size_that_is_none(ckptool, tmp_path):
    done = ckptool("convert", HUB, tmp_path / "out.safetensors", "--max-shard-size", "5 apples")
    assert done.code == 2
    assert "'5 apples' is not a shard size" in done.err
    assert not list(tmp_path.iterdir())


def test_what_fits_is_one_file(ckptool, tmp_path):
    out = tmp_path / "out.safetensors"
    assert ckptool("convert", HUB, out, "--max-shard-size", "5GB").code == 0
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("given", ["", "pytorch_model.bin.index.json"])
def test_in_place_every_tensor_stays_in_its_file(ckptool, tmp_path, given):
    folder = shutil.copytree(WRAPPED, tmp_path / "set")
    before = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    done = ckptool("strip-module", folder / given, "--in-place")
    assert done.code == 0, done.err
    after = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    assert sorted(map(str, folder.iterdir())) == sorted(
        str(folder / one.name) for one in WRAPPED.iterdir()
    )
    assert after["weight_map"] == {
        name.removeprefix("module."): file for name, file in before["weight_map"].items()
    }
    again, first = (
        ckptool("list", one, "--json", "--hash").document["tensors"] for one in (folder, WRAPPED)
    )
    assert [row["sha256"] for row in again] == [row["sha256"] for row in first]


def test_in_place_in_other_sizes_what_is_left_of_the_old_set_is_named(tmp_path):
    folder = shutil.copytree(WRAPPED, tmp_path / "set")
    with ckptool_library.open(folder) as checkpoint:
        receipt = checkpoint.save(checkpoint.path, in_place=True, max_shard_size="1MB")
    assert any("that the new index does not list" in note for note in receipt.notes)
    assert len(receipt.files) == 2
    assert len(list(folder.iterdir())) == 5


@pytest.mark.parametrize(
    ("target", "format", "shard"),
    [
        ("model.bin", "torch-sharded", "model-00001-of-00001.bin"),
        ("model", "safetensors-sharded", "model-00001-of-00001.safetensors"),
    ],
)
def test_a_format_in_shards_can_be_asked_for(ckptool, tmp_path, target, format, shard):
    done = ckptool("convert", HUB, tmp_path / target, "--format", format, "--json")
    assert done.code == 0, done.err
    assert done.document["format"] == format
    index = pathlib.Path(done.document["file"])
    assert set(json.loads(index.read_bytes())["weight_map"].values()) == {shard}
    with ckptool_library.open(index) as ours, ckptool_library.open(HUB) as theirs:
        assert ckptool_library.diff(ours, theirs).equal


def test_what_fits_in_one_shard_is_one_file_where_only_a_size_is_given(ckptool, tmp_path):
    done = ckptool("convert", HUB, tmp_path / "model.bin", "--max-shard-size", "5GB")
    assert done.code == 0, done.err
    assert [file.name for file in tmp_path.iterdir()] == ["model.bin"]
    assert torch.load(tmp_path / "model.bin", weights_only=True)


def linked(folder, to):
    """A folder as a hub's cache has it: names that lead to files elsewhere."""
    to.mkdir()
    folder.mkdir()
    for file in WRAPPED.iterdir():
        shutil.copyfile(file, to / file.name)
        (folder / file.name).symlink_to(to / file.name)


def test_in_place_a_set_of_links_is_refused_without_force(ckptool, tmp_path):
    linked(tmp_path / "set", tmp_path / "blobs")
    before = {file.name: file.read_bytes() for file in (tmp_path / "blobs").iterdir()}
    done = ckptool("strip-module", tmp_path / "set", "--in-place")
    assert done.code == 2
    assert "is a link to" in done.err
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "blobs").iterdir()}
    assert ckptool("strip-module", tmp_path / "set", "--in-place", "--force").code == 0


def test_shards_of_torch_keep_their_wrappers(ckptool, tmp_path):
    torch.save({"module.w": torch.ones(2), "module.b": torch.ones(2)}, tmp_path / "in.pth")
    done = ckptool(
        "convert", tmp_path / "in.pth", tmp_path / "o.bin", "--max-shard-size", 8, "--json"
    )
    assert done.document["file"] == str(tmp_path / "o.bin.index.json")
    assert list(json.loads((tmp_path / "o.bin.index.json").read_text())["weight_map"]) == [
        "module.w",
        "module.b",
    ]


def test_what_is_left_of_an_older_set_is_named(ckptool, tmp_path):
    for size in ("40", "1MB"):
        target = tmp_path / INDEX
        done = ckptool("convert", HUB, target, "--max-shard-size", size, "--force")
        assert done.code == 0, done.err
    assert "note: kept shards that the new index does not list: model-00001-of-" in done.err


def test_a_folder_with_shards_and_the_whole_is_not_guessed_between(ckptool, tmp_path):
    folder = shutil.copytree(HUB, tmp_path / "set")
    assert ckptool("convert", HUB, folder / "model.safetensors").code == 0
    done = ckptool("list", folder)
    assert done.code == 2
    assert "several checkpoints: 'model.safetensors', 'model.safetensors.index.json'" in done.err
    assert ckptool("list", folder / INDEX).code == 0


def test_an_index_that_is_none_is_told_from_one_that_is_missing(ckptool, tmp_path):
    folder = shutil.copytree(HUB, tmp_path / "set")
    (folder / INDEX).write_bytes(b"")
    done = ckptool("list", folder)
    assert "a sharded checkpoint with a damaged index" in done.err
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert "the index lists no tensor" in ckptool("info", folder).out


def test_shards_without_a_target_are_refused_by_the_name_of_the_folder(
    ckptool, tmp_path, monkeypatch
):
    shutil.copytree(WRAPPED, tmp_path / "p")
    monkeypatch.chdir(tmp_path)
    assert ckptool("strip-module", "p").err.startswith("ckptool: p: is a sharded checkpoint")
