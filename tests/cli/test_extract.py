"""extract, with torch reading what it writes."""

import os
import shutil
import warnings
from fnmatch import fnmatch

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def same(left, right):
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name])


def test_the_weights_alone(ckptool, model, tmp_path):
    done = ckptool("extract", model, "--model-only")
    target = tmp_path / "model.extracted.pth"
    assert (done.code, done.out) == (0, "")
    assert "kept 9 of 9 tensors" in done.err
    assert "left out: optim_dict (optimizer" in done.err
    assert "left out: epoch (value)" in done.err
    wanted = torch.load(model)["state_dict"]
    made = torch.load(target, weights_only=True)
    same(made, wanted)
    assert made._metadata == wanted._metadata
    assert target.stat().st_size < model.stat().st_size


def test_a_pickled_module_becomes_a_state_dict(ckptool, net, tmp_path):
    torch.save({"net": torch.nn.DataParallel(net), "epoch": 3}, tmp_path / "m.pth")
    out = tmp_path / "w.pth"
    assert ckptool("extract", tmp_path / "m.pth", "--model-only", "-o", out).code == 0
    made = torch.load(out, weights_only=True)
    same(made, torch.nn.DataParallel(net).state_dict())
    assert made._metadata == torch.nn.DataParallel(net).state_dict()._metadata


def test_between_raw_and_averaged_weights_the_user_chooses(ckptool, fixtures, tmp_path):
    source, out = fixtures / "ecosystem" / "ema.pth", tmp_path / "out.pth"
    done = ckptool("extract", source, "--model-only", "-o", out)
    assert done.code == 2
    assert "model (9 tensors), model_ema (10 tensors)" in done.err
    assert "--key model" in done.err
    assert os.listdir(tmp_path) == []
    assert ckptool("extract", source, "--model-only", "--key", "model_ema", "-o", out).code == 0
    same(torch.load(out), torch.load(source, weights_only=False)["model_ema"])


def test_a_section_and_a_tensor_by_its_address(ckptool, model, tmp_path):
    out = tmp_path / "out.pth"
    assert ckptool("extract", model, "--key", "optim_dict", "-o", out).code == 0
    assert torch.load(out) == torch.load(model)["optim_dict"]
    done = ckptool("extract", model, "--key", "module.fc.bias", "-o", out, "--force")
    assert done.code == 0
    same(torch.load(out), {"module.fc.bias": torch.load(model)["state_dict"]["module.fc.bias"]})


def test_globs(ckptool, model, net, tmp_path):
    out = tmp_path / "out.pth"
    options = ["--include", "module.conv1.*", "--include", "*.bias", "--exclude", "*bn1*"]
    assert ckptool("extract", model, *options, "-o", out).code == 0
    before, after = torch.load(model), torch.load(out)
    names = ["module.conv1.weight", "module.conv1.bias", "module.fc.bias"]
    same(after["state_dict"], {name: before["state_dict"][name] for name in names})
    assert list(after["state_dict"]._metadata) == ["", "module", "module.conv1", "module.fc"]
    assert after["epoch"] == 7
    found = torch.nn.DataParallel(net).load_state_dict(after["state_dict"], strict=False)
    assert found.unexpected_keys == []


def test_an_optimizer_with_state_goes_as_a_whole_and_is_named(ckptool, fixtures, tmp_path):
    source, out = fixtures / "torch-2.13.0" / "dp_full.pth", tmp_path / "out.pth"
    done = ckptool("extract", source, "--include", "*.weight", "-o", out)
    assert "left out: optim_dict (optimizer, 18 tensors)" in done.err
    made = torch.load(out)
    assert set(made) == {"epoch", "state_dict"}
    assert all(name.endswith(".weight") for name in made["state_dict"])


@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("ecosystem/lightning.ckpt", "model.*"),
        ("ddp/ddp_full.pth", "module.conv1.*"),
        ("modules/state_extra.pth", "*weight"),
        ("torch-1.4.0/dp.pth", "*conv1*"),
    ],
)
def test_real_files_give_the_tensors_that_are_chosen(ckptool, fixtures, tmp_path, name, glob):
    every = contents(ckptool, fixtures / name)
    for option, wanted in (("--include", True), ("--exclude", False)):
        out = tmp_path / f"{option}.pth"
        assert ckptool("extract", fixtures / name, option, glob, "-o", out).code == 0
        made = contents(ckptool, out)
        assert made
        assert made.items() < every.items()
        assert all(fnmatch(path.rpartition("/")[2], glob) == wanted for path in made)
        torch.load(out, weights_only=False, map_location="cpu")


def contents(ckptool, path):
    rows = ckptool("list", path, "--hash", "--json").document["tensors"]
    return {row["name"]: (row["dtype"], tuple(row["shape"]), row["sha256"]) for row in rows}


def test_bytes_that_nothing_refers_to_are_left_out(ckptool, tmp_path):
    large = torch.arange(250_000.0)
    torch.save({"view": large[:1000], "more": large[1000:2000], "own": torch.randn(9, 9)},
               tmp_path / "m.pth")  # fmt: skip
    out = tmp_path / "out.pth"
    done = ckptool("extract", tmp_path / "m.pth", "--include", "own", "-o", out)
    assert "note" not in done.err
    assert "compact" not in done.err
    assert out.stat().st_size < 4000
    done = ckptool("extract", tmp_path / "m.pth", "--include", "view", "-o", out, "--force")
    assert "trimmed 1 storage from 1,000,000 to 4,000 bytes" in done.err
    assert out.stat().st_size < 8000
    assert torch.equal(torch.load(out)["view"], large[:1000])


def test_in_place_needs_force_because_the_rest_is_lost(ckptool, model):
    before = model.read_bytes()
    wanted = torch.load(model)["state_dict"]
    done = ckptool("extract", model, "--model-only", "--in-place")
    assert done.code == 2
    assert "would lose data: optim_dict" in done.err
    assert "`--force` does it anyway" in done.err
    assert model.read_bytes() == before
    assert ckptool("extract", model, "--model-only", "--in-place", "--force").code == 0
    same(torch.load(model), wanted)
    assert model.stat().st_size < len(before)
    assert os.listdir(model.parent) == ["model.pth"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ([], "at least one of --key, --include, --exclude, --model-only", "--model-only"),
        (["--key", "nothing"], "no entry is named 'nothing'", "ckptool list"),
        (
            ["--key", ""],
            "an entry with an empty key cannot be selected",
            "leave out --key",
        ),
        (["--key", "epoch"], "'epoch' is a value", "ckptool show"),
        (["--include", "conf1*"], "no tensor matches 'conf1*'; did you mean module.conv1", "list"),
        (["--exclude", "modul.*"], "no tensor matches 'modul.*'; did you mean module.", "list"),
        (["--exclude", "c.weight"], "no tensor matches 'c.weight'; did you mean module.", "list"),
        (
            ["--exclude", "*"],
            "no tensor would remain",
            "hint: left out would be: state_dict (state dict, 9 tensors)",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(ckptool, model, options, message, hint):
    done = ckptool("extract", model, *options)
    assert done.code == 2
    assert message in done.err
    assert hint in done.err.splitlines()[-1]
    assert os.listdir(model.parent) == ["model.pth"]


def test_json_tells_what_was_left_out(ckptool, model):
    document = ckptool("extract", model, "--model-only", "--json", "--dry-run").document
    assert document["tensors"] == 9
    assert document["left_out"] == ["optim_dict (optimizer, 0 tensors)", "epoch (value)"]
    assert [change["kind"] for change in document["changes"]] == ["extract"]
    assert os.listdir(model.parent) == ["model.pth"]


def test_keys_of_a_folder_of_dcp_are_dropped_in_its_index(ckptool, fixtures, tmp_path):
    run = shutil.copytree(fixtures / "dcp" / "training-2.13.0", tmp_path / "run")
    items = {path.name: path.read_bytes() for path in run.glob("*.distcp")}
    words = ("extract", run, "--exclude", "optim/*", "--in-place")
    assert "would lose data" in ckptool(*words).err
    done = ckptool(*words, "--force")
    assert done.code == 0, done.err
    assert "unused bytes stay in the folder" in done.err
    assert {path.name: path.read_bytes() for path in run.glob("*.distcp")} == items
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(run, tmp_path / "back.pth")
    assert "optim" not in torch.load(tmp_path / "back.pth", weights_only=False)


def test_averages_are_taken_out_alone(ckptool, tmp_path):
    root = {"model": {"a.w": torch.zeros(2)}, "ema": {"shadow_params": [torch.ones(2)]}}
    torch.save(root, tmp_path / "run.pth")
    done = ckptool("extract", tmp_path / "run.pth", "--ema", "-o", tmp_path / "ema.pth")
    assert done.code == 0, done.err
    assert "took 1 averaged weight from ema/shadow_params" in done.err
    assert torch.load(tmp_path / "ema.pth")["a.w"].tolist() == [1, 1]
    done = ckptool("extract", tmp_path / "run.pth", "--ema", "--key", "ema")
    assert done.code == 2
    assert "--ema cannot be combined with" in done.err
    done = ckptool("extract", tmp_path / "ema.pth", "--ema")
    assert done.code == 2
    assert "has no averaged weights; searched for" in done.err
