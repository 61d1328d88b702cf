"""Names without wrappers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.errors import NameCollision
from ckptool.matching.unwrapping import bare_forms, wrapped_submodules
from ckptool.wrappers import WRAPPERS, strip_names


def test_names_without_wrappers_have_one_form():
    assert bare_forms(["a.weight", "mlp_module.0.weight", "module"]) == [{}]
    assert bare_forms([]) == [{}]


def test_wrappers_go_and_then_module_from_submodules():
    names = ["module.features.module.0.w", "module.head._orig_mod.w"]
    assert bare_forms(names) == [
        {},
        {names[0]: "features.module.0.w", names[1]: "head.w"},
        {names[0]: "features.0.w", names[1]: "head.w"},
    ]


def test_a_submodule_that_has_more_than_module_is_no_wrapper():
    assert bare_forms(["a.module.w", "a.b"]) == [{}]
    assert bare_forms(["a.module"]) == [{}]
    assert bare_forms(["a.module.module.w"]) == [{}, {"a.module.module.w": "a.w"}]


def test_an_average_inside_a_model_has_its_counter_beside():
    names = ["ema.n_averaged", "ema.module.w", "w"]
    assert bare_forms(names) == [{}, {"ema.module.w": "ema.w"}]


def test_forms_in_which_two_names_are_one_are_none():
    assert bare_forms(["a._orig_mod.w", "a.w"]) == [{}]


def test_paths_of_wrapped_submodules_are_outermost_first():
    assert wrapped_submodules(["a.module.module.w", "b.module.w", "b.x"]) == ["a", "a.module"]
    assert wrapped_submodules([".".join("abcdef" * 300) + ".module.w"]) == []


PART = st.sampled_from([*WRAPPERS, "a", "0", "n_averaged", "my_module"])
NAMES = st.sets(st.lists(PART, min_size=1, max_size=5).map(".".join), min_size=1, max_size=6)


@settings(max_examples=500, deadline=None)
@given(NAMES)
def test_the_form_without_wrappers_is_what_taking_off_all_levels_comes_to(names):
    names = sorted({*names, f"{min(names)}.weight"})
    try:
        expected = strip_names(names).renamed
    except NameCollision:
        return
    if expected:
        assert bare_forms(names)[1] == expected
    for form in bare_forms(names):
        assert len({form.get(name, name) for name in names}) == len(names)
