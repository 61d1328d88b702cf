"""A folder that a library saved one model into is that model."""

import os
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import CheckpointError, CheckpointWarning, FileMissing, NotACheckpoint
from tests.formats.shards import write_set

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
ONE = (
    SAFE, PICKLED, "pytorch_model_fsdp.bin", "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
RIVALS = {
    (SAFE, PICKLED): "transformers",
    (SAFE, PICKLED, "pytorch_model_fsdp.bin"): "transformers",
    (PICKLED, "pytorch_model_fsdp.bin"): "transformers",
    (SAFE, "pytorch_model.bin.index.json"): "transformers",
    ("model.safetensors.index.json", PICKLED): "transformers",
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"): "diffusers",
    ("adapter_model.safetensors", "adapter_model.bin"): "peft",
}
"""What is read, what is not, and whose order it is."""
BESIDE = (
    "config.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "scaler.pt",
    "training_args.bin", "trainer_state.json", "random_states_0.pkl", "sampler.bin",
    "model.fp16.safetensors", "tokenizer.index.json", "tf_model.h5",
)  # fmt: skip
"""What else such a folder holds."""


def write(folder, name):
    """A file that holds one tensor of its own name."""
    tensors = {name: torch.ones(2)}
    if name.endswith(".index.json"):
        ending = ".bin" if ".bin" in name else ".safetensors"
        return write_set(folder, {f"x-00001-of-00001{ending}": tensors}, index=name)
    (save_file if name.endswith(".safetensors") else torch.save)(tensors, folder / name)
    return folder / name


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "checkpoint-500"
    made.mkdir()
    for name in BESIDE:
        (made / name).write_bytes(b"{}")
    (made / "global_step500").mkdir()
    return made


def said(folder):
    """What a folder gives, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read(folder)


def read(folder):
    with ckptool.open(folder) as checkpoint:
        return list(checkpoint.root), checkpoint.path


@pytest.mark.parametrize("name", ONE)
def test_the_one_model_in_a_folder_is_read(folder, name):
    path = write(folder, name)
    assert said(folder) == ([name], str(path))
    assert said(f"{folder}/") == ([name], str(path))
    assert ckptool.verify(folder).file == str(path)
    assert list(ckptool.load_state_dict(folder)) == [name]


@pytest.mark.parametrize("names", RIVALS)
def test_of_one_model_twice_the_one_that_its_library_takes_is_read_and_told(folder, names):
    paths = [write(folder, name) for name in names]
    whose = RIVALS[names]
    told = rf"reading '{names[0]}', as {whose} does, and not '{names[1]}'"
    with pytest.warns(CheckpointWarning, match=told):
        assert read(folder) == ([names[0]], str(paths[0]))


@pytest.mark.parametrize("names", [
    (SAFE, "adapter_model.safetensors"),
    (PICKLED, "diffusion_pytorch_model.bin"),
    (SAFE, "model_1.safetensors"),
    (PICKLED, "pytorch_model_1.bin"),
])  # fmt: skip
def test_of_two_models_none_is_taken(folder, names):
    for name in names:
        write(folder, name)
    with pytest.raises(NotACheckpoint, match="several checkpoints"):
        read(folder)


def test_of_a_trainers_folder_without_the_model_that_is_told(folder):
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        write(folder, name)
    with pytest.raises(NotACheckpoint, match="the folder of a trainer without the model") as caught:
        read(folder)
    assert str(caught.value.hint).startswith("add the model's file to the folder, or give one of")


@pytest.mark.parametrize("name", [SAFE, PICKLED])
def test_one_file_beside_the_shards_of_its_name_is_a_rival(folder, name):
    write(folder, name)
    write(folder, f"{name}.index.json")
    with pytest.raises(NotACheckpoint, match="several checkpoints: "):
        read(folder)


@pytest.mark.parametrize("name", ["best.pth", "model.pt", "model.fp16.safetensors", "weights.bin"])
def test_other_names_are_told_and_not_taken(tmp_path, name):
    write(tmp_path, name)
    with pytest.raises(NotACheckpoint, match=f"the checkpoint '{name}' inside"):
        read(tmp_path)


def test_a_folder_of_that_name_is_no_model(folder):
    (folder / SAFE).mkdir()
    with pytest.raises(CheckpointError, match="a folder"):
        read(folder)
    write(folder, PICKLED)
    assert said(folder)[0] == [PICKLED]


def test_a_link_that_leads_nowhere_is_no_reason_to_take_another(folder):
    write(folder, PICKLED)
    (folder / SAFE).symlink_to("gone")
    with pytest.raises(FileMissing) as caught:
        read(folder)
    assert caught.value.file == str(folder / SAFE)


def test_a_link_is_read_as_the_hub_keeps_its_files(folder, tmp_path):
    write(tmp_path, SAFE).rename(tmp_path / "blob")
    (folder / SAFE).symlink_to("../blob")
    assert said(folder) == ([SAFE], str(folder / SAFE))


def test_an_unzipped_archive_is_one_whatever_lies_in_it(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    shutil.unpack_archive(tmp_path / "a.pth", tmp_path / "out", "zip")
    (inner,) = (tmp_path / "out").iterdir()
    write(inner, SAFE)
    assert read(inner)[0] == ["a"]


def test_what_is_wrong_with_the_file_is_told_with_its_path(folder):
    (folder / SAFE).write_bytes(b"not that")
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.file == str(folder / SAFE)


def test_every_file_is_closed_again(folder):
    write(folder, PICKLED)
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    before = len(os.listdir("/proc/self/fd"))
    ckptool.open(folder).close()
    ckptool.verify(folder)
    (folder / PICKLED).write_bytes(b"x")
    with pytest.raises(CheckpointError):
        ckptool.open(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_read_again_where_it_is_replaced_meanwhile(folder, monkeypatch):
    path = write(folder, SAFE)
    walk, done = ckptool.formats.opening.walk, []

    def walked(*given):
        if not done:
            done.append(os.utime(path, ns=(1, 1)))
        return walk(*given)

    monkeypatch.setattr("ckptool.formats.opening.walk", walked)
    assert said(folder)[0] == [SAFE]
    assert done


def test_a_change_in_place_is_of_the_file(folder):
    path = folder / PICKLED
    torch.save({"module.a": torch.ones(2)}, path)
    with ckptool.open(folder) as checkpoint:
        checkpoint.strip_module().save(checkpoint.path, in_place=True)
    assert said(folder) == (["a"], str(path))
