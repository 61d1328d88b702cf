"""Several files that hold parts of one state dict."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import FileMissing, NameCollision, UnsupportedFormat, UsageError


@pytest.fixture
def parts(tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for number, path in enumerate(paths):
        tensors = {f"l{number}.w": torch.full((3,), number), f"l{number}.b": torch.ones(2)}
        save_file(tensors, path, metadata={"format": "pt"})
    return paths


def test_files_are_joined_into_one_and_into_shards(parts, tmp_path):
    ckptool.convert(parts, tmp_path / "whole.safetensors")
    found = load_file(tmp_path / "whole.safetensors")
    assert set(found) == {f"l{i}.{n}" for i in range(3) for n in "wb"}
    assert all(torch.equal(found[f"l{i}.w"], torch.full((3,), i)) for i in range(3))
    ckptool.convert(parts, f"{tmp_path}/shards/", max_shard_size="100")
    assert ckptool.diff(tmp_path / "whole.safetensors", tmp_path / "shards").identical


def test_files_of_torch_and_of_safetensors_together(parts, tmp_path):
    torch.save({"head.w": torch.ones(2), "note": "text"}, tmp_path / "head.pth")
    ckptool.convert([tmp_path / "head.pth", *parts], tmp_path / "all.pth")
    found = torch.load(tmp_path / "all.pth")
    assert next(iter(found)) == "head.w"
    assert len(found) == 8
    assert found["note"] == "text"


def test_a_number_that_is_missing_and_a_name_in_two_files(parts, tmp_path):
    with pytest.raises(FileMissing, match=r"m-00002-of-00003\.safetensors: is one of 3 files"):
        ckptool.convert([parts[0], parts[2]], tmp_path / "whole.safetensors")
    ckptool.convert(parts, tmp_path / "whole.safetensors")
    with pytest.raises(NameCollision, match=r"is in .*whole"):
        ckptool.convert([tmp_path / "whole.safetensors", *parts], tmp_path / "new.safetensors")
    with pytest.raises(UsageError, match="twice"):
        ckptool.convert([*parts, parts[0]], tmp_path / "new.safetensors")


def test_what_is_no_flat_state_dict_is_refused(parts, tmp_path):
    torch.save({"state_dict": {"w": torch.ones(1)}}, tmp_path / "nested.pth")
    with pytest.raises(UsageError, match="no flat state dict"):
        ckptool.convert([tmp_path / "nested.pth", *parts], tmp_path / "new.pth")
    with pytest.raises(UsageError, match="no flat state dict"):
        ckptool.convert([*parts, tmp_path / "nested.pth"], tmp_path / "new.pth")
    scripted = torch.jit.script(torch.nn.Linear(1, 1))
    scripted.save(tmp_path / "s.pt")
    with pytest.raises(UnsupportedFormat):
        ckptool.convert([*parts, tmp_path / "s.pt"], tmp_path / "new.pth")
