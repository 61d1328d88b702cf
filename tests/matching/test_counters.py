"""Counters that old files have not."""

from __future__ import annotations

from ckptool.matching.counters import beside, uncounted

COUNTER = "bn.num_batches_tracked"


def test_a_state_of_an_old_version_or_of_none_need_not_count():
    for versions in (None, {}, {"": {"version": 2}}, {"bn": {"version": 1}}, {"bn": None}):
        assert uncounted([COUNTER, "bn.weight"], {}, versions) == {COUNTER}
    assert uncounted([COUNTER], {}, {"bn": {"version": 2}}) == set()


def test_the_version_is_that_of_the_module_in_the_file():
    own = {beside(COUNTER): "module.bn.running_mean"}
    assert uncounted([COUNTER], own, {"module.bn": {"version": 2}}) == set()
    assert uncounted([COUNTER], own, {"bn": {"version": 2}}) == {COUNTER}


def test_the_running_mean_stands_beside_the_counter():
    assert beside("num_batches_tracked") == "running_mean"
    assert beside(COUNTER) == "bn.running_mean"
