"""The benchmarks measure what they say: the inputs, the turns, the bounds."""

import re
import sys
from pathlib import Path

import pytest

import ckptool
from benchmarks.__main__ import make
from benchmarks.decoder import decoder
from benchmarks.inputs import hollow, large, many, renamed, shapes, single, zero
from benchmarks.kept import Kept
from benchmarks.report import steps, table
from benchmarks.rows import MB, Growth, Result, Row, clear
from benchmarks.timing import Command, Measured, Sample, measure, ratio
from benchmarks.works import RULE, Inputs, rows
from ckptool.core.tree import name_of

OURS = Command("ckptool list", ("ckptool", "list"))
THEIRS = Command("cp", ("cp",))


@pytest.fixture(autouse=True)
def no_device_tag_left_behind():
    """`save_tagged` registers a tag for the whole process; take it back."""
    import torch

    registry = torch.serialization._package_registry
    before = list(registry)
    yield
    registry[:] = before


def timed(command, *seconds, peak=MB):
    return Measured(command, tuple(Sample(second, peak) for second in seconds))


def test_the_large_file_has_225_tensors_of_about_the_size_asked_for(tmp_path):
    import torch

    size = 20 * MB
    large(tmp_path / "large.pth", size)
    state = torch.load(tmp_path / "large.pth", map_location="meta", weights_only=True)
    assert len(state) == 225
    assert all(name.startswith("module.") for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


def test_the_float32_file_holds_numbers_such_as_weights_are(tmp_path):
    import torch

    single(tmp_path / "single.pth", 20 * MB)
    state = torch.load(tmp_path / "single.pth", map_location="cpu", mmap=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert 0 < max(tensor.abs().max().item() for tensor in state.values()) < 1


def test_the_folder_is_of_four_ranks(tmp_path):
    make("folder", tmp_path / "run", MB)
    assert len(list((tmp_path / "run").glob("*.distcp"))) == 4
    assert not list(tmp_path.glob("*.store"))
    with ckptool.open(tmp_path / "run") as checkpoint:
        names = [name_of(path) for path, _ in checkpoint.tensors()]
    assert len(names) == 225
    assert names[0].startswith("model/module.")


def test_the_folder_of_deepspeed_is_read(tmp_path):
    zero(tmp_path / "step", 20 * MB)
    with ckptool.open(tmp_path / "step", master=True) as checkpoint:
        assert len(checkpoint["module"]) == 225
        assert {one.dtype for _, one in checkpoint.tensors()} == {"float32"}
    assert 0.8 < sum(one.stat().st_size for one in (tmp_path / "step").iterdir()) / (20 * MB) < 1.3


def test_a_hollow_file_is_large_and_takes_no_room(tmp_path):
    import torch

    hollow(tmp_path / "hollow.pth", 10**12)
    status = (tmp_path / "hollow.pth").stat()
    assert status.st_size > 0.9 * 10**12
    assert status.st_blocks * 512 < 10 * MB
    assert len(torch.load(tmp_path / "hollow.pth", map_location="meta")) == 225


def test_what_a_run_left_is_removed(tmp_path):
    (tmp_path / "source").write_bytes(b"source and an edit")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "one").write_bytes(b"x")
    clear(Row("edit", tmp_path / "source", (OURS,), edits=True), 6)
    clear(Row("shard", tmp_path / "source", (OURS,), output=tmp_path / "shards"), 6)
    assert (tmp_path / "source").read_bytes() == b"source"
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("size", [500 * MB, 5000 * MB])
def test_the_shapes_fill_the_size(size):
    import math

    assert 2 * sum(map(math.prod, shapes(size).values())) == pytest.approx(size, rel=0.08)


def test_the_tensors_of_the_many_have_a_storage_each_and_a_tag(tmp_path):
    import torch

    many(tmp_path / "many.pth", 7)
    tags = []
    state = torch.load(
        tmp_path / "many.pth", map_location=lambda storage, tag: tags.append(tag) or storage
    )
    assert tags == ["cuda:3"] * 7
    assert len({tensor.data_ptr() for tensor in state.values()}) == 7


def test_names_of_the_many_are_those_of_the_renamed_after_a_rule(tmp_path):
    import torch

    import ckptool

    renamed(tmp_path / "renamed.pth", 7)
    state = {f"module.layers.{index}.weight": torch.rand(2, 3) for index in range(7)}
    _, report = ckptool.match(state, tmp_path / "renamed.pth", rename=[RULE])
    assert (report.fitting, report.names) == (7, 7)


def test_commands_take_turns(tmp_path):
    log = tmp_path / "log"
    a, b = (
        Command.program(name, f"open({str(log)!r}, 'a').write({name!r})") for name in ("a", "b")
    )
    seen = []
    measured = measure([a, b], 2, before=lambda: seen.append(1))
    assert log.read_text() == "abab"
    assert len(seen) == 4
    assert [len(one.samples) for one in measured] == [2, 2]
    assert all(sample.peak > MB for one in measured for sample in one.samples)


def test_a_command_that_fails_says_how():
    with pytest.raises(RuntimeError, match=r"exited 3: it broke"):
        measure(
            [Command.program("x", "import sys; sys.stderr.write('it broke'); sys.exit(3)")], 1, int
        )


def test_a_command_may_end_with_a_finding():
    program = "import sys; sys.exit(1)"
    command = Command("finding", (sys.executable, "-c", program), ends=1)
    assert len(measure([command], 1, lambda: None)[0].samples) == 1
    with pytest.raises(RuntimeError, match="exited 0"):
        measure([Command("fine", (sys.executable, "-c", ""), ends=1)], 1, lambda: None)


def test_a_program_may_tell_the_time_that_counts():
    program = Command.program("told", "print('warm'); print(0.25)", tells=True)
    assert measure([program], 1, lambda: None)[0].samples[0].seconds == 0.25


def test_the_decoder_takes_the_large_file(tmp_path):
    import torch

    size = 20 * MB
    large(tmp_path / "large.pth", size)
    state = torch.load(tmp_path / "large.pth", map_location="cpu", mmap=True)
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    model = decoder(size)
    assert list(model.load_state_dict(state)) == [[], []]
    assert {one.device.type for one in decoder(size, device="meta").parameters()} == {"meta"}


def test_the_ratio_is_of_rounds_not_of_medians():
    assert ratio(timed(OURS, 1, 10, 3), timed(THEIRS, 2, 20, 1)) == 0.5


def test_a_bound_that_is_missed_is_named():
    row = Row(
        "work",
        Path("x"),
        (OURS, THEIRS),
        beside="cp",
        most_times=1.0,
        most_seconds=0.5,
        most_bytes=10 * MB,
        peak_beside=True,
    )
    slow = Result(row, (timed(OURS, 2, peak=20 * MB), timed(THEIRS, 1)))
    assert list(slow.misses()) == [
        "2.00 s, at most 0.5 s wanted",
        "20 MB, at most 10 MB wanted",
        "2.00 x cp, at most 1 x wanted",
        "20 MB, at most 1 MB wanted",
    ]
    assert not list(Result(row, (timed(OURS, 0.4), timed(THEIRS, 1))).misses())
    assert "2.00" in table([slow])


def test_growth_is_what_one_more_tensor_costs():
    results = [
        Result(
            Row("list", Path("x"), (OURS,), growth=Growth("list", "tensors", n)),
            (timed(OURS, n / 1000),),
        )
        for n in (1000, 5000)
    ]
    (step,) = steps(results)
    assert step.seconds == pytest.approx(0.001)
    assert step.peak == 0


def test_every_row_compares_ckptool_with_something_or_has_a_bound():
    edited = {MB: Path("small"), 4 * MB: Path("middle"), 10**12: Path("hollow")}
    many = {10: Path("few"), 100: Path("many")}
    files = map(Path, ("large", "twin", "single", "other"))
    folders = map(Path, ("renamed", "zero", "out", "dcp", "shards", "files"))
    inputs = Inputs(*files, edited, many, *folders, 20 * MB, Path("peers"))
    for row in rows(inputs):
        assert len(row.commands) > 1 or row.bounds()
        words = " ".join(row.commands[0].arguments)
        assert re.search(r"ckptool|benchmarks\.line", words)
        assert row.commands[0].arguments[0] == sys.executable
        assert not row.beside or row.beside in [command.label for command in row.commands]


def test_what_grows_is_drawn(tmp_path):
    plot = pytest.importorskip("benchmarks.plot", reason="matplotlib is of the extra `bench`")
    results = [
        Result(
            Row("work", Path("x"), (OURS, THEIRS), growth=Growth("list", "bytes", amount)),
            (timed(OURS, 0.1), timed(THEIRS, amount / MB)),
        )
        for amount in (10 * MB, 1000 * MB)
    ]
    pages = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in pages:
        plot.draw(results, path)
    text = pages[0].read_text()
    assert text == pages[1].read_text()
    for word in ("list", "bytes", "seconds", "peak MB", "ckptool", "cp"):
        assert f">{word}<" in text


def test_a_run_goes_on_behind_the_rows_that_are_kept(tmp_path):
    row = Row("work", Path("x"), (OURS, THEIRS))
    result = Result(row, (timed(OURS, 1, 2), timed(THEIRS, 3, 4)))
    Kept(tmp_path / "kept.json", read=False).add(result)
    again = Kept(tmp_path / "kept.json", read=True)
    assert again.result(row, 2) == result
    assert again.result(row, 5) is None
    assert again.result(Row("other", Path("x"), (OURS,)), 2) is None
    assert Kept(tmp_path / "kept.json", read=False).result(row, 2) is None
