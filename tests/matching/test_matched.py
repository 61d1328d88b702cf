"""Names of files held against names of models."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings, strategies as st

from ckptool.core.names import WRAPPERS, strip_names
from ckptool.errors import NameCollision, UsageError
from ckptool.matching import MatchReport, Slot, match_keys
from ckptool.transforms.name_rules import prefix_rule, regex_rule

NET = {
    "stem.weight": (8, 3), "stem.bias": (8,), "layers.0.attn.weight": (8, 8),
    "layers.1.attn.weight": (8, 8), "norm.weight": (8,), "norm.running_mean": (8,),
    "norm.num_batches_tracked": (), "head.weight": (5, 8), "head.bias": (5,),
}  # fmt: skip


def slots(names, kind="parameter", **dtypes):
    """Slots of these shapes; `names` alone are of two elements each."""
    shapes = names if isinstance(names, dict) else dict.fromkeys(names, (2,))
    return {name: Slot(shape, dtypes.get(name, "float32"), kind) for name, shape in shapes.items()}


def before(front, names=NET):
    return {f"{front}{name}": shape for name, shape in names.items()}


def compiled(part, names=NET):
    return {
        name.replace(f"{part}.", f"{part}._orig_mod.") if name.startswith(part) else name: shape
        for name, shape in names.items()
    }


def averaged(names=NET):
    return {"n_averaged": (), **before("module.", names)}


def parallel_layers(names=NET):
    return {name.replace("layers.", "layers.module."): shape for name, shape in names.items()}


WRAPPINGS = {
    "plain": dict,
    "dp": lambda names: before("module.", names),
    "compile": lambda names: before("_orig_mod.", names),
    "compile of dp": lambda names: before("_orig_mod.module.", names),
    "dp of compile": lambda names: before("module._orig_mod.", names),
    "compile inside": lambda names: compiled("layers", names),
    "fsdp inside and out": lambda names: {
        f"_fsdp_wrapped_module.{name.replace('layers.', 'layers._fsdp_wrapped_module.')}": shape
        for name, shape in names.items()
    },
    "averaged": averaged,
    "averaged dp": lambda names: averaged(before("module.", names)),
    "lightning": lambda names: before("model.", names),
    "lightning with dp": lambda names: before("model.module.", names),
    "lightning of compile": lambda names: before("model._orig_mod.", names),
    "deepspeed": lambda names: before("_forward_module.model.", names),
    "parallel layers": parallel_layers,
    "checkpointed": lambda names: {
        name.replace("attn.", "attn._checkpoint_wrapped_module."): shape
        for name, shape in names.items()
    },
}  # fmt: skip


def inner(names):
    """The names of a wrapping, in the order of NET, the average's counter left out."""
    return [name for name in names if not name.endswith("n_averaged")]


@pytest.mark.parametrize("mine", WRAPPINGS)
def test_every_wrapping_goes_into_every_other_by_the_rules_that_the_report_gives(mine):
    have, by_rules = WRAPPINGS[mine](NET), 0
    for theirs, wrapping in WRAPPINGS.items():
        want = wrapping(NET)
        match = match_keys(slots(have), slots(want))
        expected = dict(zip(inner(want), inner(have), strict=True))
        if "n_averaged" in have and "n_averaged" in want:
            expected["n_averaged"] = "n_averaged"
        assert match.pairs == expected, theirs
        assert match.report.fits, theirs
        assert match.report.coverage == 1.0, theirs
        rules = [regex_rule(one.rule) for one in match.report.renamed if one.rule]
        if len(rules) < len(match.report.renamed):
            continue  # several places have no single rule
        by_rules += 1
        for wanted, own in match.pairs.items():
            name = own
            for rule in rules:
                name = rule.apply(name) or name
            assert name == wanted or "n_averaged" in name, theirs
    assert by_rules > 3


def test_equal_names_need_no_rule():
    match = match_keys(slots(NET), slots(NET), file="a.pth", model="Net")
    assert match.pairs == {name: name for name in NET}
    assert match.renamed == match.pairs
    report = match.report
    assert (report.file, report.model, report.renamed, report.notes) == ("a.pth", "Net", (), ())
    assert (report.fitting, report.names) == (len(NET), len(NET))
    assert report.loaded == report.parameters == sum(map(math.prod, NET.values()))


def test_pairs_are_in_the_order_of_the_model():
    match = match_keys(slots(["b", "a"]), slots(["a", "b"]))
    assert list(match.pairs) == ["a", "b"]


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (["model.w", "model.model.w"], ["w", "model.w"]),
        (["w", "model.w"], ["model.w", "model.model.w"]),
        (["module.w", "module.module.w"], ["w", "module.w"]),
        (["w", "module.w"], ["module.w", "module.module.w"]),
        (["_orig_mod.model.w", "_orig_mod.model.model.w"], ["w", "model.w"]),
        (["model.w", "model.model.w"], ["module.w", "module.model.w"]),
        (["a.b.w", "a.b.b.w"], ["b.w", "b.b.w"]),
        (["b.w", "b.b.w"], ["w", "b.w"]),
    ],
)  # fmt: skip
def test_a_real_child_of_a_wrapper_name_is_not_taken_for_its_parent(have, want):
    match = match_keys(slots(have), slots(want))
    assert match.pairs == dict(zip(want, have, strict=True))


def test_nor_where_the_file_has_more_than_the_model():
    have = {"model.w": (2,), "model.model.w": (2,), "loss.weight": (7,)}
    match = match_keys(slots(have), slots(["w", "model.w"]))
    assert match.pairs == {"w": "model.w", "model.w": "model.model.w"}
    assert match.report.unexpected_keys == ["loss.weight"]


def test_nor_where_the_model_has_more_than_the_file():
    match = match_keys(slots(["w", "model.w"]), slots(["model.w", "model.model.w", "head.bias"]))
    assert match.pairs == {"model.w": "w", "model.model.w": "model.w"}
    assert match.report.missing_keys == ["head.bias"]


def test_two_parts_that_are_the_model_are_not_guessed_between_though_a_name_is_equal():
    have = ["model.w", "model.model.w", "teacher.w", "teacher.model.w"]
    match = match_keys(slots(have), slots(["w", "model.w"]))
    assert match.pairs == {}
    assert match.report.missing_keys == ["w", "model.w"]
    assert match.report.unexpected_keys == have
    assert {name for one in match.report.ambiguous for name in one.candidates} == {"w", "model.w"}


VISION = {"conv1.w": (8, 3), "blocks.0.w": (8, 8), "blocks.1.w": (8, 8), "ln.w": (8,)}
CLIP = {**before("visual.", VISION), "token.w": (9, 8), "blocks.0.w": (8, 8), "blocks.1.w": (8, 8)}


def test_of_two_towers_alike_none_gets_what_is_the_other_s():
    match = match_keys(slots(CLIP), slots(VISION))
    assert match.pairs == {name: f"visual.{name}" for name in VISION}
    assert match.report.unexpected_keys == ["token.w", "blocks.0.w", "blocks.1.w"]
    match = match_keys(slots(VISION), slots(CLIP))
    assert match.pairs == {f"visual.{name}": name for name in VISION}
    assert match.report.missing_keys == ["token.w", "blocks.0.w", "blocks.1.w"]


@pytest.mark.parametrize("front", ["net.", "module.", "model.body."])
def test_nor_below_a_front_that_all_names_share(front):
    have = before(front, CLIP)
    pairs = {name: f"{front}visual.{name}" for name in VISION}
    off, on = match_keys(slots(have), slots(VISION)), match_keys(slots(VISION), slots(have))
    assert off.pairs == pairs
    assert on.pairs == {n: name for name, n in pairs.items()}
    both = {**have, **before(f"{front}other.", VISION)}
    assert match_keys(slots(both), slots(VISION)).pairs == {}


TOWERS = {"text": "abcd", "image": "abef"}


def test_no_rule_is_told_that_takes_the_rest_from_another_part():
    have = {f"{part}.{name}.w": (4, 4) for part, names in TOWERS.items() for name in names}
    wanted = slots({f"{name}.w": (4, 4) for name in "abcdef"})
    match = match_keys(slots(have), wanted, rules=[regex_rule(r"^text\.=>")])
    assert match.pairs == {f"{name}.w": f"text.{name}.w" for name in "abcd"}
    assert all(not one.rules for one in match.report.ambiguous)


def test_nor_where_the_tower_has_more_than_the_file():
    match = match_keys(slots(CLIP), slots({**VISION, "head.w": (5, 8)}))
    assert match.pairs == {name: f"visual.{name}" for name in VISION}
    assert match.report.missing_keys == ["head.w"]


def test_a_part_of_which_some_is_met_elsewhere_gives_nothing_to_the_rest():
    have = ["a.w", "c.w", "backbone.a.w", "backbone.b.w"]
    match = match_keys(slots(have), slots(["a.w", "b.w", "c.w"]))
    assert match.pairs == {"a.w": "a.w", "c.w": "c.w"}
    match = match_keys(slots(["a.w", "b.w", "c.w"]), slots(have))
    assert match.pairs == {"a.w": "a.w", "c.w": "c.w"}


def test_the_user_s_rule_says_which_tower_it_is():
    both = {**before("enc.", {**VISION, "head.w": (2, 8)}), **before("dec.", VISION)}
    wanted = {**VISION, "head.w": (2, 8)}
    match = match_keys(slots(both), slots(wanted), rules=[regex_rule(r"^dec\.=>")])
    assert match.pairs == {name: f"dec.{name}" for name in VISION}
    assert match.report.missing_keys == ["head.w"]


def test_of_two_parts_that_may_be_meant_each_has_its_rule():
    part = {"emb.w": (9, 4), **{f"encoder.{n}.w": (4, 4) for n in range(3)}, "pooler.w": (4, 4)}
    both = {**before("encoder.", part), **before("decoder.", part)}
    match = match_keys(slots(part), slots(both))
    assert match.pairs == {}
    (one,) = match.report.ambiguous
    assert one.rules == ("^=>encoder.", "^=>decoder.")
    assert match.report.respelled == ()


@pytest.mark.parametrize("front", ["encoder", "emb", "pooler", "body"])
def test_all_of_a_file_may_be_a_part_that_is_called_as_one_of_its_own(front):
    part = {"emb.w": (9, 4), **{f"encoder.{n}.w": (4, 4) for n in range(3)}, "pooler.w": (4, 4)}
    whole = {**before(f"{front}.", part), "head.w": (2, 4)}
    pairs = {f"{front}.{name}": name for name in part}
    assert match_keys(slots(part), slots(whole)).pairs == pairs
    assert match_keys(slots(whole), slots(part)).pairs == {n: full for full, n in pairs.items()}


def test_two_towers_that_are_the_model_are_not_guessed_between():
    have = {**CLIP, **before("other.", VISION)}
    match = match_keys(slots(have), slots(VISION))
    assert match.pairs == {}
    assert len(match.report.ambiguous) == 1


def test_a_sequential_that_is_shifted_is_not_matched():
    match = match_keys(slots(["0.weight", "2.weight"]), slots(["2.weight", "4.weight"]))
    assert match.pairs == {"2.weight": "2.weight"}
    assert match.report.missing_keys == ["4.weight"]
    assert match.report.unexpected_keys == ["0.weight"]


def test_mlp_module_is_no_wrapper():
    match = match_keys(slots(["mlp_module.0.weight"]), slots(["mlp_0.weight"]))
    assert match.pairs == {}
    assert not match.report.fits


def test_wrappers_that_would_make_two_names_one_stay():
    have = ["a._orig_mod.w", "a.w"]
    match = match_keys(slots(have), slots(have))
    assert match.pairs == {name: name for name in have}
    assert match_keys(slots(have), slots(["a.w"])).pairs == {"a.w": "a.w"}


def test_an_equal_name_of_another_shape_is_mismatched_and_nothing_else():
    have, want = {**NET, "extra.weight": (6, 8)}, {**NET, "head.weight": (6, 8)}
    report = match_keys(slots(before("module.", have)), slots(want)).report
    assert [(m.name, m.own, m.shape, m.wanted) for m in report.mismatched] == [
        ("head.weight", "module.head.weight", (5, 8), (6, 8))
    ]
    assert report.missing_keys == []
    assert report.unexpected_keys == ["module.extra.weight"]
    assert not report.fits
    assert report.coverage < 1


def test_missing_and_unexpected_are_as_torch_has_them():
    have, want = slots(["module.b", "module.a", "module.c"]), slots(["a", "d", "e"])
    report = match_keys(have, want).report
    assert report.missing_keys == ["d", "e"]
    assert report.unexpected_keys == ["module.b", "module.c"]


def test_what_is_no_tensor_is_not_loaded_into_one():
    match = match_keys({"a": Slot(kind="extra")}, {"a": Slot((2,), "float32", "parameter")})
    assert match.pairs == {}
    assert match.report.mismatched == ()
    assert match.report.missing_keys == match.report.unexpected_keys == ["a"]


def test_extra_state_and_lazy_parameters_take_what_is_there():
    want = {"a._extra_state": Slot(kind="extra"), "b": Slot(None, None, "parameter")}
    have = {"module.a._extra_state": Slot((3,), "uint8"), "module.b": Slot((2,), "float32")}
    assert set(match_keys(have, want).pairs) == set(want)


def test_rules_of_the_user_come_first():
    rules = [
        prefix_rule("old=new"),
        regex_rule(r"\.w$=>.weight"),
        regex_rule("nowhere=>here"),
    ]
    match = match_keys(slots(["module.old.w"]), slots(["module.new.weight"]), rules=rules[1:])
    assert match.pairs == {}
    match = match_keys(slots(["old.w", "b.x"]), slots(["new.weight", "b.x"]), rules=rules)
    assert match.pairs == {"new.weight": "old.w", "b.x": "b.x"}
    assert [(one.kind, one.text, one.names, one.rule) for one in match.report.renamed] == [
        ("rule", "old=new", (("old.w", "new.weight"),), r"^old(\.|$)=>new\1"),
        ("rule", r"\.w$=>.weight", (("old.w", "new.weight"),), r"\.w$=>.weight"),
    ]
    assert match.report.notes == ("rule nowhere=>here matches no key",)


def test_rules_that_make_two_names_one_are_refused():
    with pytest.raises(NameCollision, match="'a' and 'b'"):
        match_keys(slots(["a", "b"]), slots(["a"]), rules=[regex_rule("^b$=>a")])
    with pytest.raises(UsageError, match="the rules would leave nothing of the key 'a'"):
        match_keys(slots(["a"]), slots(["a"]), rules=[regex_rule("^a$=>")])


def test_weight_norm_old_and_new_with_wrappers_and_fronts_around():
    old = before("module.model.", {"conv.weight_g": (8, 1), "conv.weight_v": (8, 3), "c.w": (4,)})
    new = {
        "conv.parametrizations.weight.original0": (8, 1),
        "conv.parametrizations.weight.original1": (8, 3), "c.w": (4,),
    }  # fmt: skip
    there = match_keys(slots(old), slots(new))
    assert there.pairs == dict(zip(new, old, strict=True))
    assert [one.kind for one in there.report.renamed] == ["wrapper", "prefix", "known", "known"]
    back = match_keys(slots(new), slots(old))
    assert back.pairs == dict(zip(old, new, strict=True))
    assert back.report.fits


def test_the_counter_of_a_batch_norm_of_before_it_counted_is_kept():
    have, want = dict(NET), dict(NET)
    del have["norm.num_batches_tracked"]
    for metadata in (None, {}, {"norm": {"version": 1}}, {"norm": {}}, {"": {"version": 1}}):
        report = match_keys(slots(have), slots(want), metadata=metadata).report
        assert [name for name, _ in report.kept] == ["norm.num_batches_tracked"]
        assert report.fits
        assert report.coverage == 1.0
    report = match_keys(slots(have), slots(want), metadata={"norm": {"version": 2}}).report
    assert report.missing_keys == ["norm.num_batches_tracked"]


def test_its_version_is_looked_up_by_its_path_in_the_file():
    have = before("module.body.", NET)
    del have["module.body.norm.num_batches_tracked"]
    metadata = {"module.body.norm": {"version": 2}, "norm": {"version": 1}}
    report = match_keys(slots(have), slots(NET), metadata=metadata).report
    assert report.missing_keys == ["norm.num_batches_tracked"]


def test_a_counter_called_so_of_no_normalization_is_missing():
    report = match_keys(slots(["a"]), slots(["a", "b.num_batches_tracked"])).report
    assert report.missing_keys == ["b.num_batches_tracked"]


def test_a_frozen_normalization_leaves_the_counter_out():
    want = dict(NET)
    del want["norm.num_batches_tracked"]
    report = match_keys(slots(before("module.")), slots(want)).report
    assert [name for name, _ in report.left_out] == ["module.norm.num_batches_tracked"]
    assert report.fits


def test_the_counter_of_an_average_is_neither_missing_nor_unexpected():
    report = match_keys(slots(averaged()), slots(NET)).report
    assert [name for name, _ in report.left_out] == ["n_averaged"]
    report = match_keys(slots(NET), slots(averaged())).report
    assert [name for name, _ in report.kept] == ["n_averaged"]
    assert report.coverage == 1.0


def tied(*names, shape=(4, 2)):
    return {name: Slot(shape, "float32", "parameter", "tie") for name in names}


def test_one_name_of_a_tie_is_enough():
    want = {**slots(["a"]), **tied("embed.weight", "head.weight")}
    have = slots({"module.a": (2,), "module.head.weight": (4, 2)})
    match = match_keys(have, want)
    assert match.pairs["embed.weight"] == match.pairs["head.weight"] == "module.head.weight"
    report = match.report
    assert report.tied == (("embed.weight", "head.weight"),)
    assert (report.loaded, report.parameters, report.fits) == (10, 10, True)
    assert match.renamed["module.head.weight"] == "head.weight"


def test_both_names_of_a_tie_are_themselves():
    have = slots({"embed.weight": (4, 2), "head.weight": (4, 2)})
    match = match_keys(have, tied("embed.weight", "head.weight"))
    assert match.pairs == {name: name for name in have}
    assert match.report.parameters == 8


def test_a_tie_of_the_file_makes_none_of_the_model():
    have = tied("a", "b")
    want = slots({"a": (4, 2), "b": (4, 2), "c": (4, 2)})
    report = match_keys(have, want).report
    assert report.tied == ()
    assert report.missing_keys == ["c"]


def test_coverage_is_of_parameters_where_they_are_known():
    want = {"w": Slot((6,), "float32", "parameter"), "mean": Slot((2,), "float32", "buffer")}
    report = match_keys(slots({"w": (6,)}), want).report
    assert (report.loaded, report.parameters, report.missing_keys) == (6, 6, ["mean"])


def test_coverage_is_of_names_where_shapes_are_not_known():
    names = {name: Slot() for name in ("a", "b", "c", "d")}
    report = match_keys(slots(["a", "b", "c"]), names).report
    assert report.coverage == 0.75


def test_casts_are_lossy_by_what_the_types_hold():
    have = {"a": Slot((2,), "float32"), "b": Slot((2,), "bfloat16"), "c": Slot((2,), "float32")}
    want = {"a": Slot((2,), "float16"), "b": Slot((2,), "float32"), "c": Slot((2,), "float32")}
    report = match_keys(have, want).report
    assert [(c.name, c.before, c.after, c.lossy) for c in report.cast] == [
        ("a", "float32", "float16", True), ("b", "bfloat16", "float32", False),
    ]  # fmt: skip
    assert not report.fits


def test_names_that_no_model_takes_are_renamed_as_the_others_are():
    match = match_keys(slots(["module.a", "module.b"]), slots(["a"]))
    assert match.renamed == {"module.a": "a", "module.b": "b"}


def test_a_name_that_is_taken_is_not_given_to_what_is_left_over():
    have = slots({"a._orig_mod.w": (3,), "a.w": (2,), "b._orig_mod.x": (4,)})
    match = match_keys(have, slots({"a.w": (2,), "b.x": (4,)}))
    assert len(set(match.renamed.values())) == len(have)


def test_an_ambiguity_is_decided_by_the_rule_that_it_tells():
    have = slots(
        {f"module.{part}.{name}": shape for part in ("s", "t") for name, shape in NET.items()}
    )
    report = match_keys(have, slots(NET)).report
    assert report.coverage == 0
    (ambiguity,) = report.ambiguous
    assert set(ambiguity.candidates) == set(NET)
    decided = match_keys(have, slots(NET), rules=[regex_rule(ambiguity.rules[0])])
    assert decided.report.coverage == 1
    assert not decided.report.ambiguous


@pytest.mark.parametrize("file", WRAPPINGS)
def test_so_it_is_with_wrappers_around_and_inside(file):
    parts = [before(f"{part}.", WRAPPINGS[file](NET)) for part in ("raw", "ema")]
    have = slots({**parts[0], **parts[1]})
    for model, wrapping in WRAPPINGS.items():
        want = slots(wrapping(NET))
        report = match_keys(have, want).report
        assert report.coverage == 0, model
        for rule in {rule for one in report.ambiguous for rule in one.rules}:
            decided = match_keys(have, want, rules=[regex_rule(rule)])
            assert decided.report.coverage == 1, model
            assert len({own.partition(".")[0] for own in decided.pairs.values()}) == 1, model


def test_nothing_at_all():
    match = match_keys({}, {})
    assert (match.pairs, match.renamed, match.report) == ({}, {}, MatchReport())


PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "module", "model", "weight"])
TREES = st.sets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8)
FRONTS = st.lists(
    st.sampled_from(["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module."]),
    max_size=3,
).map("".join)  # fmt: skip


@settings(max_examples=300)
@given(TREES, FRONTS, FRONTS)
def test_a_model_wrapped_anyhow_gets_its_own_tensors(names, mine, theirs):
    names = sorted(names)
    different = {name: (number + 2,) for number, name in enumerate(names)}
    alike = dict.fromkeys(names, (2,))
    for shapes in (different, alike):
        match = match_keys(slots(before(mine, shapes)), slots(before(theirs, shapes)))
        assert match.pairs == {f"{theirs}{name}": f"{mine}{name}" for name in names}


WRAPPED = st.lists(st.sampled_from(["a", "0", *WRAPPERS]), min_size=1, max_size=4)


@settings(max_examples=300)
@given(st.sets(WRAPPED.map(".".join), min_size=1, max_size=6))
def test_wrappers_come_off_as_strip_names_takes_them(names):
    have = {name: (number + 2,) for number, name in enumerate(sorted(names))}
    try:
        stripped = strip_names(have).renamed
    except NameCollision:
        return
    pairs = {stripped.get(name, name): name for name in have}
    match = match_keys(slots(have), slots({new: have[own] for new, own in pairs.items()}))
    assert match.pairs == pairs


@settings(max_examples=300)
@given(TREES, TREES)
@example({"a", "a.a.module.a", "a.a.module.module"}, {"module"})
def test_every_name_is_accounted_for_once(mine, theirs):
    match = match_keys(slots(sorted(mine)), slots(sorted(theirs)))
    report = match.report
    assert set(match.pairs) | set(report.missing_keys) | {n for n, _ in report.kept} == theirs
    assert len(match.pairs) + len(report.missing_keys) + len(report.kept) == len(theirs)
    own = list(match.pairs.values())
    assert len(set(own)) == len(own)
    left = [*report.unexpected_keys, *(name for name, _ in report.left_out)]
    assert sorted([*own, *left]) == sorted(mine)
    for one in report.ambiguous:
        assert set(one.names) | set(one.candidates) <= mine | theirs
    assert set(match.renamed) == mine


def test_names_of_a_hostile_file_cost_little():
    many = itertools.count()
    dotted = {"a." * 3000 + str(next(many)): (2,) for _ in range(50)}
    wrapped = {"_orig_mod." * 50_000 + "w": (2,), "module." * 50_000 + "x": (2,)}
    match = match_keys(slots({**dotted, **wrapped}), slots({"b." * 3000 + "w": (2,), "w": (2,)}))
    assert match.pairs.get("w") in (None, "_orig_mod." * 50_000 + "w")
