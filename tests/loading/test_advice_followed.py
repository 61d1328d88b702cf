"""What a refusal advises can be given as it stands, and is enough."""

import re
import shlex

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ckptool
from ckptool.errors import MatchError
from ckptool.matching import Allowance, Slot, match_keys
from ckptool.render.text import to_option_words, to_options_text
from ckptool.transforms import regex_rule
from tests.loading.test_temptations import WRONG, built, layers, state_of
from tests.matching.test_renamed_trees import cases

STEM = layers("stem.", "a", size=5)


def blocks(name):
    return {
        f"{name}.{number}.{part}": shape
        for number in range(3)
        for part, shape in {**layers("attn.", "q"), **layers("", "mlp", size=4)}.items()
    }


def inside(name, shapes):
    return {f"{name}.{inner}": shape for inner, shape in shapes.items()}


def sequence(*numbers, size=5):
    """Layers of one shape, as an `nn.Sequential` numbers them."""
    return {
        name: shape
        for number in numbers
        for name, shape in layers("", str(number), size=size).items()
    }


NORM = {"weight": (5,), "bias": (5,), "running_mean": (5,), "num_batches_tracked": ()}
VGG = {**inside("features", sequence(0, 3, 6)), **inside("classifier", sequence(0, 3, size=4))}
RESNET = {
    **inside("conv1", {"weight": (5, 3)}), **inside("bn1", NORM),
    **{
        name: shape
        for layer in (1, 2)
        for block in (0, 1)
        for part, shapes in (("conv1", {"weight": (5, 5)}), ("bn1", NORM), ("bn2", NORM))
        for name, shape in inside(f"layer{layer}.{block}.{part}", shapes).items()
    },
}  # fmt: skip


def densenet(norm, conv):
    """Two layers of two blocks."""
    return {
        name: shape
        for block in (1, 2)
        for layer in (1, 2)
        for number in (1, 2)
        for part, shapes in ((norm, NORM), (conv, {"weight": (5, 5, number)}))
        for name, shape in inside(f"block{block}.layer{layer}.{part}{number}", shapes).items()
    }


PROPOSED = {
    "a part of another name": ({**STEM, **blocks("layers")}, {**STEM, **blocks("blocks")}),
    "in a wrapper": (
        {f"module.{name}": shape for name, shape in {**STEM, **blocks("old")}.items()},
        {**STEM, **blocks("new")},
    ),
    "a sequence and a head": (
        {**inside("backbone", sequence(0, 2, 4)), **layers("", "head", size=7)},
        {**inside("features", sequence(0, 2, 4)), **layers("", "classifier", size=7)},
    ),
    "a sequence alone": (
        inside("encoder", sequence(0, 2)), inside("enc", sequence(0, 2)),
    ),
    "a sequence beside layers of its shapes": (
        {**inside("encoder", sequence(0, 2)), **STEM}, {**inside("enc", sequence(0, 2)), **STEM},
    ),
    "attention": (
        {f"layers.{n}.attn.{w}": s for n in range(3) for w, s in NORM.items()},
        {f"layers.{n}.self_attn.{w}": s for n in range(3) for w, s in NORM.items()},
    ),
    "both parts of a VGG": (
        VGG, {n.replace("features", "body").replace("classifier", "head"): VGG[n] for n in VGG},
    ),
    "one part of a VGG": (VGG, {n.replace("features", "backbone"): VGG[n] for n in VGG}),
    "a number behind a dot": (densenet("norm.", "conv."), densenet("norm", "conv")),
    "a number that loses its dot": (densenet("norm", "conv"), densenet("norm.", "conv.")),
    "counters": (
        {**inside("backbone", RESNET), **STEM}, {**inside("encoder", RESNET), **STEM},
    ),
    "counters that an old file has not": (
        {
            **{n: s for n, s in inside("backbone", RESNET).items() if not n.endswith("tracked")},
            **STEM,
        },
        {**inside("encoder", RESNET), **STEM},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROPOSED)
def test_a_proposed_rule_loads_what_was_refused(case):
    have, want = PROPOSED[case]
    model, state = built(want), state_of(have)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, state)
    assert all(torch.equal(before[name], held) for name, held in model.state_dict().items())
    given = dict(caught.value.remedy.arguments)
    assert given.keys() == {"rename"}
    report = ckptool.load_into(model, state, **given)
    assert report.fits
    assert report.coverage == 1


def followed(have, want, arguments):
    """What is still refused once the arguments are given."""
    given = dict(arguments)
    rules = [regex_rule(text) for text in given.pop("rename", ())]
    allowed = {
        name.removeprefix("allow_"): value for name, value in given.items() if name != "prefixes"
    }
    return Allowance(**allowed).judge(match_keys(have, want, rules=rules).report).problems


def pasted(text):
    """What of a hint can be given as it stands: what is in backticks, or all of it."""
    return [found[1] for found in re.findall(r"(`+)(.+?)\1", text)] or [text]


def check_texts(remedy):
    """What is shown can be pasted, into Python and into a shell, and is what is meant."""
    ways = [way for way in (remedy, *remedy.instead) if way.arguments and not way.to_fill_in]
    if not ways:
        return
    calls, options = pasted(str(remedy)), pasted(to_options_text(remedy))
    assert len(ways) == len(calls) == len(options), str(remedy)
    for way, call, line in zip(ways, calls, options, strict=True):
        given = {
            name: [*value] if isinstance(value, tuple) else value for name, value in way.arguments
        }
        assert eval(f"dict({call})") == given
        assert shlex.split(line) == to_option_words(way)


def check_advice(have, want):
    """Follow each way; return what each pairs."""
    have, want = ({name: Slot(shape) for name, shape in side.items()} for side in (have, want))
    judgement = Allowance().judge(match_keys(have, want).report)
    remedy = judgement.remedy
    check_texts(remedy)
    assert not (judgement.accepted and remedy)
    for way in (remedy, *remedy.instead):
        if way.arguments and not way.to_fill_in:
            assert followed(have, want, way.arguments) == (), str(remedy)
            rules = map(regex_rule, dict(way.arguments).get("rename", ()))
            yield match_keys(have, want, rules=rules).pairs


@pytest.mark.parametrize("case", {**WRONG, **PROPOSED})
def test_of_names_that_tempt_what_is_advised_is_enough(case):
    have, want = {**WRONG, **PROPOSED}[case][:2]
    for pairs in check_advice(have, want):
        lost = [n for n in want if n not in pairs and not n.endswith("num_batches_tracked")]
        assert len(lost) <= max(2, len(want) // 10)


FORMS = [
    {"fc.weight_orig": (3, 3), "fc.weight_mask": (3, 3)},
    {"fc.weight_orig": (3, 3), "fc.weight_u": (3,), "fc.weight_v": (3,)},
    {"fc.weight_g": (3, 1), "fc.weight_v": (3, 3)},
    {"fc.parametrizations.weight.original": (3, 3), "fc.parametrizations.weight.0._u": (3,)},
    {"fc.weight.absmax": (3,)},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_in_another_form_is_not_hinted_away(form):
    body = {f"body.{number}.weight": (5, 5) for number in range(60)}
    for have, want in ((form, {"fc.weight": (3, 3)}), ({"fc.weight": (3, 3)}, form)):
        assert list(check_advice({**body, **have}, {**body, **want})) == []


@pytest.mark.parametrize(
    "tuned",
    [
        {"0.lora_A.default.weight": (2, 5)},
        {"0.oft_R.default.weight": (2, 5), "0.base_layer.weight": (5, 5)},
        {"0.vera_lambda_b.default": (5,), "0.base_layer.weight": (5, 5)},
    ],
    ids=["LoRA", "OFT", "VeRA"],
)
def test_of_a_model_with_adapters_the_merged_one_is_asked_for(tuned):
    want = {f"body.{number}.weight": (5, 5) for number in range(60)}
    have = {f"base_model.model.{name}": shape for name, shape in want.items()}
    have.update({f"base_model.model.body.{name}": shape for name, shape in tuned.items()})
    if len(tuned) > 1:
        del have["base_model.model.body.0.weight"]
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(built(want), state_of(have))
    assert caught.value.remedy.arguments == ()
    assert "ckptool merge-lora BASE" in caught.value.hint


@settings(max_examples=300)
@given(cases(), st.integers(0, 50))
def test_of_random_models_what_is_advised_loads_all_that_the_file_has(case, resized):
    have, want, truth = case
    if resized < len(have):  # a tensor of the file has another shape
        have = {own: (*have[own], 5) if n == resized else have[own] for n, own in enumerate(have)}
    for pairs in check_advice(have, want):
        for name, shape in want.items():
            if have.get(truth[name]) == shape:
                assert pairs.get(name) == truth[name]
