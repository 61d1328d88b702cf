"""Names and shapes that suggest what is not so: refused, and never guessed at."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from tests.loading.bits import untouched_by
from tests.loading.optimizing import model_of


def state_of(shapes):
    """A state dict of them, each tensor unlike any other."""
    return {name: torch.full(shape, n + 1.0) for n, (name, shape) in enumerate(shapes.items())}


def built(shapes):
    """A model that has these parameters."""
    return model_of(state_of(shapes))


def layers(prefix, *names, size=3):
    """Weight and bias of linear layers of one size."""
    return {
        f"{prefix}{name}.{leaf}": shape
        for name in names
        for leaf, shape in (("weight", (size, size)), ("bias", (size,)))
    }


BODY = {**layers("body.", "0", "1", "2", size=5), "stem.weight": (5, 2)}
"""A model's greater part, the same on both sides."""


def alike(prefix, *names):
    """Layers of the shape that those of the greater part have: it says nothing."""
    return layers(prefix, *names, size=5)


WRONG = {
    "a layer's name that ends like a wrapper": (
        {**BODY, **alike("mlp_module.", "0")}, {**BODY, **alike("mlp_", "0")},
    ),
    "a layer's name that holds a wrapper": (
        {**BODY, **alike("mlp_module.", "0")}, {**BODY, **alike("mlp.", "0")},
    ),
    "nothing but a layer's name that ends like a wrapper": (
        layers("mlp_module.", "0"), layers("mlp_", "0"),
    ),
    "a name that ends like a prefix": (
        {**BODY, **alike("submodel.", "fc")}, {**BODY, **alike("sub.", "fc")},
    ),
    "layers of one shape": (
        {**BODY, **layers("", "up", "down")}, {**BODY, **layers("", "top", "bottom")},
    ),
    "layers of one shape, and nothing else": (
        layers("", "up", "down"), layers("", "top", "bottom"),
    ),
    "query, key and value": (
        {**BODY, **layers("attn.", "q", "k", "v")},
        {**BODY, **layers("attn.", "query", "key", "value")},
    ),
    "one encoder for two": (
        layers("encoder.", "0", "1"),
        {**layers("encoder_q.", "0", "1"), **layers("encoder_k.", "0", "1")},
    ),
    "two encoders for one": (
        {**layers("student.", "a", "b"), **layers("teacher.", "a", "b")}, layers("", "a", "b"),
    ),
    "an average next to the model": (
        {**layers("online_model.", "a", "b"), **layers("ema_model.", "a", "b")},
        layers("model.", "a", "b"),
    ),
    "an average for the model itself": (
        {**BODY, **layers("unet_ema.", "a", "b", size=4)},
        {**BODY, **layers("unet.", "a", "b", size=4)},
    ),
    "one part for either of two": (
        layers("encoder.", "a", "b"), {**layers("", "a", "b"), **layers("enc.", "a", "b")},
    ),
    "either of two parts for one": (
        {**layers("", "a", "b"), **layers("enc.", "a", "b")}, layers("encoder.", "a", "b"),
    ),
    "numbered layers of numbered layers, by other numbers": (
        layers("net.", "0.0", "0.1", "1.0", "1.1"), layers("net.", "1.0", "1.1", "2.0", "2.1"),
    ),
    "layers of a sequence moved by two": (
        layers("net.", "0", "2", "4"), layers("net.", "2", "4", "6"),
    ),
    "layers counted from one": (layers("net.", "1", "2", "3"), layers("net.", "0", "1", "2")),
    "a layer more in the model": (layers("net.", "0", "1"), layers("net.", "0", "1", "2")),
    "a layer more in the file": (layers("net.", "0", "1", "2"), layers("net.", "0", "1")),
    "an inner layer named like a prefix, alone": (
        {"model.w": (3, 3)}, {"w": (3, 3), "model.w": (3, 3)},
    ),
    "an inner layer named like a wrapper, alone": (
        {"module.w": (3, 3)}, {"w": (3, 3), "module.w": (3, 3)},
    ),
    "an outer layer alone": ({"w": (3, 3)}, {"w": (3, 3), "module.w": (3, 3)}),
    "a normalized weight for a plain one": (
        {**BODY, "fc.weight_g": (3, 1), "fc.weight_v": (3, 3)}, {**BODY, "fc.weight": (3, 3)},
    ),
    "a new normalized weight for a plain one": (
        {
            **BODY, "fc.parametrizations.weight.original0": (3, 1),
            "fc.parametrizations.weight.original1": (3, 3),
        },
        {**BODY, "fc.weight": (3, 3)},
    ),
    "a plain weight for a normalized one": (
        {**BODY, "fc.weight": (3, 3)}, {**BODY, "fc.weight_g": (3, 1), "fc.weight_v": (3, 3)},
    ),
    "a spectral weight for a plain one": (
        {**BODY, "fc.weight_orig": (3, 3), "fc.weight_u": (3,), "fc.weight_v": (3,)},
        {**BODY, "fc.weight": (3, 3)},
    ),
    "mean and variance": (
        {**BODY, "bn.mean": (3,), "bn.var": (3,)},
        {**BODY, "bn.running_mean": (3,), "bn.running_var": (3,)},
    ),
    "a scale and a shift": (
        {**BODY, "n.a_2": (3,), "n.b_2": (3,)}, {**BODY, "n.weight": (3,), "n.bias": (3,)},
    ),
    "two heads for one": (
        {**BODY, "fc.weight": (7, 5), "aux.weight": (7, 5)}, {**BODY, "classifier.weight": (7, 5)},
    ),
    "one head for two": (
        {**BODY, "classifier.weight": (7, 5)}, {**BODY, "fc.weight": (7, 5), "aux.weight": (7, 5)},
    ),
    "shapes that fit crosswise, with no other witness": (
        {"fc1.weight": (4, 8), "fc2.weight": (8, 4)}, {"a.weight": (8, 4), "b.weight": (4, 8)},
    ),
    "one tensor of the same shape": ({"left.weight": (9, 4)}, {"right.weight": (9, 4)}),
    "a part of one block for that of another": (
        layers("", "0.fc", "0.out", "2.out", "4.fc", "4.out"),
        layers("", "2.fc", "0.out", "2.out", "4.fc", "4.out"),
    ),
    "a layer of a new name for a new layer elsewhere": (
        layers("", "0.fc", "1.fc", "0.out", "1.out", "2.out"),
        layers("", "0.fc", "1.lin", "2.fc", "0.out", "1.out", "2.out"),
    ),
    "blocks that another order numbers": (
        {**layers("down.", "0", "1"), **layers("up.", "0", "1")},
        {**layers("enc.", "0", "1"), **layers("dec.", "0", "1")},
    ),
    "a scale that has both names": (
        {"norm.gamma": (3,), "norm.beta": (3,)},
        {"norm.weight": (3,), "norm.bias": (3,), "norm.gamma": (3,), "norm.beta": (3,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused(case):
    have, want = WRONG[case]
    model = built(want)
    for wrapper in ("", "module.", "_orig_mod.module.", "model."):
        if wrapper == "model." and "alone" in case:  # with that prefix it is another case
            continue
        state = {wrapper + name: tensor for name, tensor in state_of(have).items()}
        with untouched_by(MatchError, model):
            ckptool.load_into(model, state)


@pytest.mark.parametrize("case", ["one part for either of two", "either of two parts for one"])
def test_which_of_two_parts_is_asked_whatever_is_allowed(case):
    have, want = WRONG[case]
    with pytest.raises(MatchError, match="ambiguous: ") as caught:
        ckptool.load_into(built(want), state_of(have), strict=False)
    given = dict(caught.value.remedy.arguments)
    report = ckptool.load_into(built(want), state_of(have), **{"strict": False, **given})
    assert report.fitting == len(layers("", "a", "b"))


@pytest.mark.parametrize("case", WRONG)
def test_what_is_missing_is_not_filled_with_something_else_and_proposed_rules_decide(case):
    have, want = WRONG[case]
    model, state = built(want), state_of(have)

    def check_matched(model, wrapper):
        matched, report = ckptool.match(state, model)
        for name, tensor in matched.items():
            assert tensor is state[name.removeprefix(wrapper)], name
        absent = {name for name in state if not any(state[name] is m for m in matched.values())}
        assert set(report.unexpected_keys) == absent
        return report

    if "alone" not in case:  # whose outer layer would have the inner one's name in a wrapper
        check_matched(nn.DataParallel(model), "module.")
    before = check_matched(model, "")
    for rule in {rule for one in before.ambiguous for rule in one.rules}:
        _, after = ckptool.match(state, model, rename=[rule])
        assert after.coverage > before.coverage, rule


RIGHT = {
    "an inner layer named like a prefix": (
        {"model.w": (3, 3), "model.model.w": (3, 3)},
        {"w": (3, 3), "model.w": (3, 3)},
        {"w": "model.w", "model.w": "model.model.w"},
    ),
    "an inner layer named like a wrapper": (
        {"module.w": (3, 3), "module.module.w": (3, 3)},
        {"w": (3, 3), "module.w": (3, 3)},
        {"w": "module.w", "module.w": "module.module.w"},
    ),
    "the same the other way round": (
        {"w": (3, 3), "module.w": (3, 3)},
        {"module.w": (3, 3), "module.module.w": (3, 3)},
        {"module.w": "w", "module.module.w": "module.w"},
    ),
    "names that fit as they are": (
        {"model.w": (3, 3), "model.model.w": (3, 3)},
        {"model.w": (3, 3), "model.model.w": (3, 3)},
        {"model.w": "model.w", "model.model.w": "model.model.w"},
    ),
    "a wrapper around a name that holds one": (
        {f"module.{name}": shape for name, shape in layers("mlp_module.", "0", "1").items()},
        layers("mlp_module.", "0", "1"),
        {name: f"module.{name}" for name in layers("mlp_module.", "0", "1")},
    ),
    "a prefix that all share, and a layer of that name": (
        {f"model.{name}": s for name, s in {**BODY, **layers("model.", "fc")}.items()},
        {**BODY, **layers("model.", "fc")},
        {name: f"model.{name}" for name in {**BODY, **layers("model.", "fc")}},
    ),
}


PROPOSED = {
    "sizes that tell one layer from the other": (
        {**BODY, **layers("body.x.", "up", size=6), **layers("body.x.", "down", size=7)},
        {**BODY, **layers("body.y.", "up", size=6), **layers("body.y.", "down", size=7)},
        ("body.y.", "body.x."),
    ),
    "one head of a shape that nothing else has": (
        {**BODY, "fc.weight": (7, 5), "fc.bias": (7,)},
        {**BODY, "classifier.weight": (7, 5), "classifier.bias": (7,)},
        ("classifier.", "fc."),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_only_looks_doubtful_is_loaded_right(case):
    have, want, pairs = RIGHT[case]
    state = state_of(have)
    model = built(want)
    report = ckptool.load_into(model, state)
    assert report.coverage == 1.0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[pairs[name]]), name


@pytest.mark.parametrize("case", PROPOSED)
def test_what_is_likely_is_proposed_and_loaded_right_where_that_is_followed(case):
    have, want, (new, old) = PROPOSED[case]
    state, model = state_of(have), built(want)
    with untouched_by(MatchError, model) as caught:
        ckptool.load_into(model, state)
    report = ckptool.load_into(model, state, **dict(caught.value.remedy.arguments))
    assert report.coverage == 1.0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name.replace(new, old)]), name
