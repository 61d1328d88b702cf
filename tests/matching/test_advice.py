"""What is advised where names are not concluded."""

import pytest

from ckptool.matching import Ambiguity, MatchReport
from ckptool.matching.advice import is_of_another, may_be_asked, ruling

WHOLE = Ambiguity(("s.a.w", "s.b.w"), ("a.w", "b.w"), (r"^s\.=>",))
LONE = Ambiguity(("proj.w", "proj.b"), ("pool.w", "pool.b"), (r"^proj\.=>pool.",))
SHIFTED = Ambiguity(("a.3.w", "a.4.w"), ("a.0.w", "a.1.w"), (r"^a\.3\.=>a.0.",))


def report(fitting, missing=2, unexpected=2):
    names = [f"x{number}" for number in range(max(missing, unexpected))]
    return MatchReport(
        fitting=fitting,
        names=fitting + missing,
        missing_keys=names[:missing],
        unexpected_keys=names[:unexpected],
    )


@pytest.mark.parametrize(
    ("fitting", "missing", "unexpected", "expected"),
    [(0, 9, 9, True), (2, 30, 30, True), (2, 30, 0, False), (20, 30, 30, False), (9, 0, 90, False)],
)
def test_next_to_nothing_of_both_sides_is_another_model(fitting, missing, unexpected, expected):
    assert is_of_another(report(fitting, missing, unexpected)) is expected


@pytest.mark.parametrize(
    ("fitting", "unclear", "expected"),
    [
        (30, [WHOLE], True),
        (30, [LONE], False),
        (30, [LONE, WHOLE], True),
        (30, [SHIFTED], False),
        (0, [SHIFTED], False),
        (0, [LONE], True),
        (0, [WHOLE], True),
        (30, [], False),
        (30, [Ambiguity(("a.w", "b.w"), ("x.w", "y.w"))], False),
    ],
)
def test_a_rule_is_advised_where_it_is_likely(fitting, unclear, expected):
    assert may_be_asked(report(fitting), unclear) is expected


def test_not_where_it_would_leave_most_as_it_was():
    assert not may_be_asked(report(0, missing=9, unexpected=9), [WHOLE])


def test_rules_that_rule_each_other_out_are_all_told():
    unclear = Ambiguity(("s.a", "t.a"), ("a",), (r"^s\.=>", r"^t\.=>"))
    assert ruling([unclear], ["a"], ["s.a", "t.a"]) == (
        r"rules=[r'^s\.=>'], allow_unexpected=True; or rules=[r'^t\.=>'] instead"
    )
    assert ruling([WHOLE, LONE], [], []) == r"rules=[r'^s\.=>']"
