"""Of many layers that are alike the first ones are asked; nothing else may come of it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.matching import matched, repeated
from ckptool.matching.inference import inferred
from ckptool.matching.repeated import inferred_by_few
from ckptool.matching.slots import Slot
from ckptool.transforms.name_rules import regex_rule

LEAVES = {
    "attn.q.weight": (8, 8),
    "attn.k.weight": (8, 8),
    "mlp.up.weight": (32, 8),
    "norm.bias": (8,),
}


def layers(count, front="layers", **changed):
    slots = {f"{front}.{n}.{leaf}": shape for n in range(count) for leaf, shape in LEAVES.items()}
    slots |= {"embed.weight": (100, 8), "head.weight": (100, 8)} | changed
    return {name: Slot(shape, "float32") for name, shape in slots.items()}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Models of a dozen layers are large, and numbers from 3 on are late."""
    monkeypatch.setattr(repeated, "_MANY", 0)
    monkeypatch.setattr(repeated, "_LATE", re.compile("[0-9]{2}|[3-9]"))


def by_few(have, want):
    pairs = {name: name for name in want if name in have}
    return inferred_by_few(have, want, pairs), inferred(have, want, pairs)


def renamed(slots, old, new):
    return {name.replace(old, new): slot for name, slot in slots.items()}


@pytest.mark.parametrize(("old", "new"), [("layers.", "blocks."), ("attn.", "self_attn.")])
def test_what_the_first_layers_tell_is_told_of_all(old, new):
    have = layers(12)
    some, whole = by_few(have, renamed(have, old, new))
    assert some is not None
    assert [(one.text, one.rule) for one in some.rules] == [
        (one.text, one.rule) for one in whole.rules
    ]
    assert [dict(one.pairs) for one in some.rules] == [dict(one.pairs) for one in whole.rules]
    assert sum(len(one.pairs) for one in some.rules) >= 12


@pytest.mark.parametrize(
    "want",
    [
        pytest.param(renamed(layers(13), "layers.", "blocks."), id="one more at the end"),
        pytest.param(renamed(layers(11), "layers.", "blocks."), id="one less at the end"),
        pytest.param(
            renamed(layers(12, **{"layers.9.attn.q.weight": (4, 4)}), "layers.", "blocks."),
            id="one of another shape",
        ),
        pytest.param(
            {**renamed(layers(12), "layers.", "blocks."), "stem.weight": Slot((9, 9), "float32")}
            | {f"layers.{n}.attn.q.weight": Slot((8, 8), "float32") for n in (10, 11)},
            id="names that stay at the end",
        ),
        pytest.param(
            {
                name: slot
                for name, slot in renamed(layers(12), "layers.", "blocks.").items()
                if not re.match(r"blocks\.(9|1\d)\.mlp", name)
            },
            id="less in the last ones",
        ),
    ],
)
def test_all_are_looked_at_where_the_last_layers_are_not_as_the_first(want):
    some, _ = by_few(layers(12), want)
    assert some is None


def test_all_are_looked_at_where_there_is_a_question():
    have = {**renamed(layers(12), "layers.", "a."), **renamed(layers(12), "layers.", "b.")}
    some, whole = by_few(have, layers(12))
    assert some is None
    assert whole.ambiguous


def test_all_are_looked_at_where_few_have_small_numbers():
    have = {f"n{n}.{c}.weight": Slot((8, 8), "float32") for n in range(3) for c in "abcdef"}
    some, _ = by_few(have, renamed(have, "n", "m"))
    assert some is None


WORDS = st.sampled_from(["layers", "blocks", "h", "attn", "mlp", "q", "k", "norm"])
PATHS = st.tuples(WORDS, st.integers(2, 8), WORDS, st.sampled_from([(4, 4), (8,), (8, 4)]))


def tree(parts):
    return {
        f"{front}.{n}.{leaf}.weight": Slot(shape, "float32")
        for front, count, leaf, shape in parts
        for n in range(count)
    }


@given(st.lists(PATHS, min_size=1, max_size=5), st.lists(PATHS, max_size=2), WORDS, WORDS)
@settings(max_examples=150, deadline=None)
def test_it_never_says_anything_else(parts, others, old, new):
    have = tree(parts)
    want = {**renamed(tree(parts), f"{old}.", f"{new}."), **tree(others)}
    some = matched(have, want).report
    original = repeated._MANY
    repeated._MANY = 10**9
    try:
        assert some == matched(have, want).report
    finally:
        repeated._MANY = original


def test_a_rule_gives_all_names_what_it_says():
    have = layers(12)
    some, _ = by_few(have, renamed(have, "layers.", "blocks."))
    for rule in some.rules:
        apply = regex_rule(rule.rule).apply
        assert {own: apply(own) for own in rule.pairs.values()} == {
            own: wanted for wanted, own in rule.pairs.items()
        }
