"""Numbers, commands and documents fit for a terminal."""

import io
import json
import os
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from ckptool.render.text import (
    PLAIN,
    detect_look,
    format_number,
    format_size,
    json_lines,
    make_pasteable,
    shorten,
)


def test_sizes():
    for nbytes, shown in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (1 << 70, "1,048,576.0 PiB"),
    ]:
        assert format_size(nbytes) == shown, nbytes


def test_a_long_text_loses_its_middle():
    assert shorten("abc", 8) == "abc"
    assert shorten("0123456789abcdef", 10) == "0123...def"
    assert (
        shorten("model.layers.12.self_attn.q_proj.weight", 34)
        == "model.layers.12....n.q_proj.weight"
    )
    assert len(shorten("x" * 1000, 1)) == 8


def test_numbers():
    for value, shown in [
        (0.1, "0.1"),
        (1 / 3, "0.333333"),
        (3, "3"),
        (True, "True"),
        (1 - 2j, "1-2j"),
    ]:
        assert format_number(value) == shown, value


def test_a_command_of_printable_words_stays_as_it_is():
    command = "ckptool list 'a b;$(x).pth' ./ä.pth"
    assert make_pasteable(command) == command


def test_words_that_no_terminal_shows_are_quoted_for_the_shell():
    name = os.fsdecode(b"a\nb\x1b[2J\\'\xff.pth")
    command = shlex.join(["ckptool", "list", name, "plain"])
    assert make_pasteable(command) == "ckptool list $'a\\nb\\033[2J\\\\'\"'\"$'\\377.pth' plain"


def test_words_that_the_encoding_of_stdout_lacks_are_quoted_for_the_shell(monkeypatch):
    command = "ckptool list 'modèle.pth' '名.pth' --key 'a b'"
    for encoding, first in (("ascii", r"$'mod\303\250le.pth'"), ("latin-1", "'modèle.pth'")):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert make_pasteable(command) == rf"ckptool list {first} $'\345\220\215.pth' --key 'a b'"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash reads it")
@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(min_size=1).filter(lambda raw: 0 not in raw), min_size=1, max_size=4))
def test_a_shell_takes_the_words_from_the_screen(words):
    command = make_pasteable(shlex.join(["printf", r"%s\0", *map(os.fsdecode, words)]))
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == words


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("NO_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_is_plain_and_endless():
    assert detect_look(io.StringIO()) == PLAIN


def test_a_terminal_has_color():
    assert detect_look(Terminal()).color


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_color_can_be_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not detect_look(Terminal()).color
    assert detect_look(Terminal()).alarm("x") == "x"


def test_the_width_is_that_of_the_environment_or_of_the_terminal(monkeypatch):
    assert detect_look(Terminal()).width is None
    monkeypatch.setenv("COLUMNS", "72")
    assert detect_look(Terminal()).width == 72
    monkeypatch.setenv("COLUMNS", "wide")
    monkeypatch.setattr(Terminal, "fileno", lambda _: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((99, 9)))
    assert detect_look(Terminal()).width == 99


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
