"""Lists of modules whose numbers may have moved."""

import pytest

from ckptool.matching.allowance import Allowance
from ckptool.matching.matched import matched
from ckptool.matching.numbering import moved_lists
from ckptool.matching.slots import Slot


def report(own, wanted):
    have, want = ({name: Slot((4, 4), "float32") for name in side} for side in (own, wanted))
    return matched(have, want).report


@pytest.mark.parametrize("front", ["", "module.", "model."])
def test_a_list_that_is_counted_from_another_number_is_told_with_both_ranges(front):
    found = report(
        [f"{front}layers.{n}.{m}.w" for n in (1, 2, 3, 4) for m in "ab"],
        [f"layers.{n}.{m}.w" for n in range(4) for m in "ab"],
    )
    assert found.moved == (
        "layers.{1..4} of the file may be layers.{0..3} of the model, by other numbers",
    )
    error = Allowance().refusal(found)
    assert str(error).endswith(found.moved[0])
    assert "all of the list; or allow_missing=['layers.0.a.w', " in error.hint
    assert error.hint.endswith(" where equal numbers are the same layers")
    assert "rules=" not in error.hint
    assert error.remedy.arguments == ()


def test_numbers_with_gaps_are_listed():
    found = report([f"{n}.w" for n in (0, 2, 4, 6)], [f"{n}.w" for n in range(4)])
    assert found.moved == ("{0,2,4,6} of the file may be {0..3} of the model, by other numbers",)


def test_more_layers_on_one_side_are_not_counted_otherwise():
    own, wanted = ([f"layers.{n}.w" for n in range(count)] for count in (8, 4))
    assert moved_lists(own, wanted, own[4:], []) == ()
    assert report(own, [*wanted, "head.w"]).moved == ()
