"""Folders of parts: what is missing of them."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ckptool
from ckptool.errors import MatchError
from ckptool.trainer import sharded
from ckptool.trainer.checkpoints import hold_run_folder
from ckptool.trainer.sharded import is_sharded


def test_a_run_finishes_what_a_kill_has_left_before_all_else(tmp_path):
    for name in (".last.old", ".mine.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.pth").write_text("old")
    with hold_run_folder(str(tmp_path)):
        assert (tmp_path / "last" / "run.pth").read_text() == "old"
        assert (tmp_path / ".mine.old").exists()


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "last"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save({"state_dict": {"weight": torch.ones(1000)}}, checkpoint_id=path)
    ckptool.save(path / "run.pth", step=3)
    return path


def test_a_whole_folder_has_no_damage(whole):
    assert is_sharded(whole)
    assert sharded.find_damage(str(whole)) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run.pth", "run.pth, which is written last, is missing"),
        (".metadata", ".metadata cannot be read"),
        ("__0_0.distcp", "__0_0.distcp is missing"),
    ],
)
def test_a_file_that_is_missing_is_named(whole, name, told):
    (whole / name).unlink()
    assert told in sharded.find_damage(str(whole))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run.pth", "run.pth"),
        (".metadata", ".metadata cannot be read"),
        ("__0_0.distcp", "__0_0.distcp is truncated: 2,000 of"),
    ],
)
def test_a_file_that_was_cut_is_named(whole, name, told):
    data = (whole / name).read_bytes()
    (whole / name).write_bytes(data[:2000] if len(data) > 2000 else data[:100])
    assert told in sharded.find_damage(str(whole))


class Stranger:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_index_that_names_anything_else_is_not_run(whole, tmp_path):
    (whole / ".metadata").write_bytes(pickle.dumps(Stranger(tmp_path / "made")))
    assert f"its index refers to {os.mkdir.__module__}.mkdir" in sharded.find_damage(str(whole))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("groups", [[], [{"params": []}, {"params": []}]])
def test_an_optimizer_of_other_groups_is_refused(whole, groups):
    ckptool.save(whole / "run.pth", step=3, param_groups=groups, overwrite=True)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(MatchError, match="other parameters"):
        sharded.load_optimizer(str(whole), model, torch.optim.SGD(model.parameters()))


def test_another_folder_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not is_sharded(tmp_path)
