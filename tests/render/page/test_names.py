"""Names as a tree."""

from hypothesis import given
from hypothesis import strategies as st

from ckptool.paths import name_of
from ckptool.render.page.data import Names
from ckptool.words import clean
from tests.render.page.pages import names


def placed(paths):
    tree = Names()
    rows = tree.columns(paths)
    return {"names": tree.to_dict(), "tensors": rows}


def test_what_names_begin_with_is_stored_once():
    document = placed([("state_dict", "a.b.weight"), ("state_dict", "a.b.bias"), ("epoch",)])
    assert document == {
        "names": {"label": ["", "state_dict", "/a", ".b"], "parent": [0, 0, 1, 2]},
        "tensors": {"label": [".weight", ".bias", "epoch"], "module": [3, 3, 0]},
    }


def test_a_file_that_is_one_tensor_has_no_name():
    assert placed([()])["tensors"] == {"label": [""], "module": [0]}


def test_a_dot_and_a_slash_make_different_modules():
    document = placed([("a", "b.c"), ("a.b", "c")])
    assert len(document["names"]["label"]) == 4
    assert names(document) == ["a/b.c", "a.b/c"]


@given(st.lists(st.lists(st.one_of(st.text(alphabet="ab/.", max_size=5), st.integers(0, 3)))))
def test_the_parts_make_the_name_again(paths):
    assert names(placed(paths)) == [name_of(tuple(path)) for path in paths]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_what_a_screen_might_obey_is_spelled_out(path):
    (name,) = names(placed([path]))
    assert clean(name) == name


def test_a_million_dots_make_no_million_modules():
    assert len(placed([("." * 1_000_000,)])["names"]["label"]) < 200
