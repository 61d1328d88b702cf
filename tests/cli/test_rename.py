"""rename, with torch reading what it writes."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def named(tmp_path, net):
    """A checkpoint of a model and an optimizer that knows the names."""
    optimizer = torch.optim.Adam(net.named_parameters())
    net(torch.randn(2, 3, 9, 9)).sum().backward()
    optimizer.step()
    path = tmp_path / "model.pth"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


@pytest.fixture
def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    )


class Renamed(torch.nn.Module):
    """The same network with other names."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.act = torch.nn.ReLU()
        self.flat = torch.nn.Flatten()


RULES = ["--prefix", "0=stem", "--map", r"^1\.=>norm.", "--prefix", "2=act", "--prefix", "3.=flat."]


def test_the_result_loads_into_the_other_model_metadata_and_all(ckptool, named, tmp_path):
    done = ckptool("rename", named, *RULES)
    target = tmp_path / "model.renamed.pth"
    assert (done.code, done.out) == (0, "")
    assert f"wrote {target} (torch-zip, " in done.err
    assert "0=stem changed 2 names: 0.weight -> stem.weight" in done.err
    before, after = torch.load(named), torch.load(target)
    other = Renamed()
    other.load_state_dict(after["model"])
    wanted = other.state_dict()
    assert list(after["model"]) == list(wanted)
    assert after["model"]._metadata == wanted._metadata
    for old, new in zip(before["model"].values(), after["model"].values(), strict=True):
        assert torch.equal(old, new)
    names = [name for name, _ in other.named_parameters()]
    assert after["optimizer"]["param_groups"][0]["param_names"] == names
    assert after["epoch"] == 3


def test_the_order_of_different_options_counts(ckptool, tmp_path):
    source, table = tmp_path / "m.pth", tmp_path / "names.txt"
    torch.save({"a.w": torch.ones(1)}, source)
    table.write_text("b.w c.w\n")
    rules = {
        "--map": ["--map", "^c=>d"], "--prefix": ["--prefix", "a=b"],
        "--map-file": ["--map-file", table],
    }  # fmt: skip
    for order, name in (
        (["--prefix", "--map-file", "--map"], "d.w"),
        (["--map", "--prefix", "--map-file"], "c.w"),
        (["--map-file", "--map", "--prefix"], "b.w"),
    ):
        options = [word for option in order for word in rules[option]]
        done = ckptool("rename", *options, source, "-o", tmp_path / "out.pth", "--force")
        assert done.code == 0
        assert list(torch.load(tmp_path / "out.pth")) == [name]
    repeated = ["--map=a=>x", "--prefix=x=y", "--map=y=>z", "--prefix=z=last"]
    ckptool("rename", source, *repeated, "-o", tmp_path / "out.pth", "--force")
    assert list(torch.load(tmp_path / "out.pth")) == ["last.w"]


def test_a_json_table(ckptool, tmp_path):
    source, table = tmp_path / "m.safetensors", tmp_path / "names.json"
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, source)
    table.write_text(json.dumps({"a": "b", "b": "a", "c": "d"}))
    done = ckptool("rename", source, "--map-file", table)
    assert done.code == 0
    assert "warning: 1 of the 3 names in " in done.err
    made = load_file(tmp_path / "m.renamed.safetensors")
    assert {name: value.item() for name, value in made.items()} == {"b": 1.0, "a": 0.0}


def test_in_place(ckptool, model):
    assert ckptool("rename", model, "--in-place", "--prefix", "module=net").code == 0
    assert next(iter(torch.load(model)["state_dict"])) == "net.conv1.weight"


def test_only_one_state_dict(ckptool, tmp_path):
    state = {"a.w": torch.ones(1)}
    torch.save({"model": state, "ema": dict(state)}, tmp_path / "m.pth")
    out = tmp_path / "out.pth"
    ckptool("rename", tmp_path / "m.pth", "--key", "ema", "--map", "a=>b", "-o", out)
    made = torch.load(out)
    assert (list(made["model"]), list(made["ema"])) == (["a.w"], ["b.w"])


def test_what_cannot_be_is_refused_and_nothing_is_written(ckptool, model):
    for options, message in (
        ([], "at least one of --map, --map-file and --prefix"),
        (["--map", "conv=bn"], "'conv=bn' is not a rule REGEX=>REPL"),
        (["--map", "(=>x"], "'(' is not a regular expression: "),
        (["--map", r"a=>\1"], "invalid group reference 1"),
        (["--prefix", "module"], "'module' is not a rule OLD=NEW"),
        (["--map-file", "nowhere.txt"], "nowhere.txt: there is no such file"),
        (["--map", ".*=>"], "nothing would be left of the name 'module.conv1.weight'"),
        (["--map", "weight|bias=>w"], "'module.conv1.weight' and 'module.conv1.bias' would both"),
        (["--map", "a=>b", "--key", "nothing"], "there is nothing named 'nothing'"),
        (["--prefix", "module=a/b"], "'a/b.conv1.weight' has a / in it"),  # no address
    ):
        done = ckptool("rename", model, *options)
        assert done.code == 2, options
        assert message in done.err
        assert os.listdir(model.parent) == ["model.pth"]


def test_a_rule_that_matches_nothing_is_told_and_the_file_written_all_the_same(ckptool, model):
    done = ckptool("rename", model, "--prefix", "modul=x", "--json")
    assert done.code == 0
    assert "warning: modul=x matched no name; there is module." in done.err
    assert "names, values and devices stay" in done.err
    assert [change["kind"] for change in done.document["changes"]] == ["warning"]
    assert model.with_name("model.renamed.pth").exists()


def test_a_dry_run_writes_nothing(ckptool, model):
    done = ckptool("rename", model, "--prefix", "module=", "--dry-run")
    assert (done.code, os.listdir(model.parent)) == (0, ["model.pth"])
    assert "module= changed " in done.err
