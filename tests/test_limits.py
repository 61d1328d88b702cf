"""How bounds print."""

import inspect

import ckptool
from ckptool.limits import DEFAULT_LIMITS, Limits


def test_only_bounds_that_are_not_the_default_are_shown():
    assert repr(DEFAULT_LIMITS) == "Limits()"
    assert repr(Limits(max_depth=9, max_records=7)) == "Limits(max_records=7, max_depth=9)"
    assert "limits: 'Limits' = Limits()" in str(inspect.signature(ckptool.open))
