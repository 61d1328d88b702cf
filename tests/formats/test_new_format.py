"""A format that is one file of code goes through every verb, and nothing knows it by name."""

import re

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from tests.files.faults import crashes, needs_fork
from tests.formats import tiles
from tests.formats.contract import FormatContract
from tests.sources import PROJECT

WEIGHTS = {
    "module.fc.weight": torch.arange(35.0).reshape(5, 7),
    "module.conv.weight": torch.arange(120.0).reshape(2, 3, 4, 5),
    "module.fc.bias": torch.arange(7.0),
}


class TestContract(FormatContract):
    name = "tiles"
    is_covered = True

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        tiles.register(monkeypatch)

    def files(self, folder):
        tiles.write(folder / "run", WEIGHTS)
        return folder / "run"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(7, 5)
        self.fc.bias = torch.nn.Parameter(torch.zeros(7))
        self.conv = torch.nn.Module()
        self.conv.weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 5))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiles.register(monkeypatch)
    tiles.write(tmp_path / "run", WEIGHTS)
    torch.save(WEIGHTS, tmp_path / "same.pth")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(found, wanted=WEIGHTS):
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in found)


def test_the_format_is_small():
    text = (PROJECT / "tests/formats/tiles.py").read_text()
    assert text[: text.index("\ndef register")].count("\n") <= 80


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("list run", 0, r"module\.conv\.weight +float32"),
        ("info run", 0, "it is a folder of tiles"),
        ("show run module.fc.bias", 0, r"float32 \[7\]"),
        ("stats run", 0, r"module\.conv\.weight"),
        ("diff run same.pth", 0, "identical: 3 entries"),
        ("verify run", 0, r"ok \(3 tensors, .*9 CRC-32 checksums\)"),
        ("doctor run", 1, "it is a folder of tiles"),
        ("match run --like same.pth", 0, "run fits same.pth: all 3 tensors"),
        ("report run same.pth -o page.html", 0, "page.html"),
        ("extract run -o some.pth --include *fc*", 0, "kept 2 of 3 tensors"),
        ("cast run --dtype bfloat16 -o cast.pth", 0, "bfloat16"),
        ("rename run --rename conv=>stem -o renamed.pth", 0, r"wrote renamed\.pth"),
        ("remap run --to cuda:1 -o there.pth", 0, "moved 3 tensors from cpu to cuda:1"),
        ("strip-module run -o bare.pth", 0, 'removed "module." from 3 keys'),
        ("average run same.pth -o mean.pth", 0, "the mean of 2 files"),
    ],
)
def test_every_verb(folder, capfd, arguments, code, text):
    assert main(arguments.split()) == code
    found = capfd.readouterr()
    assert re.search(text, found.out + found.err), found


def test_what_is_written_is_what_lies_in_the_tiles(folder):
    assert main(["convert", "run", "out.safetensors"]) == 0
    bare = {name.removeprefix("module."): one for name, one in WEIGHTS.items()}
    assert same(load_file("out.safetensors"), bare)
    assert main(["convert", "run", "out.pth"]) == 0
    assert same(torch.load("out.pth"))
    assert main(["convert", "run", "to/", "--max-shard-size", "200"]) == 0
    shards = [load_file(file) for file in sorted(folder.glob("to/*.safetensors"))]
    assert len(shards) > 1
    assert same({name: one for shard in shards for name, one in shard.items()}, bare)
    assert same(ckptool.load_state_dict("run"), bare)


def test_a_model_is_filled(folder):
    net = Net()
    ckptool.load_into(net, "run")
    assert net.fc.weight.equal(WEIGHTS["module.fc.weight"])
    assert net.conv.weight.equal(WEIGHTS["module.conv.weight"])


@pytest.mark.parametrize("file", ["0.bin", "1.bin", "2.bin"])
def test_damage_is_found_and_not_handed_on(folder, capfd, file):
    path = folder / "run" / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    assert main(["verify", "run"]) == 1
    assert main(["convert", "run", "out.safetensors"]) == 2
    assert not (folder / "out.safetensors").exists()
    path.write_bytes(raw[:-4])
    assert main(["verify", "run"]) == 1
    assert main(["stats", "run"]) == 2
    assert "Traceback" not in capfd.readouterr().err


@needs_fork
@pytest.mark.parametrize("target", ["out.safetensors", "out.pth"])
def test_a_kill_leaves_a_whole_file_or_none(folder, target):
    out = folder / "made" / target
    (folder / "made").mkdir()

    def prepare():
        for file in out.parent.iterdir():
            file.unlink()

    def convert():
        ckptool.convert("run", out)

    convert()
    whole = out.read_bytes()
    ends = set()
    for crash in crashes(convert, prepare):
        ends.add(out.exists())
        assert not out.exists() or out.read_bytes() == whole, crash
    assert ends == {True, False}
