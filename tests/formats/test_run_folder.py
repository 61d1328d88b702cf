"""The folder of a run: which checkpoint is the last, and which the best."""

import json

import pytest
import torch

import ckptool
from ckptool.errors import NotACheckpoint


def lightning(path, step, best=""):
    monitor = "ModelCheckpoint{'monitor': 'val_loss'}"
    root = {
        "state_dict": {"w": torch.ones(2)},
        "global_step": step,
        "pytorch-lightning_version": "2.5",
        "callbacks": {monitor: {"best_model_path": best}},
    }
    torch.save(root, path)


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ("/home/them/epoch=0-step=10.ckpt", ", and the best is 'epoch=0-step=10.ckpt'"),
        ("C:\\runs\\epoch=1-step=20.ckpt", ", and the best is 'epoch=1-step=20.ckpt'"),
        ("/home/them/gone.ckpt", ""),
        ("", ""),
    ],
)
def test_a_run_of_lightning_names_its_last_and_its_best_file(tmp_path, best, told):
    lightning(tmp_path / "epoch=0-step=10.ckpt", 10)
    lightning(tmp_path / "epoch=1-step=20.ckpt", 20, "/of/another/time.ckpt")
    lightning(tmp_path / "last.ckpt", 20, best)
    with pytest.raises(NotACheckpoint) as caught:
        ckptool.info(tmp_path)
    assert f"the last is 'last.ckpt' (step 20){told}" in caught.value.message
    chosen = told.partition("is '")[2].rstrip("'") or "last.ckpt"
    assert f"{tmp_path}/{chosen}" in caught.value.hint
    (complaint,) = ckptool.doctor(tmp_path).complaints
    assert "the last is 'last.ckpt'" in complaint.text


def test_other_files_called_ckpt_are_no_run_of_lightning(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(NotACheckpoint, match="several checkpoints"):
        ckptool.info(tmp_path)


@pytest.mark.parametrize("best", ["runs/checkpoint-500", None])
def test_a_run_of_a_trainer_names_its_steps_by_number(tmp_path, best):
    for step in (500, 1500):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "best_model_checkpoint": best}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(NotACheckpoint) as caught:
        ckptool.info(tmp_path)
    told = ", and the best is 'checkpoint-500'" if best else ""
    assert f"the last is 'checkpoint-1500' (step 1,500){told}" in caught.value.message
