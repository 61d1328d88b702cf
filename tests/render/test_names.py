"""Names made shorter so that they stay apart."""

import string

from hypothesis import given
from hypothesis import strategies as st

from ckptool.render.text import fit_names

WORDS = st.text(string.ascii_lowercase + "_", min_size=1, max_size=20)
NAMES = st.lists(
    st.lists(st.one_of(WORDS, st.integers(0, 30).map(str)), min_size=1, max_size=6).map(".".join),
    unique=True,
    max_size=20,
)


def test_leading_components_go_first_and_numbers_stay():
    name = "model.layers.12.self_attn.q_proj.weight"
    assert fit_names([name], 39) == [name]
    assert fit_names([name], 34) == ["m.l.12.self_attn.q_proj.weight"]
    assert fit_names([name], 30) == ["m.l.12.self_attn.q_proj.weight"]
    assert fit_names([name], 12) == ["m.l.12.s.q.w"]


def test_as_much_is_kept_as_tells_siblings_apart():
    names = ["block.norm1.weight", "block.norm2.weight", "block.conv.weight", "block.norm1.bias"]
    assert fit_names(names, 9) == ["b.norm1.w", "b.norm2.w", "b.c.w", "b.norm1.b"]


def test_the_numbers_of_folded_layers_stay():
    assert fit_names(["model.layers.{0..4,6..23}.mlp.up_proj.weight"], 26) == [
        "m.l.{0..4,6..23}.m.u.w"
    ]


def test_a_long_component_keeps_what_there_is_room_for():
    assert fit_names(["model/" + "x" * 100], 20) == ["m/" + "x" * 15 + "..."]
    assert fit_names(["x" * 30, "y"], 20) == ["x" * 17 + "...", "y"]


def test_what_cannot_be_short_loses_its_middle():
    (found,) = fit_names([".".join("abcdefghij" * 3)], 20)
    assert len(found) == 20
    assert "..." in found


def test_names_of_megabytes_are_not_compared():
    found = fit_names(["a." * (1 << 21), "b." * 20, "c"], 20)
    assert found == ["a.a.a.a.a...a.a.a.a.", "b.b.b.b.b...b.b.b.b.", "c"]


@given(NAMES, st.integers(8, 80))
def test_names_fit_and_whatever_is_no_longer_than_that_stays(names, width):
    found = fit_names(names, width)
    assert all(len(short) <= width for short in found)
    assert all(a == b for a, b in zip(names, found, strict=True) if len(a) <= width)


@given(NAMES)
def test_names_that_fit_without_a_gap_are_distinct(names):
    found = [short for short in fit_names(names, 24) if "..." not in short]
    assert len(set(found)) == len(found)
