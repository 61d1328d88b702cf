"""Numbers as the page has them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.render.figures import bars
from ckptool.render.page.data import DIGITS, figure


def test_a_figure():
    for value, shown in [
        (None, None),
        (0, 0),
        (True, 1),
        (-7, -7),
        (2**53 - 1, 2**53 - 1),
        (2**63 - 1, 9.22337e18),
        (0.1234567890, 0.123457),
        (3.0, 3),
        (-0.0, 0),
        (1e300, 1e300),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (1 + 2j, None),
    ]:
        assert figure(value) == shown, value


@given(st.one_of(st.floats(), st.integers(-(1 << 80), 1 << 80)))
def test_json_takes_every_figure_and_it_is_right_to_six_digits(value):
    shown = figure(value)
    json.dumps(shown, allow_nan=False)
    if math.isfinite(value):
        assert float(shown) == pytest.approx(value, rel=1e-5)


def test_bars_are_drawn_against_the_fullest_and_none_that_has_elements_is_empty():
    drawn = bars((0, 1, 500_000, 1_000_000), DIGITS)
    assert [DIGITS.index(digit) for digit in drawn] == [0, 1, 32, 63]


def test_a_histogram_of_nothing_is_flat():
    assert bars((0, 0), DIGITS) == "00"
    assert bars((), DIGITS) == ""
