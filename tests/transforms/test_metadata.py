"""The entries of `_metadata` moved with their modules, and removed with them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ckptool.core.model import OrderedMap
from ckptool.core.names import make_module_prefixer, make_prefixer, strip_names
from ckptool.transforms.metadata import drop_empty_modules, move_metadata
from tests.trees import modules_of


def entries(*paths):
    return OrderedMap((path, {"version": at}) for at, path in enumerate(paths, start=10))


def versions(metadata):
    return {path: entry["version"] for path, entry in metadata.items()}


def moved(metadata, names, rename_module=str):
    return move_metadata(metadata, names, rename_module)


def stripped(metadata, names, **options):
    result = strip_names(names, **options)
    every = {name: result.renamed.get(name, name) for name in names}
    return moved(metadata, every, result.rename_module)


def test_the_wrapped_modules_entry_replaces_the_wrappers():
    made = stripped(entries("", "module", "module.bn", "module.act"), ["module.bn.weight"])
    assert list(versions(made).items()) == [("", 11), ("bn", 12), ("act", 13)]
    assert type(made) is OrderedMap


def test_a_wrapper_in_the_middle_also_where_it_holds_no_name():
    old = {"": 0, "a": 1, "a._orig_mod": 2, "act": 3, "act._orig_mod": 4, "b": 5}
    assert stripped(old, ["a._orig_mod.w", "b.w"]) == {"": 0, "a": 2, "act": 4, "b": 5}


def test_a_wrapper_on_a_submodule():
    old = {"": 0, "f": 1, "f.module": 2, "f.module.0": 3, "c": 4}
    assert stripped(old, ["f.module.0.w", "c.w"], at="f") == {"": 0, "f": 2, "f.0": 3, "c": 4}


@pytest.mark.parametrize(
    ("at", "old", "names", "new"),
    [
        (None, ["", "bn"], ["bn.w"], {"": 1, "module": 10, "module.bn": 11}),
        (None, ["", "act"], [], {"": 1, "module": 10, "module.act": 11}),
        ("f", ["", "f", "f.0"], ["f.0.w"], {"": 10, "f": 1, "f.module": 11, "f.module.0": 12}),
    ],
)
def test_what_comes_to_stand_around_a_module_has_an_entry_of_its_own(at, old, names, new):
    renamed = {name: make_prefixer("module", at)(name) for name in names}
    made = moved(entries(*old), renamed, make_module_prefixer("module", at))
    assert list(versions(made).items()) == list(new.items())


def test_paths_that_are_no_strings_stay():
    assert moved({3: 1, "a": 2}, {"a.w": "b.w"}) == {3: 1, "b": 2}


def test_a_module_goes_where_its_names_go_whatever_becomes_of_their_last_part():
    names = {"bn.gamma": "norm.weight", "bn.beta": "norm.bias"}
    assert versions(moved(entries("", "bn"), names)) == {"": 10, "norm": 11}


def test_a_container_goes_with_what_is_in_it():
    names = {"net.a.0.w": "body.a.0.w", "net.b.w": "body.b.w"}
    old = entries("", "net", "net.a", "net.a.0", "net.b")
    assert list(moved(old, names)) == ["", "body", "body.a", "body.a.0", "body.b"]


def test_names_that_go_apart_take_the_entry_along_each():
    names = {"attn.q.w": "x.q.w", "attn.in_w": "packed.in_w", "attn.out_w": "packed.out_w"}
    made = versions(moved(entries("", "attn", "attn.q"), names))
    assert made == {"": 10, "x": 11, "packed": 11, "x.q": 12}
    halves = versions(moved(entries("", "a"), {"a.w": "b.w", "a.v": "a.v"}))
    assert halves == {"": 10, "b": 11, "a": 11}


def test_of_two_modules_that_become_one_the_one_that_stays_tells():
    names = {"a.w": "b.w", "b.v": "b.v"}
    assert versions(moved(entries("", "a", "b"), names)) == {"": 10, "b": 12}
    both = {"a.w": "c.w", "b.v": "c.v"}
    assert versions(moved(entries("", "a", "b", "c"), both)) == {"": 10, "c": 11}


def test_one_module_becomes_the_root_and_the_root_one_module():
    assert versions(moved(entries("", "a"), {"a.w": "w"})) == {"": 11}
    assert versions(moved(entries("", "a"), {"w": "a.w", "a.v": "v"})) == {"a": 10, "": 11}
    assert versions(moved(entries(""), {"w": "a.w"})) == {"": 1, "a": 10}


COMPONENTS = st.sampled_from(["a", "b", "0", "1", "conv"])
MODULE_NAMES = st.lists(
    st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), unique=True, min_size=1, max_size=6
)


def every_module(names):
    return entries(*modules_of(names))


@given(MODULE_NAMES, st.permutations(["a", "b", "0", "1", "conv"]))
def test_components_that_change_places_and_back_are_the_identity(names, others):
    there = dict(zip(["a", "b", "0", "1", "conv"], others, strict=True))
    back = {new: old for old, new in there.items()}

    def rename(by):
        return lambda name: ".".join(by.get(part, part) for part in name.split("."))

    old = every_module(names)
    new = [rename(there)(name) for name in names]
    once = moved(old, dict(zip(names, new, strict=True)), rename(there))
    assert list(once) == [rename(there)(path) for path in old]
    twice = moved(once, dict(zip(new, names, strict=True)), rename(back))
    assert list(twice.items()) == list(old.items())


def test_modules_that_lost_all_their_names_go_with_what_is_inside_them():
    old = {"": 0, "a": 1, "a.conv": 2, "a.act": 3, "b": 4, "act": 5, 3: 6}
    names = ["a.conv.w", "a.conv.b", "b.w"]
    assert drop_empty_modules(old, names, ["b.w"]) == {"": 0, "b": 4, "act": 5, 3: 6}
    assert drop_empty_modules(old, names, ["a.conv.b"]) == {
        "": 0, "a": 1, "a.conv": 2, "a.act": 3, "act": 5, 3: 6,
    }  # fmt: skip
    assert drop_empty_modules(old, names, []) == {"": 0, "act": 5, 3: 6}


@given(MODULE_NAMES, st.data())
def test_what_remains_is_what_the_kept_names_need(names, data):
    kept = [name for name in names if data.draw(st.booleans())]
    made = drop_empty_modules(every_module(names), names, kept)
    assert list(made) == [path for path in every_module(names) if path in every_module(kept)]
