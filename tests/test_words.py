"""Names and numbers as words."""

import pytest

from ckptool.words import clean, clean_lines, counted, listed, printable


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


def test_plurals():
    assert [counted(n, "tensor") for n in (0, 1, 2000)] == [
        "0 tensors",
        "1 tensor",
        "2,000 tensors",
    ]
    assert [counted(2, noun) for noun in ("entry", "key")] == ["2 entries", "2 keys"]


def test_names_for_a_terminal():
    assert printable("a\x1b[31m\nü") == "a\\x1b[31m\\nü"
    assert len(printable("x" * 5000)) < 200
    assert printable(" a ") == clean(" a ") == "\\x20a\\x20"
    assert listed(["a", "b"]) == "a, b"
    assert listed(map(str, range(10)), most=2) == "0, 1, and 8 more"
    assert listed([]) == "nothing"
