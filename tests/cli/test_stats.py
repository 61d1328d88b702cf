"""`ckptool stats` on the command line."""

import io
import json
import math

import pytest
import torch

from ckptool.cli import main
from tests.tensors.samples import sparse


@pytest.fixture
def odd(tmp_path):
    """A checkpoint in which everything that is flagged is there."""
    tree = {f"layers.{at}.w": torch.randn(8).bfloat16() for at in range(5)}
    tree["layers.3.w"] = torch.randn(8)
    tree |= {"nan": torch.tensor([1.0, math.nan]), "zero": torch.zeros(3), "one": torch.ones(3)}
    path = tmp_path / "odd.pth"
    torch.save(tree, path)
    return path


def test_it_answers_and_does_not_judge(ckptool, odd):
    done = ckptool("stats", odd)
    assert (done.code, done.err) == (0, "")
    for words in ("dtype-outlier", "all-zero", "constant", "float32, but 4 of layers.{0..4}.w"):
        assert words in done.out


def test_the_document(ckptool, odd):
    document = ckptool("stats", odd, "--json", "--bins", "4").document
    assert document["schema"] == "ckptool.stats/1"
    rows = {row["name"]: row for row in document["tensors"]}
    assert rows["nan"]["flags"] == ["nan"]
    assert rows["zero"]["histogram"] == {"low": 0.0, "high": 0.0, "counts": [0, 0, 3, 0]}
    assert document["totals"]["nan"] == 1


def test_every_option_at_once(ckptool, model):
    done = ckptool(
        "stats", model, "--key", "state_dict", "--include", "*conv*", "--exclude", "*bias",
        "--sort", "norm", "--fold", "--fmt", "csv", "--bins", "3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [line.split(",")[0] for line in done.out.splitlines()] == [
        "name", "state_dict/module.conv1.weight",
    ]  # fmt: skip


def test_sorted_rows_in_both_forms(ckptool, odd):
    names = [
        row["name"] for row in ckptool("stats", odd, "--sort", "name", "--json").document["tensors"]
    ]
    assert names == sorted(names)
    shown = ckptool("stats", odd, "--sort", "name").out.splitlines()[1 : len(names) + 1]
    assert [line.split()[0] for line in shown] == names


def test_folded_rows_in_the_document(ckptool, odd):
    rows = ckptool("stats", odd, "--fold", "--json").document["tensors"]
    assert ("layers.{0..2,4}.w", 4) in [(row["name"], row["count"]) for row in rows]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--key", "nothing"], "no entry is named 'nothing'"),
        (["--bins", "0"], "--bins"),
        (["--sort", "color"], "--sort"),
        (["--json", "--fmt", "csv"], "--fmt and --json cannot be combined"),
    ],
)
def test_wrong_usage(ckptool, odd, arguments, words):
    done = ckptool("stats", odd, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_without_torch_it_says_what_to_install(process, odd, tmp_path):
    (tmp_path / "shadow/torch").mkdir(parents=True)
    (tmp_path / "shadow/torch/__init__.py").write_text("raise ModuleNotFoundError('no torch')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'shadow')!r})\n"
        "from ckptool.cli import main; sys.exit(main())\n"
    )
    done = process("stats", odd, code=("-c", code))
    assert done.code == 2
    assert "tensors need torch, which cannot be imported: " in done.err
    assert "pip install torch" in done.err


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_nothing_to_measure_needs_no_torch(process, tmp_path):
    path = tmp_path / "sparse.pth"
    torch.save(sparse(), path)
    code = (
        "import sys\nfrom ckptool.cli import main\ncode = main()\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    done = process("stats", path, "--json", code=("-c", code))
    assert done.code == 0, done.err
    assert all(row["reason"] for row in json.loads(done.out)["tensors"])


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "█"), ("ascii", "@")])
def test_histograms_in_what_the_encoding_has(odd, monkeypatch, encoding, mark):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding=encoding))
    assert main(["stats", str(odd)]) == 0
    text = shown.getvalue().decode(encoding)
    assert mark in text
    assert "\\u" not in text
