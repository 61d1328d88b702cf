"""Tables: drawn, streamed, fitted to a terminal."""

import pytest

from ckptool.render.table import table_lines
from ckptool.render.text import PLAIN, Look

HEADERS = ["name", "size"]


def lines(rows, look=PLAIN, **options):
    return list(table_lines(HEADERS, rows, look, **options))


def test_columns_are_aligned():
    assert lines([["a", "10 B"], ["long", "1 B"]], right={1}) == [
        "name  size",
        "a     10 B",
        "long   1 B",
    ]


def test_what_looks_like_a_number_stays_text():
    for text in ["001", "1e5", "nan", "1_000", "0x10"]:
        assert lines([[text, "x"]])[1].startswith(text), text


def test_no_rows_leave_the_header():
    assert lines([]) == ["name  size"]


def test_one_endless_name_does_not_cost_every_row_its_length():
    rows = [["short", "1 B"]] * 50 + [["x" * 1_000_000, "1 B"]]
    found = lines(rows)
    assert max(map(len, found[:-1])) < 200
    assert found[-1].startswith("x" * 1_000_000)


def test_rows_fit_the_terminal():
    rows = [[f"{n}." + "name" * 30, "10 B"] for n in range(30)]
    found = lines(rows, Look(width=60))
    assert max(map(len, found)) <= 60
    assert "..." in found[1]


@pytest.mark.parametrize("width", [44, 45, 46])
def test_names_stay_apart_where_they_are_shortened(width):
    names = [
        f"model.layers.{at}.self_attn.{part}_proj.weight" for at in range(12) for part in "qkv"
    ]
    found = lines([[name, "1.5 KiB"] for name in names], Look(width=width), right={1})
    rows, note = found[1 : len(names) + 1], found[len(names) + 1 :]
    assert max(map(len, found)) <= width
    assert len({row.split()[0] for row in rows}) == len(names)
    assert all(f".{name.split('.')[2]}." in row for name, row in zip(names, rows, strict=True))
    assert " ".join(map(str.strip, note)) == "(a wider terminal shows names in full)"


def test_the_widest_of_several_flexible_columns_is_shortened_first():
    rows = [["name" * 3, "x" * 100], ["n", "y"]]
    found = lines(rows, Look(width=50), flexible=(0, 1))
    assert max(map(len, found)) == 50
    assert "namenamename" in found[1]


def test_columns_that_can_be_spared_go_first_and_are_named():
    headers = ["name", "a", "b", "c"]
    rows = [["name" * 10, "1" * 10, "2" * 10, "3" * 10]]
    wide = list(table_lines(headers, rows, Look(width=76), spare=(2, 1)))
    assert [len(wide), len(wide[1])] == [2, 76]
    found = list(table_lines(headers, rows, Look(width=50), right={3}, spare=(2, 1)))
    assert found[0].split() == ["name", "a", "c"]
    assert max(map(len, found)) <= 50
    assert found[2] == "(a wider terminal shows names in full, b)"
    least = list(table_lines(headers, rows, Look(width=30), spare=(2, 1)))
    assert least[0].split() == ["name", "c"]
    assert least[2:] == ["(a wider terminal shows names", "  in full, b, a)"]


def test_a_terminal_too_narrow_still_shows_something():
    assert "..." in lines([["name" * 30, "10 B"]], Look(width=5))[1]


def test_only_the_header_is_colored():
    found = lines([["a", "b"]], Look(color=True))
    assert found[0].startswith("\x1b[1m")
    assert "\x1b" not in found[1]
