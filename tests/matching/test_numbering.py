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


def layers(start, names, count=3):
    return {
        f"{start}{n}.{name}": Slot(shape, "float32")
        for n in range(count)
        for name, shape in names.items()
    }


OF_THE_FILE = {"norm.w": (8,), "attn.query.w": (8, 8), "attn.key.w": (8, 8), "up.dense.w": (32, 8)}
OF_THE_MODEL = {"norm.w": (8,), "attn.q.w": (8, 8), "attn.k.w": (8, 8), "mlp.fc1.w": (32, 8)}


@pytest.mark.parametrize("start", ["encoder.layer.", "layers."])
def test_a_list_that_has_all_under_other_names_is_told_and_is_not_to_stay_at_random(start):
    found = matched(layers(start, OF_THE_FILE), layers("layers.", OF_THE_MODEL)).report
    assert found.respelled == (
        f"{start}{{0..2}} of the file may be layers.{{0..2}} of the model, by other names below",
    )
    error = Allowance().refusal(found)
    assert str(error).endswith(found.respelled[0])
    assert error.hint == (
        "give the layers' tensors the names that the model has: rules=['REGEX=>REPL']"
    )
    assert error.remedy.arguments == ()


def test_a_list_with_other_shapes_or_numbers_or_two_that_are_alike_are_not_told():
    wanted = layers("layers.", OF_THE_MODEL)
    for have in (
        layers("h.", {**OF_THE_FILE, "attn.key.w": (8, 4)}),
        layers("h.", OF_THE_FILE, 2),
        layers("h.", OF_THE_FILE) | layers("g.", OF_THE_FILE),
    ):
        assert matched(have, wanted).report.respelled == ()
    more = layers("h.", {**OF_THE_FILE, "attn.inv.w": (3,)})
    assert len(matched(more, wanted).report.respelled) == 1


def test_a_rule_of_a_list_whose_rest_has_other_names_is_concluded_from_what_has_the_same():
    below = {"norm_1.w": (8,), "norm_2.w": (8,)}
    have = layers("encoder.layer.", OF_THE_FILE | below)
    want = layers("layers.", OF_THE_MODEL | below)
    rule, by_shape = matched(have, want).report.renamed
    assert (rule.text, len(rule.names)) == ("encoder.layer. -> layers.", 9)
    assert by_shape.text == "encoder.layer.*.up.dense. -> layers.*.mlp.fc1."
