"""The files next to the weights of a folder are named."""

import json

import pytest
import torch

import ckptool
from ckptool.cli import main

TRAINING = "optimizer.pt, rng_state.pth, scheduler.pt"


@pytest.fixture
def folder(tmp_path):
    """A folder as a Trainer saves it at a step."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, tmp_path / name)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 1500}))
    return tmp_path


def notes(path):
    return [note for note in ckptool.info(path).notes if note.startswith("next to it")]


def test_the_state_of_a_training_is_named_with_its_step(folder):
    assert notes(folder) == [f"next to it is the state of the training at step 1,500: {TRAINING}"]
    (folder / "trainer_state.json").write_text("no JSON")
    assert notes(folder) == [f"next to it is the state of the training: {TRAINING}"]


def test_an_adapter_next_to_a_model_is_named(folder):
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    (folder / "adapter_config.json").write_text("{}")
    told = notes(folder / "pytorch_model.bin")
    assert told[1:] == ["next to it is an adapter: adapter_model.bin, adapter_config.json"]
    assert len(notes(folder / "adapter_model.bin")) == 1


def test_a_file_that_opens_no_folder_has_no_neighbors(folder):
    torch.save({"w": torch.ones(2)}, folder / "mine.pth")
    assert notes(folder / "mine.pth") == []


def test_list_and_doctor_name_it_too(folder, capfd):
    said = f"next to it is the state of the training at step 1,500: {TRAINING}"
    assert main(["list", str(folder)]) == 0
    assert f"note: {said}" in capfd.readouterr().err
    assert main(["list", str(folder), "-q"]) == 0
    assert capfd.readouterr().err == ""
    found = ckptool.doctor(folder)
    assert [one.text for one in found.complaints if one.kind == "neighbors"] == [said]
    assert found.ok
