"""How far a comparison has come."""

import pytest

from ckptool.inspection.diff_contents import Meter


@pytest.mark.parametrize("told", [[10], [4, 4, 2], [4, 9, 9], [1]])
def test_bytes_done_go_up_to_what_was_expected_and_never_back(told):
    seen = []
    meter = Meter(lambda done, total: seen.append((done, total)))
    meter.expect(10)
    meter.expect(5)
    for nbytes in (10, 5):
        meter.begin(nbytes)
        for count in told:
            meter.told(count)
        meter.end()
    assert seen[-1] == (15, 15)
    assert seen == sorted(seen)


def test_more_than_expected_is_not_more_than_all():
    seen = []
    meter = Meter(lambda done, total: seen.append((done, total)))
    meter.expect(3)
    meter.begin(5)
    meter.end()
    assert seen == [(5, 5)]


def test_less_than_expected_is_all_at_the_end():
    seen = []
    meter = Meter(lambda done, total: seen.append((done, total)))
    meter.finish()
    assert seen == []
    meter.expect(3)
    meter.finish()
    assert seen == [(3, 3)]
