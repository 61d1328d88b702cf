"""Tables in tabulate's formats."""

import csv
import html.parser
import re

import pytest
import tabulate

from ckptool.errors import UsageError
from ckptool.render.table import resolve_format, separate_blocks, table_lines
from ckptool.render.text import Look

HEADERS = ["name", "size"]
EVIL = "a|b\\|<b>&*x* `y` __z__ [l](u)"


def lines(rows, fmt, headers=HEADERS, **options):
    return list(table_lines(headers, rows, Look(fmt=resolve_format(fmt)), **options))


def test_every_format_holds_every_cell_whole():
    for fmt in [*tabulate.tabulate_formats, "csv", "markdown"]:
        for count in (0, 1, 2001):
            rows = [[f"layers.{n}.{'deep.' * 40}weight", "001"] for n in range(count)]
            found = "\n".join(lines(rows, fmt, right={1}))
            assert "name" in found, fmt
            assert "size" in found, fmt
            names = re.findall(r"layers\.[0-9]+\.(?:deep\.){40}weight", found)
            assert names == [name for name, _ in rows], fmt
            assert found.count(" 001") + found.count(",001") + found.count("\t001") == count, fmt
            assert "\x1b" not in found, fmt


def test_a_cell_is_never_taken_for_a_number():
    (_, *rows) = csv.reader(lines([["1e5", "001"], ["0x10", "1_000"]], "csv"))
    assert rows == [["1e5", "001"], ["0x10", "1_000"]]


def test_csv_comes_back_as_it_went():
    rows = [['a,"b"', "1 B"], ["", "; '"], ["=1+1", EVIL]]
    assert list(csv.reader(lines(rows, "csv"))) == [HEADERS, *rows]


def test_tsv_is_not_padded():
    assert lines([["a", "10 B"], ["long", "x"]], "tsv") == ["name\tsize", "a\t10 B", "long\tx"]


def gfm_cells(line):
    """The cells of a row as cmark-gfm splits and unescapes it."""
    inner = re.fullmatch(r"\| (.*) \|", line)[1]
    cells = re.split(r" +\| +", re.sub(r"\\(.)", lambda m: chr(0xE000 + ord(m[1])), inner))
    return [
        re.sub("[\ue000-\uf000]", lambda m: chr(ord(m[0]) - 0xE000), cell.strip()) for cell in cells
    ]


def test_markdown_syntax_in_a_cell_is_escaped():
    for fmt in ["markdown", "github", "pipe"]:
        found = lines([[EVIL, "1 B"], ["_a.b_c", "[2, 3] {0..3}"]], fmt)
        assert gfm_cells(found[2]) == [EVIL, "1 B"], fmt
        bare = re.sub(r"\\.", "", found[2])
        assert bare.count("|") == 3, fmt
        assert not set("<`*&") & set(bare), fmt
        assert "](" not in bare, fmt
        assert found[3].split() == ["|", r"\_a.b_c", "|", "[2,", "3]", "{0..3}", "|"], fmt


class Cells(html.parser.HTMLParser):
    """The text of each cell, and every tag."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


@pytest.mark.parametrize("fmt", ["html", "unsafehtml"])
def test_a_name_is_no_markup(fmt):
    found = Cells("\n".join(lines([["<script>alert(1)</script>", "&amp;"]], fmt)))
    assert found.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    cells = [cell.strip() for cell in found.cells]
    assert cells == ["name", "size", "<script>alert(1)</script>", "&amp;"]


def test_a_name_is_no_latex_command():
    for fmt in ["latex", "latex_raw", "latex_booktabs", "latex_longtable"]:
        found = "\n".join(lines([["a_b$x$", r"\input{x}"]], fmt))
        assert r"a\_b\$x\$" in found, fmt
        assert r"\input" not in found, fmt


@pytest.mark.parametrize("fmt", ["jira", "youtrack", "asciidoc", "textile", "moinmoin", "orgtbl"])
def test_a_bar_in_a_cell_makes_no_column(fmt):
    def columns(name):
        (line,) = (line for line in lines([[name, "1"]], fmt) if "zz" in line)
        return len(re.findall(r"(?<!\\)\|", line))

    assert columns("zz|zz") == columns("zz_zz")


def test_mediawiki_and_rst_syntax_is_escaped():
    found = "\n".join(lines([["{{x}}[[y]]''z''||q", "1"]], "mediawiki"))
    for syntax in ("{{", "[[", "''", "||q"):
        assert syntax not in found
    assert r"\*x\* \|y\| z\_" in "\n".join(lines([["*x* |y| z_", "1"]], "rst"))


def test_an_unknown_format_is_told_all_there_are():
    with pytest.raises(UsageError, match="markdown") as caught:
        resolve_format("word")
    for name in (*tabulate.tabulate_formats, "csv"):
        assert f" {name}" in str(caught.value)


def test_one_endless_name_is_refused_where_it_would_pad_every_row():
    rows = [["short", "1 B"]] * 400 + [["x" * 1_000_000, "1 B"]]
    with pytest.raises(UsageError, match="1,000,003 characters wide") as caught:
        lines(rows, "markdown")
    assert "csv" in caught.value.hint
    assert len(lines(rows, "csv")) == 402


def test_blocks_stand_apart_and_empty_ones_leave_no_trace():
    assert list(separate_blocks([[], ["a", "b"], iter(()), ["c"], []])) == ["a", "b", "", "c"]
    assert list(separate_blocks([])) == []
