"""Numbers and commands fit for a terminal."""

import os
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.render.text import number, runnable, shorten, size


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (1 << 70, "1,048,576.0 PiB"),
    ],
)
def test_sizes(nbytes, shown):
    assert size(nbytes) == shown


def test_a_long_text_loses_its_middle():
    assert shorten("abc", 8) == "abc"
    assert shorten("0123456789abcdef", 10) == "0123...def"
    assert len(shorten("x" * 1000, 1)) == 8


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.1, "0.1"), (1 / 3, "0.333333"), (3, "3"), (True, "True"), (1 - 2j, "1-2j")],
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_a_command_of_printable_words_stays_as_it_is():
    command = "ckptool list 'a b;$(x).pth' ./ä.pth"
    assert runnable(command) == command


def test_words_that_no_terminal_shows_are_quoted_for_the_shell():
    name = os.fsdecode(b"a\nb\x1b[2J\\'\xff.pth")
    command = shlex.join(["ckptool", "list", name, "plain"])
    assert runnable(command) == "ckptool list $'a\\nb\\x1b[2J\\\\'\"'\"$'\\xff.pth' plain"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash reads it")
@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(min_size=1).filter(lambda raw: 0 not in raw), min_size=1, max_size=4))
def test_a_shell_takes_the_words_from_the_screen(words):
    command = runnable(shlex.join(["printf", r"%s\0", *map(os.fsdecode, words)]))
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == words
