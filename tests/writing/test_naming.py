"""Where a result goes when the user does not say."""

import pytest
import torch

import ckptool
from ckptool.errors import UsageError
from ckptool.writing.target import is_folder_target, make_default_target


def test_the_word_goes_before_the_ending():
    for source, target in [
        ("model.pth", "model.stripped.pth"),
        ("a.b/model", "a.b/model.stripped"),
        ("/x/model.pth.tar", "/x/model.stripped.pth.tar"),
        ("model.tar", "model.stripped.tar"),
        ("v1.0.ckpt", "v1.0.stripped.ckpt"),
        ("model.safetensors", "model.stripped.safetensors"),
        (".hidden", ".hidden.stripped"),
        ("program.pt2", "program.stripped.pth"),
        ("data.pkl", "data.stripped.pth"),
    ]:
        assert make_default_target(source, "stripped") == target


def test_a_chosen_format_has_its_ending():
    for source, format, target in [
        ("model.pth", "safetensors", "model.cpu.safetensors"),
        ("model.safetensors", "torch-zip", "model.cpu.pth"),
        ("model.bin", "torch-legacy", "model.cpu.bin"),
        ("model.safetensors", "safetensors", "model.cpu.safetensors"),
    ]:
        assert make_default_target(source, "cpu", format) == target


def test_shards_become_one_file_where_the_format_is_of_one():
    for source, format, target in [
        ("m.safetensors.index.json", "safetensors", "m.cpu.safetensors"),
        ("m.safetensors.index.fp16.json", "torch-zip", "m.cpu.pth"),
        ("a.b/pytorch_model.bin.index.json", "torch-legacy", "a.b/pytorch_model.cpu.pth"),
        ("folder/", "safetensors", "folder.cpu.safetensors"),
    ]:
        assert make_default_target(source, "cpu", format, sharded=True) == target


@pytest.mark.parametrize("format", [None, "safetensors-sharded", "torch-sharded"])
def test_shards_are_not_written_where_nobody_said(format):
    with pytest.raises(
        UsageError, match=r"model\.safetensors\.index\.json: is a sharded checkpoint and needs a"
    ) as caught:
        make_default_target("model.safetensors.index.json", "cpu", format, sharded=True)
    assert "-o FOLDER/model.safetensors.index.json" in caught.value.hint


@pytest.mark.parametrize("tail", ["", "/"])
def test_a_folder_becomes_a_file_beside_it(tmp_path, tail):
    folder = tmp_path / "model.v1"
    folder.mkdir()
    assert make_default_target(f"{folder}{tail}", "stripped") == f"{folder}.stripped.pth"


@pytest.fixture
def sources(tmp_path):
    """A file, a folder, and an index of shards of one state dict."""
    torch.save({"w": torch.ones(4, 4), "v": torch.ones(4, 4)}, tmp_path / "file.pth")
    index = tmp_path / "folder" / "model.safetensors.index.json"
    ckptool.convert(tmp_path / "file.pth", index, max_shard_size=64)
    ckptool.convert(tmp_path / "file.pth", tmp_path / "dcp", format="dcp")
    return {
        "file": tmp_path / "file.pth",
        "folder": tmp_path / "folder",
        "index": index,
        "metadata": tmp_path / "dcp" / ".metadata",
        "several": [*(tmp_path / "folder").glob("*.safetensors")],
    }


@pytest.mark.parametrize("source", ["file", "folder", "index", "metadata", "several"])
@pytest.mark.parametrize("name", ["out", "v1.5", "out.pth", "out.safetensors", "out/", "there"])
def test_a_name_without_a_known_extension_is_a_folder_for_a_set(sources, tmp_path, source, name):
    (tmp_path / "there").mkdir()
    target = f"{tmp_path}/{name}"
    if source == "file" and name in ("out", "v1.5"):
        with pytest.raises(UsageError, match="no known extension") as caught:
            ckptool.convert(sources[source], target)
        for choice in (f"{target}/", f"{target}.pth"):
            assert f"{choice} for a" in caught.value.hint
        assert not (tmp_path / name).exists()
        return
    written = ckptool.convert(sources[source], target).path
    is_file = name in ("out.pth", "out.safetensors")
    assert written == (target if is_file else str(tmp_path / name / "model.safetensors"))


def test_an_option_or_a_file_that_is_there_settles_what_a_name_means(sources, tmp_path):
    out, file = str(tmp_path / "out"), sources["file"]
    assert is_folder_target(out, file, needs_folder=True)
    assert not is_folder_target(out, file, "torch-zip")
    assert is_folder_target(out, file, "dcp")
    (tmp_path / "out").write_bytes(b"")
    assert not is_folder_target(out, file)
    assert not is_folder_target(tmp_path / "b.weights", tmp_path / "a.weights")
    with ckptool.open(sources["index"]) as opened:
        assert is_folder_target(tmp_path / "new", opened)
    with ckptool.open(file) as opened, pytest.raises(UsageError):
        is_folder_target(tmp_path / "new", opened)
