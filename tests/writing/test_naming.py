"""Where a result goes when the user does not say."""

import pytest

from ckptool.errors import UsageError
from ckptool.writing.target import default_target


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
        assert default_target(source, "stripped") == target


def test_a_chosen_format_has_its_ending():
    for source, format, target in [
        ("model.pth", "safetensors", "model.cpu.safetensors"),
        ("model.safetensors", "torch-zip", "model.cpu.pth"),
        ("model.bin", "torch-legacy", "model.cpu.bin"),
        ("model.safetensors", "safetensors", "model.cpu.safetensors"),
    ]:
        assert default_target(source, "cpu", format) == target


def test_shards_become_one_file_where_the_format_is_of_one():
    for source, format, target in [
        ("m.safetensors.index.json", "safetensors", "m.cpu.safetensors"),
        ("m.safetensors.index.fp16.json", "torch-zip", "m.cpu.pth"),
        ("a.b/pytorch_model.bin.index.json", "torch-legacy", "a.b/pytorch_model.cpu.pth"),
        ("folder/", "safetensors", "folder.cpu.safetensors"),
    ]:
        assert default_target(source, "cpu", format, sharded=True) == target


@pytest.mark.parametrize("format", [None, "safetensors-sharded", "torch-sharded"])
def test_shards_are_not_written_where_nobody_said(format):
    with pytest.raises(UsageError, match="-o must say") as caught:
        default_target("model.safetensors.index.json", "cpu", format, sharded=True)
    assert "-o FOLDER/model.safetensors.index.json" in caught.value.hint


@pytest.mark.parametrize("tail", ["", "/"])
def test_a_folder_becomes_a_file_beside_it(tmp_path, tail):
    folder = tmp_path / "model.v1"
    folder.mkdir()
    assert default_target(f"{folder}{tail}", "stripped") == f"{folder}.stripped.pth"
