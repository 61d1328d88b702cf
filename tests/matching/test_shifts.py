"""Parts of layers that stand in other layers of the same list."""

import pytest

from ckptool.matching import Allowance, Slot, matched
from ckptool.matching.shifts import moved_parts


def layers(numbers, *names):
    """Four layers, some of which have more."""
    below = {name: Slot((8, 8)) for name in names or ("downsample.weight",)}
    body = {f"layers.{n}.block.weight": Slot((8, 8)) for n in range(4)}
    more = {f"layers.{n}.{name}": slot for n in numbers for name, slot in below.items()}
    return body | more


@pytest.mark.parametrize("names", [["downsample.weight"], ["downsample.a.w", "downsample.b.w"]])
@pytest.mark.parametrize("front", ["", "module."])
def test_a_part_that_has_moved_is_told_and_not_allowed_before_that(names, front):
    have = {f"{front}{name}": slot for name, slot in layers(range(3), *names).items()}
    match = matched(have, layers(range(1, 4), *names))
    told = (
        "layers.{0..2}.downsample of the file may be layers.{1..3}.downsample of the model, by "
        "other numbers"
    )
    assert match.report.moved == (told,)
    error = Allowance().refusal(match.report, match.again)
    assert str(error).endswith(told)
    assert error.remedy.arguments == ()
    assert error.hint.startswith(f"{told}: `rules=[")


def test_a_part_that_more_layers_have_has_not_moved():
    for have, want in (((0, 1, 2), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 1))):
        assert matched(layers(have), layers(want)).report.moved == ()
    other = layers([1], "other.weight")
    assert matched(layers([0]), other).report.moved == ()
    assert moved_parts([], [], {}, {}) == ()


def test_of_one_layer_its_number_is_told():
    (told,) = matched(layers([0]), layers([2])).report.moved
    assert told.startswith("layers.0.downsample of the file may be layers.2.downsample of")


def test_where_next_to_nothing_fits_it_is_not_allowed_even_for_equal_numbers():
    have = {f"x.{name}": slot for name, slot in layers(range(3)).items()}
    want = {f"{name}.y": slot for name, slot in layers(range(3)).items()}
    more = (
        {f"other.{n}.w": Slot((3, n)) for n in (1, 2)},
        {f"other.{n}.w": Slot((4, n)) for n in (3, 4)},
    )
    match = matched(have | more[0], want | more[1])
    assert match.report.moved
    assert str(Allowance().refusal(match.report, match.again).remedy) == (
        "other.{1..2} of the file may be other.{3..4} of the model, by other numbers: "
        "rules=['REGEX=>REPL'] for each layer of the list"
    )
