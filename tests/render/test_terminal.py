"""What a stream can show."""

import io
import os

import pytest

from ckptool.render.terminal import PLAIN, look_of


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("NO_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_is_plain_and_endless():
    assert look_of(io.StringIO()) == PLAIN


def test_a_terminal_has_colour():
    assert look_of(Terminal()).colour


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not look_of(Terminal()).colour
    assert look_of(Terminal()).alarm("x") == "x"


def test_the_width_is_that_of_the_environment_or_of_the_terminal(monkeypatch):
    assert look_of(Terminal()).width is None
    monkeypatch.setenv("COLUMNS", "72")
    assert look_of(Terminal()).width == 72
    monkeypatch.setenv("COLUMNS", "wide")
    monkeypatch.setattr(Terminal, "fileno", lambda _: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((99, 9)))
    assert look_of(Terminal()).width == 99
