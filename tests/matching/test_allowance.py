"""What is accepted of a match, and how the rest is refused."""

from __future__ import annotations

import pytest

from ckptool.errors import MatchError, UsageError
from ckptool.matching import (
    Allowance,
    Ambiguity,
    DtypeChange,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Renaming,
)

LAYERS = [f"layers.{number}.weight" for number in range(8)]


def report(**fields):
    """Of a model most of which is loaded."""
    known = {"file": "a.pth", "model": "Net", "loaded": 98, "parameters": 100}
    return MatchReport(**{**known, "fitting": 9, "names": 10, **fields})


def large(**fields):
    """Of a model of so many tensors that a few may lack."""
    return report(fitting=95, names=100, **fields)


def kinds(allowance, found):
    return [problem.kind for problem in allowance.judge(found).problems]


def test_what_fits_is_accepted():
    whole = report(loaded=100, fitting=10)
    assert Allowance().judge(whole).problems == ()
    assert Allowance().refusal_error(whole) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"fitting": 0, "loaded": 0},
        {"fitting": 0, "loaded": 0, "names": 0, "parameters": 0},
        {"loaded": 0},
        {"loaded": 50},
        {"missing_keys": ["a"]},
        {"cast": (DtypeChange("a", "a", "float32", "float16", lossy=True),)},
        {"optimizer": OptimizerReport("names", 0, 2, ("one",))},
        {"untied": (("a", "b"),)},
        {"ambiguous": (Ambiguity(("a",), ("b",)),)},
        {"moved": ("layers.{0..1} of the file may be layers.{1..2} of the model",)},
    ],
)
def test_what_is_refused_has_a_reason(fields):
    for least in (None, 0, 0.75, 1):
        found, allowance = report(**fields), Allowance(min_coverage=least)
        assert (allowance.refusal_error(found) is None) == (
            allowance.judge(found).problems == ()
        ), least


def test_strict_refuses_missing_and_unexpected_names_and_not_strict_allows_them():
    found = report(missing_keys=["a"], unexpected_keys=["b"])
    assert kinds(Allowance(), found) == ["missing", "unexpected"]
    assert kinds(Allowance(strict=False), found) == []
    assert kinds(Allowance(strict=False, missing=False), found) == ["missing"]
    assert kinds(Allowance(missing=True, unexpected=True), found) == []


@pytest.mark.parametrize("globs", ["head.*", ["head.*"], ("nothing", "head.[wb]*")])
def test_globs_allow_the_names_that_they_match(globs):
    found = report(missing_keys=["head.weight"], unexpected_keys=["head.weight"])
    assert kinds(Allowance(missing=globs), found) == ["unexpected"]
    assert kinds(Allowance(unexpected=globs), found) == ["missing"]
    more = report(missing_keys=["head.weight", "my.head.weight"])
    (problem,) = Allowance(missing=globs).judge(more).problems
    assert problem.text == "1 tensor is missing from the file: my.head.weight"


def test_no_globs_allow_nothing():
    assert kinds(Allowance(missing=[]), report(missing_keys=["a"])) == ["missing"]


def test_another_shape_is_allowed_by_either_name_and_not_by_strict():
    found = report(mismatched=(Mismatch("head.weight", "module.fc.weight", (3,), (2,)),))
    assert kinds(Allowance(strict=False), found) == ["mismatched"]
    assert kinds(Allowance(mismatched="head.*"), found) == []
    assert kinds(Allowance(mismatched="module.fc.*"), found) == []
    assert kinds(Allowance(mismatched="module.*.bias"), found) == ["mismatched"]


def test_only_lossy_casts_are_refused():
    exact = DtypeChange("a", "a", "bfloat16", "float32", lossy=False)
    lossy = DtypeChange("b", "b", "float32", "float16", lossy=True, loss="2 of 4 overflow")
    found = report(cast=(exact, lossy))
    (problem,) = Allowance(strict=False).judge(found).problems
    assert problem.text == ("1 tensor is changed by a cast: b float32 -> float16 (2 of 4 overflow)")
    assert problem.remedy.arguments == (("allow_lossy_cast", ("b",)),)
    assert kinds(Allowance(lossy_cast=True), found) == []
    assert kinds(Allowance(), report(cast=(exact,))) == []


def test_ties_that_the_file_has_not_are_refused_whatever_is_allowed():
    found = report(untied=(("embed.weight", "head.weight"),))
    allowance = Allowance(strict=False, mismatched=True, lossy_cast=True)
    (problem,) = allowance.judge(found).problems
    assert "embed.weight, head.weight are tied in the model, but differ in the file" in problem.text
    refused = report(missing_keys=["a"], untied=found.untied)
    hint = Allowance().refusal_error(refused).hint
    assert hint.startswith("untie them in the model, or keep only one of them in the file")
    assert not Allowance().judge(refused).remedy.arguments


def test_where_nothing_fits_nothing_is_accepted_unless_no_coverage_is_asked_for():
    found = report(missing_keys=["a", "b"], unexpected_keys=["c"], fitting=0, names=2, loaded=0)
    assert kinds(Allowance(strict=False), found) == ["coverage"]
    assert kinds(Allowance(strict=False, min_coverage=0), found) == []
    error = Allowance(strict=False).refusal_error(found)
    assert "the file has c; the model has a, b" in str(error)
    assert "rename=" in error.hint


def test_a_model_without_tensors_takes_a_file_without_any():
    assert Allowance().judge(MatchReport()).problems == ()


def test_a_share_that_is_too_small_is_refused():
    found = report(missing_keys=["a"])
    (problem,) = Allowance(strict=False, min_coverage=0.99).judge(found).problems
    assert problem.kind == "coverage"
    assert problem.text == (
        "98.0% of the model's parameters would be loaded, expected at least 99%"
    )
    assert kinds(Allowance(strict=False, min_coverage=0.98), found) == []


UNCLEAR = Ambiguity(("s.a.w", "s.b.w", "t.a.w"), ("a.w", "b.w"), (r"^s\.=>",))
PROPOSED = Renaming("proposed", "", (("s.a.w", "a.w"), ("s.b.w", "b.w")), r"^s\.=>")
LEFT = {"missing_keys": ["a.w", "b.w"], "unexpected_keys": ["s.a.w", "s.b.w", "t.a.w"]}


def test_what_is_ambiguous_is_refused_while_one_of_its_names_is():
    found = report(**LEFT, ambiguous=(UNCLEAR,), proposed=(PROPOSED,))
    first, *_ = Allowance().judge(found).problems
    assert first.kind == "ambiguous"
    assert first.text == "ambiguous: s.a.w, s.b.w, t.a.w could be a.w, b.w"
    assert str(first.remedy) == (
        r"`rename=[r'^s\.=>'], allow_unexpected=['t.a.w']` (left out: t.a.w)"
    )
    assert Allowance().refusal_error(found).remedy == first.remedy
    assert Allowance().refusal_error(found).hint == str(first.remedy)
    assert kinds(Allowance(strict=False), found) == []
    assert kinds(Allowance(unexpected=True), found) == ["ambiguous", "missing"]


def test_each_way_to_decide_a_question_is_told():
    other = Renaming("proposed", "", (("t.a.w", "a.w"),), r"^t\.=>")
    asked = Ambiguity(UNCLEAR.names, UNCLEAR.candidates, (r"^s\.=>", r"^t\.=>"))
    remedy = (
        Allowance()
        .refusal_error(report(**LEFT, ambiguous=(asked,), proposed=(PROPOSED, other)))
        .remedy
    )
    assert dict(remedy.arguments)["rename"] == (r"^s\.=>",)
    (way,) = remedy.instead
    assert dict(way.arguments) == {
        "rename": (r"^t\.=>",),
        "allow_missing": ("b.w",),
        "allow_unexpected": ("s.a.w", "s.b.w"),
    }


def test_rules_that_are_proposed_are_told_together_with_what_is_left():
    other = Renaming("proposed", "", (("t.a.w", "c.w"),), r"^t\.a\.=>c.")
    found = report(
        missing_keys=["a.w", "b.w", "c.w", "d"],
        unexpected_keys=LEFT["unexpected_keys"],
        proposed=(PROPOSED, other),
    )
    error = Allowance().refusal_error(found)
    assert error.remedy.arguments == (
        ("rename", (r"^s\.=>", r"^t\.a\.=>c.")), ("allow_missing", ("d",)),
    )  # fmt: skip
    assert error.message.endswith("the rules in the hint match more, but were not applied")
    allowed = Allowance(missing="d").refusal_error(found)
    assert allowed.remedy.arguments == (("rename", (r"^s\.=>", r"^t\.a\.=>c.")),)


def test_where_a_model_is_of_another_size_its_shapes_are_told():
    wrong = tuple(Mismatch(name, name, (3,), (2,)) for name in LAYERS)
    found = report(mismatched=wrong, fitting=0, names=8, loaded=0)
    (first,) = Allowance().judge(found).problems
    assert (
        first.text == "8 tensors are of another shape: layers.{0..7}.weight (file [3], model [2])"
    )
    assert not first.remedy
    assert Allowance().refusal_error(found).hint == (
        "the architectures differ: 8 of the model's 8 tensors are not in the file"
    )
    (second,) = Allowance(mismatched=True).judge(found).problems
    assert second.text == "nothing is left to load: the common keys have other shapes"
    assert Allowance(mismatched=True, min_coverage=0).judge(found).problems == ()


def test_buffers_alone_are_nothing_of_a_model():
    found = report(missing_keys=["1.weight"], fitting=1, names=2, loaded=0, parameters=9)
    (problem,) = Allowance(strict=False).judge(found).problems
    assert problem.text.startswith("the file has none of the model's parameters; only 1 other ")


def test_what_is_no_share_is_none_and_what_is_allowed_is_yes_or_no_or_globs():
    for least in (float("nan"), -1, 2, "0.5", True):
        with pytest.raises(UsageError, match="is not a number from 0 to 1"):
            Allowance(min_coverage=least)
    for allowed in (3, [1], b"x", {"a": 1}):
        with pytest.raises(UsageError, match="is not True, False or a list of globs"):
            Allowance(missing=allowed)
    with pytest.raises(UsageError, match="is not True or False"):
        Allowance(strict="no")


def test_of_very_many_names_only_the_first_are_folded():
    found = report(missing_keys=[f"l.{n}.weight" for n in range(20_000)])
    (problem,) = Allowance().judge(found).problems
    assert problem.text == (
        "20,000 tensors are missing from the file: l.{0..1999}.weight, l.2000.weight, "
        "l.2001.weight, l.2002.weight, and 17,997 more"
    )


def test_what_the_optimizer_refuses():
    optimizer = OptimizerReport("names", 0, 2, ("the file has 3 parameters, the optimizer 2",))
    (problem,) = Allowance(strict=False).judge(report(optimizer=optimizer)).problems
    assert (problem.kind, problem.text) == ("optimizer", optimizer.problems[0])


def test_what_helps_against_the_optimizers_first_problem_is_in_the_hint():
    optimizer = OptimizerReport("names", 0, 2, ("one", "two"), remedy="optimizer_key='a'")
    found = report(missing_keys=["b"], optimizer=optimizer)
    assert [str(one.remedy) for one in Allowance(strict=False).judge(found).problems] == [
        "optimizer_key='a'", "",
    ]  # fmt: skip
    assert Allowance().refusal_error(found).hint == "`allow_missing=['b']`, optimizer_key='a'"


def test_a_refusal_is_three_lines_a_hint_and_the_report():
    found = report(
        missing_keys=LAYERS,
        unexpected_keys=["b"],
        mismatched=(Mismatch("c", "c", (3,), (2,)),),
        untied=(("d", "e"),),
    )
    error = Allowance().refusal_error(found)
    assert isinstance(error, MatchError)
    assert str(error).splitlines() == [
        "a.pth does not fit Net: 9 of 10 tensors match (98.0% of the parameters)",
        "1 tensor is of another shape: c (file [3], model [2])",
        "8 tensors are missing from the file: layers.{0..7}.weight",
    ]
    assert error.report is found
    assert error.file == "a.pth"


def test_its_hint_is_what_has_to_be_allowed():
    missing = large(missing_keys=LAYERS)
    assert Allowance().refusal_error(missing).hint == "allow_missing='layers.*'"
    both = large(missing_keys=["a", "b.c", "d", "e"], unexpected_keys=["f"])
    assert Allowance().refusal_error(both).hint == (
        "allow_missing=['a', 'b.c', 'd', 'e'], allow_unexpected=['f']"
    )


def test_what_the_hint_says_helps():
    found = large(missing_keys=LAYERS, unexpected_keys=["b[0]"])
    assert Allowance(missing="layers.*", unexpected="b[[]0]").judge(found).problems == ()
    assert (
        Allowance().refusal_error(found).hint
        == "allow_missing='layers.*', allow_unexpected=['b[[]0]']"
    )


OTHERS = [f"other.{n}" for n in range(11)]
WRONG = tuple(Mismatch(f"w.{n}", f"w.{n}", (3,), (2,)) for n in range(4))


@pytest.mark.parametrize(
    "fields",
    [
        {"missing_keys": OTHERS},
        {"missing_keys": LAYERS, "mismatched": WRONG},
        {"missing_keys": ["a"], "unexpected_keys": OTHERS},
        {"unexpected_keys": OTHERS},
        {
            "missing_keys": [*OTHERS, "a"],
            "proposed": (Renaming("proposed", "", (("b", "a"),), "b=>a"),),
            "unexpected_keys": ["b"],
        },
    ],
)
def test_more_than_a_tenth_of_a_model_is_never_hinted_away(fields):
    found = large(**fields)
    judgement = Allowance().judge(found)
    assert judgement.remedy.note.startswith("the architectures differ: ")
    assert not any(one.arguments for one in (judgement.remedy, *judgement.remedy.instead))
    assert not any(problem.remedy.arguments for problem in judgement.problems)
    assert str(judgement.remedy).endswith("even after the proposed rules") == ("proposed" in fields)


def test_what_a_part_of_a_larger_file_has_beside_it_may_be_left_out():
    rule = Renaming("proposed", "", tuple((f"a.{n}", f"b.{n}") for n in range(9)), "^a=>b")
    found = report(
        missing_keys=[name for _, name in rule.names],
        unexpected_keys=[*(own for own, _ in rule.names), *(f"text.{n}" for n in range(90))],
        proposed=(rule,),
    )
    assert str(Allowance().judge(found).remedy) == (
        "`rename=['^a=>b'], allow_unexpected='text.*'` (left out: text.{0..89})"
    )


def test_a_name_that_may_be_another_one_is_not_hinted_away():
    asked = Ambiguity(("fc.weight", "aux.weight"), ("head.weight",))
    found = large(
        missing_keys=["head.weight"],
        unexpected_keys=["fc.weight", "aux.weight"],
        ambiguous=(asked,),
    )
    judgement = Allowance().judge(found)
    assert judgement.problems[0].text == "ambiguous: fc.weight, aux.weight could be head.weight"
    assert str(judgement.remedy) == (
        "rename=['REGEX=>REPL'] if these are the same tensors; otherwise the architectures differ"
    )
    assert not judgement.remedy.arguments
    assert not any(problem.remedy.arguments for problem in judgement.problems)
    assert Allowance(strict=False).judge(found).problems == ()


def test_where_more_has_to_be_loaded_no_allowance_helps():
    found = large(missing_keys=["a"])
    assert not Allowance(min_coverage=0.99).judge(found).remedy


def test_names_that_look_like_arguments_are_only_names():
    name = "x', rename='a=>b\", allow_mismatched=True"
    error = Allowance().refusal_error(report(missing_keys=[name], unexpected_keys=["min_coverage"]))
    assert error.remedy.arguments == (
        ("allow_missing", (name,)),
        ("allow_unexpected", ("min_coverage",)),
    )
    assert eval(f"dict({error.hint})")["allow_missing"] == [name]


def test_a_name_with_a_control_character_is_in_an_argument_what_it_is():
    error = Allowance().refusal_error(report(missing_keys=["a\x1bb"]))
    assert error.remedy.arguments == (("allow_missing", ("a\x1bb",)),)
    assert error.hint == r"allow_missing=['a\x1bb']"


def test_a_name_that_no_one_could_read_is_not_given_to_an_argument():
    long = "x" * 5000
    error = Allowance().refusal_error(
        report(missing_keys=[f"a.{long}"], unexpected_keys=[f"{long}.b"])
    )
    assert error.hint.startswith("too many differences for a few globs")
    error = Allowance().refusal_error(report(missing_keys=[f"a.{long}"]))
    assert error.remedy.arguments == (("allow_missing", ("a.*",)),)


def test_a_coverage_is_never_rounded_up_to_all():
    found = report(missing_keys=["a"], loaded=99_999_999, parameters=100_000_000)
    assert "(>99.9% of the parameters)" in str(Allowance().refusal_error(found))


def test_a_state_dict_in_memory_has_no_name():
    found = report(file="", model="", missing_keys=["a"])
    assert str(Allowance().refusal_error(found)).startswith(
        "the state dict does not fit the model: 9 of"
    )


def test_names_that_control_the_terminal_are_escaped_and_long_lists_cut():
    found = report(
        file="\x1b[31m.pth",
        missing_keys=["a\x1b[0m", *map(str, "bcdefghij")],
        unexpected_keys=["x" * 5000],
    )
    text = str(Allowance().refusal_error(found).message)
    assert "\x1b" not in text
    assert "and 6 more" in text
    assert len(text) < 600
