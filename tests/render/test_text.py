"""Words and numbers fit for a terminal."""

import pytest

from ckptool.render.text import clean, clean_lines, number, plural, shorten, size


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("conv1.weight", "conv1.weight"),
        ("Gewicht.ä.层", "Gewicht.ä.层"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("evil\u202egnp.exe", "evil\\u202egnp.exe"),
        ("\u2066x\u2069\u200f", "\\u2066x\\u2069\\u200f"),
        ("lone\ud800", "lone\\ud800"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\U000e0001", "\\U000e0001"),
        (" a b  ", "\\x20a b\\x20\\x20"),
        (" ", "\\x20"),
        ("", ""),
    ],
)
def test_what_a_terminal_might_obey_is_spelled_out(raw, shown):
    assert clean(raw) == shown
    assert clean(raw).encode("utf-8").decode() == shown


def test_line_breaks_may_be_kept():
    assert clean_lines("a\n  \x1bb\n") == "a\n  \\x1bb\n"


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


def test_plurals():
    assert [plural(n, "tensor") for n in (0, 1, 2000)] == ["0 tensors", "1 tensor", "2,000 tensors"]
    assert plural(2, "entry") == "2 entries"


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
