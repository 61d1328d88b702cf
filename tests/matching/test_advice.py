"""What is advised where names are not concluded."""

import pytest

from ckptool.errors import NameCollision
from ckptool.matching import Ambiguity, MatchReport, Mismatch, Slot
from ckptool.matching.advice import (
    OTHER,
    SCATTERED,
    allowing,
    allowing_all,
    by_who_wrote_it,
    doubted,
    elsewhere,
    is_named_otherwise,
    is_of_another,
    may_be_asked,
    naming,
    ruling,
    tried,
)
from ckptool.matching.again import Again
from ckptool.remedies import Remedy

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


def left_over(**left):
    """What has to be allowed once a rule is given, which is nothing for others."""
    return lambda rules: left.get("".join(rules).strip("^=>"))


def test_rules_that_rule_each_other_out_are_all_told():
    unclear = Ambiguity(("s.a", "t.a"), ("a",), ("^s=>", "^t=>", "^u=>"))
    rest = Remedy((("allow_unexpected", True),), " (passes over it)")
    other = Remedy((("allow_missing", True),))
    assert str(ruling([unclear], left_over(s=rest, t=rest, u=other))) == (
        "`rules=['^s=>'], allow_unexpected=True` (passes over it); "
        "or `rules=['^t=>'], allow_unexpected=True` (passes over it); "
        "or `rules=['^u=>'], allow_missing=True`"
    )


def test_rules_that_do_no_good_are_not_told():
    unclear = Ambiguity(("s.a", "t.a"), ("a",), ("^s=>", "^t=>"))
    assert str(ruling([unclear], left_over(t=Remedy()))) == "rules=['^t=>']"
    assert not ruling([unclear], left_over())
    assert not ruling([Ambiguity(("a",), ("b",))], lambda rules: Remedy())


def test_of_questions_those_that_more_than_a_lone_module_speaks_for_are_answered():
    assert str(ruling([LONE, WHOLE], lambda rules: Remedy())) == r"rules=[r'^s\.=>']"
    assert dict(ruling([WHOLE, WHOLE], lambda rules: Remedy()).arguments) == {
        "rules": (r"^s\.=>", r"^s\.=>")
    }


def after(missing, unexpected, mismatched=()):
    """What is found again, whatever the rules are."""
    known = {"missing_keys": ["a", "b"], "unexpected_keys": ["x", "y"]}
    found = MatchReport(missing_keys=missing, unexpected_keys=unexpected, mismatched=mismatched)
    return lambda rules: found if rules else MatchReport(**known)


def test_a_rule_that_is_tried_tells_what_is_left():
    report = MatchReport(missing_keys=["a", "b", "own"], unexpected_keys=["x", "y"])
    found = tried(report, ["r=>"], after(["b"], ["y"]))
    assert (found.missing_keys, found.unexpected_keys) == (["b", "own"], ["y"])
    wrong = Mismatch("a", "x", (1,), (2,))
    found = tried(report, ["r=>"], after(["b"], ["y"], (wrong,)))
    assert found.mismatched == (wrong,)


@pytest.mark.parametrize(
    "again",
    [
        after(["a", "b"], ["x", "y"]),
        after(["b", "met before"], ["y"]),
        after(["b"], ["y", "taken before"]),
    ],
)
def test_a_rule_that_meets_nothing_or_loses_something_does_no_good(again):
    report = MatchReport(missing_keys=["a", "b"], unexpected_keys=["x", "y"])
    assert tried(report, ["r=>"], again) is None


def test_rules_that_go_not_together_do_no_good():
    def collide(rules):
        if rules:
            raise NameCollision("two of one name")
        return MatchReport()

    assert tried(MatchReport(), ["a=>b"], collide) is None
    assert tried(MatchReport(), ["no rule"], None) is None


def test_where_nothing_else_is_known_a_rule_is_tried_on_the_names_alone():
    report = MatchReport(missing_keys=["b.w", "c.w"], unexpected_keys=["a.w", "d.w"])
    found = tried(report, ["^a=>x", "^x=>b"], None)
    assert (found.missing_keys, found.unexpected_keys) == (["c.w"], ["d.w"])


@pytest.mark.parametrize(
    ("names", "others", "given"),
    [
        (["a", "b"], ["c"], ("a", "b")),
        (["l.0.w", "l.1.w", "l.2.w", "l.3.w"], ["c"], "l.*"),
        (["l.0.w", "l.1.w", "l.2.w", "l.3.w"], ["l.0.b"], "l.*.w"),
        (["a", "b", "c", "d"], ["e"], ("a", "b", "c", "d")),
        (["a[0]"], ["a0"], ("a[[]0]",)),
        ([f"{n}{c}.w" for n in "abcdefgh" for c in "xyz"], [], True),
    ],
)
def test_what_is_allowed_is_no_more_than_has_to_be(names, others, given):
    found = allowing("allow_missing", names, [*names, *others])
    assert found.arguments == (("allow_missing", given),)


def test_where_a_few_globs_would_allow_more_nothing_is_allowed():
    names = [f"{n}{c}.w" for n in "abcdefgh" for c in "xyz"]
    assert allowing("allow_missing", names, [*names, "other"]) is SCATTERED
    assert allowing("allow_missing", names) is SCATTERED  # what else there is is not known
    one = allowing("allow_unexpected", ["x"])
    assert allowing_all([one, SCATTERED]) is SCATTERED
    assert allowing_all([one]) == one


def asked(have, want):
    return Again(lambda rules: MatchReport(), have, want)


def test_where_shapes_meet_under_other_names_it_is_of_no_other_model():
    have = {"a.w": Slot((4, 4)), "a.b": Slot((4,)), "n": Slot(())}
    want = {"b.w": Slot((4, 4)), "b.b": Slot((5,)), "m": Slot(())}
    report = MatchReport(missing_keys=list(want), unexpected_keys=list(have))
    assert is_named_otherwise(report, asked(have, want))
    assert not is_named_otherwise(report, asked(have, want), 0.5)
    assert not is_named_otherwise(report, asked({**have, "a.w": Slot((2,))}, want))
    assert not is_named_otherwise(report, None)
    assert str(naming(report, asked(have, want))).startswith("what is left on both sides has the")
    assert naming(report, None) is OTHER


def test_a_module_is_doubted_of_which_the_file_has_all_shapes_left_over():
    have = {"x.w": Slot((4, 4)), "x.b": Slot((4,)), "n": Slot(())}
    want = {"a.w": Slot((4, 4)), "a.b": Slot((4,)), "c.w": Slot((5, 4)), "c.b": Slot((1,))}
    report = MatchReport(missing_keys=list(want), unexpected_keys=list(have))
    assert elsewhere(report, asked(have, want)) == ["a.w", "a.b"]
    assert elsewhere(report, asked(have, want | {"d.w": Slot((4, 4))})) == ["a.w", "a.b"]
    assert elsewhere(report, None) == []
    twice = want | {"d.w": Slot((4, 4))}
    report = MatchReport(missing_keys=list(twice), unexpected_keys=list(have))
    assert elsewhere(report, asked(have, twice)) == []


def test_what_is_doubted_is_allowed_where_it_is_not_the_same():
    allowed = Remedy((("allow_missing", ("a.w",)),))
    assert str(doubted(["a.w", "a.b"], allowed)) == (
        "a.w, a.b may be in the file under another name: rules=['REGEX=>REPL']; "
        "or `allow_missing=['a.w']` where it is not"
    )
    assert str(doubted(["a.w"], SCATTERED)).endswith("name: rules=['REGEX=>REPL']")


def test_what_wrote_the_file_comes_first():
    allowed = Remedy((("allow_missing", ("a.w",)),))
    assert str(by_who_wrote_it("Net.from_pretrained('x')", allowed)) == (
        "Net.from_pretrained('x'); or `allow_missing=['a.w']`"
    )
    assert str(by_who_wrote_it("Net.from_pretrained('x')", OTHER)) == "Net.from_pretrained('x')"
