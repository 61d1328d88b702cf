"""Keys with variables: what they match, what they make, and what is no pattern."""

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import UsageError
from ckptool.recipes.names import Pattern, parse_patterns

MATCHES = [
    ("layers.{n}.w", "layers.10.w", {"n": "10"}),
    ("layers.{n}.w", "layers.1.2.w", None),
    ("layers.{n}.w", "layers..w", None),
    ("{x*}.w", "a.b/c.w", {"x": "a.b/c"}),
    ("pre.{x*}", "pre.", {"x": ""}),
    ("{w:q|k.a}.{p}", "k.a.bias", {"w": 1, "p": "bias"}),
    ("{w:q|k}.{p}", "v.bias", None),
    ("{w:a|ab}c", "abc", {"w": 1}),
    ("{rank:02}/w", "07/w", {"rank": "7"}),
    ("{rank:02}/w", "7/w", None),
    ("{rank:02}/w", "123/w", {"rank": "123"}),
    ("{rank:02}/w", "007/w", None),
    ("layer{s+1}.w", "layer4.w", {"s": "3"}),
    ("layer{s+1}.w", "layer0.w", None),
    ("layer{s+1}.w", "layer04.w", None),
    ("up.{3-n}.w", "up.1.w", {"n": "2"}),
    ("up.{3-n}.w", "up.4.w", None),
    ("h.{n-1}.w", "h.0.w", {"n": "1"}),
    ("{n}.{n}", "4.4", {"n": "4"}),
    ("{n}.{n}", "4.5", None),
    ("conv{c}x{d}", "conv1x2", {"c": "1", "d": "2"}),
    ("a.b", "a.b", {}),
    ("a.b", "a_b", None),
    ("a+(b)", "a+(b)", {}),
]


@pytest.mark.parametrize(("text", "key", "values"), MATCHES)
def test_a_pattern_takes_keys_apart_and_makes_them_again(text, key, values):
    pattern = Pattern.parse(text)
    assert pattern.match(key) == values
    if values is not None:
        assert pattern.fill(values) == key


@given(st.integers(0, 10**8), st.integers(1, 9))
def test_a_number_of_some_digits_comes_back(number, width):
    pattern = Pattern.parse(f"x{{n:0{width}}}")
    key = pattern.fill({"n": str(number)})
    assert key == f"x{number:0{width}}"
    assert pattern.match(key) == {"n": str(number)}


def test_parameters_shift_numbers():
    pattern = Pattern.parse("mtp.{n+layers}.{last-m}").bind({"layers": 61, "last": 3})
    assert pattern.match("mtp.62.1") == {"n": "1", "m": "2"}
    with pytest.raises(UsageError, match="needs the parameter 'layers'"):
        Pattern.parse("mtp.{n+layers}").bind({})


def test_a_list_of_words_holds_for_the_other_side_too():
    left, right = parse_patterns(["{w:q|k}.w", "{w}.w"])
    assert right.match("k.w") == left.match("k.w") == {"w": 1}
    assert right.match("v.w") is None


def test_a_question_mark_is_no_part_of_the_key():
    pattern = Pattern.parse("lm_head.weight?")
    assert pattern.is_optional
    assert pattern.covers("lm_head.weight")
    assert Pattern.parse("rope.freqs").covers("00/rope.freqs", is_path=True)
    assert not Pattern.parse("00/rope.freqs").covers("rope.freqs", is_path=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "?", "a{", "a}", "{}", "{1}", "{n:}x{", "{a b}", "{n++1}", "{{n}}",
        "{x*}{y*}{z*}", "{a}{b}{c}d", ".".join(f"{{v{n}}}" for n in range(13)), "a" * 2001,
    ],
)  # fmt: skip
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(UsageError):
        Pattern.parse(text)


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(UsageError, match="2 and 3 words"):
        parse_patterns(["{w:a|b}", "{w:a|b|c}"])


def test_a_negative_number_has_no_key():
    with pytest.raises(UsageError, match="cannot have n = 9"):
        Pattern.parse("up.{3-n}").fill({"n": "9"})


@pytest.mark.parametrize("text", ["{x*}a{y*}b", "{x}a{y}b", "{w:" + "|".join(["a"] * 600) + "}b"])
def test_keys_made_to_be_slow_are_compared_all_the_same(text):
    assert Pattern.parse(text).match("a" * 4000) is None
