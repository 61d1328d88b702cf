"""Tables of numbers in text files."""

import csv
import io
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import FileDenied, FileMissing, TrainingError
from ckptool.trainer.data import read_table


@pytest.fixture
def table(tmp_path):
    """Reads bytes, or text in UTF-8, as a file."""

    def read(content):
        path = tmp_path / "rows.csv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_table(str(path))

    return read


NUMBERS = [[1.0, 2.5], [3.0, -4.0]]
READ = {
    "names": ("a,b\n1,2.5\n3,-4\n", ("a", "b")),
    "no names": ("1,2.5\n3,-4\n", ("1", "2")),
    "no last line end": ("a,b\n1,2.5\n3,-4", ("a", "b")),
    "crlf": ("a,b\r\n1,2.5\r\n3,-4\r\n", ("a", "b")),
    "old mac": ("a,b\r1,2.5\r3,-4\r", ("a", "b")),
    "byte order mark": ("\ufeffa,b\n1,2.5\n3,-4\n", ("a", "b")),
    "byte order mark before numbers": ("\ufeff1,2.5\n3,-4\n", ("1", "2")),
    "semicolons": ("a;b\n1;2.5\n3;-4\n", ("a", "b")),
    "tabs": ("a\tb\n1\t2.5\n3\t-4\n", ("a", "b")),
    "quotes": ('"a","b"\n"1","2.5"\n"3","-4"\n', ("a", "b")),
    "blanks": (" a, b\n 1,  2.5\n3 ,-4 \n", ("a", "b")),
    "quotes after blanks": ('"a", "b"\n1, "2.5"\n3, "-4"\n', ("a", "b")),
    "blank lines": ("\n \na,b\n\n1,2.5\n  \n3,-4\n\n\n", ("a", "b")),
    "exponents": ("a,b\n1e0,25e-1\n+3.,-.4E1\n", ("a", "b")),
    "a delimiter in a name": ('"a, m",b\n1,2.5\n3,-4\n', ("a, m", "b")),
    "another delimiter in a name": ("a; m,b\n1,2.5\n3,-4\n", ("a; m", "b")),
    "a line end in a name": ('"a\nm",b\n1,2.5\n3,-4\n', ("a\nm", "b")),
    "an index without a name": (",b\n1,2.5\n3,-4\n", ("1", "b")),
    "years among the names": ("2019,b\n1,2.5\n3,-4\n", ("2019", "b")),
    "letters of the world": ("größe,高さ\n1,2.5\n3,-4\n", ("größe", "高さ")),
}


def test_what_people_write_is_read(table):
    for what, (content, columns) in READ.items():
        names, values = table(content)
        assert names == columns, what
        assert values.dtype == torch.float64, what
        assert values.tolist() == NUMBERS, what


def test_of_one_line_the_delimiter_is_seen_too(table):
    assert table("1;2;3\n")[1].tolist() == [[1, 2, 3]]


REFUSED = {
    "text": ("a,b\n1,2\n3,x\n", "line 3: 'x' in column 'b' is not a finite number"),
    "text in the first line": ("1.5,x\n3,4\n", "line 1: 'x' in column '2' is not a finite number"),
    "a hole": ("a,b\n1,\n", "line 2: '' in column 'b' is not"),
    "a hole in the first line": ("1,,3\n1,2,3\n", "line 1: '' in column '2' is not"),
    "a hole of blanks": ("a,b\n  ,2\n", "line 2: '' in column 'a' is not"),
    "a line of delimiters": ("a,b\n1,2\n,\n", "line 3: '' in column 'a' is not"),
    "nan": ("a,b\n1,nan\n", "line 2: 'nan' in column 'b' is not a finite number"),
    "infinity": ("a,b\n-inf,1\n", "line 2: '-inf' in column 'a'"),
    "beyond floats": ("a,b\n1e999,1\n", "line 2: '1e999' in column 'a'"),
    "an underscore": ("a,b\n1_000,1\n", "line 2: '1_000' in column 'a'"),
    "a long text": (f"a,b\n{'x' * 99},1\n", f"'{'x' * 40}...' in column 'a' is not"),
    "a short line": ("a,b\n1,2\n3\n", "line 3: 1 cell, but 2 in the lines before"),
    "a long line": ("a,b\n1,2\n3,4,5\n", "line 3: 3 cells, but 2 in the lines before"),
    "a short line after semicolons": ("a;b\n1\n", "line 2: 1 cell, but 2 in the lines before"),
    "two names": ("a,b,a\n1,2,3\n", "line 1: two columns are named 'a'"),
    "a number as a name": ("2,,3\nx,1,1\n", "line 1: '' in column '2' is not"),
    "no row": ("a,b\n", "there is no row below the names of the columns"),
    "nothing": ("", "there is no row"),
    "blank lines alone": ("\n \n", "there is no row"),
    "an open quote": ('a,b\n1,"2\n', "line 2: unexpected end of data"),
    "a quote that goes on": ('a,b\n"1"2,3\n', "line 2: ',' expected after '\"'"),
    "not utf-8": (b"a,b\n1,2\n3,caf\xe9\n", "is not UTF-8"),
    "a name that is not": (b"a,caf\xe9\n1,2\n", "is not UTF-8"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), "is not UTF-8"),
    "a cell without end": ("x" * 200_000, "line 1: field larger than field limit"),
    "a late cell without end": (
        f"a,b\n1,2\n1,{'2' * 200_000}\n",
        "line 3: field larger than field limit",
    ),
    "after a quoted line end": ('"a\nm",b\n1,2\n3,x\n', "line 4: 'x' in column 'b'"),
    "after blank lines": ("\n\na,b\n\n1,x\n", "line 5: 'x' in column 'b'"),
}


def test_what_is_no_table_of_numbers_is_told_with_its_place(table, tmp_path):
    for content, told in REFUSED.values():
        with pytest.raises(TrainingError, match=re.escape(told)) as caught:
            table(content)
        assert str(caught.value).startswith(f"{tmp_path / 'rows.csv'}: "), told


def test_a_decimal_comma_is_told_as_such(table):
    with pytest.raises(TrainingError, match="'1,5' in column 'a' is not") as caught:
        table("a;b\n1,5;2\n")
    assert caught.value.hint.startswith("numbers such as 1.5 in every cell")


def test_control_characters_are_not_passed_on(table):
    with pytest.raises(TrainingError) as caught:
        table("a\x1b[31m,b\nx\x1b[2J,1\n")
    assert str(caught.value).isprintable()


def test_a_file_that_is_not_there_or_a_folder_is_told(tmp_path):
    with pytest.raises(FileMissing, match="no such file"):
        read_table(str(tmp_path / "none.csv"))
    with pytest.raises(FileDenied, match="cannot be read"):
        read_table(str(tmp_path))


@given(st.binary() | st.text("0123456789.,;-e\t\n\r\"' x").map(str.encode))
def test_whatever_is_in_a_file_it_is_a_table_or_told(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    path.write_bytes(content)
    with suppress(TrainingError):
        names, values = read_table(str(path))
        assert values.isfinite().all()
        assert len(set(names)) == values.shape[1]


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.data(), st.sampled_from(",;\t"), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_what_csv_writes_is_read(tmp_path_factory, data, delimiter, has_names, end):
    width = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.lists(finite, min_size=width, max_size=width), min_size=1))
    text = io.StringIO()
    quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
    names = [f"name {number}" for number in range(width)]
    writer.writerows([names, *rows] if has_names else rows)
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    path.write_bytes(text.getvalue().encode())
    columns, values = read_table(str(path))
    assert values.tolist() == rows
    assert not has_names or columns == tuple(names)
