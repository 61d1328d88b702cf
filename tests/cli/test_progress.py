"""The bar: on a terminal, after half a second, gone afterwards."""

import io

import pytest

from ckptool.cli.console import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_stated_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def test_nothing_is_drawn_in_the_first_half_second(clock):
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock) as bar:
        clock.now += 0.49
        bar(1, 10)
    assert stream.getvalue() == ""


def test_then_bytes_done_of_total_and_in_the_end_nothing(clock):
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock) as bar:
        clock.now += 0.6
        bar(512, 1024)
        drawn = stream.getvalue()
        assert drawn == "\r[############------------] 512 B of 1.0 KiB, 1 s left"
    assert stream.getvalue() == drawn + "\r" + " " * (len(drawn) - 1) + "\r"


def test_the_phase_and_the_time_that_is_left(clock):
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock, phases=("writing", "reading back")) as bar:
        for seconds, done in ((10, 1 << 29), (10, 1 << 30), (1, 1 << 20)):
            clock.now += seconds
            bar(done, 1 << 30)
        clock.now += 10
        bar(2 << 20, 1 << 30)
    drawn = [line.rstrip().partition("] ")[2] for line in stream.getvalue().split("\r")[1:5]]
    assert drawn == [
        "writing 512.0 MiB of 1.0 GiB, 10 s left",
        "writing 1.0 GiB of 1.0 GiB",
        "reading back 1.0 MiB of 1.0 GiB",
        "reading back 2.0 MiB of 1.0 GiB, 1 h 25 min left",
    ]


def test_a_text_stands_in_the_place_of_bytes_and_a_wiped_bar_comes_again(clock):
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock) as bar:
        clock.now += 1
        bar(1, 2, "step 1 of 2")
        bar.wipe()
        bar.wipe()
        clock.now += 1
        bar(2, 2, "step 2 of 2")
    first, second = (
        f"[{bar}] step {n} of 2" for n, bar in ((1, "#" * 12 + "-" * 12), (2, "#" * 24))
    )
    gone = f"\r{' ' * len(first)}\r"
    assert stream.getvalue() == f"\r{first}{gone}\r{second}{gone}"


def test_it_is_not_drawn_more_often_than_anyone_can_read(clock):
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock) as bar:
        clock.now += 0.6
        for done in range(1000):
            bar(done, 1000)
        assert stream.getvalue().count("\r") == 1


def test_a_shorter_line_covers_a_longer_one(clock):
    stream = Terminal()
    bar = ProgressBar(stream=stream, clock=clock)
    clock.now += 1
    bar(1023, 4096)
    clock.now += 1
    bar(1024, 4096)
    first, second = stream.getvalue().split("\r")[1:]
    assert len(second) >= len(first) - 1


@pytest.mark.parametrize("columns", [10, 30, 40, 60])
def test_it_fits_the_terminal(clock, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with ProgressBar(stream=stream, clock=clock) as bar:
        for done in (1, 1 << 29, 1 << 30):
            clock.now += 1
            bar(done, 3 << 30)
    drawn = stream.getvalue().split("\r")
    assert max(map(len, drawn)) < columns
    assert ("#" in drawn[3]) == (columns >= 40)


def test_a_terminal_made_narrower_gets_shorter_lines(clock, monkeypatch):
    stream = Terminal()
    bar = ProgressBar(stream=stream, clock=clock)
    for columns in ("70", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        clock.now += 1
        bar(1 << 20, 1 << 30)
    assert len(stream.getvalue().split("\r")[-1]) < 40


def test_nothing_of_nothing_is_done(clock):
    stream = Terminal()
    bar = ProgressBar(stream=stream, clock=clock)
    clock.now += 1
    bar(0, 0)
    assert "#" * 24 in stream.getvalue()


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_never_in_a_pipe_nor_when_quiet(clock, stream, quiet):
    with ProgressBar(stream=stream, quiet=quiet, clock=clock) as bar:
        clock.now += 10
        bar(1, 2)
    assert stream.getvalue() == ""
