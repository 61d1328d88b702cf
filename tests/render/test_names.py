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


def test_a_name_loses_its_middle():
    name = "model.layers.12.self_attn.q_proj.weight"
    assert fit_names([name], 39) == [name]
    assert fit_names([name], 34) == ["model.layers.12....n.q_proj.weight"]
    assert fit_names([name, "bias"], 12) == ["model...ight", "bias"]


def test_the_gap_is_where_names_of_one_layer_stay_apart():
    names = [f"model.layers.{{0..31}}.self_attn.{part}_proj.weight" for part in "qkv"]
    assert fit_names(names, 24) == [f"model....n.{part}_proj.weight" for part in "qkv"]


def test_the_gap_is_where_names_of_many_layers_stay_apart():
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(10, 20)]
    assert fit_names(names, 24) == [f"model.layers.{layer}....eight" for layer in range(10, 20)]


@given(NAMES, st.integers(8, 80))
def test_names_fit_and_whatever_is_no_longer_than_that_stays(names, width):
    found = fit_names(names, width)
    assert all(len(short) <= width for short in found)
    assert all(a == b for a, b in zip(names, found, strict=True) if len(a) <= width)
