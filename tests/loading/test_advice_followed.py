"""What a refusal advises, given as it is told, loads; and it says what is not loaded then."""

import re
import shlex

import pytest
import torch
from hypothesis import given, settings

import ckptool
from ckptool.errors import AmbiguousName, MatchError
from ckptool.matching import Allowance, Slot, matched
from ckptool.render.remedies import as_options, option_words
from ckptool.transforms import regex_rule
from tests.loading.test_renamed_trees import cases
from tests.loading.test_temptations import BODY, WRONG, built, layers, state_of

ENCODER = ("0", "2", "4")
QUERY, KEY = layers("encoder_q.", *ENCODER), layers("encoder_k.", *ENCODER)
HEAD = layers("fc.", "0", size=7)


def listed(name, count, size=3):
    """Blocks of a list."""
    return {
        f"{name}.{n}.{part}": shape
        for n in range(count)
        for part, shape in layers("", "attn", "mlp", size=size).items()
    }


NOT_ALL = {
    "two encoders for one": ({**QUERY, **KEY}, layers("", *ENCODER), ["encoder_k"]),
    "two encoders for one of another name": (
        {**QUERY, **KEY, "queue": (9, 4)}, layers("encoder.", *ENCODER), ["encoder_k", "queue"],
    ),
    "two encoders for one that has a head": (
        {**QUERY, **KEY, "queue": (9, 4)}, {**layers("encoder.", *ENCODER), **HEAD},
        ["encoder_k", "queue", "fc"],
    ),
    "as many names on both sides": (
        {**QUERY, **KEY}, {**layers("encoder.", *ENCODER), **layers("fc.", "0", "1", "2", size=7)},
        ["encoder_k", "fc"],
    ),
    "two encoders in a wrapper": (
        {f"module.{name}": shape for name, shape in {**QUERY, **KEY}.items()},
        layers("", *ENCODER), ["encoder_k"],
    ),
    "one encoder for two": (layers("encoder.", *ENCODER), {**QUERY, **KEY}, ["encoder_k"]),
    "more layers under another name": (
        listed("layers", 8), listed("blocks", 4), ["layers.{4..7}"],
    ),
    "more layers, and as many other names": (
        listed("layers", 8), {**listed("blocks", 4), **{f"fc.{n}": (7, 7) for n in range(16)}},
        ["layers.{4..7}", "fc.{0..15}"],
    ),
    "fewer layers under another name": (
        listed("layers", 4), listed("blocks", 8), ["blocks.{4..7}"],
    ),
    "a head of another shape under the new name": (
        {**QUERY, **KEY, "encoder_q.6.weight": (4, 3)},
        {**layers("encoder.", *ENCODER), "encoder.6.weight": (5, 3)}, ["encoder_k"],
    ),
}  # fmt: skip
"""Of each what is left over, as the hint has to tell it."""


def refused(have, want, **options):
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(built(want), state_of(have), **options)
    return caught.value


@pytest.mark.parametrize("case", NOT_ALL)
def test_a_rule_that_is_not_all_comes_with_what_makes_it_load(case):
    have, want, left = NOT_ALL[case]
    error = refused(have, want)
    given = dict(error.remedy.arguments)
    assert given["rules"]
    assert all(word in error.hint for word in left), error.hint
    report = ckptool.load_into(built(want), state_of(have), **given)
    assert report.coverage > error.report.coverage


@pytest.mark.parametrize("case", NOT_ALL)
def test_the_text_is_the_call(case):
    have, want, _ = NOT_ALL[case]
    error = refused(have, want)
    given = eval(f"dict({told(error.hint)[0]})")
    assert given == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in error.remedy.arguments
    }
    ckptool.load_into(built(want), state_of(have), **given)


def followed(have, want, arguments):
    """What is still refused once the arguments are given."""
    given = dict(arguments)
    rules = [regex_rule(text) for text in given.pop("rules", ())]
    allowed = {name.removeprefix("allow_"): value for name, value in given.items()}
    match = matched(have, want, rules=rules)
    return Allowance(**allowed).problems(match.report)


def told(text):
    """What of a hint can be given as it stands: what is in backticks, or all of it."""
    return [found[1] for found in re.findall(r"(`+)(.+?)\1", text)] or [text]


def check_texts(remedy):
    """What is told can be pasted, into Python and into a shell, and is what is meant."""
    ways = [way for way in (remedy, *remedy.instead) if way.arguments and not way.to_fill_in]
    calls, options = told(str(remedy)), told(as_options(remedy))
    if not ways:
        return
    assert len(ways) == len(calls) == len(options), str(remedy)
    for way, call, line in zip(ways, calls, options, strict=True):
        given = {
            name: [*value] if isinstance(value, tuple) else value for name, value in way.arguments
        }
        assert eval(f"dict({call})") == given
        assert shlex.split(line) == option_words(way)


def check_advice(have, want):
    have, want = ({name: Slot(shape) for name, shape in side.items()} for side in (have, want))
    match = matched(have, want)
    remedy = Allowance().judged(match.report, match.again).remedy
    check_texts(remedy)
    for way in (remedy, *remedy.instead):
        given = dict(way.arguments)
        if not given or way.to_fill_in or "more is asked then" in way.note:
            continue
        assert followed(have, want, given.items()) == (), str(remedy)


@pytest.mark.parametrize("case", {**WRONG, **NOT_ALL})
def test_of_names_that_tempt_what_is_advised_is_enough(case):
    have, want, *_ = {**WRONG, **NOT_ALL}[case]
    check_advice(have, want)


@given(cases())
@settings(max_examples=200)
def test_of_random_models_what_is_advised_is_enough(case):
    have, want, _ = case
    check_advice(have, want)


def test_a_rule_helps_beside_what_it_does_not_mend():
    have = {**QUERY, **KEY, "scale": (3,), **BODY}
    want = {**layers("encoder.", *ENCODER), "scale": (4,), **BODY}
    error = refused(have, want)
    given = dict(error.remedy.arguments)
    assert given["allow_mismatched"] == ("scale",)
    ckptool.load_into(built(want), state_of(have), **given)


def test_a_lossy_cast_is_allowed_beside_the_rule():
    have, want = {**QUERY, **KEY, "scale": (3,)}, {**layers("encoder.", *ENCODER), "scale": (3,)}
    state = {**state_of(have), "scale": torch.full((3,), 1e300, dtype=torch.float64)}
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(built(want), state)
    given = dict(caught.value.remedy.arguments)
    assert given["allow_lossy_cast"] == ("scale",)
    ckptool.load_into(built(want), state, **given)


def test_what_is_allowed_already_is_told_once():
    have, want, _ = NOT_ALL["two encoders for one of another name"]
    allowed = ("encoder_k.*", "encoder_q.*", "queue")
    error = refused(have, want, allow_unexpected=[*allowed])
    given = dict(error.remedy.arguments)
    assert (given.keys(), given["allow_unexpected"]) == ({"rules", "allow_unexpected"}, allowed)


HALVES = {**layers("enc.", *ENCODER), **layers("dec.", *ENCODER)}
WHOLES = {**layers("encoder.", *ENCODER), **layers("decoder.", *ENCODER), **HEAD}


@pytest.mark.parametrize("front", ["", "x.y."])
@pytest.mark.parametrize(
    "allowed",
    [{}, {"allow_missing": "fc.*"}, {"allow_missing": ["fc.*"]}, {"allow_missing": True}],
    ids=repr,
)
def test_whoever_does_what_each_hint_says_gets_there(front, allowed):
    """Each hint takes the place of the call before: nothing that was given is lost."""
    state = {f"{front}{name}": value for name, value in state_of(HALVES).items()}
    source = {"model": state, "ema": dict(state)}
    given = {"rules": iter(["^never=>met"]), **allowed}
    if front:
        given["prefixes"] = ["x.=", "y="]
    for _ in range(5):
        try:
            report = ckptool.load_into(built(WHOLES), source, **given)
        except (AmbiguousName, MatchError) as error:
            given = eval(f"dict({told(error.hint)[0]})")
        else:
            break
    assert set(report.missing_keys) == set(HEAD)
    assert (given["rules"][0], given["key"]) == ("^never=>met", "model")


def test_a_rule_that_would_do_no_good_is_not_advised():
    have, want, _ = NOT_ALL["two encoders for one"]
    match = matched(*({n: Slot(s) for n, s in side.items()} for side in (have, want)))
    question = match.report.ambiguous[0]
    for rule in ("^encoder=>x", "^.*$=>0.weight"):  # which meets nothing, or makes two names one
        unclear = type(question)(question.names, question.candidates, (rule,))
        report = match.report.with_changes(ambiguous=(unclear,))
        remedy = Allowance().judged(report, match.again).remedy
        assert "rules" not in dict(remedy.arguments)
        assert rule not in str(remedy)


def test_what_is_advised_beside_strict_false_has_that_as_well():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    state = {"0.weight": torch.ones(3, 2), "1.weight": torch.ones(5, 3), "1.bias": torch.ones(4)}
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, state, strict=False)
    assert caught.value.hint == "strict=False, allow_mismatched=['1.weight']"
    report = ckptool.load_into(model, state, **dict(caught.value.remedy.arguments))
    assert report.missing_keys == ["0.bias"]
