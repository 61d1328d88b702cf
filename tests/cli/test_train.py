"""`train`: its options, what it prints, how it ends. What training does is in tests/trainer."""

import gc
import io
import json
import os
import signal
from dataclasses import fields

import click
import pytest
import torch

import ckptool as library
from ckptool.cli import train_verb
from ckptool.cli.console import Screen
from ckptool.cli.train_verb import EventPrinter
from ckptool.trainer import TrainResult
from ckptool.trainer.config import TrainConfig, check_options
from ckptool.trainer.events import EpochEnded, Note, Saved, Started, Stepped, Traced, Validating
from ckptool.trainer.launching import handle_signals
from tests.cli.test_group import command_of
from tests.forks import FORKS, ended, finished, start

TIMEOUT = 300


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that no launcher has started, and whose environment is as it was afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # what a test sets is taken back, too
        monkeypatch.delenv(name)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def options():
    return {one.name: one for one in command_of("train").params if isinstance(one, click.Option)}


def test_every_field_of_the_configuration_is_an_option_of_its_name_with_its_default():
    for field in fields(TrainConfig):
        option = options()[field.name]
        name = "force" if field.name == "overwrite" else field.name.replace("_", "-")
        assert f"--{name}" in option.opts
        assert len(option.help) > 5
        if field.name not in ("out", "batch_size"):
            assert option.default == field.default


def test_the_help_has_each_option_once_under_a_heading(ckptool):
    assert set(train_verb.command.begins) <= set(options())
    said = ckptool("train", "--help-all").out
    for option in options().values():
        assert (
            said.count(f"\n  {option.opts[-1]} ") + said.count(f"\n  -q, {option.opts[-1]} ") == 1
        )
    assert "`" not in said
    assert "_" not in said.replace("last_", "").split("Examples")[0].replace("step-%08d.pth", "")


def test_wrong_usage_is_told_as_it_was_typed(ckptool, out):
    for words, said in (
        (["--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["--save-every", "-3"], "--save-every -3 must be at least 1"),
        (["--seed", str(2**63)], f"--seed {2**63} must be from -2**63 to below 2**63"),
        (["--lr", "nan"], "--lr nan must be a finite float32 number"),
        (["--clip", "0"], "--clip 0.0 must be above 0"),
        (["--ema", "1"], "--ema 1.0 must be from 0 to below 1"),
        (
            ["--optimizer", "sgd", "--momentum", "1.5"],
            "--momentum 1.5 must be from 0 to below 1",
        ),
        (["--resume", ""], "--resume '' must be a checkpoint, a folder or auto"),
        (["--momentum", "0.9"], "--momentum 0.9 needs --optimizer sgd, not --optimizer adam"),
        (["--max-steps", "0"], "--max-steps 0 must be at least 1"),
        (["--staleness", "2"], "--staleness 2 needs --strategy parameter-server"),
        (["--gamma", "0.5"], "--gamma 0.5 needs --schedule step"),
        (["--step-size", "3"], "--step-size 3 needs --schedule step"),
        (["--sharded"], "--sharded needs --strategy fsdp"),
        (["--device-ids", "0,1"], "--device-ids 0,1 needs --strategy dp"),
        (["--devices", "cpu,cpu"], "--devices cpu,cpu needs --strategy model-parallel"),
        (["--device-ids", "0,x"], "'0,x' is not a list such as 0,1"),
        (["--strategy", "dpp"], "'dpp' is not one of 'single', 'dp'"),
        (
            ["--strategy", "ddp"],
            "--strategy ddp needs several processes\nhint: add --nproc 2, or use torchrun",
        ),
        (["--nproc", "2"], "--nproc 2 needs --strategy ddp or fsdp or parameter-server, not --str"),
        (["--strategy", "dp", "--port", "2000"], "--port 2000 needs --strategy ddp"),
        (["--nproc", "0", "--strategy", "ddp"], "'--nproc': 0 is not in the range x>=1"),
        (["--gpus", "0,two"], "'two' is not a GPU number"),
        (["--gpus", "0,0"], "--gpus '0,0' has 0 more than once"),
        (["--gpus", ""], "'' is not a GPU number"),
    ):
        done = ckptool("train", "--out", out, *words)
        assert (done.code, done.out) == (2, ""), words
        assert said in done.err
        assert not out.exists()


def test_out_is_asked_for(ckptool):
    done = ckptool("train", "--epochs", "1")
    assert (done.code, done.err.splitlines()[0]) == (2, "ckptool: Missing option '--out'.")


def test_a_strategy_of_one_process_is_not_started_in_several(ckptool, out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = ckptool("train", "--out", out, "--strategy", "single")
    assert done.code == 2
    assert "--strategy single runs in one process, but a launcher started 2" in done.err


def test_the_library_spells_the_same_faults_as_arguments():
    with pytest.raises(library.UsageError, match=r"^batch_size=0 must be at least 1$"):
        TrainConfig(out="run", batch_size=0)
    values = {**TrainConfig(out="run").to_dict(), "save": "all"}
    with pytest.raises(library.UsageError, match="save='all' must be one of full, wrapped"):
        check_options(values)


def test_batches_are_those_of_the_tutorial_where_the_data_are(ckptool, out):
    sizes = {}
    for data in ("random", "friedman"):
        folder = out / data
        assert ckptool("train", "--out", folder, "--data", data, "--epochs", 1, "-q").code == 0
        sizes[data] = library.load(folder / "last.pth")["config"]["batch_size"]
    assert sizes == {"random": 30, "friedman": 32}


def test_an_epoch_is_a_line_and_in_the_end_it_says_what_it_wrote(ckptool, out):
    done = ckptool("train", "--out", out, "--epochs", 2, "--batch-size", 100)
    heading, *epochs, best, last, command, sentence = done.out.splitlines()
    assert done.code == 0
    assert heading.split() == ["epoch", "step", "train_loss", "val_loss", "lr", "samples/s"]
    figures = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line, epoch in zip(epochs, figures, strict=True):
        assert len(line) == len(heading)
        cells = [float(cell) for cell in line.split()]
        assert cells == pytest.approx(list(epoch.values()), rel=0.01)
    assert best.split() == [str(out / "best.pth"), "step", "8"]
    assert last.split() == [str(out / "last.pth"), "step", "8"]
    assert done.err == "single on cpu: 753 parameters, 400 samples, 4 steps an epoch\n"
    assert ckptool(*command.split()[1:]).code == 0
    assert sentence.startswith("Trained to step 8, 2 epochs. The lowest loss of an epoch is ")


def test_as_json_it_is_one_document(ckptool, out):
    words = ["train", "--out", out, "--batch-size", 100, "--json"]
    document = ckptool(*words, "--epochs", 1).document
    assert document["schema"] == "ckptool.train/1"
    figures = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert document["history"] == figures
    assert (document["epoch"], document["step"], document["stopped"]) == (1, 4, None)
    assert document["resumed"] is None
    assert {one["path"] for one in document["checkpoints"]} == {
        str(out / "best.pth"),
        str(out / "last.pth"),
    }
    again = ckptool(*words, "--epochs", 1, "--resume", "auto").document
    assert again["resumed"]["step"] == 4
    assert (again["history"], again["checkpoints"]) == ([], [])
    assert "nothing left to train" in again["notes"][0]


def test_quiet_leaves_the_epochs_alone_and_a_second_run_is_refused(ckptool, out):
    done = ckptool("train", "--out", out, "--epochs", 1, "-q")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("epoch ")
    done = ckptool("train", "--out", out, "--epochs", 1)
    assert done.code == 2
    assert "hint: continue with --resume auto" in done.err
    assert ckptool("train", "--out", out, "--epochs", 1, "--force").code == 0


def test_batches_are_traced_in_the_words_of_the_tutorial(ckptool, out):
    words = ["--data", "random", "--model", "linear", "--strategy", "dp", "--epochs", "1"]
    done = ckptool("train", "--out", out, *words, "--trace-batches", "--device", "cpu")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    seen = "input size torch.Size([30, 5]) output size torch.Size([30, 2]) device cpu"
    assert f"\tIn Model: {seen}" in lines
    for size in (30, 10):
        seen = f"input size torch.Size([{size}, 5]) output_size torch.Size([{size}, 2])"
        assert f"Outside: {seen} device cpu" in lines


def test_the_collector_works_while_it_trains(ckptool, out, monkeypatch):
    seen = []
    monkeypatch.setattr(EventPrinter, "tell", lambda *_: seen.append(gc.isenabled()))
    assert ckptool("train", "--out", out, "--epochs", 1).code == 0
    assert set(seen) == {True}


def teller(rank=None, *, as_json=False):
    return EventPrinter(TrainConfig(out="run"), Screen(as_json=as_json, quiet=False), rank=rank)


TRACED = Traced(False, "cpu", (15, 5), (15, 2))
EVENTS = [
    Started("ddp", ("cpu",), 2, 10, 100, 4, 1),
    Stepped(1, 1, 0.5, 30),
    Note("said"),
    EpochEnded(1, 4, 0.5, None, 0.01, 100.0),
    Saved("nowhere/last.pth", 1, 4),
]


def test_only_rank_0_tells(capsys):
    told = {}
    for rank in (0, 1):
        one = teller(rank)
        for event in EVENTS:
            one.tell(event)
        one.finish(TrainResult(1, 4, 0, 0.5, None, "run"))
        told[rank] = capsys.readouterr()
    assert told[0].out.splitlines()[-1] == (
        "Trained to step 4, 1 epoch. The lowest loss of an epoch is 0.5."
    )
    assert told[0].out.splitlines()[1].split() == ["1", "4", "0.5", "0.01", "100"]
    assert told[0].err.startswith("ddp on 2 processes, cpu: 10 parameters, 100 samples, 4 steps an")
    assert "note: said" in told[0].err
    assert told[1] == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_bar_shows_the_step_and_is_gone_before_a_line_is_printed(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("ckptool.cli.console._DELAY", 0)
    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    one = teller()
    for event in EVENTS[:2]:
        one.tell(event)
    line = "[######------------------] epoch 1 of 1, step 1 of 4, loss 0.5"
    assert screen.getvalue().endswith(f"\r{line}")
    one.tell(EVENTS[3])
    assert f"\r{line}\r{' ' * len(line)}\r\x1b[1mepoch" in screen.getvalue()


def test_a_bar_tells_the_time_that_is_left_and_the_validation(monkeypatch):
    texts, clock = [], iter([10.0, 20.0, 20.0 + 3600])
    monkeypatch.setattr("ckptool.cli.train_verb.time.monotonic", lambda: next(clock))
    one = teller()
    one.tell(Started("ddp", ("cpu",), 2, 10, 100, 4, 2))
    one._bar = lambda done, total, text: texts.append(text)
    for step in (1, 5, 6):
        one.tell(Stepped(1, step, 0.5, 30))
    one.tell(Validating(8, 20))
    assert [text.partition("loss 0.5")[2] for text in texts[:3]] == [
        "",
        ", 8 s left",
        ", 24 min left",
    ]
    assert texts[3] == "validation, sample 8 of 20"


@pytest.mark.parametrize(("rank", "front"), [(None, ""), (0, "[rank 0] "), (1, "[rank 1] ")])
def test_every_process_tells_what_its_replica_saw(capsys, rank, front):
    teller(rank).tell(TRACED)
    line = "\tIn Model: input size torch.Size([15, 5]) output size torch.Size([15, 2]) device cpu\n"
    assert capsys.readouterr() == (front + line, "")


def test_a_trace_is_no_part_of_a_document(capsys):
    teller(as_json=True).tell(TRACED)
    assert capsys.readouterr().out == ""


@pytest.fixture
def launched(monkeypatch):
    """What was to be started, which is not, and ends with the exit code of SIGTERM."""
    calls = []

    def launch(words, *, nproc, port):
        calls.append((words, nproc, port))
        return 143

    monkeypatch.setattr(train_verb, "launch", launch)
    return calls


def test_several_processes_get_the_same_words(ckptool, out, launched):
    words = ["--out", str(out), "--strategy", "ddp", "--nproc", "3", "--port", "4711", "-q"]
    done = ckptool("train", *words)
    assert (done.code, done.out, done.err) == (143, "", "")
    assert launched == [(["train", *words], 3, 4711)]


def test_what_is_wrong_for_all_of_them_is_told_before_they_start(ckptool, out, launched):
    words = ["--strategy", "ddp", "--nproc", "2"]
    assert "nowhere.csv" in ckptool("train", "--out", out, "--data", "csv:nowhere.csv", *words).err
    assert ckptool("train", "--out", out, "--epochs", "1", "-q").code == 0
    assert "already has an earlier run" in ckptool("train", "--out", out, *words).err
    done = ckptool("train", "--out", out.with_name("other"), *words, "--batch-size", 1)
    assert "a batch of 1 sample cannot be split over 2 processes" in done.err
    file = out / "last.pth"
    assert "is a file, not a folder" in ckptool("train", "--out", file, *words).err
    assert launched == []


def test_workers_leave_what_is_wrong_to_their_launcher(ckptool, out, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for words, said in ((["--epochs", "0"], "--epochs 0 must be"), (["--seed", "x"], "--seed")):
        with pytest.raises(SystemExit) as ended, handle_signals(signal.default_int_handler):
            ckptool("train", "--out", out, *words)
        assert ended.value.code == 2
        assert said in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_two_processes_train_as_one_and_the_older_launcher_of_torch_goes_on(out):
    words = ["train", "--out", "run", "--strategy", "ddp", "--device", "cpu", "--batch-size", 200]
    more = ("--epochs", 1, "--nproc", 2, "--trace-batches")
    done = finished("ckptool", *words, *more, cwd=out.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "ddp on 2 processes, cpu: 753 parameters, 400 samples, 2 steps an epoch\n"
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        seen = "In Model: input size torch.Size([100, 10]) output size torch.Size([100, 1])"
        assert lines.count(f"[rank {rank}] \t{seen} device cpu") == 2
    assert sum(line.startswith("epoch") for line in lines) == 1
    older = ("torch.distributed.launch", "--nproc_per_node", 2, "-m", "ckptool")
    more = finished(*older, *words, "--epochs", 2, "--resume", "auto", cwd=out.parent)
    assert more.returncode == 0, more.stderr
    assert [line.split()[:2] for line in more.stdout.splitlines()[:2]][1] == ["2", "4"]
    assert len(more.stdout.splitlines()) == 6
    assert more.stdout.splitlines()[-1].startswith("Trained to step 4, 2 epochs. The lowest loss")
    assert more.stderr.count("resuming from run/last.pth at step 2\n") == 1
    assert "ddp on 2 processes" in more.stderr


DYING = """
import os, signal
from torch import nn

class Dying(nn.Linear):
    "Ends rank 1 of the first attempt, in its second epoch."
    def __init__(self):
        super().__init__(10, 1)
        self.seen = 0

    def forward(self, x):
        self.seen += self.training
        if self.seen == 20 and os.environ["RANK"] == "1":
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


@pytest.mark.parametrize("strategy", ["ddp", "parameter-server"])
def test_torchrun_starts_again_what_has_lost_a_rank(tmp_path, strategy):
    (tmp_path / "dying.py").write_text(DYING)
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts", 3, "--nproc-per-node", 2)
    words = ("train", "--out", "run", "--device", "cpu", "--epochs", 3)
    more = ("--strategy", strategy) if strategy != "ddp" else ()
    more = (*more, "--model", "dying:Dying")
    done = finished(*torchrun, "-m", "ckptool", *words, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming from run/last.pth at step 13\n" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("Trained to step 39, 3 epochs.")


def test_torchrun_does_not_go_on_from_a_run_that_was_refused(ckptool, out):
    words = ("train", "--device", "cpu", "--epochs")
    assert ckptool(*words, 1, "--out", out).code == 0
    before = (out / "last.pth").read_bytes()
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts", 1, "--nproc-per-node", 1)
    done = finished(*torchrun, "-m", "ckptool", *words, 2, "--out", "run", cwd=out.parent)
    assert done.returncode == 1
    assert "run already has an earlier run: " in done.stderr
    assert (out / "last.pth").read_bytes() == before


AT_PYTHONS_END = """
import os, sys
from ckptool.cli import main

class Late:
    def __del__(self, abort=os.abort):
        abort()

kept = Late()
sys.exit(main())
"""


def test_a_process_that_was_connected_ends_before_python_takes_its_lock_away(tmp_path):
    (tmp_path / "program.py").write_text(AT_PYTHONS_END)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 1, "program.py")
    words = ("train", "--out", "run", "--strategy", "ddp", "--device", "cpu", "--epochs", 1)
    done = finished(*launcher, *words, cwd=tmp_path, are_workers_warm=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Trained to step 13, 1 epoch.")
    words = (*words, "--epochs", 0)
    done = finished(*launcher, *words, cwd=tmp_path, are_workers_warm=False)
    assert done.returncode == 1
    assert "SIGABRT" in done.stderr  # it never was connected


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "more"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, ["--strategy", "ddp", "--nproc", "2", "--device", "cpu"]),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(out, number, more):
    words = ["train", "--out", "run", "--epochs", "1000000", "--batch-size", "400", *more]
    pipe, printed = FORKS.Pipe(duplex=False)
    said = out.with_name("said")
    running = start("ckptool", *words, environment={}, said=said, printed=printed, cwd=out.parent)
    printed.close()
    with os.fdopen(os.dup(pipe.fileno())) as lines:
        assert lines.readline().startswith("epoch")
        assert lines.readline()
        os.kill(running.pid, number)
        lines.read()
    assert ended([running], timeout=TIMEOUT) == [128 + number]
    step = library.load(out / "last.pth")["step"]
    saved = f"saved at step {step:,} in run/last.pth; continue with --resume auto"
    assert said.read_text().splitlines()[1:] == [saved]


def test_devices_are_listed(ckptool, monkeypatch):
    done = ckptool("train", "--list-devices")
    assert done.code == 0
    assert f"{torch.get_num_threads()} threads" in done.out
    document = ckptool("train", "--list-devices", "--json").document
    assert document["schema"] == "ckptool.devices/1"
    assert document["cuda"] == torch.cuda.device_count()
    assert sum(one["is_current"] for one in document["devices"]) == 1
    assert document["devices"][-1]["name"] == "cpu"


class Card:
    name = "NVIDIA H100 80GB HBM3"
    total_memory = 80 << 30


@pytest.fixture
def two_gpus(monkeypatch):
    """As many GPUs as CUDA_VISIBLE_DEVICES names, of a machine with 0 to 2."""

    def count():
        words = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")
        good = [word in ("0", "1", "2") for word in words]
        return [*good, False].index(False)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count() > 0)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)


@pytest.mark.usefixtures("two_gpus")
def test_some_of_the_gpus_are_renumbered(ckptool):
    done = ckptool("train", "--gpus", "0,2", "--list-devices")
    assert (done.code, done.err) == (0, "cuda:0 is GPU 0, cuda:1 is GPU 2\n")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["2", "GPUs"]
    assert rows[2] == ["cuda:0", *Card.name.split(), "80.0", "GiB", "0", "*"]
    assert rows[3][-1] == "2"
    other = ckptool("train", "--gpus", "1", "--list-devices")
    assert "changed CUDA_VISIBLE_DEVICES from 0,2 to 1" in other.err


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_named(ckptool, out):
    done = ckptool("train", "--out", out, "--gpus", "0,7")
    assert (done.code, done.out) == (2, "")
    assert "GPU 7 is not available: torch sees 1 GPU of 0,7" in done.err


def test_gpus_where_there_are_none(ckptool, out):
    if torch.cuda.is_available():
        pytest.skip("there are some")
    done = ckptool("train", "--out", out, "--gpus", "0")
    assert done.code == 2
    assert "GPU 0 is not available: torch sees 0 GPUs of 0" in done.err


def test_a_checkpoint_says_which_gpu_was_which(ckptool, out, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-8932f937,-1,3")
    assert ckptool("train", "--out", out, "--epochs", 1, "--device", "cpu").code == 0
    assert library.load(out / "last.pth")["gpus"] == {"cuda:0": "2", "cuda:1": "GPU-8932f937"}
