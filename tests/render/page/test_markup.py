"""HTML from text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.render.page.document import element, script_json, table, words
from tests.render.page.pages import Page

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "a\u2028b\u2029c",
    "\ud800",
    "\u202egnp.exe",
    "\x1b[31m\x00",
    "&lt;b&gt;",
    "\"'` onload=x",
]


def test_text_of_a_file_stays_text():
    for text in HOSTILE:
        page = Page(element("p", words(text), title=words("x")).encode())
        assert [one.tag for one in page.elements] == ["p"], text
        assert page.one("p").text.isprintable(), text


@given(st.text())
def test_an_attribute_stays_within_its_quotes(text):
    page = Page(element("p", "", class_=text).encode("utf-8", "replace"))
    assert [one.tag for one in page.elements] == ["p"]
    assert set(page.one("p").attributes) <= {"class"}


@given(st.recursive(st.text() | st.integers(), st.lists, max_leaves=5))
def test_data_in_a_script_comes_back_and_cannot_end_it(document):
    text = script_json(document)
    assert json.loads(text) == document
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()


def test_what_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json([float("nan")])


def test_a_table_has_headers_of_its_columns_and_numbers_to_the_right():
    page = Page(table(["a", "b"], [["1", "2"]], right={1}, class_="x", caption="c").encode())
    assert [one.attributes.get("class") for one in page.all("th")] == [None, "right"]
    assert [one.text for one in page.all("td")] == ["1", "2"]
    assert page.one("caption").text == "c"
