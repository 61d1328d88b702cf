"""Names like one that is not there."""

from ckptool.transforms.name_rules import similar

NAMES = ["encoder.layers.0.weight", "encoder.layers.0.bias", "decoder.norm.weight", "head/fc.bias"]


def test_the_closest_name_comes_first():
    assert similar("encoder.layer.0.weigth", NAMES)[0] == "encoder.layers.0.weight"
    assert similar("decoder.norms.weight", NAMES, most=1) == ["decoder.norm.weight"]


def test_a_word_finds_the_names_that_have_a_component_like_it():
    assert similar("decodr.*", NAMES)[0] == "decoder.norm.weight"
    assert similar("encodr", NAMES) == NAMES[:3]
    assert similar("heads", NAMES) == ["head/fc.bias"]


def test_numbers_and_single_letters_are_like_nothing():
    assert similar("0.x", NAMES) == []
    assert similar("", NAMES) == []
    assert similar("something", []) == []


def test_names_that_take_long_to_compare_are_few():
    many = [f"{'ab.' * 38}{at}" for at in range(5000)]
    assert len(similar("ba." * 39, many)) <= 3
    assert similar("x" * 10**6, ["x" * 10**6]) == []
