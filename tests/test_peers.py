"""The table of what others make of the fixtures: its judge, and ckptool's own column."""

import re

import pytest
import torch

from benchmarks.inputs import marking
from benchmarks.peers import OURS, columns, fixtures, judged
from tests.sources import PROJECT

ORACLE = {
    "tensors": [
        {"path": ["state_dict", "a"], "shape": [2], "sha256": "1"},
        {"path": ["state_dict", "b"], "shape": [2], "sha256": "2"},
        {"path": ["optimizer", "state", 0], "shape": [3], "sha256": "3"},
    ]
}


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ([([2], "1"), ([2], "2")], "right"),
        ([([2], "1"), ([2], "2"), ([3], "3")], "right"),
        ([([2], None), ([2], None)], "right"),
        ([([2], "1")], "part"),
        ([], "part"),
        ([([2], "1"), ([2], "9")], "wrong"),
        ([([4], None)], "wrong"),
    ],
)
def test_the_judge(given, outcome):
    assert judged(given, ORACLE) == outcome


def test_a_file_that_leaves_a_mark_leaves_it_where_it_is_run(tmp_path):
    mark = tmp_path / "mark"
    for path in marking(tmp_path, mark)[:2]:
        with pytest.raises(Exception, match="weights_only"):
            torch.load(path, weights_only=True)
        assert not mark.exists()
        torch.load(path, weights_only=False)["marks"].close()
        mark.unlink()


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="each file is read in a fork")
def test_our_column_is_that_of_the_page(tmp_path):
    column, outcomes = columns(OURS, tmp_path)
    assert outcomes == dict.fromkeys(fixtures(), "right")
    page = (PROJECT / "docs" / "peers.md").read_text(encoding="utf-8")
    table = re.search(r"^\| +\| ckptool .*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert dict(rows) == column
