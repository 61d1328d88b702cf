"""Names: wrappers are whole components, and repeated layers one pattern."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import assume, given, strategies as st

from ckptool.core.names import (
    WRAPPERS,
    Family,
    check_collisions,
    find_wrappers,
    format_ranges,
    group_families,
    make_prefixer,
    split_numbers,
    strip_names,
)
from ckptool.errors import NameCollision, UsageError


def stripped(*names, **options):
    renamed = strip_names(names, **options).renamed
    return [renamed.get(name, name) for name in names]


@pytest.mark.parametrize("word", WRAPPERS)
def test_each_word_is_a_wrapper_at_the_front(word):
    result = strip_names([f"{word}.fc.weight", f"{word}.fc.bias"])
    assert list(result.renamed.values()) == ["fc.weight", "fc.bias"]
    assert (result.levels, result.wrappers) == (1, (word,))


@pytest.mark.parametrize("word", WRAPPERS[1:])
def test_each_word_but_module_is_a_wrapper_in_the_middle(word):
    assert stripped(f"a.{word}.w", "b.w", f"a.{word}.c.{word}.w") == ["a.w", "b.w", "a.c.w"]


@pytest.mark.parametrize(
    ("names", "expected", "levels", "wrappers"),
    [
        (["module._orig_mod.0.weight"], ["0.weight"], 2, ("module", "_orig_mod")),
        (["_orig_mod.module.0.weight"], ["0.weight"], 2, ("_orig_mod", "module")),
        (["0._orig_mod.weight"], ["0.weight"], 1, ("_orig_mod",)),
        (["module.module.w", "module.module.b"], ["w", "b"], 2, ("module",)),
        (["module.a.w", "a.w"], ["module.a.w", "a.w"], 0, ()),
        (["module.a.w", "b"], ["module.a.w", "b"], 0, ()),
        (["a.module.w", "a.module.b"], ["a.module.w", "a.module.b"], 0, ()),
        (["module.mlp_module.0.weight"], ["mlp_module.0.weight"], 1, ("module",)),
        (["mlp_module.0.weight", "module_list.0"], ["mlp_module.0.weight", "module_list.0"], 0, ()),
        (["my_orig_mod.w", "_orig_mod_.w"], ["my_orig_mod.w", "_orig_mod_.w"], 0, ()),
        (["module", "_orig_mod"], ["module", "_orig_mod"], 0, ()),
        (["a._orig_mod"], ["a._orig_mod"], 0, ()),
        (["n_averaged", "module.w"], ["n_averaged", "w"], 1, ("module",)),
        (["module.n_averaged", "module.module.w"], ["n_averaged", "w"], 2, ("module",)),
        (["_orig_mod.n_averaged", "_orig_mod.module.w"], ["n_averaged", "w"], 2,
         ("_orig_mod", "module")),
        (["module.fc._extra_state", "module.fc.w"], ["fc._extra_state", "fc.w"], 1, ("module",)),
        (["_forward_module._fsdp_wrapped_module.l.0._checkpoint_wrapped_module.w",
          "_forward_module._fsdp_wrapped_module.l.1.w"], ["l.0.w", "l.1.w"], 3,
         ("_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")),
        (["n_averaged"], ["n_averaged"], 0, ()),
        ([], [], 0, ()),
    ],
)  # fmt: skip
def test_levels_go_from_the_outside_until_nothing_changes(names, expected, levels, wrappers):
    result = strip_names(names)
    assert [result.renamed.get(name, name) for name in names] == expected
    assert (result.levels, result.wrappers) == (levels, wrappers)
    assert find_wrappers(names) == wrappers


def test_levels_stops_earlier():
    names = "module._orig_mod.module.w", "module._orig_mod.module.b"
    assert stripped(*names, levels=1) == ["_orig_mod.module.w", "_orig_mod.module.b"]
    assert stripped(*names, levels=2) == ["module.w", "module.b"]
    assert stripped(*names, levels=9) == ["w", "b"]
    with pytest.raises(UsageError, match="levels must be at least 1, not 0"):
        strip_names(names, levels=0)


def test_only_narrows_to_kinds_and_looks_behind_those_that_stay():
    names = "_orig_mod.module.a._checkpoint_wrapped_module.w", "_orig_mod.module.b"
    assert stripped(*names, only="module") == [
        "_orig_mod.a._checkpoint_wrapped_module.w", "_orig_mod.b",
    ]  # fmt: skip
    assert stripped(*names, only=["_checkpoint_wrapped_module"]) == [
        "_orig_mod.module.a.w", "_orig_mod.module.b",
    ]  # fmt: skip
    assert stripped(*names, only=("module", "_orig_mod")) == ["a._checkpoint_wrapped_module.w", "b"]
    with pytest.raises(UsageError, match="'modul' is not a known wrapper prefix") as caught:
        strip_names(names, only="modul")
    assert "_orig_mod" in caught.value.hint


def test_at_takes_the_wrapper_off_a_submodule():
    names = "features.module.0.weight", "features.module.0.bias", "classifier.weight"
    result = strip_names(names, at="features")
    assert result.renamed == {names[0]: "features.0.weight", names[1]: "features.0.bias"}
    assert stripped("features.module.w", "features.x.w", at="features") == [
        "features.module.w", "features.x.w",
    ]  # fmt: skip
    assert stripped("features.module.w", "featuresque.module.w", at="features") == [
        "features.w", "featuresque.module.w",
    ]  # fmt: skip


def test_two_names_that_would_become_one_are_refused_by_both_names():
    with pytest.raises(NameCollision, match=r"'a._orig_mod.w' and 'a.w' would both become 'a.w'"):
        strip_names(["a._orig_mod.w", "a.w"])
    with pytest.raises(NameCollision, match=r"'epoch' and 'module\.epoch'"):
        check_collisions(["epoch", "module.epoch", 3], {"module.epoch": "epoch"})
    check_collisions([1, "1", "a"], {"a": "b"})


def test_adding_leaves_the_counter_of_averaged_weights():
    add = make_prefixer("module")
    assert [add(name) for name in ("n_averaged", "fc.w")] == ["n_averaged", "module.fc.w"]
    assert make_prefixer("_orig_mod", "f")("f.w") == "f._orig_mod.w"
    assert make_prefixer("_orig_mod", "f")("g.w") == "g.w"
    with pytest.raises(UsageError):
        make_prefixer("model")


COMPONENT = st.sampled_from(["a", "b", "0", "mlp_module", "n_averaged", "_orig_mod_x", *WRAPPERS])
NAMES = st.lists(st.lists(COMPONENT, min_size=1, max_size=5).map(".".join), unique=True, max_size=6)


def apply(names, **options):
    try:
        return stripped(*names, **options)
    except NameCollision:
        assume(False)


@given(NAMES, st.sampled_from(WRAPPERS))
def test_what_is_added_comes_off_again(names, word):
    added = [make_prefixer(word)(name) for name in names]
    assert apply(added, levels=1) == names


@given(NAMES)
def test_stripping_twice_is_stripping_once(names):
    once = apply(names)
    assert apply(once) == once
    assert len(set(once)) == len(names)


@given(NAMES)
def test_components_only_go_never_change_or_move(names):
    for old, new in zip(names, apply(names), strict=True):
        gone = iter(old.split("."))
        assert all(part in gone for part in new.split("."))
        assert [part for part in old.split(".") if part not in WRAPPERS] == [
            part for part in new.split(".") if part not in WRAPPERS
        ]


@given(NAMES)
def test_no_name_keeps_a_wrapper_but_module(names):
    for name in apply(names):
        assert not set(name.split(".")[:-1]) & set(WRAPPERS[1:])


@given(NAMES.filter(bool), st.sampled_from(WRAPPERS))
def test_module_stays_unless_every_name_begins_with_it(names, word):
    plain = [*names, "plain"]
    assume(len(set(plain)) == len(plain))
    for old, new in zip(plain, apply(plain, only="module"), strict=True):
        assert old == new


def labels(*names):
    return [family.label for family in group_families((name, None) for name in names)]


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
    assert group_families((name, 0) for name in names) == [
        Family("layers.{0..31}.mlp.weight", tuple(names), tuple(range(32)))
    ]


def test_gaps_are_told():
    assert labels(*(f"blocks.{n}.x" for n in (8, 3, 0, 1, 2))) == ["blocks.{0..3,8}.x"]


def test_a_name_alone_is_itself():
    assert labels("layers.3.w", "fc.bias", "") == ["layers.3.w", "fc.bias", ""]


def test_signatures_part_families_in_the_order_of_their_first_names():
    rows = [("l.0.w", "a"), ("l.1.w", "b"), ("x", "a"), ("l.2.w", "a"), ("l.3.w", "b")]
    assert group_families(rows) == [
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
    assert group_families([("a.0", 0), ("a.1", 0), ("a.0", 0)]) == [
        Family("a.{0..1}", ("a.0", "a.1", "a.0"), (0, 1, 2))
    ]


def test_a_name_of_a_million_numbers_costs_no_more_than_its_length():
    name = "0." * 1_000_000
    assert labels(name + "1", name + "2") == [name + "1", name + "2"]


def test_many_names_that_make_no_box():
    names = [f"a.{n}.b.{n * n % 1009}.c.{n % 7}.d.{n % 1013}" for n in range(20_000)]
    found = group_families((name, None) for name in names)
    assert sum(len(family.names) for family in found) == len(names)


def test_a_name_taken_apart():
    assert split_numbers("a.3.b/0") == (("a.", ".b/", ""), (3, 0))
    assert split_numbers("conv1.w") == (("conv1.w",), ())


@pytest.mark.parametrize(
    ("numbers", "text"), [([5], "{5}"), ([2, 0, 1], "{0..2}"), ([0, 2, 3, 9], "{0,2..3,9}")]
)
def test_ranges(numbers, text):
    assert format_ranges(numbers) == text


components = st.one_of(st.integers(0, 3).map(str), st.sampled_from(["w", "conv1", "00", "a/1"]))
some_names = st.lists(components, min_size=1, max_size=6).map(".".join)


@given(st.lists(st.tuples(some_names, st.booleans()), unique=True, max_size=60))
def test_each_name_is_in_one_family_and_its_label_expands_to_it_alone(rows):
    found = group_families(rows)
    assert sorted(n for f in found for n in f.numbers) == list(range(len(rows)))
    for family in found:
        assert sorted(expanded(family.label)) == sorted(family.names)
    assert [f.numbers[0] for f in found] == sorted(f.numbers[0] for f in found)
    for family in found:
        assert list(family.numbers) == sorted(family.numbers)
        assert [rows[number][0] for number in family.numbers] == list(family.names)
        assert len({rows[number][1] for number in family.numbers}) == 1
