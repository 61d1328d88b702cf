"""`convert --move --set --drop --overlay`, and sources below keys of their own."""

import json

import pytest
import torch


@pytest.fixture
def file(tmp_path):
    state = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.zeros(2)}
    torch.save({"model_state_dict": state, "ema": state, "epoch": 3}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_the_container_is_put_right_in_one_command(ckptool, file, tmp_path):
    (tmp_path / "dims.json").write_text('{"n_mels": 80}')
    words = ["--move", "model_state_dict=model", "--drop", "ema", "--set", 'name="base"',
             "--set", f"dims=@{tmp_path / 'dims.json'}", "--set", "epoch=4"]  # fmt: skip
    done = ckptool("convert", file, tmp_path / "b.pth", *words, "--json")
    assert done.code == 0
    receipt = json.loads(done.out)
    assert {one["kind"] for one in receipt["changes"]} == {"move", "set"}
    assert receipt["left_out"] == ["ema (state_dict, 2 tensors)"]
    found = torch.load(tmp_path / "b.pth", weights_only=True)
    assert (found["name"], found["dims"], found["epoch"]) == ("base", {"n_mels": 80}, 4)
    assert list(found) == ["model", "epoch", "name", "dims"]


def test_force_drops_parameters(ckptool, file, tmp_path):
    words = ["convert", file, tmp_path / "b.pth", "--drop", "ema/fc.bias"]
    assert ckptool(*words).code == 2
    assert ckptool(*words, "--force").code == 0
    assert list(torch.load(tmp_path / "b.pth")["ema"]) == ["fc.weight"]


def test_in_place_changes_the_source(ckptool, file, tmp_path):
    done = ckptool("convert", file, "--in-place", "--move", "ema=averaged", "--set", "epoch=0")
    assert done.code == 0
    assert list(torch.load(file)) == ["model_state_dict", "averaged", "epoch"]
    for more in ([tmp_path / "b.pth"], ["-o", tmp_path / "b.pth"], ["--max-shard-size", "1KB"]):
        assert ckptool("convert", file, *more, "--in-place", "--drop", "averaged").code == 2
    assert "averaged" in torch.load(file)


def test_several_files_are_put_below_keys(ckptool, file, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "b.bin")
    out = tmp_path / "ip-adapter.bin"
    words = [f"image_proj={file}", f"ip_adapter={tmp_path / 'b.bin'}", "-o", out]
    assert ckptool("convert", *words).code == 0
    found = torch.load(out, weights_only=True)
    assert list(found) == ["image_proj", "ip_adapter"]
    assert found["image_proj"]["epoch"] == 3
    assert ckptool("convert", words[0], file, "-o", tmp_path / "x.pth").code == 2
    assert ckptool("convert", words[0], words[0], "-o", tmp_path / "x.pth").code == 2
    odd = tmp_path / "k=v.pth"
    odd.write_bytes(file.read_bytes())
    assert ckptool("convert", odd, tmp_path / "y.pth").code == 0


def test_an_overlay_is_closed_and_counted(ckptool, file, tmp_path):
    torch.save({"weight": torch.full((2, 2), 3.0)}, tmp_path / "fc.pth")
    words = ["--key", "ema", "--overlay", tmp_path / "fc.pth", "--overlay-at", "fc"]
    done = ckptool("convert", file, tmp_path / "b.pth", *words)
    assert done.code == 0
    assert torch.load(tmp_path / "b.pth")["fc.weight"].sum() == 12
    assert ckptool("convert", file, tmp_path / "c.pth", "--overlay-at", "fc").code == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--set", "epoch=abc"], "quote a string"),
        (["--set", "epoch"], "--set epoch=3"),
        (["--set", "e=@nowhere.json"], ""),
        (["--set", "epoch=1", "--set", "epoch=2"], ""),
        (["--overlay", "a.pth", "--overlay", "b.pth"], "once for each"),
        (["--move", "epoch"], "for example --move model_state_dict=state_dict"),
    ],
)
def test_wrong_words_are_refused(ckptool, file, tmp_path, words, hint):
    done = ckptool("convert", file, tmp_path / "b.pth", *words)
    assert (done.code, hint in done.err) == (2, True)
    assert not (tmp_path / "b.pth").exists()


def test_a_prefix_that_is_a_key_of_the_file_is_told(ckptool, file, tmp_path):
    done = ckptool("rename", file, "--prefix", "ema=net", "-o", tmp_path / "b.pth")
    assert "--move ema=net" in done.err


@pytest.mark.parametrize(
    ("options", "text", "hint"),
    [
        (["--overlay-include", "a", "--overlay-add"],
         "ckptool: --overlay-include, --overlay-add need another file",
         "add --overlay FILE"),
        (["--allow-missing", "a"], "ckptool: --allow-missing needs a reference", "add --like FILE"),
        (["--param", "heads=2"], "ckptool: --param needs a recipe", "add --recipe NAME"),
        (["--reverse"], "ckptool: --reverse needs a recipe", "add --recipe NAME"),
    ],
)  # fmt: skip
def test_an_option_without_the_one_it_is_about(ckptool, options, text, hint):
    made = ckptool("convert", "model.pth", "-o", "out.pth", *options)
    assert made.code == 2
    assert text in made.err
    assert hint in made.err
