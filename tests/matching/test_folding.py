"""Names in one line of a message."""

from ckptool.matching.folding import folded, folded_within, labels

MANY = [f"l.{n}.w" for n in range(20_000)]


def test_repeated_layers_are_one_name_and_long_lists_are_cut():
    names = [f"l.{n}.w" for n in range(4)]
    assert folded([*names, "b"]) == "l.{0..3}.w, b"
    assert folded([*"abcdef"]) == "a, b, c, d, and 2 more"
    assert folded_within([*names, *"abc"]) == "l.{0..3}.w, a, b, and 1 more"


def test_of_very_many_some_are_looked_at():
    assert folded(MANY) == "the first 2,000 of 20,000 are l.{0..1999}.w"
    assert folded_within(MANY) == "20,000 tensors, such as l.{0..1999}.w"


def test_what_names_have_in_common_is_told_once():
    assert labels([("l.0.w", 1), ("l.1.w", 1), ("b", 3)]) == [("l.{0..1}.w", 1), ("b", 3)]
