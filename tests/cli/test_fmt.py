"""--fmt: the tables alone, in another format."""

import csv

import pytest
import torch

from ckptool.cli.group import VERBS

TABLES = ("list", "info", "show", "stats", "diff", "verify", "match")
WITH_TABLES = [name for name in VERBS["Inspect"] if name in TABLES]


def test_a_list_as_csv_is_its_tables_and_nothing_else(ckptool, model):
    done = ckptool("list", model, "--fmt", "csv", "--include", "state_dict/*", "--include", "epoch")
    tensors, values = (list(csv.reader(part.splitlines())) for part in done.out.split("\n\n"))
    assert tensors[0] == ["name", "dtype", "shape", "device", "size", "marks"]
    assert tensors[1][:3] == ["state_dict/module.conv1.weight", "float32", "[8, 3, 3, 3]"]
    assert len(tensors) == 10
    assert values == [["name", "type", "value"], ["epoch", "int", "7"]]


def test_nothing_is_shortened(ckptool, tmp_path):
    path = tmp_path / "long.pth"
    torch.save({"note": "word " * 100, "n" * 300: torch.zeros(1)}, path)
    done = ckptool("list", path, "--fmt", "markdown")
    assert "n" * 300 in done.out
    assert "word " * 99 in done.out
    assert "..." not in done.out


def test_info_shows_its_sections(ckptool, model):
    rows = list(csv.reader(ckptool("info", model, "--fmt", "csv").out.splitlines()))
    assert rows[0] == ["section", "kind", "tensors", "parameters", "bytes", "wrappers"]
    assert rows[1] == ["state_dict", "state_dict", "9", "330", "1.4 KiB", "module."]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("epoch", ["value", "7"]),
        ("module.fc.bias", ["dtype", "float32"]),
        ("state_dict", ["module.fc.bias", "tensor float32 [10] on cpu"]),
    ],
)
def test_show_makes_a_table_of_anything(ckptool, model, name, row):
    done = ckptool("show", model, name, "--fmt", "csv")
    assert row in list(csv.reader(done.out.splitlines()))


@pytest.mark.parametrize("verb", ["list", "info"])
def test_a_format_that_is_none_is_wrong_usage_before_the_file_is_opened(ckptool, verb):
    done = ckptool(verb, "missing.pth", "--fmt", "word")
    assert (done.code, done.out) == (2, "")
    assert "github" in done.err


@pytest.mark.parametrize("other", ["--json", "--tree"])
def test_what_is_no_table_takes_no_format(ckptool, model, other):
    done = ckptool("list", model, "--fmt", "csv", other)
    assert (done.code, done.out) == (2, "")
    assert other in done.err


@pytest.mark.parametrize("name", WITH_TABLES)
def test_every_column_has_a_heading_and_every_row_all_columns(ckptool, model, name):
    more = {"show": ["state_dict"], "diff": [model], "match": ["--like", model]}.get(name, [])
    done = ckptool(name, model, *more, "--fmt", "csv")
    assert done.code == 0
    for part in done.out.split("\n\n"):
        headings, *rows = csv.reader(part.splitlines())
        assert all(headings)
        assert {len(row) for row in rows} <= {len(headings)}
