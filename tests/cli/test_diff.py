"""diff on the command line."""

import csv
import os
import re

import pytest
import torch

from tests.cli.conftest import Net


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two checkpoints in the current folder: a.pth and b.pth, which is DataParallel's."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    state = Net().state_dict()
    torch.save({"epoch": 1, "state_dict": state}, "a.pth")
    changed = {f"module.{name}": tensor.clone() for name, tensor in state.items()}
    changed["module.fc.bias"] += 1
    changed["module.bn1.weight"][:4] *= 1.5
    torch.save({"epoch": 2, "state_dict": changed}, "b.pth")
    return tmp_path


def tensors(path, **named):
    torch.save(named, path)
    return path


def test_the_largest_relative_norm_stands_first(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth")
    assert (done.code, done.err) == (1, "")
    rows = re.findall(r"^state_dict/(\S+) +value ", done.out, re.MULTILINE)
    assert rows == ["fc.bias", "bn1.weight"]
    assert "epoch  value  1     2" in done.out
    assert done.out.splitlines()[2] == "3 of 10 common entries differ; 7 equal"


def test_the_figures_are_those_of_torch(ckptool, files):
    a, b = (torch.load(name)["state_dict"] for name in ("a.pth", "b.pth"))
    one, other = a["fc.bias"].double(), b["module.fc.bias"].double()
    rows = list(csv.DictReader(ckptool("diff", "a.pth", "b.pth", "--fmt", "csv").out.splitlines()))
    row = next(row for row in rows if row["name"] == "state_dict/fc.bias")
    norm = (one - other).norm() / one.norm()
    assert float(row["rel norm"]) == pytest.approx(norm.item(), rel=1e-5)
    assert float(row["max abs"]) == pytest.approx((one - other).abs().max().item(), rel=1e-5)
    assert float(row["mean abs"]) == pytest.approx((one - other).abs().mean().item(), rel=1e-5)
    assert float(row["rmse"]) == pytest.approx((one - other).square().mean().sqrt().item(), 1e-5)
    assert float(row["cosine"]) == pytest.approx(
        torch.cosine_similarity(one, other, dim=0).item(), rel=1e-4
    )
    assert row["differing"] == "100%"


def test_a_file_is_itself(ckptool, model):
    done = ckptool("diff", model, model)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"identical: \d+ entries\n", done.out)


def test_what_is_identical_but_for_devices_says_so(ckptool, model, tmp_path):
    other = tmp_path / "other.pth"
    assert ckptool("remap", model, "--map", "cpu=cuda:3", "-o", other).code == 0
    done = ckptool("diff", model, other)
    assert done.code == 0
    assert re.fullmatch(
        r"identical: \d+ entries \(ignored device: cpu -> cuda:3 \(\d+\)\)\n", done.out
    )
    strict = ckptool("diff", model, other, "--strict")
    assert strict.code == 1
    assert "device: cpu -> cuda:3" in strict.out


def test_quick_says_that_it_trusted_the_checksums(ckptool, model, tmp_path):
    other = tmp_path / "other.pth"
    assert ckptool("strip-module", model, "-o", other).code == 0
    done = ckptool("diff", model, other, "--quick")
    assert done.code == 0
    assert re.search(r"\(\d+ tensors compared only by CRC-32\)", done.out)


def test_structure_leaves_values_alone(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--structure")
    assert done.code == 0
    assert done.out == "the same structure: 10 entries (values not compared)\n"


def test_any_two_formats_and_folders(ckptool, files):
    assert ckptool("convert", "a.pth", "a.safetensors", "--key", "state_dict").code == 0
    shards = ("shards/model.safetensors.index.json", "--max-shard-size", "1KB")
    assert ckptool("convert", "a.pth", *shards, "--key", "state_dict").code == 0
    assert ckptool("diff", "a.safetensors", "shards").code == 0
    done = ckptool("diff", "a.safetensors", "a.pth", "--key", "state_dict")
    assert (done.code, done.out) == (0, "identical: 9 entries\n")


def test_names_are_compared_as_they_are_or_as_they_are_mapped(ckptool, files):
    strict = ckptool("diff", "a.pth", "b.pth", "--strict-names", "--name-status")
    assert "R\tstate_dict/conv1.weight\tstate_dict/module.conv1.weight" in strict.out
    assert "D\tstate_dict/fc.bias" in strict.out
    tensors("c.pth", **{"enc.w": torch.zeros(2)})
    tensors("d.pth", **{"backbone.w": torch.zeros(2)})
    assert ckptool("diff", "c.pth", "d.pth", "--rename", "^enc=>backbone").code == 0


def test_layers_are_one_row_unless_asked(ckptool, tmp_path):
    a = tensors(tmp_path / "a.pth", **{f"l.{n}.w": torch.ones(4) for n in range(3)})
    b = tensors(tmp_path / "b.pth", **{f"l.{n}.w": torch.full((4,), 2.0 + n) for n in range(3)})
    assert re.search(
        r"^l\.\{0\.\.2\}\.w +x3 +value +3 +3 ", ckptool("diff", a, b).out, re.MULTILINE
    )
    apart = ckptool("diff", a, b, "--no-fold").out
    assert re.findall(r"^(l\.\d\.w) +value +(\d) +\d ", apart, re.MULTILINE) == [
        ("l.2.w", "3"),
        ("l.1.w", "2"),
        ("l.0.w", "1"),
    ]
    assert re.search(r"^l\.2 +1 ", ckptool("diff", a, b, "--no-fold", "--stat").out, re.MULTILINE)


def test_name_status_is_for_programs(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--name-status")
    assert done.code == 1
    assert done.out == "M\tstate_dict/fc.bias\nM\tstate_dict/bn1.weight\nM\tepoch\n"
    same = ckptool("diff", "a.pth", "a.pth", "--name-status")
    assert (same.code, same.out) == (0, "")


def test_stat_counts_by_module(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--stat")
    assert done.code == 1
    assert re.search(r"^state_dict/fc +1  ~$", done.out, re.MULTILINE)


def test_tolerances_are_those_of_allclose(ckptool, tmp_path):
    a = tensors(tmp_path / "a.pth", w=torch.ones(3), n=torch.tensor([float("nan"), 1.0]))
    b = tensors(tmp_path / "b.pth", w=torch.ones(3) + 1e-4, n=torch.tensor([float("nan"), 1.001]))
    assert ckptool("diff", a, b).code == 1
    assert ckptool("diff", a, b, "--atol", "0.01").code == 1
    done = ckptool("diff", a, b, "--atol", "0.01", "--equal-nan")
    assert (done.code, done.out) == (0, "equal: 2 entries (2 within the tolerance)\n")


def test_max_diffs_keeps_the_worst(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--max-diffs", "1")
    assert "fc.bias" in done.out
    assert "bn1.weight" not in done.out
    assert "and 1 more tensor (--max-diffs)" in done.out
    rows = ckptool("diff", "a.pth", "b.pth", "--max-diffs", "1", "--name-status")
    assert "M\tstate_dict/fc.bias" in rows.out
    assert "1 more tensor" in rows.err
    quiet = ckptool("diff", "a.pth", "b.pth", "--max-diffs", "1", "--name-status", "-q")
    assert (quiet.out, quiet.err) == (rows.out, "")


def test_what_became_nan_is_kept_first(ckptool, tmp_path):
    a = tensors(tmp_path / "a.pth", big=torch.ones(3), bad=torch.ones(3))
    b = tensors(tmp_path / "b.pth", big=torch.zeros(3), bad=torch.tensor([1, float("nan"), 1]))
    done = ckptool("diff", a, b, "--max-diffs", "1", "--json")
    assert [row["name"] for row in done.document["changed"]] == ["bad"]


def test_the_figure_to_sort_by(ckptool, tmp_path):
    a = tensors(tmp_path / "a.pth", small=torch.full((4,), 0.1), large=torch.full((4,), 9.0))
    b = tensors(tmp_path / "b.pth", small=torch.full((4,), 0.3), large=torch.full((4,), 10.0))
    for sort, names in [("rel_norm", ["small", "large"]), ("max_abs", ["large", "small"])]:
        done = ckptool("diff", a, b, "--sort", sort)
        assert re.findall(r"^(small|large) ", done.out, re.MULTILINE) == names
        document = ckptool("diff", a, b, "--sort", sort, "--json").document
        assert [row["name"] for row in document["changed"]] == names
        assert document["sort"] == sort


def test_after_a_conversion_the_rest_is_a_few_lines(ckptool, model):
    target = model.with_suffix(".safetensors")
    assert ckptool("convert", model, target).code == 0
    done = ckptool("diff", model, target)
    assert done.code == 1
    assert re.search(r"^only in A: optim_dict, \d+ entries$", done.out, re.MULTILINE)
    assert "optim_dict/" not in done.out
    assert len(done.out.splitlines()) < 15
    assert "optim_dict/param_groups/0/lr" in ckptool("diff", model, target, "--no-fold").out
    weights = ckptool("diff", model, target, "--model-only")
    assert (weights.code, weights.out) == (0, "identical: 9 entries\n")


def test_weights_that_differ_are_found_without_the_rest(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--model-only", "--json")
    assert done.code == 1
    assert [row["a"]["name"] for row in done.document["changed"]] == [
        "state_dict/fc.bias",
        "state_dict/bn1.weight",
    ]
    assert done.document["values"] == []
    tensors("none.pth", state={}, param_groups=[])
    assert ckptool("diff", "a.pth", "none.pth", "--model-only").code == 2


def test_the_document(ckptool, files):
    done = ckptool("diff", "a.pth", "b.pth", "--json")
    assert done.code == 1
    assert done.document["schema"] == "ckptool.diff/1"
    assert done.document["identical"] is False
    assert [row["name"] for row in done.document["changed"]] == [
        "state_dict/fc.bias",
        "state_dict/bn1.weight",
    ]


@pytest.mark.parametrize("nothing", sorted({"/dev/null", os.devnull}))
def test_against_nothing_everything_is_new(ckptool, files, nothing):
    done = ckptool("diff", nothing, "a.pth", "--name-status")
    assert done.code == 1
    assert len(re.findall("^A\t", done.out, re.MULTILINE)) == 10
    assert ckptool("diff", "a.pth", nothing, "--stat").code == 1
    assert ckptool("diff", nothing, nothing).code == 0


def test_options_that_make_no_sense_are_wrong_usage(ckptool, files):
    for options in (
        ["--structure", "--atol", "1"],
        ["--structure", "--quick"],
        ["--quick", "--rtol", "1"],
        ["--stat", "--name-status"],
        ["--stat", "--json"],
        ["--json", "--fmt", "csv"],
        ["--name-status", "--fmt", "csv"],
        ["--atol", "-1"],
        ["--rtol", "nan"],
        ["--max-diffs", "-1"],
        ["--rename", "no arrow"],
        ["--key", "nowhere"],
        ["--fmt", "word"],
    ):
        done = ckptool("diff", "a.pth", "b.pth", *options)
        assert (done.code, done.out) == (2, ""), options
        assert done.err.startswith("ckptool: ")


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint at all"])
def test_a_file_that_cannot_be_read_is_an_error_whichever_it_is(ckptool, files, content):
    if content is not None:
        (files / "c.pth").write_bytes(content)
    for pair in (("a.pth", "c.pth"), ("c.pth", "a.pth")):
        done = ckptool("diff", *pair)
        assert (done.code, done.out) == (2, "")
        assert "c.pth" in done.err


def test_a_half_copy_is_faithful_or_not(ckptool, tmp_path):
    wide = {"w": torch.randn(20)}
    torch.save(wide, tmp_path / "wide.pth")
    torch.save({"w": wide["w"].half()}, tmp_path / "half.pth")
    assert ckptool("diff", tmp_path / "wide.pth", tmp_path / "half.pth").code == 1
    done = ckptool("diff", tmp_path / "wide.pth", tmp_path / "half.pth", "--ignore-dtype")
    assert done.code == 0, done.out
    torch.save({"w": wide["w"].bfloat16().half()}, tmp_path / "half.pth")
    done = ckptool("diff", tmp_path / "wide.pth", tmp_path / "half.pth", "--ignore-dtype")
    assert done.code == 1
