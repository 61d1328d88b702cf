"""strip-module, add-module, remap, rename, compact and convert; torch reads what they write."""

import argparse
import json
import os
import re
import shlex
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file


def names(path, key="state_dict"):
    return list(torch.load(path)[key])


def plain(state):
    return [name.removeprefix("module.") for name in state]


def test_what_is_written_equals_the_source(ckptool, model, tmp_path):
    ckptool("strip-module", model, "-o", tmp_path / "deep" / "out.pth")
    before, after = torch.load(model), torch.load(tmp_path / "deep" / "out.pth")
    assert after["epoch"] == before["epoch"]
    assert after["optim_dict"] == before["optim_dict"]
    for name, tensor in before["state_dict"].items():
        assert torch.equal(after["state_dict"][name.removeprefix("module.")], tensor)


def test_the_model_of_a_folder_is_written_beside_it_and_edited_in_place(ckptool, model, tmp_path):
    (tmp_path / "run").mkdir()
    inside = model.rename(tmp_path / "run" / "pytorch_model.bin")
    assert ckptool("strip-module", tmp_path / "run").code == 0
    assert "fc.weight" in names(tmp_path / "run" / "pytorch_model.stripped.bin")
    assert "module.fc.weight" in names(inside)
    assert ckptool("strip-module", tmp_path / "run", "--in-place").code == 0
    assert "fc.weight" in names(inside)


def test_add_module_undoes_it(ckptool, model, tmp_path):
    ckptool("strip-module", model)
    assert ckptool("add-module", tmp_path / "model.stripped.pth").code == 0
    assert names(tmp_path / "model.stripped.wrapped.pth") == names(model)


def test_levels_only_and_at_are_passed_on(ckptool, tmp_path):
    source, target = tmp_path / "m.pth", tmp_path / "out.pth"
    torch.save({"module._orig_mod.f.module.w": torch.ones(1)}, source)
    for options, name in (
        (["--levels", "1"], "_orig_mod.f.module.w"),
        (["--only", "_orig_mod"], "module.f.module.w"),
        (["--at", "module._orig_mod.f"], "module._orig_mod.f.w"),
    ):
        assert ckptool("strip-module", source, "-o", target, "--force", *options).code == 0
        assert list(torch.load(target)) == [name]


def test_nothing_to_change_is_said_and_written_all_the_same(ckptool, model, tmp_path):
    ckptool("strip-module", model)
    done = ckptool("strip-module", tmp_path / "model.stripped.pth")
    assert done.code == 0
    assert (
        "warning: no key has a wrapper prefix\nkeys, values and devices are unchanged" in done.err
    )
    assert (tmp_path / "model.stripped.stripped.pth").exists()


def test_a_wrapper_inside_the_model_is_named_with_its_command(ckptool, tmp_path):
    inner = {"encoder.module.w": torch.ones(2), "head.w": torch.ones(2)}
    torch.save(inner, tmp_path / "inner.pth")
    done = ckptool("strip-module", tmp_path / "inner.pth")
    (command,) = re.findall(r"ckptool (strip-module .* --at encoder)", done.err)
    assert ckptool(*shlex.split(command), "--force").code == 0
    made = torch.load(tmp_path / "inner.stripped.pth")
    assert [*made] == ["encoder.w", "head.w"]


def test_a_change_of_format_or_protocol_alone_is_said(ckptool, net, tmp_path):
    source = tmp_path / "in.pth"
    for given, said in (
        ({"pickle_protocol": 4}, "changed pickle protocol 4 to 2"),
        ({"_use_new_zipfile_serialization": False}, "converted torch-legacy to torch-zip"),
    ):
        torch.save(net.state_dict(), source, **given)
        for name in ("new.pth", "again.pth"):
            done = ckptool("convert", source, tmp_path / name, "--format", "torch-zip", "--force")
            assert (said in done.err) == (name == "new.pth")
            source = tmp_path / name
        source = tmp_path / "in.pth"


def test_an_ending_that_says_nothing_and_a_new_folder_are_noted(ckptool, model, tmp_path):
    said = "note: .weights is not a known extension; the file is written as torch-zip"
    target = tmp_path / "deep" / "out.weights"
    folder = f"note: created the folder {target.parent}"
    for first in (True, False):
        done = ckptool("strip-module", model, "-o", target, "--force")
        assert (folder in done.err) == first
        assert said in done.err
    for words in (("--format", "torch-zip"), ("--in-place",)):
        done = ckptool("strip-module", target, *words, "--force")
        assert "note" not in done.err


def test_a_path_in_a_hint_is_one_word_of_a_shell(ckptool, model):
    spaced = model.rename(model.with_name("a b.pth"))
    for words in (("show", spaced, "nothing"), ("extract", spaced, "--include", "nothing")):
        assert ckptool(*words).err.endswith(f"hint: ckptool list '{spaced}'\n")
    assert f"hint: ckptool list '{spaced}'" in ckptool("stats", spaced, "--key", "epoch").err


def test_what_blocks_weights_only_is_named(ckptool, tmp_path):
    torch.save({"w": torch.ones(1), "args": argparse.Namespace(lr=1)}, tmp_path / "m.pth")
    done = ckptool("strip-module", tmp_path / "m.pth")
    assert done.code == 0
    assert "weights_only=True rejects it: " in done.err
    assert "argparse.Namespace" in done.err


def test_another_format_is_chosen_by_option(ckptool, model, tmp_path):
    done = ckptool("strip-module", model, "--format", "torch-legacy", "--json")
    assert done.document["format"] == "torch-legacy"
    assert names(tmp_path / "model.stripped.pth") == plain(names(model))


@pytest.fixture
def tagged(fixtures, tmp_path):
    """A copy of a checkpoint that was saved from the fourth GPU."""
    target = tmp_path / "gpu.pth"
    target.write_bytes((fixtures / "torch-2.13.0" / "dp_full_cuda3.pth").read_bytes())
    return target


def devices(ckptool, path):
    return set(ckptool("info", path, "--json").document["devices"])


def test_remap_writes_tags_under_the_name_of_the_device(ckptool, tagged):
    for options, name, device in (
        (["--to", "cpu"], "gpu.cpu.pth", "cpu"),
        (["--to", "cuda:0"], "gpu.cuda0.pth", "cuda:0"),
        (["--map", "cuda:3=cuda:1"], "gpu.remapped.pth", "cuda:1"),
        (["--map", "cuda:*=mps"], "gpu.remapped.pth", "mps"),
        (["--visible-devices", "1,3"], "gpu.remapped.pth", "cuda:1"),
    ):
        assert ckptool("remap", *options, tagged).code == 0
        made = tagged.with_name(name)
        assert devices(ckptool, made) == {device}, options
        made.unlink()


def test_what_is_remapped_to_the_cpu_loads_with_a_bare_torch_load(ckptool, tagged):
    ckptool("remap", "--to", "cpu", tagged)
    loaded = torch.load(tagged.with_name("gpu.cpu.pth"))
    wanted = torch.load(tagged, map_location="cpu")
    for name, tensor in wanted["state_dict"].items():
        assert torch.equal(loaded["state_dict"][name], tensor)


def test_a_word_that_is_no_device_is_an_error(ckptool, tagged):
    for word in ("gpu3", "cuda3", ""):
        done = ckptool("remap", "--to", word, tagged)
        assert done.code == 2, word
        assert "is not a device" in done.err
        assert os.listdir(tagged.parent) == ["gpu.pth"]


def test_convert_to_safetensors_names_what_it_leaves_out(ckptool, model, tmp_path):
    target = tmp_path / "model.safetensors"
    done = ckptool("convert", model, target)
    assert done.code == 0
    assert "left out: " in done.err
    assert "epoch" in done.err
    assert sorted(load_file(target)) == sorted(plain(names(model)))


def test_convert_keeps_wrappers_where_told(ckptool, model, tmp_path):
    target = tmp_path / "model.safetensors"
    ckptool("convert", model, target, "--wrappers", "keep")
    assert sorted(load_file(target)) == sorted(names(model))


def test_strict_refuses_to_leave_anything_out(ckptool, model, tmp_path):
    done = ckptool("convert", model, tmp_path / "model.safetensors", "--strict")
    assert done.code == 2
    assert os.listdir(tmp_path) == ["model.pth"]


def test_convert_to_torch_keeps_everything_and_does_what_it_is_told(ckptool, tagged):
    target = tagged.with_name("laptop.pth")
    assert ckptool("convert", tagged, target, "--wrappers", "strip", "--to", "cpu").code == 0
    loaded = torch.load(target)
    assert set(loaded) == {"epoch", "state_dict", "optim_dict"}
    assert not any(name.startswith("module.") for name in loaded["state_dict"])


def test_convert_takes_device_rules(ckptool, tagged):
    target = tagged.with_name("out.pth")
    assert ckptool("convert", tagged, target, "--map", "cuda:3=cuda:0").code == 0
    assert devices(ckptool, target) == {"cuda:0"}
    done = ckptool("convert", tagged, target, "--force", "--to", "cpu", "--map", "a=b")
    assert done.code == 2
    done = ckptool("convert", tagged, target, "--force", "--visible-devices", "0,3")
    assert devices(ckptool, target) == {"cuda:1"}


def test_model_only_takes_the_weights_alone(ckptool, model, net, tmp_path):
    target = tmp_path / "weights.pth"
    assert ckptool("convert", model, target, "--model-only", "--wrappers", "strip").code == 0
    assert list(torch.load(target)) == list(net.state_dict())


def test_a_pickled_module_becomes_a_state_dict(ckptool, net, tmp_path):
    torch.save(net, tmp_path / "whole.pth")
    assert ckptool("convert", tmp_path / "whole.pth", tmp_path / "w.pth", "--model-only").code == 0
    loaded = torch.load(tmp_path / "w.pth", weights_only=True)
    net.load_state_dict(loaded)


def test_several_state_dicts_need_a_key(ckptool, net, tmp_path):
    state = net.state_dict()
    copy = {name: value.clone() for name, value in state.items()}
    torch.save({"model": state, "ema": copy}, tmp_path / "m.pth")
    target = tmp_path / "m.safetensors"
    done = ckptool("convert", tmp_path / "m.pth", target)
    assert done.code == 2
    assert "ema" in done.err
    assert ckptool("convert", tmp_path / "m.pth", target, "--key", "ema").code == 0
    assert set(load_file(target)) == set(copy)


def test_ties_are_kept_or_copied(ckptool, tmp_path):
    weight = torch.randn(16, 16)
    torch.save({"a": weight, "b": weight}, tmp_path / "m.pth")
    kept, copied = tmp_path / "kept.safetensors", tmp_path / "copied.safetensors"
    ckptool("convert", tmp_path / "m.pth", kept)
    ckptool("convert", tmp_path / "m.pth", copied, "--ties", "copy")
    assert len(load_file(kept)) == 1
    assert len(load_file(copied)) == 2


@pytest.mark.parametrize("machine", ["one_gpu", "cpu"])
def test_the_commands_that_info_proposes_work(ckptool, tagged, machine):
    command = ckptool("info", tagged, "--json").document["commands"][machine]
    _, *arguments = shlex.split(command)
    assert ckptool(*arguments).code == 0
    made = arguments[2]
    assert "commands" in ckptool("info", made, "--json").document
    found = ckptool("info", made, "--json").document
    assert machine not in found["commands"]


@pytest.mark.parametrize(
    "verb",
    [
        ["strip-module"],
        ["add-module"],
        ["remap", "--to", "cpu"],
        ["cast", "--dtype", "float16"],
        ["rename", "--prefix", "module=net"],
        ["extract", "--model-only"],
        ["compact"],
    ],
    ids=lambda words: words[0],
)
def test_a_second_file_is_written_where_there_is_none_yet(ckptool, model, tmp_path, verb):
    target = tmp_path / "out.pth"
    assert ckptool(*verb, model, target).code == 0
    written, before = target.read_bytes(), model.read_bytes()
    for more in ([], ["--force"]):
        done = ckptool(*verb, model, target, *more)
        assert done.code == 2
        assert "already exists" in done.err
        assert f"-o {target} --force" in done.err
    for more in (["--in-place"], ["-o", tmp_path / "other.pth"]):
        assert ckptool(*verb, model, tmp_path / "new.pth", *more).code == 2
    assert (target.read_bytes(), model.read_bytes()) == (written, before)
    assert set(os.listdir(tmp_path)) == {"model.pth", "out.pth"}


def test_convert_takes_its_target_as_an_option_too(ckptool, model, tmp_path):
    target = tmp_path / "out.safetensors"
    assert ckptool("convert", model, "-o", target, "--model-only").code == 0
    assert len(load_file(target)) == 9
    done = ckptool("convert", model)
    assert done.code == 2
    assert "convert needs a DESTINATION" in done.err
    done = ckptool("convert", model, "")
    assert (done.code, sorted(tmp_path.iterdir())) == (2, [model, target])
    assert "DESTINATION is empty" in done.err


def test_convert_joins_files(ckptool, model, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "b.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    assert ckptool("convert", *paths, "-o", tmp_path / "ab.safetensors").code == 0
    assert load_file(tmp_path / "ab.safetensors").keys() == {"a", "b"}
    assert ckptool("convert", *paths, tmp_path / "ab.pth", "--nest", "state_dict").code == 0
    assert torch.load(tmp_path / "ab.pth").keys() == {"state_dict"}
    assert ckptool("convert", *paths, model, "-o", tmp_path / "no.pth").code == 2


LARGE, SMALL = 300_000, 30
"""Elements of a tensor that threads check while it is copied, and of one that is read before."""


@pytest.fixture(params=[LARGE, SMALL])
def damaged(request, tmp_path):
    """A torch zip of three tensors, a byte of the second one flipped."""
    path = tmp_path / "in" / "m.pth"
    path.parent.mkdir()
    tensors = {name: torch.full((request.param + 1,), float(at)) for at, name in enumerate("abc")}
    tensors["b"][7] = 12345.0
    torch.save({f"module.{name}": tensor[1:] for name, tensor in tensors.items()}, path)
    flip(path, tensors["b"][7:8].numpy().tobytes())
    return path


def flip(path, mark):
    """Turn a bit of the one place where `mark` stands."""
    content = bytearray(path.read_bytes())
    assert content.count(mark) == 1
    content[content.index(mark)] ^= 1
    path.write_bytes(content)


def test_damage_is_told_and_nothing_is_written(ckptool, damaged, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for verb, target, options in (
        ("convert", "o.safetensors", ()),
        ("convert", "o.pth", ("--format", "torch-legacy")),
        ("convert", "o.safetensors.index.json", ("--max-shard-size", "1MB")),
        ("convert", "o.safetensors", ("--dtype", "bfloat16")),
        ("convert", "o.pth", ("--compact",)),
        ("convert", "o.pth", ("--dtype", "bfloat16", "--no-verify")),
        ("convert", "o.safetensors", ("--no-verify",)),
        ("strip-module", "o.safetensors", ()),
        ("add-module", "o.safetensors", ()),
        ("rename", "o.safetensors", ("--rename", "b=>d")),
        ("remap", "o.safetensors", ("--to", "cpu")),
        ("extract", "o.safetensors", ("--include", "*b")),
        ("compact", "o.pth", ()),
        ("cast", "o.safetensors", ("--dtype", "float64")),
        ("cast", "o.pth", ("--dtype", "float16")),
    ):
        named = [out / target] if verb == "convert" else ["-o", out / target]
        done = ckptool(verb, damaged, *named, *options)
        assert done.code == 2, (verb, options)
        assert str(damaged) in done.err
        assert "is damaged" in done.err
        assert "data/1" in done.err or "storage '1'" in done.err
        assert os.listdir(out) == []
    done = ckptool("average", damaged, damaged, "-o", out / "o.safetensors")
    assert done.code == 2
    assert "is damaged" in done.err
    assert os.listdir(out) == []


def test_what_is_not_damaged_is_taken_out_and_a_checksum_goes_from_zip_to_zip(
    ckptool, damaged, tmp_path
):
    target = tmp_path / "o.safetensors"
    assert ckptool("convert", damaged, target, "--exclude", "*b").code == 0
    assert set(load_file(target)) == {"a", "c"}
    assert ckptool("strip-module", damaged, "-o", tmp_path / "o.pth").code == 0
    done = ckptool("verify", tmp_path / "o.pth")
    assert done.code == 1
    assert "data/1" in done.out


@pytest.mark.parametrize("options", [("-o", "o.pth"), ("--in-place",)])
def test_a_damaged_pickle_is_told_by_who_writes_it_anew(ckptool, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.pth"
    torch.save({"module.w": torch.ones(2), "epoch": 1234567.25}, path)
    flip(path, struct.pack(">d", 1234567.25))
    before = path.read_bytes()
    done = ckptool("strip-module", path, *options)
    assert done.code == 2
    assert "record 'data.pkl' is damaged" in done.err
    assert os.listdir(tmp_path) == ["m.pth"]
    assert path.read_bytes() == before


def test_a_checksum_that_was_not_computed_is_none(ckptool, tmp_path):
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(LARGE)}, tmp_path / "m.pth")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert ckptool("convert", tmp_path / "m.pth", tmp_path / "o.safetensors").code == 0
    assert load_file(tmp_path / "o.safetensors")["w"].eq(1).all()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_of_numpys_is_checked_by_the_record_that_it_is_in(ckptool, tmp_path, save):
    values = np.random.default_rng(0).standard_normal(LARGE)
    save(tmp_path / "m.npz", w=values)
    content = bytearray((tmp_path / "m.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m.npz").write_bytes(content)
    done = ckptool("convert", tmp_path / "m.npz", tmp_path / "o.safetensors")
    assert done.code == 2
    assert "damaged" in done.err
    assert not (tmp_path / "o.safetensors").exists()


def test_big_endian_numbers_are_checked_though_they_are_turned(ckptool, tmp_path):
    torch.save({"w": torch.arange(9.0)}, tmp_path / "m.pth")
    with (
        zipfile.ZipFile(tmp_path / "m.pth") as old,
        zipfile.ZipFile(tmp_path / "big.pth", "w") as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, b"big" if name.endswith("byteorder") else content)
    flip(tmp_path / "big.pth", torch.arange(9.0).numpy().tobytes())
    assert ckptool("convert", tmp_path / "big.pth", tmp_path / "o.pth").code == 2
    assert not (tmp_path / "o.pth").exists()


@pytest.mark.parametrize("verb", ["extract", "cast"])
def test_verbs_take_the_masters_of_deepspeed(ckptool, fixtures, verb, tmp_path):
    target = tmp_path / "out.pth"
    words = ["--dtype", "float64", "--cast-optimizer"] if verb == "cast" else ["--model-only"]
    run = ckptool(verb, fixtures / "zero" / "z2-bf16", "--master", *words, "-o", target)
    assert (run.code, "replaced 8 weights with the fp32 master weights" in run.err) == (0, True)


def test_a_result_is_named_after_the_folder_of_a_pattern(ckptool, fixtures, tmp_path):
    folder = shutil.copytree(fixtures / "ranks" / "fsdp2-2.13.0", tmp_path / "run")
    done = ckptool("cast", f"{folder}/model_*.pt", "--dtype", "bfloat16")
    assert done.code == 0
    assert (tmp_path / "run.bfloat16.pth").exists()


def test_what_is_salvaged_is_told_and_what_is_lost_is_exit_code_1(ckptool, tmp_path):
    whole, cut = tmp_path / "whole.pth", tmp_path / "cut.pth"
    torch.save({f"l{i}": torch.ones(100, 100) for i in range(4)}, whole)
    cut.write_bytes(whole.read_bytes()[:100_000])
    assert ckptool("convert", cut, tmp_path / "a.pth").code == 2
    done = ckptool("convert", cut, tmp_path / "a.pth", "--salvage")
    assert done.code == 1
    assert done.err.splitlines()[:2] == [
        "salvaged 2 of 4 tensors; 2 damaged",
        "left out: 2 entries of the root: l2, l3",
    ]
    assert ckptool("convert", whole, tmp_path / "b.pth", "--salvage").code == 0
    assert ckptool("convert", cut, tmp_path / "c.pth", "--salvage", "--strict").code == 2
    assert not (tmp_path / "c.pth").exists()


@pytest.fixture
def named(tmp_path):
    """A checkpoint of a model and an optimizer that knows the names."""
    net = numbered()
    optimizer = torch.optim.Adam(net.named_parameters())
    net(torch.randn(2, 3, 9, 9)).sum().backward()
    optimizer.step()
    path = tmp_path / "model.pth"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def numbered():
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


RULES = [
    "--prefix",
    "0=stem",
    "--rename",
    r"^1\.=>norm.",
    "--prefix",
    "2=act",
    "--prefix",
    "3.=flat.",
]


def test_the_result_loads_into_the_other_model_metadata_and_all(ckptool, named, tmp_path):
    done = ckptool("rename", named, *RULES)
    target = tmp_path / "model.renamed.pth"
    assert (done.code, done.out) == (0, "")
    assert f"wrote {target} (torch-zip, " in done.err
    assert "renamed 2 keys with 0=stem (0.weight -> stem.weight)" in done.err
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
        "--rename": ["--rename", "^c=>d"], "--prefix": ["--prefix", "a=b"],
        "--rename-file": ["--rename-file", table],
    }  # fmt: skip
    for order, name in (
        (["--prefix", "--rename-file", "--rename"], "d.w"),
        (["--rename", "--prefix", "--rename-file"], "c.w"),
        (["--rename-file", "--rename", "--prefix"], "b.w"),
    ):
        options = [word for option in order for word in rules[option]]
        done = ckptool("rename", *options, source, "-o", tmp_path / "out.pth", "--force")
        assert done.code == 0
        assert list(torch.load(tmp_path / "out.pth")) == [name]
    repeated = ["--rename=a=>x", "--prefix=x=y", "--rename=y=>z", "--prefix=z=last"]
    ckptool("rename", source, *repeated, "-o", tmp_path / "out.pth", "--force")
    assert list(torch.load(tmp_path / "out.pth")) == ["last.w"]


def test_a_json_table(ckptool, tmp_path):
    source, table = tmp_path / "m.safetensors", tmp_path / "names.json"
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, source)
    table.write_text(json.dumps({"a": "b", "b": "a", "c": "d"}))
    done = ckptool("rename", source, "--rename-file", table)
    assert done.code == 0
    assert "warning: 1 of 3 keys in " in done.err
    made = load_file(tmp_path / "m.renamed.safetensors")
    assert {name: value.item() for name, value in made.items()} == {"b": 1.0, "a": 0.0}


def test_only_one_state_dict(ckptool, tmp_path):
    state = {"a.w": torch.ones(1)}
    torch.save({"model": state, "ema": dict(state)}, tmp_path / "m.pth")
    out = tmp_path / "out.pth"
    ckptool("rename", tmp_path / "m.pth", "--key", "ema", "--rename", "a=>b", "-o", out)
    made = torch.load(out)
    assert (list(made["model"]), list(made["ema"])) == (["a.w"], ["b.w"])


def test_what_cannot_be_is_refused_and_nothing_is_written(ckptool, model):
    for options, message in (
        ([], "rename needs --rename, --rename-file or --prefix"),
        (["--rename", "conv=bn"], "ckptool: 'conv=bn' is not a rule of the form REGEX=>REPL"),
        (["--rename", "(=>x"], "'(' is not a regular expression: "),
        (["--rename", r"a=>\1"], "invalid group reference 1"),
        (["--prefix", "module"], "'module' is not a rule of the form OLD=NEW"),
        (["--rename-file", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--rename", ".*=>"], "the rules would leave nothing of the key 'module.conv1.weight'"),
        (
            ["--rename", "weight|bias=>w"],
            "'module.conv1.weight' and 'module.conv1.bias' would both",
        ),
        (["--rename", "a=>b", "--key", "nothing"], "no entry is named 'nothing'"),
        (["--prefix", "module=a/b"], "'a/b.conv1.weight' contains a slash"),  # no address
    ):
        done = ckptool("rename", model, *options)
        assert done.code == 2, options
        assert message in done.err
        assert os.listdir(model.parent) == ["model.pth"]


def test_a_rule_that_matches_nothing_is_told_and_the_file_written_all_the_same(ckptool, model):
    done = ckptool("rename", model, "--prefix", "modul=x", "--json")
    assert done.code == 0
    assert "warning: rule modul=x matches no key; did you mean module." in done.err
    assert "keys, values and devices are unchanged" in done.err
    assert [change["kind"] for change in done.document["changes"]] == ["warning"]
    assert model.with_name("model.renamed.pth").exists()


@pytest.fixture
def views(tmp_path):
    """4.0 MB on disk for 8 KB of views."""
    path = tmp_path / "views.pth"
    big = torch.randn(1000, 1000)
    torch.save({"rows": big[:2], "first": big[0], "step": 3}, path)
    return path


def test_the_views_take_what_they_are(ckptool, views, tmp_path):
    done = ckptool("compact", views)
    target = tmp_path / "views.compact.pth"
    assert done.code == 0
    assert "trimmed the storage of rows, first from 4,000,000 to 8,000 bytes" in done.err
    assert "saved 3,992,000 of 4,000,000 bytes of tensor data" in done.err
    assert "views.pth 3.8 MiB, views.compact.pth 9." in done.err
    assert target.stat().st_size < 12_000
    before, after = (torch.load(path, weights_only=True) for path in (views, target))
    assert torch.equal(after["rows"], before["rows"])
    assert after["first"].data_ptr() == after["rows"].data_ptr()
    assert after["step"] == 3


def test_the_result_is_mapped_and_read_without_its_bytes(ckptool, views, tmp_path):
    assert ckptool("compact", views).code == 0
    target = tmp_path / "views.compact.pth"
    mapped = torch.load(target, weights_only=True, mmap=True)
    assert torch.equal(mapped["first"], torch.load(views, weights_only=True)["first"])
    assert torch.load(target, map_location="meta", weights_only=True)["rows"].shape == (2, 1000)


def test_what_an_edit_in_place_left_goes(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({f"module.layer{at}.weight": torch.ones(3) for at in range(50)}, path)
    first = path.stat().st_size
    assert ckptool("strip-module", "--in-place", path).code == 0
    assert ckptool("compact", "--in-place", path).code == 0
    assert path.stat().st_size < first
    assert ckptool("info", "--json", path).document["dead_bytes"] == 0
    assert len(torch.load(path, weights_only=True)) == 50


def test_records_that_nothing_refers_to_go_in_place_too(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("model/data/7", b"x" * 9000)
    done = ckptool("compact", "--in-place", path)
    assert done.code == 0
    assert "that nothing refers to" in done.err
    with zipfile.ZipFile(path) as file:
        assert "archive/data/7" not in file.namelist()
    assert path.stat().st_size < 9000


def test_nothing_to_compact_is_said_and_written_all_the_same(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(3)}, path)
    done = ckptool("compact", path)
    assert done.code == 0
    assert "nothing to compact" in done.err
    assert torch.equal(torch.load(tmp_path / "model.compact.pth")["a"], torch.ones(3))


def test_info_tells_what_compact_would_leave_out(ckptool, views):
    done = ckptool("info", views)
    assert "3.8 MiB of tensor data, 7.8 KiB used" in done.out
    assert f"ckptool compact {views}" in done.out
    assert "ckptool compact" not in ckptool("info", views.with_name("views.compact.pth")).out
