"""Names of repeated layers as patterns."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.names import Family, families, numbered, ranges


def labels(*names):
    return [family.label for family in families((name, None) for name in names)]


def expanded(label):
    """The names that a label stands for."""
    sides = [
        [str(n) for run in part[1:-1].split(",") for n in span(run)] if part[:1] == "{" else [part]
        for part in re.split(r"(\{[0-9.,]+\})", label)
    ]
    return ["".join(parts) for parts in itertools.product(*sides)]


def span(run):
    first, _, last = run.partition("..")
    return range(int(first), int(last or first) + 1)


def test_layers_are_one_family():
    names = [f"layers.{n}.mlp.weight" for n in range(32)]
    assert families((name, 0) for name in names) == [
        Family("layers.{0..31}.mlp.weight", tuple(names), tuple(range(32)))
    ]


def test_gaps_are_told():
    assert labels(*(f"blocks.{n}.x" for n in (8, 3, 0, 1, 2))) == ["blocks.{0..3,8}.x"]


def test_a_name_alone_is_itself():
    assert labels("layers.3.w", "fc.bias", "") == ["layers.3.w", "fc.bias", ""]


def test_signatures_part_families_in_the_order_of_their_first_names():
    rows = [("l.0.w", "a"), ("l.1.w", "b"), ("x", "a"), ("l.2.w", "a"), ("l.3.w", "b")]
    assert families(rows) == [
        Family("l.{0,2}.w", ("l.0.w", "l.2.w"), (0, 3)),
        Family("l.{1,3}.w", ("l.1.w", "l.3.w"), (1, 4)),
        Family("x", ("x",), (2,)),
    ]


def test_a_full_product_is_folded_in_every_number():
    names = [f"layers.{n}.experts.{k}.w" for n in range(2) for k in range(8)]
    assert labels(*names) == ["layers.{0..1}.experts.{0..7}.w"]


def test_a_number_that_never_changes_stays():
    assert labels("a.3.b.0.c", "a.3.b.1.c") == ["a.3.b.{0..1}.c"]


def test_what_is_no_product_is_folded_where_most_is_gained():
    names = [f"layers.{n}.experts.{k}.w" for n in range(3) for k in range(8)]
    names += [f"layers.3.experts.{k}.w" for k in range(4)]
    assert labels(*names) == ["layers.{0..2}.experts.{0..7}.w", "layers.3.experts.{0..3}.w"]
    assert labels("a.0.0", "a.1.1", "a.2.2") == ["a.0.0", "a.1.1", "a.2.2"]


def test_keys_of_a_path_count_as_components():
    names = [f"optim/state/{n}/exp_avg" for n in range(9)]
    assert labels(*names) == ["optim/state/{0..8}/exp_avg"]


@pytest.mark.parametrize("other", ["conv2.w", "01.w", "-1.w", "1a.w", "\u0661.w", "1234567890.w"])
def test_only_whole_components_that_are_plain_numbers_are_folded(other):
    first = re.sub("[0-9]", "0", other, count=1)
    assert labels("conv1.w", "1.w", other, first) == [
        "conv1.w",
        "1.w",
        *dict.fromkeys([other, first]),
    ]


def test_a_name_that_comes_twice_is_there_twice():
    assert families([("a.0", 0), ("a.1", 0), ("a.0", 0)]) == [
        Family("a.{0..1}", ("a.0", "a.1", "a.0"), (0, 1, 2))
    ]


def test_a_name_of_a_million_numbers_costs_no_more_than_its_length():
    name = "0." * 1_000_000
    assert labels(name + "1", name + "2") == [name + "1", name + "2"]


def test_many_names_that_make_no_box():
    names = [f"a.{n}.b.{n * n % 1009}.c.{n % 7}.d.{n % 1013}" for n in range(20_000)]
    found = families((name, None) for name in names)
    assert sum(len(family.names) for family in found) == len(names)


def test_a_name_taken_apart():
    assert numbered("a.3.b/0") == (("a.", ".b/", ""), (3, 0))
    assert numbered("conv1.w") == (("conv1.w",), ())


@pytest.mark.parametrize(
    ("numbers", "text"), [([5], "{5}"), ([2, 0, 1], "{0..2}"), ([0, 2, 3, 9], "{0,2..3,9}")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


components = st.one_of(st.integers(0, 3).map(str), st.sampled_from(["w", "conv1", "00", "a/1"]))
some_names = st.lists(components, min_size=1, max_size=6).map(".".join)


@given(st.lists(st.tuples(some_names, st.booleans()), unique=True, max_size=60))
def test_each_name_is_in_one_family_and_its_label_expands_to_it_alone(rows):
    found = families(rows)
    assert sorted(n for f in found for n in f.numbers) == list(range(len(rows)))
    for family in found:
        assert sorted(expanded(family.label)) == sorted(family.names)
    assert [f.numbers[0] for f in found] == sorted(f.numbers[0] for f in found)
    for family in found:
        assert list(family.numbers) == sorted(family.numbers)
        assert [rows[number][0] for number in family.numbers] == list(family.names)
        assert len({rows[number][1] for number in family.numbers}) == 1
