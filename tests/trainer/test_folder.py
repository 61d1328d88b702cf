"""The folder of a run: written to before the first step, and never shared with another run."""

import errno
import os
import sys

import pytest
import torch

from ckptool.errors import FileBusy, FileMissing, TrainingError, WriteDenied, WriteError
from ckptool.trainer import checkpoints as folder
from tests.files.sets import needs_posix, needs_refusals
from tests.forks import ended, finished, wait_for
from tests.trainer.ranks import stepping
from tests.trainer.runs import BytesDone, held, lines, run


def names(out):
    return sorted(os.listdir(out))


def test_checkpoints_come_the_newest_first(tmp_path):
    for name, step in (
        ("last.pth", 4),
        ("best.pth", 6),
        ("step-00000006.pth", 6),
        ("other.pth", 9),
    ):
        torch.save({"step": step}, tmp_path / name)
    (tmp_path / "step-100000000").mkdir()
    (tmp_path / "step-7.pth").write_bytes(b"")
    assert [
        (os.path.basename(path), step) for path, step in folder.list_checkpoints(str(tmp_path))
    ] == [
        ("step-100000000", 100_000_000),
        ("step-00000006.pth", 6),
        ("best.pth", 6),
        ("last.pth", 4),
    ]


def test_where_one_has_no_step_the_time_decides(tmp_path):
    for time, name in enumerate(("step-00000009.pth", "last.pth", "step-00000003.pth"), start=1):
        torch.save({"state_dict_model": {}}, tmp_path / name)
        os.utime(tmp_path / name, (time, time))
    found = [os.path.basename(path) for path, _ in folder.list_checkpoints(str(tmp_path))]
    assert found == ["step-00000003.pth", "last.pth", "step-00000009.pth"]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert folder.list_checkpoints(str(tmp_path / "none")) == []


def test_the_last_ones_by_number_stay(tmp_path):
    for step in (8, 99_999_999, 100_000_000, 20):
        (tmp_path / f"step-{step:08d}.pth").touch()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "last.pth").touch()
    folder.remove_numbered(str(tmp_path), 2)
    assert names(tmp_path) == ["last.pth", "step-100000000.pth", "step-99999999.pth"]


@pytest.mark.parametrize("kind", ["full", "wrapped", "unwrapped"])
def test_a_run_does_not_begin_in_the_folder_of_another(tmp_path, kind):
    run(tmp_path, save=kind, epochs=1, save_every=1)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with pytest.raises(
        TrainingError, match=r"already has an earlier run: .*, and 2 more"
    ) as caught:
        run(tmp_path, save=kind)
    assert "--resume auto" in caught.value.hint
    assert "--force" in caught.value.hint
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_figures_alone_are_a_run_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(TrainingError, match=r"(?m)an earlier run: metrics\.jsonl$"):
        run(tmp_path)


def test_what_is_no_run_of_ours_is_no_obstacle(tmp_path):
    (tmp_path / "model.pth").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("")
    run(tmp_path, epochs=1)
    assert (tmp_path / "model.pth").read_text() == "mine"


def test_an_earlier_run_is_overwritten_where_that_is_asked_for(tmp_path):
    run(tmp_path, save_every=1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "mine.txt").touch()
    run(tmp_path, overwrite=True, epochs=1)
    assert names(tmp_path) == ["best.pth", "last.pth", "metrics.jsonl", "mine.txt"]
    assert [line["epoch"] for line in lines(tmp_path)] == [1]


def test_a_link_to_another_disk_is_a_checkpoint_of_the_folder(tmp_path):
    out = tmp_path / "out"
    run(out, save_every=1, keep=9, epochs=2)
    (out / "last.pth").rename(tmp_path / "elsewhere.pth")
    (out / "last.pth").symlink_to(tmp_path / "elsewhere.pth")
    before = names(out)
    steps = held(out / "last.pth")["step"]
    folder.require_one_run(str(out), origin=str(out / "last.pth"), step=steps)
    folder.require_one_run(str(out), origin=str(out / "last.pth"), step=steps, overwrite=True)
    assert names(out) == before


def test_an_earlier_step_is_gone_on_from_where_nothing_of_later_ones_is_there(tmp_path):
    run(tmp_path, save_every=1, keep=9, epochs=2)
    origin = str(tmp_path / "step-00000002.pth")
    with pytest.raises(TrainingError, match="already has checkpoints after step 2: "):
        run(tmp_path, resume=origin)
    told = BytesDone()
    run(tmp_path, told, resume=origin, overwrite=True, epochs=1)
    assert told.of("Resumed")[0].step == 2
    assert names(tmp_path) == [
        "best.pth",
        "last.pth",
        "metrics.jsonl",
        "step-00000001.pth",
        "step-00000002.pth",
    ]
    assert held(tmp_path / "last.pth")["step"] == 3


def test_another_run_s_checkpoint_begins_one_in_an_empty_folder(tmp_path):
    run(tmp_path / "a", epochs=1)
    run(tmp_path / "b", epochs=1)
    origin = tmp_path / "a" / "last.pth"
    with pytest.raises(
        TrainingError, match=r"(?m)b already has an earlier run: last\.pth, best\.pth$"
    ):
        run(tmp_path / "b", resume=origin)
    result = run(tmp_path / "c", resume=origin, epochs=2)
    assert (result.epoch, result.step) == (2, 6)
    assert [line["epoch"] for line in lines(tmp_path / "c")] == [2]
    assert (tmp_path / "a" / "last.pth").exists()


@pytest.fixture
def under_way(tmp_path):
    """A run in another process, which waits where it has saved more than once, to be killed."""
    runs = {str(tmp_path / "out"): {"epochs": 1_000_000, "save_every": 1}}
    process, steps = stepping(runs, 5, said=tmp_path / "said")
    with steps:
        wait_for(5, steps)
    yield process
    ended([process], timeout=0)


@needs_posix
def test_a_run_does_not_begin_where_another_is_under_way(tmp_path, under_way):
    out = tmp_path / "out"
    before = {name: (out / name).read_bytes() for name in names(out)}
    assert "last.pth" in before
    for options in ({}, {"resume": "auto"}, {"overwrite": True}):
        with pytest.raises(FileBusy, match="out is in use by ") as caught:
            run(out, stepless(), **options)
        assert f"process {under_way.pid}" in str(caught.value) or sys.platform != "linux"
        assert "another folder" in caught.value.hint
        assert {name: (out / name).read_bytes() for name in names(out)} == before, options


@needs_posix
def test_a_killed_run_is_in_nobody_s_way(tmp_path, under_way):
    under_way.kill()
    under_way.join()
    told = BytesDone()
    run(tmp_path / "out", told, resume="auto", epochs=3)
    assert told.of("Resumed")[0].step >= 4
    assert not [name for name in names(tmp_path / "out") if "lock" in name]


def test_a_folder_that_was_made_for_a_run_that_is_refused_goes_again(tmp_path):
    (tmp_path / "there").mkdir()
    for out in ("there/a/b", "there"):
        with pytest.raises(FileMissing):
            run(tmp_path / out, resume=str(tmp_path / "none.pth"))
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []


@needs_posix
def test_a_file_system_without_locks_trains_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    run(tmp_path / "out", epochs=1)
    assert names(tmp_path / "out") == ["best.pth", "last.pth", "metrics.jsonl"]


def stepless():
    """An observer that lets no step be taken."""

    def act(event):
        assert type(event).__name__ not in ("Stepped", "Started")

    return BytesDone(act)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(WriteError, match="out: is a file, not a folder"):
        run(tmp_path / "out", stepless())
    with pytest.raises(WriteError, match=r"cannot be written \(Not a directory\)"):
        run(tmp_path / "out" / "deeper", stepless())


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "out" / "last.pth").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"last\.pth: is a folder"):
        run(tmp_path / "out", stepless())


@needs_posix
@needs_refusals
def test_a_folder_that_refuses(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(WriteDenied, match="Permission denied"):
            run(tmp_path, stepless())
    finally:
        tmp_path.chmod(0o755)


def test_a_system_that_refuses(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ckptool.files.atomic.reserve", refuse)
    with pytest.raises(WriteDenied, match=r"last\.pth: cannot be written \(Permission denied\)"):
        run(tmp_path, stepless())
    assert names(tmp_path) == []


@needs_posix
def test_a_disk_without_room_for_a_checkpoint_that_is_to_come(tmp_path):
    """The file of the first step would fit; with the optimizer's state it does not."""
    done = finished("tests.trainer.little_room", tmp_path / "out", cwd=tmp_path, timeout=60)
    assert done.stdout.endswith("last.pth: cannot be written (File too large)\n"), done.stderr
    assert not (tmp_path / "out").exists()
