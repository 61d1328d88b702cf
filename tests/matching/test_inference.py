"""Rename rules that two sets of names suggest by themselves."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptool.matching.inference import inferred
from ckptool.matching.slots import Slot, fits
from ckptool.transforms.name_rules import regex_rule


def slots(names, shape=(4, 4)):
    """All of one shape, which tells nothing apart; of a mapping, each its own."""
    if isinstance(names, dict):
        return {name: Slot(own, "float32") for name, own in names.items()}
    return {name: Slot(shape, "float32") for name in names}


def equal(have, want):
    """Names that are equal, as they are met before anything is inferred."""
    return {name: name for name in want if name in have and fits(have[name], want[name])}


def found(have, want):
    """What is inferred, checked: nothing twice, nothing that is met, rules for just their names."""
    pairs = equal(have, want)
    result = inferred(have, want, pairs)
    met = [wanted for rule in result.rules for wanted in rule.pairs]
    used = [own for rule in result.rules for own in rule.pairs.values()]
    assert len({*met, *pairs}) == len(met) + len(pairs)
    assert len({*used, *pairs.values()}) == len(used) + len(pairs)
    for rule in result.rules:
        new = {own: wanted for wanted, own in rule.pairs.items()}
        apply = regex_rule(rule.rule).apply
        assert {name: apply(name) for name in have} == {name: new.get(name) for name in have}
    for question in result.ambiguous:
        assert question.names
        assert set(question.names) <= {*have} - {*used, *pairs.values()}
        assert question.candidates
        assert set(question.candidates) <= {*want} - {*met, *pairs}
    assert not {*result.near} & {*met, *pairs}
    return result


def texts(have, want):
    return [(rule.text, rule.rule) for rule in found(have, want).rules]


def nothing(have, want):
    """The questions asked where nothing is concluded."""
    result = found(have, want)
    assert result.rules == ()
    return result.ambiguous


BLOCKS = [f"layer{i}.{j}.{m}.weight" for i in (1, 2) for j in (0, 1) for m in ("conv1", "conv2")]
NET = [*BLOCKS, "conv1.weight", "fc.weight"]


def decoder(front="", layers="layers", attn="attn", up="fc1", numbers=range(4), width=8):
    """A transformer, all of its layers alike."""
    shapes = {f"{front}embed.weight": (100, width), f"{front}norm.weight": (width,)}
    for number in numbers:
        layer = f"{front}{layers}.{number}"
        for name in "qkv":
            shapes[f"{layer}.{attn}.{name}.weight"] = (width, width)
            shapes[f"{layer}.{attn}.{name}.bias"] = (width,)
        shapes |= {f"{layer}.{up}.weight": (4 * width, width), f"{layer}.{up}.bias": (4 * width,)}
        shapes |= {f"{layer}.fc2.weight": (width, 4 * width), f"{layer}.fc2.bias": (width,)}
        shapes |= {f"{layer}.norm.weight": (width,), f"{layer}.norm.bias": (width,)}
    return slots(shapes)


def resnet(front="", head="fc", classes=10, first="conv1"):
    """A residual network of two stages, its shapes as they are in one."""
    shapes = {f"{front}conv1.weight": (64, 3, 7, 7)}
    wide = 64
    for stage, width in ((1, 64), (2, 128), (3, 256), (4, 512)):
        for block in (0, 1):
            at = f"{front}layer{stage}.{block}"
            shapes[f"{at}.{first}.weight"] = (width, wide, 3, 3)
            shapes[f"{at}.conv2.weight"] = (width, width, 3, 3)
            shapes |= {
                f"{at}.bn{n}.{leaf}": (width,) for n in (1, 2) for leaf in ("weight", "bias")
            }
            wide = width
    shapes |= {f"{front}{head}.weight": (classes, 512), f"{front}{head}.bias": (classes,)}
    return slots(shapes)


# prefixes


def test_a_prefix_goes():
    result = found(slots(f"net.{name}" for name in NET), slots(NET))
    (rule,) = result.rules
    assert (rule.kind, rule.text, rule.rule) == ("prefix", "net. taken off", r"^net\.=>")
    assert rule.pairs == {name: f"net.{name}" for name in NET}
    assert result.ambiguous == ()


def test_a_prefix_is_put_on():
    (rule,) = found(slots(NET), slots(f"net.{name}" for name in NET)).rules
    assert (rule.kind, rule.text, rule.rule) == ("prefix", "net. put before", "^=>net.")


def test_a_prefix_of_several_components_goes():
    assert texts(resnet("model.backbone."), resnet()) == [
        ("model.backbone. taken off", r"^model\.backbone\.=>")
    ]


def test_each_part_may_have_a_prefix_of_its_own():
    have = slots([f"a.{name}" for name in BLOCKS] + ["b.stem.conv.weight", "b.stem.norm.weight"])
    want = slots([*BLOCKS, "stem.conv.weight", "stem.norm.weight"])
    assert texts(have, want) == [
        ("a. taken off", r"^a\.=>"),
        ("b. taken off", r"^b\.=>"),
    ]


def test_names_that_a_prefix_leads_nowhere_are_left_alone():
    have = slots([f"net.{name}" for name in NET] + ["net.aux.weight", "step"])
    assert texts(have, slots(NET)) == [("net. taken off", r"^net\.(?!aux\.)=>")]


def test_a_name_of_another_shape_is_near():
    result = found(resnet("model.", classes=1000), resnet())
    assert result.near == {"fc.weight": "model.fc.weight", "fc.bias": "model.fc.bias"}
    assert "fc.weight" not in result.rules[0].pairs


def test_two_prefixes_that_fit_are_not_chosen_between():
    have = slots(f"{side}.{name}" for side in ("student", "teacher") for name in NET)
    (question,) = nothing(have, slots(NET))
    assert set(question.names) == set(have)
    assert set(question.candidates) == set(NET)
    assert question.rules == (r"^student\.=>", r"^teacher\.=>")


def test_two_prefixes_that_could_be_put_on_are_not_chosen_between():
    want = slots(f"{side}.{name}" for side in ("student", "teacher") for name in NET)
    (question,) = nothing(slots(NET), want)
    assert question.rules == ("^=>student.", "^=>teacher.")


def test_a_copy_that_lacks_some_names_is_a_candidate_all_the_same():
    have = slots([f"model.{name}" for name in NET] + [f"ema.{name}" for name in NET[:-1]])
    (question,) = nothing(have, slots(NET))
    assert question.rules == (r"^model\.=>", r"^ema\.=>")


def test_a_prefix_that_explains_more_wins_over_one_that_leaves_names_over():
    other = ["critic.layer1.0.conv1.weight", "critic.value.weight", "critic.advantage.weight"]
    have = slots([f"actor.{name}" for name in NET] + other)
    assert texts(have, slots(NET)) == [("actor. taken off", r"^actor\.=>")]


def test_a_child_that_is_called_like_the_prefix_does_not_load_into_the_outer_one():
    (question,) = nothing(slots(["model.w", "model.model.w"]), slots(["w", "model.w"]))
    assert (question.names, question.candidates) == (("model.model.w",), ("w",))


def test_a_leaf_alone_is_no_prefix_while_others_are_left():
    have = slots({"fc.weight": (10, 10), "a.conv.weight": (3, 3), "b.conv.weight": (3, 4)})
    want = slots({"weight": (10, 10), "x.lin.weight": (5, 5), "y.lin.weight": (5, 6)})
    nothing(have, want)


def test_a_single_layer_loads_without_its_prefix():
    have = slots({"fc.weight": (10, 4), "fc.bias": (10,)})
    assert texts(have, slots({"weight": (10, 4), "bias": (10,)})) == [("fc. taken off", r"^fc\.=>")]


def test_a_part_of_the_file_fills_a_whole_model():
    have = slots(
        [f"model.text.{name}" for name in NET] + [f"model.image.x{n}.w" for n in range(99)]
    )
    (rule,) = found(have, slots(f"text.{name}" for name in NET)).rules
    assert (rule.kind, rule.rule) == ("prefix", r"^model\.(?=text\.)=>")


# replacements


def test_a_head_is_replaced():
    assert texts(resnet("backbone."), resnet("encoder.")) == [
        ("backbone. -> encoder.", r"^backbone\.=>encoder.")
    ]


def test_several_rules_may_be_needed():
    rest = {"classifier.weight": (7, 99), "classifier.bias": (7,)}
    have = resnet("backbone.") | slots({f"a.{name}": shape for name, shape in rest.items()})
    want = resnet("encoder.") | slots({f"b.{name}": shape for name, shape in rest.items()})
    assert texts(have, want) == [
        ("backbone. -> encoder.", r"^backbone\.=>encoder."),
        ("a. -> b.", r"^a\.=>b."),
    ]


def test_a_module_in_every_layer_is_replaced():
    assert texts(decoder(), decoder(attn="self_attn")) == [
        ("layers.*.attn. -> layers.*.self_attn.", r"^layers\.(\d+)\.attn\.=>layers.\1.self_attn.")
    ]


def test_a_layer_whose_leaf_alone_agrees_is_told_by_a_shape_that_nothing_else_has():
    assert texts(decoder(), decoder(up="lin1")) == [
        ("layers.*.fc1. -> layers.*.lin1.", r"^layers\.(\d+)\.fc1\.=>layers.\1.lin1.")
    ]
    assert texts(resnet(), resnet(head="classifier")) == [
        ("fc. -> classifier.", r"^fc\.=>classifier.")
    ]


def test_numbers_that_stay_are_open_in_the_rule():
    have, want = decoder(attn="attention"), decoder(layers="blocks", attn="self_attn")
    assert texts(have, want) == [
        (
            "layers.*.attention. -> blocks.*.self_attn.",
            r"^layers\.(\d+)\.attention\.=>blocks.\1.self_attn.",
        ),
        ("layers. -> blocks.", r"^layers\.(?!\d+\.attention\.)=>blocks."),
    ]


def test_several_replacements_in_one_name_are_found():
    have = decoder("backbone.")
    want = decoder("encoder.", layers="h", attn="self_attn", up="lin1")
    result = found(have, want)
    assert sum(len(rule.pairs) for rule in result.rules) == len(want)
    names = dict(zip(want, have, strict=True))
    assert {w: h for rule in result.rules for w, h in rule.pairs.items()} == names


def test_a_component_is_put_in():
    have = slots([f"layers.{n}.{m}.w" for n in range(3) for m in ("a.q", "a.k", "mlp.up")])
    want = slots([f"layers.{n}.inner.{m}.w" for n in range(3) for m in ("a.q", "a.k", "mlp.up")])
    (rule,) = found(have, want).rules
    assert rule.kind == "inferred"
    assert rule.rule == r"^layers\.(\d+)\.=>layers.\1.inner."


def test_the_same_components_replaced_in_several_places_are_one_rule():
    (rule,) = found(resnet(), resnet(first="c1")).rules
    assert (rule.text, rule.rule) == ("conv1. -> c1.", r"\.conv1\.=>.c1.")
    assert rule.pairs["layer1.0.c1.weight"] == "layer1.0.conv1.weight"  # other places decided it
    assert "conv1.weight" not in rule.pairs.values()


def test_a_replacement_of_another_shape_is_near():
    result = found(resnet("backbone."), resnet("encoder.", classes=7))
    assert result.near["encoder.fc.weight"] == "backbone.fc.weight"


def test_a_half_that_has_another_shape_speaks_against_a_replacement():
    have, want = decoder("a.", width=8), decoder("b.", width=16)
    want |= slots({"b.x.y.weight": (3, 3), "b.x.z.weight": (3, 3)})
    have |= slots({"a.x.y.weight": (3, 3), "a.x.z.weight": (3, 3)})
    nothing(have, want)


# what must not be guessed


def test_a_sequential_that_is_shifted_is_not_matched():
    (question,) = nothing(slots(["0.weight", "2.weight"]), slots(["2.weight", "4.weight"]))
    assert (question.names, question.candidates) == (("0.weight",), ("4.weight",))
    assert question.rules == ()  # one that closed the ring would rotate the layers


def test_named_blocks_that_are_shifted_are_not_matched():
    have = slots(f"block{n}.{m}.w" for n in (0, 1) for m in ("a.x", "b.y"))
    nothing(have, slots(f"block{n}.{m}.w" for n in (1, 2) for m in ("a.x", "b.y")))


@pytest.mark.parametrize("front", ["", "model."])
def test_layers_counted_from_one_are_not_those_counted_from_nought(front):
    have = decoder(layers="layers", numbers=range(4))
    want = decoder(front, layers="layers" if front else "blocks", numbers=range(1, 5))
    result = found(have, want)
    assert not any("layers" in own for rule in result.rules for own in rule.pairs.values())
    assert any("layers" in name for question in result.ambiguous for name in question.names)


def test_more_layers_than_the_model_has_may_be_others_where_the_list_has_another_name():
    have = decoder(numbers=range(8))
    nothing(have, decoder(layers="blocks", numbers=range(4)))
    (rule,) = found(have, decoder(attn="self_attn", numbers=range(4))).rules
    assert rule.text == "layers.*.attn. -> layers.*.self_attn."


def test_one_encoder_is_not_given_to_one_of_two():
    (question,) = nothing(resnet("encoder."), resnet("encoder_q.") | resnet("encoder_k."))
    assert question.rules == (r"^encoder\.=>encoder_q.", r"^encoder\.=>encoder_k.")
    assert set(question.names) == set(resnet("encoder."))


def test_one_that_is_met_already_is_a_candidate_too():
    have = slots(f"{part}.{name}" for part in ("attn", "cross") for name in NET)
    want = slots(f"{part}.{name}" for part in ("self", "cross") for name in NET)
    (question,) = nothing(have, want)
    assert question.rules == (r"^attn\.=>self.",)


def test_layers_of_one_shape_are_not_told_apart():
    have = slots(f"layers.{n}.attn.{m}.weight" for n in range(3) for m in "qkv")
    names = ("query", "key", "value")
    nothing(have, slots(f"layers.{n}.attn.{m}.weight" for n in range(3) for m in names))


def test_swapped_layers_of_one_shape_are_not_matched():
    have = slots(["body.a.w", "body.b.w", "lower.weight", "upper.weight"])
    nothing(have, slots(["body.a.w", "body.b.w", "first.weight", "second.weight"]))


@pytest.mark.parametrize("name", ["mlp_0.weight", "mlp.0.weight", "mlp.weight"])
def test_one_witness_is_not_enough(name):
    (question,) = nothing(slots(["mlp_module.0.weight"]), slots([name]))
    assert question.candidates == (name,)
    assert regex_rule(question.rules[0]).apply("mlp_module.0.weight") == name


def test_a_leaf_of_a_shape_that_others_have_is_not_enough():
    body = {f"body.{n}.{m}.w": (4, 4) for n in range(9) for m in "ab"}
    nothing(slots(body | {"fc.w": (4, 4)}), slots(body | {"head.w": (4, 4)}))


def test_of_two_heads_that_are_left_none_is_taken_for_the_models():
    have = resnet(head="head_dist") | slots({"decoder.weight": (99, 512)})
    (question,) = nothing(have, resnet(head="classifier"))
    assert set(question.names) == {"head_dist.weight", "head_dist.bias"}
    assert question.rules == ()  # nothing but the leaves' names speaks for it
    assert texts(resnet(head="head_dist"), resnet(head="classifier"))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ([f"layers.{n}.w" for n in (1, 2, 3, 4)], [f"layers.{n}.w" for n in (0, 1, 2, 3)]),
        ([f"{n}.w" for n in (0, 2, 4, 6)], [f"{n}.w" for n in (0, 1, 2, 3)]),
        (["x_0.w", "x_1.w"], ["x.0.w", "x.1.w"]),
        (["x.0.w", "x.1.w"], ["y.1.w", "y.2.w"]),
    ],
)
def test_no_rule_is_told_that_gives_layers_the_numbers_of_others(own, wanted):
    for question in nothing(slots(own), slots(wanted)):
        for rule in question.rules:
            for name in question.names:
                new = regex_rule(rule).apply(name) or ""
                assert re.findall(r"\d+", new) in ([], re.findall(r"\d+", name))


def test_a_lone_number_is_no_witness():
    body = {f"body.{n}.{m}.w": (4, 4) for n in range(9) for m in "ab"}
    nothing(slots(body | {"scale.value": ()}), slots(body | {"temperature.value": ()}))


def test_a_shape_that_is_unique_is_not_enough_in_a_model_that_is_not_met():
    have = slots({"fc.weight": (10, 512), "a.conv.w": (1, 2), "b.conv.w": (1, 3)})
    nothing(have, slots({"head.weight": (10, 512), "x.lin.w": (2, 2), "y.lin.w": (2, 3)}))


def test_shapes_that_are_not_known_prove_nothing():
    have = {f"a.{name}": Slot() for name in NET}
    assert nothing(have, {f"b.{name}": Slot() for name in NET}) == ()
    (rule,) = found(have, {name: Slot() for name in NET}).rules  # here the names do
    assert rule.rule == r"^a\.=>"


def test_an_entry_that_is_no_tensor_is_not_loaded_into_one():
    have = {"net.a.x.state": Slot(kind="extra"), "net.a.y.state": Slot(kind="extra")}
    nothing(have, slots(["a.x.state", "a.y.state"]))


# rules and work


def test_names_with_odd_characters_have_rules_that_hold():
    odd = ["a+b", "c(d", "e\\1", "f=>g", "h|i", "[0]", "$", "^", " ", "ü", "\\"]
    have = slots(f"{name}.{m}.w" for name in odd for m in ("x.y", "z.y"))
    want = slots(f"{name}!.{m}.w" for name in odd for m in ("x.y", "z.y"))
    have |= slots({f"body.{n}.w": (3, 3) for n in range(99)})
    want |= slots({f"body.{n}.w": (3, 3) for n in range(99)})
    found(have, want)
    (rule,) = found(slots(f"f=>g.{name}" for name in NET), slots(f"\\1.{n}" for n in NET)).rules
    assert regex_rule(rule.rule).apply("f=>g.fc.weight") == "\\1.fc.weight"


def test_names_that_suggest_no_end_of_rules_cost_little():
    parts = [f"{a}.{b}.{c}" for a in "ab" * 8 for b in "abab" for c in "abba"]
    long = [".".join("a" * n) for n in range(1, 300)]
    for have in (slots(f"x{n}.w" for n in range(5000)), slots(long), slots(["." * 5000, *parts])):
        want = slots(f"y{n}.{name}" for n, name in enumerate(have))
        inferred(have, want, {})


# random models

WORDS = st.sampled_from(["a", "b", "enc", "attn", "layers", "0", "1", "2"])
LEAVES = st.sampled_from(["weight", "bias", "w"])
MODULES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


@st.composite
def models(draw, shapes):
    """Names with their shapes; parts are repeated as lists of layers are."""
    names = {}
    for module in draw(st.lists(MODULES, min_size=1, max_size=8)):
        numbers = range(draw(st.integers(1, 3)))
        for leaf in draw(st.sets(LEAVES, min_size=1, max_size=2)):
            shape = draw(shapes)
            names |= {
                re.sub(r"\blayers\b", rf"layers.{n}", f"{module}.{leaf}"): shape for n in numbers
            }
    return names


@st.composite
def renamings(draw, names):
    """What puts on a prefix, or renames a subtree or a component everywhere; never two to one."""
    new = draw(st.one_of(WORDS, st.sampled_from(["self_attn", "model", "fresh"])))
    parts = draw(st.sampled_from(sorted(names))).split(".")
    at = draw(st.integers(0, max(0, len(parts) - 2)))
    kind = draw(st.sampled_from(["prefix", "subtree", "component", "inside"]))
    head = ".".join(parts[:at])
    before = f"{head}." if head else ""

    def rename(name):
        if kind == "prefix":
            return f"{new}.{name}"
        if kind == "component":
            *path, leaf = name.split(".")
            return ".".join([*(new if part == parts[at] else part for part in path), leaf])
        if kind == "subtree" and name.startswith(f"{before}{parts[at]}."):
            return f"{before}{new}.{name[len(before) + len(parts[at]) + 1 :]}"
        if kind == "inside" and name.startswith(before):
            return f"{before}{new}.{name[len(before) :]}"
        return name

    renamed = {name: rename(name) for name in names}
    assume(len(set(renamed.values())) == len(renamed))
    return renamed


@given(st.data())
def test_of_a_model_that_was_renamed_nothing_wrong_is_concluded(data):
    shape = st.sampled_from([(2, 3), (4, 3), (3,)])
    names = data.draw(models(data.draw(st.sampled_from([st.just((2, 3)), shape]))))
    renamed = data.draw(renamings(names))
    have, want = slots(names), slots({renamed[name]: shape for name, shape in names.items()})
    for one, other, true in (
        (have, want, renamed),
        (want, have, {new: old for old, new in renamed.items()}),
    ):
        if any(true[name] != name for name in equal(one, other)):
            return  # equal names that were met mislead
        for rule in found(one, other).rules:
            assert {own: true[own] for own in rule.pairs.values()} == {
                own: wanted for wanted, own in rule.pairs.items()
            }


@given(st.data())
def test_of_modules_that_all_have_other_shapes_everything_is_concluded(data):
    modules = data.draw(st.lists(MODULES, min_size=4, max_size=12, unique=True))
    names = {f"{module}.weight": (n + 2, 3) for n, module in enumerate(modules)}
    names |= {f"{module}.bias": (n + 2,) for n, module in enumerate(modules)}
    assume(not any(name.startswith(f"{module}.weight.") for name in names for module in modules))
    at = data.draw(st.sampled_from(modules)).split(".")
    head = ".".join(at[: data.draw(st.integers(1, len(at)))])
    old, new = f"{head}.", re.sub(r"[^.]+$", "fresh.", head)
    moved = [name for name in names if name.startswith(old)]
    assume(2 * len(moved) <= len(names))
    want = {re.sub(rf"^{re.escape(old)}", new, name): shape for name, shape in names.items()}
    rules = found(slots(names), slots(want)).rules
    assert sum(len(rule.pairs) for rule in rules) == len(moved)


# what there is too much of


def experts(layers, names, front="l.{}.experts.{}"):
    """A mixture of eight experts, three matrices of one shape in each."""
    return slots(
        f"{front.format(layer, expert)}.{name}.weight"
        for layer in range(layers)
        for expert in range(8)
        for name in names
    )


def adapted(layers, base, down, up):
    """A model with adapters beside two matrices of each layer."""
    return slots(
        {
            f"l.{layer}.{name}.{leaf}": shape
            for layer in range(layers)
            for name in "qv"
            for leaf, shape in (
                (base, (8, 8)),
                (f"{down}.weight", (2, 8)),
                (f"{up}.weight", (8, 2)),
                ("bias", (8,)),
            )
        }
    )


def test_experts_in_many_layers_are_asked_about():
    have = experts(60, ("w1", "w2", "w3"))
    want = experts(60, ("gate", "up", "down"), "l.{}.mlp.experts.{}")
    result = found(have, want)
    assert (result.rules, result.is_cut_short) == ((), False)
    assert {*result.ambiguous[0].candidates} == {*want}


def test_adapters_in_many_layers_are_asked_about():
    have = adapted(1_000, "base_layer.weight", "lora_A.default", "lora_B.default")
    result = found(have, adapted(1_000, "weight", "lora_A", "lora_B"))
    assert (len(result.ambiguous), result.is_cut_short) == (3, False)


@pytest.mark.parametrize("budget", [0, 100, 300, 1_000, 3_000, 10_000, 30_000])
def test_where_the_budget_ends_what_is_known_is_told(monkeypatch, budget):
    have = decoder("model.") | experts(3, ("w1", "w2", "w3"))
    want = decoder(layers="blocks", attn="self_attn") | experts(3, ("gate", "up", "down"))
    have |= resnet("net.backbone.")
    want |= resnet("net.")
    every = {rule.text: rule.pairs for rule in found(have, want).rules}
    monkeypatch.setattr("ckptool.matching.accounts._BUDGET", budget)
    monkeypatch.setattr("ckptool.matching.accounts._BUDGET_A_NAME", 0)
    result = found(have, want)
    assert result.is_cut_short or budget >= 10_000
    for rule in result.rules:
        assert rule.pairs.items() <= every[rule.text].items()


@pytest.mark.parametrize("count", [2, 700])
def test_a_list_whose_numbers_stand_in_words_is_one_rule_however_long_it_is(count):
    below = {"qkv.w": (24, 8), "proj.w": (8, 8), "up.w": (32, 8), "down.w": (8, 32)}
    have, want = (
        slots({f"{front}{n}.{name}": shape for n in range(count) for name, shape in below.items()})
        for front in ("layer", "layers.")
    )
    (rule,) = found(have, want).rules
    assert (rule.text, rule.rule) == ("layer*. -> layers.*.", r"^layer(\d+)\.=>layers.\1.")
    assert rule.pairs == dict(zip(want, have, strict=True))


def test_the_part_that_explains_all_of_another_with_a_bare_tensor_is_asked_about_first():
    blocks = {f"blocks.{at}.weight": (4, 4) for at in range(3)}
    have = slots({f"tower.{name}": shape for name, shape in {"pos": (7, 4), **blocks}.items()})
    want = slots(
        {f"visual.{name}": shape for name, shape in {"pos": (7, 4), **blocks}.items()}
        | {f"text.{name}": shape for name, shape in {"emb.weight": (9, 4), **blocks}.items()}
    )
    (question,) = inferred(have, want, {}).ambiguous
    assert question.rules == (r"^tower\.=>visual.", r"^tower\.(?=blocks\.)=>text.")
