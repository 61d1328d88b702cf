"""Going on from a checkpoint: which one, and what of it."""

import json
import shutil

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CorruptFile, FileMissing, MatchError, TrainingError
from ckptool.trainer import Trainer
from tests.trainer.runs import (
    BytesDone,
    Crash,
    assert_same_run,
    config,
    crash_at,
    data,
    differences,
    held,
    lines,
    net,
    run,
)


def without(told):
    (event,) = told.of("Resumed")
    return event.without


def cut_off(out, *, step=6, **options):
    """A run that has ended in a crash, with a checkpoint of each step before."""
    with pytest.raises(Crash):
        run(out, crash_at(step), **{"save_every": 1, "keep": 9, **options})


def resumed(out, told=None, **options):
    """The weights that a run begins with which goes on, and takes no step."""
    model = net(seed=5)
    told = told or BytesDone()

    def begun(event):
        told.tell(event)
        if type(event).__name__ == "Started":
            raise Crash

    with pytest.raises(Crash):
        run(out, BytesDone(begun), model=model, **options)
    return model


def test_auto_begins_anew_where_nothing_is_there(tmp_path):
    told = BytesDone()
    run(tmp_path / "a", told, resume="auto", epochs=1)
    assert told.notes == [
        f"{tmp_path / 'a'} has no checkpoint to resume from: training starts from the beginning"
    ]
    assert told.of("Resumed") == []
    run(tmp_path / "b", epochs=1)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_auto_begins_anew_where_a_run_ended_before_its_first_checkpoint(tmp_path):
    """As where the disk was full then, or between the line of the epoch and the file."""
    run(tmp_path / "cut", epochs=1)
    for name in ("last.pth", "best.pth"):
        (tmp_path / "cut" / name).unlink()
    run(tmp_path / "cut", resume="auto")
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_auto_takes_the_newest(tmp_path):
    cut_off(tmp_path, step=6)  # after the end of an epoch with step 3
    told = BytesDone()
    run(tmp_path, told, resume="auto")
    assert told.of("Resumed")[0].path == str(tmp_path / "step-00000005.pth")
    assert without(told) == ()
    assert told.notes == []
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=4)
    assert told.of("Resumed")[0].path == str(tmp_path / "last.pth")


def test_the_folder_of_a_run_is_its_newest_checkpoint(tmp_path):
    cut_off(tmp_path / "a", step=6)
    told = BytesDone()
    run(tmp_path / "b", told, resume=tmp_path / "a")
    assert told.of("Resumed")[0].path == str(tmp_path / "a" / "step-00000005.pth")
    told = BytesDone()
    run(tmp_path / "b", told, resume=tmp_path / "b", epochs=4)
    assert told.of("Resumed")[0].path == str(tmp_path / "b" / "last.pth")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has cut off."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, save_every=1, keep=9)
    return folder


def test_auto_passes_over_what_is_damaged(tmp_path, whole):
    cut_off(tmp_path / "begun")
    path = tmp_path / "begun" / "step-00000005.pth"
    content, weight = bytearray(path.read_bytes()), held(path)["state_dict"]["0.weight"]
    content[content.index(weight.numpy().tobytes())] ^= 1
    damaged = {"cut": content[:-40], "empty": b"", "flipped": content, "text": b"not a file"}
    for damage, left in damaged.items():
        out = shutil.copytree(tmp_path / "begun", tmp_path / damage)
        path = out / "step-00000005.pth"
        path.write_bytes(left)
        told = BytesDone()
        run(out, told, resume="auto", save_every=1, keep=9)
        (note,) = told.notes
        assert note.startswith(f"skipped {path}: "), damage
        assert told.of("Resumed")[0].step == 4, damage
        assert_same_run(whole, out)


def test_auto_says_where_all_are_damaged(tmp_path):
    run(tmp_path, epochs=1)
    for name in ("last.pth", "best.pth"):
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is readable: "):
        run(tmp_path, resume="auto")
    assert (tmp_path / "last.pth").read_bytes() == b"PK"
    told = BytesDone()
    run(tmp_path, told, resume="auto", overwrite=True, epochs=1)
    assert told.notes[0].endswith("training starts from the beginning")
    assert held(tmp_path / "last.pth")["epoch"] == 1


def test_a_named_file_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(FileMissing):
        run(tmp_path / "a", resume=str(tmp_path / "none.pth"))
    run(tmp_path / "b", epochs=1)
    path = tmp_path / "b" / "last.pth"
    content = bytearray(path.read_bytes())
    content[content.index(held(path)["state_dict"]["0.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    model = net(seed=3)
    with pytest.raises(CorruptFile):
        run(tmp_path / "c", resume=path, model=model)
    assert not differences(model.state_dict(), net(seed=3).state_dict())


@pytest.mark.parametrize("kind", ["full", "wrapped", "unwrapped", "module"])
def test_another_architecture_is_told_with_its_report(tmp_path, kind):
    run(tmp_path / "a", save=kind, epochs=1)
    model = net(seed=3, width=9)
    with pytest.raises(MatchError) as caught:
        run(tmp_path / "b", resume=str(tmp_path / "a" / "last.pth"), model=model)
    assert caught.value.report.mismatched
    assert not differences(model.state_dict(), net(seed=3, width=9).state_dict())
    assert not (tmp_path / "b").exists()


def named(out, **options):
    """A run of a model by its word, on data by theirs."""
    return Trainer(config(out, epochs=1, **options)).fit()


@pytest.mark.parametrize(
    ("then", "now", "hint"),
    [
        ({"model": "mlp:4"}, {"model": "mlp:5"}, "--model mlp:4"),
        ({"model": "mlp:4", "dtype": "float64"}, {"model": "mlp:4"}, "--dtype float64"),
        ({"model": "linear", "data": "random"}, {"model": "linear"}, "--data random"),
        (
            {"model": "mlp:4", "dtype": "float64"},
            {"model": "mlp:5"},
            "--model mlp:4 --dtype float64",
        ),
    ],
)
def test_another_architecture_is_told_with_the_options_of_the_run(tmp_path, then, now, hint):
    named(tmp_path / "a", **then)
    with pytest.raises(MatchError) as caught:
        named(tmp_path / "b", resume=str(tmp_path / "a" / "last.pth"), **now)
    assert caught.value.hint == f"use {hint}, as in the checkpoint"
    assert "\n" not in str(caught.value)


def test_where_the_run_is_not_known_it_is_told_how_to_see_the_difference(tmp_path):
    path = tmp_path / "theirs.pt"
    torch.save(net(width=9).state_dict(), path)
    with pytest.raises(MatchError) as caught:
        run(tmp_path / "b", resume=path)
    assert f"ckptool match {path} --like module:factory" in caught.value.hint
    torch.save({name: one.double() / 3 for name, one in net().state_dict().items()}, path)
    with pytest.raises(MatchError) as caught:
        run(tmp_path / "b", resume=path)
    assert caught.value.hint == "use --dtype float64, as in the checkpoint"


def test_what_is_done_otherwise_is_told_with_both_values(tmp_path):
    run(tmp_path, epochs=1)
    told = BytesDone()
    other = {"seed": 4, "batch_size": 5, "clip": 0.5, "save_every": 100, "keep": 2}
    run(tmp_path, told, resume="auto", epochs=2, **other)
    assert told.notes == [
        "options differ from the saved run: seed 0 -> 4, batch_size 4 -> 5, clip None -> 0.5"
    ]


def test_how_long_it_is_to_be_is_told_where_the_rate_follows_from_it(tmp_path):
    run(tmp_path, epochs=1, schedule="linear")
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=2, schedule="linear")
    assert told.notes == ["options differ from the saved run: epochs 1 -> 2"]


def test_an_epoch_of_other_batches_begins_anew(tmp_path):
    cut_off(tmp_path)
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=2, given=data(30))
    assert told.notes == ["epoch 2 is restarted, because its batches have changed"]
    assert [event.samples for event in told.of("Stepped")] == [8, 8, 8, 6]
    assert [line["step"] for line in lines(tmp_path)] == [3, 9]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_wrapped_gives_weights_and_optimizer(tmp_path, optimizer):
    options = {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    run(tmp_path / "full", epochs=2, model=alike(), **options)
    run(tmp_path / "wrapped", save="wrapped", epochs=1, model=alike(), **options)
    told = BytesDone()
    path = str(tmp_path / "wrapped" / "last.pth")
    run(tmp_path / "on", told, resume=path, epochs=2, model=alike(), **options)
    assert without(told) == ("scheduler", "rng", "progress")
    assert told.notes == [f"{path} has no parameter names for the optimizer: matched by position"]
    one, other = (held(tmp_path / name / "last.pth") for name in ("full", "on"))
    for name in ("state_dict", "optimizer", "scheduler", "step", "epoch"):
        assert not differences(one[name], other[name])


def alike():
    """A model whose parameters cannot be told apart by their shapes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("kind", ["unwrapped", "module", "safetensors", "foreign"])
def test_weights_alone_begin_an_epoch(tmp_path, kind):
    model = net()
    run(tmp_path / "a", model=model, epochs=1, save=kind if kind[0] in "um" else "full")
    path = tmp_path / "a" / "last.pth"
    if kind == "safetensors":
        ckptool.convert(path, path := tmp_path / "last.safetensors", ckptool.Take(model_only=True))
    if kind == "foreign":
        tree = {"net": {f"module.{key}": one for key, one in model.state_dict().items()}}
        torch.save({**tree, "epoch": 7}, path := tmp_path / "theirs.pt")
    told = BytesDone()
    loaded = resumed(tmp_path / "b", told, resume=path, ema=0.9, amp="fp16", epochs=9)
    assert not differences(loaded.state_dict(), model.state_dict())
    assert without(told) == ("optimizer", "scheduler", "scaler", "ema", "rng", "progress")
    assert told.of("Resumed")[0].epoch == (7 if kind == "foreign" else 0)


def test_another_optimizer_begins_anew(tmp_path):
    run(tmp_path, epochs=1)
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=2, optimizer="sgd")
    assert without(told) == ("optimizer",)
    assert told.notes == ["options differ from the saved run: optimizer adam -> sgd"]


def test_what_an_earlier_run_did_without_begins_with_its_weights(tmp_path):
    model = net()
    run(tmp_path, model=model, epochs=1)
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=2, ema=0.0)
    assert without(told) == ("ema",)
    after = held(tmp_path / "last.pth")
    assert not differences(list(after["ema"].values()), list(after["state_dict"].values()))


def test_random_numbers_of_other_processes_are_of_no_use(tmp_path):
    run(tmp_path, epochs=1)
    path = tmp_path / "last.pth"
    tree = torch.load(path, weights_only=True)
    tree["rng"] *= 2
    torch.save(tree, path)
    told = BytesDone()
    run(tmp_path, told, resume="auto", epochs=2)
    assert without(told) == ("rng",)


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}, {"patience": 1, "lr": 1e-12}])
def test_a_run_that_is_done_says_so(tmp_path, options):
    result = run(tmp_path, **options)
    before = (tmp_path / "last.pth").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    told = BytesDone()
    assert run(tmp_path, told, resume="auto", **options) == result
    (note,) = told.notes
    assert note.startswith("nothing left to train: ")
    assert not told.of("Stepped")
    assert (
        (tmp_path / "last.pth").read_bytes(),
        (tmp_path / "metrics.jsonl").read_bytes(),
    ) == before


def test_figures_of_epochs_that_come_again_go(tmp_path, whole):
    cut_off(tmp_path / "cut", step=5)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "step": 6}) + '\n[1]\nnull\n{"epoch": 3, "st')
    run(tmp_path / "cut", resume="auto", save_every=1, keep=9)
    assert_same_run(whole, tmp_path / "cut")


@pytest.mark.parametrize(("there", "back"), [("single", "dp"), ("dp", "single"), ("dp", "dp")])
def test_strategies_go_on_from_each_other(tmp_path, whole, there, back):
    cut_off(tmp_path / "cut", strategy=there)
    told = BytesDone()
    run(tmp_path / "cut", told, resume="auto", strategy=back, save_every=1, keep=9)
    assert without(told) == ()
    assert_same_run(whole, tmp_path / "cut")


def test_a_run_that_goes_on_elsewhere_says_where_the_best_epoch_is(tmp_path):
    first, then = tmp_path / "first", tmp_path / "then"
    run(first, epochs=2, lr=0.01)
    told = BytesDone()
    run(then, told, epochs=3, resume=str(first / "last.pth"), lr=1e6)
    assert not (then / "best.pth").exists()
    assert any("best.pth is only in the original run folder" in one for one in told.notes)
    told = BytesDone()
    run(tmp_path / "better", told, epochs=3, resume=str(first / "last.pth"), lr=0.01)
    assert (tmp_path / "better" / "best.pth").exists()
    assert not any("best.pth" in one for one in told.notes)
