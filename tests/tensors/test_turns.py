"""Every position is worked on once, whoever does it; a no or an error ends it for all."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.tensors.sameness import in_turns


@given(length=st.integers(0, 50), step=st.integers(1, 60), threads=st.integers(1, 4))
def test_every_position_is_met_once_and_told(length, step, threads):
    met, done = [], []

    def worker(start, stop):
        assert 0 < stop - start <= step
        met.extend(range(start, stop))
        return True

    assert in_turns(length, step, [worker] * threads, done.append)
    assert sorted(met) == list(range(length))
    assert sum(done) == length
    assert 0 not in done


def test_each_worker_has_a_thread_and_the_first_is_the_callers():
    met = [set(), set()]
    both = threading.Barrier(2)

    def worker(known):
        def work(start, _):
            if start < 2:
                both.wait()  # each has its first step
            known.add(threading.get_ident())
            return True

        return work

    told_by = set()
    workers = [worker(known) for known in met]
    assert in_turns(9, 1, workers, lambda _: told_by.add(threading.get_ident()))
    assert met[0] == told_by == {threading.get_ident()}
    assert len(met[1] - met[0]) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_no_ends_it(threads):
    met, done = [], []

    def worker(start, _):
        met.append(start)
        return start != 5

    assert not in_turns(1000, 1, [worker] * threads, done.append)
    assert len(met) <= 6 + threads
    assert sum(done) < 1000


def test_one_step_needs_no_second_worker():
    assert in_turns(5, 9, [lambda start, stop: (start, stop) == (0, 5), None])


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_either_is_raised_and_ends_it(broken):
    ready = threading.Barrier(2)
    steps = []

    def fails(*_):
        ready.wait()
        raise OSError("gone")

    def works(start, _):
        if start < 2:
            ready.wait()
        steps.append(start)
        return True

    workers = [works, works]
    workers[broken] = fails
    with pytest.raises(OSError, match="gone"):
        in_turns(10**9, 1, workers)
    assert len(steps) < 10**9
