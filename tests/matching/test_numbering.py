"""Lists of modules whose numbers may have moved."""

import pytest

from ckptool.matching.allowance import Allowance
from ckptool.matching.matched import matched
from ckptool.matching.numbering import moved_lists
from ckptool.matching.slots import Slot
from ckptool.transforms.name_rules import regex_rule


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
    assert error.hint == f"{found.moved[0]}: rules=['REGEX=>REPL'] for each layer of the list"
    assert error.remedy.arguments == ()


def test_numbers_with_gaps_are_listed():
    found = report([f"{n}.w" for n in (0, 2, 4, 6)], [f"{n}.w" for n in range(4)])
    assert found.moved == ("{0,2,4,6} of the file may be {0..3} of the model, by other numbers",)


BLOCK = {"attn.qkv.w": (12, 4), "fc1.w": (8, 4), "fc2.w": (4, 8)}


def numbered(*forms, rng=range(4), below=BLOCK):
    return {
        f"{form.format(n)}.{name}": Slot(shape, "float32")
        for form in forms
        for n in rng
        for name, shape in below.items()
    }


@pytest.mark.parametrize(
    ("own", "rng", "wanted", "told"),
    [
        ("layer{}", range(1, 5), "layer{}", "layer{1..4} of the file may be layer{0..3}"),
        ("layer{}", range(1, 5), "layers.{}", "layer{1..4} of the file may be layers.{0..3}"),
        ("layers.{}", range(1, 5), "h.{}", "layers.{1..4} of the file may be h.{0..3}"),
        ("layer{}", range(0, 8, 2), "layer{}", "layer{0,2,4,6} of the file may be layer{0..3}"),
        ("block_{}", range(1, 5), "layers.{}.0", "block_{1..4} of the file may be layers.{0..3}"),
        ("layers{}", range(1, 5), "x.layers_{}", "layers{1..4} of the file may be x.layers_{0..3}"),
    ],
)
def test_lists_of_other_names_or_numbers_in_words_are_told_and_a_rule_for_each_layer(
    own, rng, wanted, told
):
    rest = {"embed.w": Slot((9, 4), "float32")}
    found = matched(rest | numbered(own, rng=rng), rest | numbered(wanted))
    assert found.report.moved == (f"{told} of the model, by other numbers",)
    assert {n for n, h in found.pairs.items() if n != h} == set()
    hint = Allowance().judged(found.report, found.again).remedy
    assert (hint.arguments, hint.lead) == ((), f"{told} of the model, by other numbers: ")
    (asked,) = hint.instead
    assert asked.note == " where they are the same layers, in this order"
    rules = map(regex_rule, dict(asked.arguments)["rules"])
    again = matched(rest | numbered(own, rng=rng), rest | numbered(wanted), rules=rules)
    assert again.report.fits
    layer = {wanted.format(n): own.format(at) for n, at in zip(range(4), rng, strict=True)}
    assert all(
        again.pairs[f"{new}.{name}"] == f"{old}.{name}"
        for new, old in layer.items()
        for name in BLOCK
    )


def test_leaves_with_numbers_are_a_list():
    found = report([f"w{n}" for n in range(1, 5)], [f"w{n}" for n in range(4)])
    assert found.moved == ("w{1..4} of the file may be w{0..3} of the model, by other numbers",)


def test_of_two_lists_the_one_that_is_called_alike_is_told():
    have = numbered("enc.layers.{}", rng=range(1, 5)) | numbered("dec.layers.{}")
    found = matched(have, numbered("encoder.layers.{}", "decoder.layers.{}")).report
    assert found.moved == (
        "enc.layers.{1..4} of the file may be encoder.layers.{0..3} of the model, by other numbers",
    )


def test_more_layers_on_one_side_are_not_counted_otherwise():
    own, wanted = ([f"layers.{n}.w" for n in range(count)] for count in (8, 4))
    assert moved_lists(own, wanted, dict.fromkeys(own[4:], Slot((4, 4))), {}) == ()
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
