"""One document, a row a line."""

import json

import pytest

from ckptool.render.text import json_lines

DOCUMENT = {
    "schema": "x/1",
    "rows": [{"name": "a", "shape": (1, None)}, {"name": "b"}],
    "none": [],
    "names": ["a", "b"],
    "nested": {"k": [1]},
}


def test_the_lines_are_one_document():
    assert json.loads("\n".join(json_lines(DOCUMENT))) == json.loads(json.dumps(DOCUMENT))


def test_each_row_has_a_line():
    assert list(json_lines(DOCUMENT))[2:5] == [
        '  "rows": [',
        '    {"name": "a", "shape": [1, null]},',
        '    {"name": "b"}',
    ]


def test_an_empty_document():
    assert json.loads("\n".join(json_lines({}))) == {}


def test_whatever_a_terminal_might_obey_is_escaped():
    text = "\n".join(
        json_lines({"name": "\x1b[31m\u202e\ud800", "rows": [{"n": "\x9b\x7f\u2028"}]})
    )
    assert text.isascii()
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    assert json.loads(text)["name"] == "\x1b[31m\u202e\ud800"


def test_what_json_lacks_is_no_silent_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(json_lines({"x": float("nan")}))
