"""What a refusal advises can be given as it stands, and is enough."""

import re
import shlex

import pytest
import torch
from hypothesis import given, settings

import ckptool
from ckptool.errors import MatchError
from ckptool.matching import Allowance, Slot, matched
from ckptool.render.remedies import as_options, option_words
from ckptool.transforms import regex_rule
from tests.loading.test_renamed_trees import cases
from tests.loading.test_temptations import WRONG, built, layers, state_of

STEM = layers("stem.", "a", size=5)


def blocks(name):
    return {
        f"{name}.{number}.{part}": shape
        for number in range(3)
        for part, shape in {**layers("attn.", "q"), **layers("", "mlp", size=4)}.items()
    }


PROPOSED = {
    "a part of another name": ({**STEM, **blocks("layers")}, {**STEM, **blocks("blocks")}),
    "in a wrapper": (
        {f"module.{name}": shape for name, shape in {**STEM, **blocks("old")}.items()},
        {**STEM, **blocks("new")},
    ),
}


@pytest.mark.parametrize("case", PROPOSED)
def test_a_proposed_rule_loads_what_was_refused(case):
    have, want = PROPOSED[case]
    model, state = built(want), state_of(have)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, state)
    assert all(torch.equal(before[name], held) for name, held in model.state_dict().items())
    given = dict(caught.value.remedy.arguments)
    assert given["rules"]
    assert ckptool.load_into(model, state, **given).coverage == 1


def followed(have, want, arguments):
    """What is still refused once the arguments are given."""
    given = dict(arguments)
    rules = [regex_rule(text) for text in given.pop("rules", ())]
    allowed = {
        name.removeprefix("allow_"): value for name, value in given.items() if name != "prefixes"
    }
    return Allowance(**allowed).problems(matched(have, want, rules=rules).report)


def pasted(text):
    """What of a hint can be given as it stands: what is in backticks, or all of it."""
    return [found[1] for found in re.findall(r"(`+)(.+?)\1", text)] or [text]


def check_texts(remedy):
    """What is shown can be pasted, into Python and into a shell, and is what is meant."""
    ways = [way for way in (remedy, *remedy.instead) if way.arguments and not way.to_fill_in]
    if not ways:
        return
    calls, options = pasted(str(remedy)), pasted(as_options(remedy))
    assert len(ways) == len(calls) == len(options), str(remedy)
    for way, call, line in zip(ways, calls, options, strict=True):
        given = {
            name: [*value] if isinstance(value, tuple) else value for name, value in way.arguments
        }
        assert eval(f"dict({call})") == given
        assert shlex.split(line) == option_words(way)


def check_advice(have, want):
    have, want = ({name: Slot(shape) for name, shape in side.items()} for side in (have, want))
    remedy = Allowance().judged(matched(have, want).report).remedy
    check_texts(remedy)
    for way in (remedy, *remedy.instead):
        if way.arguments and not way.to_fill_in:
            assert followed(have, want, way.arguments) == (), str(remedy)


@pytest.mark.parametrize("case", {**WRONG, **PROPOSED})
def test_of_names_that_tempt_what_is_advised_is_enough(case):
    check_advice(*{**WRONG, **PROPOSED}[case][:2])


@given(cases())
@settings(max_examples=200)
def test_of_random_models_what_is_advised_is_enough(case):
    have, want, _ = case
    check_advice(have, want)
