"""doctor: each fault is found, and what it says to run mends it."""

import gzip
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import warnings
from collections import OrderedDict

import pytest
import torch

from tests.diagnosis.faults import (
    CPU,
    GPU,
    MENDED,
    Net,
    TiedNet,
    everything_at_once,
    healthy,
    retagged,
    saved,
    tied_safetensors,
    trained,
    training_run,
    wrapped,
)


def examined(ckptool, path, *options):
    done = ckptool("doctor", path, "--quick", "--json", *options)
    assert done.err == ""
    document = done.document
    assert done.code == (0 if document["ok"] else 1)
    return document


def kinds(document):
    return [complaint["kind"] for complaint in document["complaints"]]


def run(ckptool, commands):
    """Run commands exactly as they are printed."""
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "ckptool"
        done = ckptool(*arguments)
        assert done.code == 0, (command, done.err)


def read(path):
    if str(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("fault", MENDED, ids=lambda fault: fault.id)
def test_what_is_said_to_run_mends_it(ckptool, tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    path = fault.make(tmp_path)
    options = fault.options or CPU
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    document = examined(ckptool, path, *options)
    (complaint,) = [one for one in document["complaints"] if one["kind"] == fault.kind]
    assert complaint["severity"] == fault.severity
    assert complaint["commands"]
    assert set(complaint["commands"]) <= set(document["commands"])
    mended = {one["kind"] for one in document["complaints"] if one["commands"]}
    for commands in (document["commands"], [document["all_at_once"]]):
        run(ckptool, commands)
        after = examined(ckptool, document["target"], *options)
        assert not mended & set(kinds(after))
        assert after["ok"]
        Net().load_state_dict(read(document["target"]), strict=True)
        os.remove(document["target"])
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_all_faults_at_once_go_one_after_the_other(ckptool, tmp_path):
    path = everything_at_once(tmp_path)
    with warnings.catch_warnings():  # torch warns of the protocol before it fails on it
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match="Unsupported operand 149"):
            torch.load(path)
    document = examined(ckptool, path, *CPU)
    assert {"protocol", "level", "objects", "wrappers", "device", "bloat"} <= set(kinds(document))
    run(ckptool, document["commands"])
    after = examined(ckptool, document["target"], *CPU)
    assert (after["ok"], kinds(after)) == (True, ["metadata"])  # lost before: no command has it
    mended = torch.load(document["target"], weights_only=True, mmap=True)
    expected = {**trained()[0].state_dict(), "head.bias": torch.arange(4.0)}
    assert mended.keys() == expected.keys()
    assert all(torch.equal(mended[name], expected[name]) for name in expected)
    Net().load_state_dict(mended)


def test_a_healthy_file_has_no_complaint_at_all(ckptool, tmp_path):
    path = saved(healthy)(tmp_path)
    done = ckptool("doctor", "--quick", path)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{path}: no problems found with torch.load or load_state_dict\n"
    document = examined(ckptool, path)
    assert (document["complaints"], document["commands"]) == ([], [])
    assert (document["all_at_once"], document["target"]) == (None, None)


def test_the_screen_has_a_block_for_each_complaint_and_the_plan(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    retagged(saved(wrapped("module")), "cuda:3")(tmp_path)
    done = ckptool("doctor", "model.pth", "--quick", "--devices", "cpu")
    assert done.code == 1
    assert done.out.startswith(
        "model.pth does not load on this machine: 2 errors, 1 warning, 1 note\n\n1. "
    )
    plan = done.out.partition("To fix 1, 2, 3:\n")[2]
    assert (
        plan
        == "  ckptool convert model.pth model.fixed.pth --wrappers strip --to cpu\nNot fixed: 4\n"
    )
    assert done.out.count("ckptool convert") == 1
    for word in ("   where ", "   why ", "with strict=False it loads nothing"):
        assert word not in done.out
    for word in ("Unexpected key(s)", "Attempting to deserialize"):
        assert word in done.out
    done = ckptool("doctor", "model.pth", "--quick", "--devices", "cpu", "--explain")
    for word in ("   where ", "   why ", "Unexpected key(s)", "Attempting to deserialize"):
        assert word in done.out


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"", "truncated", "EOFError"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n",
         "not-a-checkpoint", "Unsupported operand 118"),
        (b"<!DOCTYPE html><title>Quota exceeded</title>", "not-a-checkpoint",
         "Unsupported operand 60"),
        (b'{"error": "not found"}', "not-a-checkpoint", "Unsupported operand 123"),
        (b"PK\x03\x04 and no more", "truncated", "failed finding central directory"),
        (b"lmgg" + bytes(60), "unsupported", "Unsupported operand 108"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_a_finding(ckptool, tmp_path, content, kind, says):
    (tmp_path / "model.pth").write_bytes(content)
    done = ckptool("doctor", tmp_path / "model.pth", "--json")
    assert (done.code, done.err) == (1, "")
    (complaint,) = done.document["complaints"]
    assert complaint["kind"] == kind
    assert says in complaint["why"]
    assert complaint["commands"] or complaint["remedy"]
    assert done.document["format"] is None


def test_a_pointer_is_fetched_by_git(ckptool, tmp_path):
    (tmp_path / "-m.pth").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    document = ckptool("doctor", tmp_path / "-m.pth", "--json").document
    assert document["commands"][0].startswith("git lfs install && git -C ")
    assert document["commands"][0].endswith(" lfs pull --include '**/-m.pth'")


@pytest.mark.parametrize(
    ("place", "given"),
    [("a b", "-C .. "), (".", ""), ("..", "-C 'it is' ")],
)
def test_a_proposed_command_starts_where_the_user_stands(
    ckptool, tmp_path, monkeypatch, place, given
):
    home = tmp_path / "it is"
    (home / "a b").mkdir(parents=True)
    (home / "m.pth").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    monkeypatch.chdir(home / place)
    document = ckptool("doctor", os.path.relpath(home / "m.pth"), "--json").document
    pull = f"git lfs install && git {given}lfs pull --include '**/m.pth'"
    assert document["commands"] == [pull]


def test_a_file_cut_short_is_a_finding(ckptool, tmp_path):
    path = saved(healthy)(tmp_path)
    path.write_bytes(path.read_bytes()[:-700])
    done = ckptool("doctor", path, "--json")
    assert (done.code, kinds(done.document)) == (1, ["truncated"])


def test_a_tar_is_unpacked_into_a_folder_of_its_own(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(healthy)(tmp_path)
    with tarfile.open("whole.tar", "w") as archive:
        archive.add(path.name)
    (tmp_path / "x.pth.tar").write_bytes((tmp_path / "whole.tar").read_bytes())
    path.write_text("mine")
    (command,) = ckptool("doctor", "x.pth.tar", "--json").document["commands"]
    subprocess.run(command, shell=True, check=True)
    assert path.read_text() == "mine"
    Net().load_state_dict(torch.load(tmp_path / "x.pth.tar.unpacked" / "model.pth"))


def test_a_gzipped_file_is_unpacked_by_the_command(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(healthy)(tmp_path)
    content = path.read_bytes()
    path.write_bytes(gzip.compress(content))
    (command,) = ckptool("doctor", "model.pth", "--json").document["commands"]
    assert command == ("gzip -dc model.pth > model.pth.unpacked && ckptool list model.pth.unpacked")
    subprocess.run(command.partition(" && ")[0], shell=True, check=True)
    assert (tmp_path / "model.pth.unpacked").read_bytes() == content


@pytest.mark.parametrize("more", [[], ["--like", "gone.pth"]])
def test_what_is_not_there_is_an_error(ckptool, tmp_path, more):
    here = saved(healthy)(tmp_path) if more else tmp_path / "gone.pth"
    done = ckptool("doctor", here, *more)
    assert (done.code, done.out) == (2, "")
    assert "no such file" in done.err


def test_a_missing_shard_is_a_finding(ckptool, tmp_path):
    index = next(fault for fault in MENDED if fault.kind == "shards").make(tmp_path)
    next(index.parent.glob("*-00001-*")).unlink()
    done = ckptool("doctor", index, "--json")
    assert (done.code, kinds(done.document)) == (1, ["missing-shard"])


def test_among_several_state_dicts_none_is_chosen(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved({"model": healthy(), "model_ema": healthy(), "epoch": 3})(tmp_path)
    document = examined(ckptool, "model.pth")
    (complaint,) = [one for one in document["complaints"] if one["kind"] == "several-models"]
    assert complaint["where"] == ["model (9 tensors)", "model_ema (9 tensors)"]
    assert (complaint["commands"], document["commands"]) == ([], [])
    for command in complaint["alternatives"]:
        run(ckptool, [command])
    for name in ("model", "model_ema"):
        Net().load_state_dict(torch.load(tmp_path / f"model.{name}.pth"))
        assert examined(ckptool, tmp_path / f"model.{name}.pth")["ok"]


def test_the_key_says_which_of_several_is_meant(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved({"model": healthy(), "ema": wrapped("module")(), "epoch": 3})(tmp_path)
    document = examined(ckptool, "model.pth", "--key", "ema")
    assert "--key ema --model-only" in document["commands"][0]
    run(ckptool, document["commands"])
    Net().load_state_dict(torch.load("model.fixed.pth"))


def test_alternatives_do_what_the_plan_does_too(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved({"model": wrapped("module")(), "ema": wrapped("module")()})(tmp_path)
    document = examined(ckptool, "model.pth")
    (complaint,) = [one for one in document["complaints"] if one["kind"] == "several-models"]
    run(ckptool, complaint["alternatives"])
    Net().load_state_dict(torch.load("model.ema.pth"))


def tied():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("ties", lambda: tied().state_dict()),
        ("views", lambda: OrderedDict(w=torch.ones(4, 6).t(), b=torch.ones(4))),
        ("views", lambda: OrderedDict(zip("ab", (lambda x: (x[:6], x[4:]))(torch.ones(9)),
                                          strict=True))),
    ],
)  # fmt: skip
def test_what_safetensors_refuses_is_converted(ckptool, tmp_path, monkeypatch, kind, make):
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    root = make()
    saved(root)(tmp_path)
    with pytest.raises((RuntimeError, ValueError)):
        save_file(dict(root), "refused.safetensors")
    document = examined(ckptool, "model.pth")
    (complaint,) = [one for one in document["complaints"] if one["kind"] == kind]
    copied = " --ties copy" if kind == "ties" else ""
    assert complaint["alternatives"] == [f"ckptool convert model.pth model.safetensors{copied}"]
    run(ckptool, complaint["alternatives"])
    assert examined(ckptool, "model.safetensors")["complaints"] == []
    written = load_file("model.safetensors")
    assert written.keys() == root.keys()
    assert all(torch.equal(root[name], value) for name, value in written.items())


@pytest.mark.parametrize("ours", [False, True])
def test_names_that_a_safetensors_file_only_mentions_come_back(
    ckptool, tmp_path, monkeypatch, ours
):
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    torch.save(TiedNet().state_dict(), "reference.pth")
    if ours:
        assert ckptool("convert", "reference.pth", "tied.safetensors").code == 0
    else:
        tied_safetensors(tmp_path)
    with pytest.raises(RuntimeError, match="Missing key"):
        TiedNet().load_state_dict(load_file("tied.safetensors"))
    for options in ((), ("--like", "reference.pth")):
        document = examined(ckptool, "tied.safetensors", *options)
        (complaint,) = [one for one in document["complaints"] if one["kind"] == "aliases"]
        assert complaint["severity"] == "fails"
        assert complaint["where"][0] in ("head.weight = emb.weight", "emb.weight = head.weight")
        assert complaint["commands"] == ["ckptool convert tied.safetensors tied.fixed.pth"]
    run(ckptool, [*document["commands"], *complaint["alternatives"]])
    for path in ("tied.fixed.pth", "tied-2.safetensors"):
        assert examined(ckptool, path)["ok"]
        TiedNet().load_state_dict(read(path))


def test_shards_with_names_that_are_only_mentioned_become_a_torch_file(ckptool, tmp_path):
    torch.save(TiedNet().state_dict(), tmp_path / "tied.pth")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    assert ckptool("convert", tmp_path / "tied.pth", index, "--max-shard-size", "50").code == 0
    document = examined(ckptool, index)
    assert {"shards", "aliases"} <= set(kinds(document))
    run(ckptool, document["commands"])
    TiedNet().load_state_dict(torch.load(document["target"]))


@pytest.mark.parametrize("key", [None, "m"])
def test_every_alternative_runs_without_the_plan(ckptool, tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    root = wrapped("module")()
    root["module.head.bias"] = torch.arange(100_000.0)[:4]
    root["module.features.0.bias"] = torch.ones(5, 2)[:, 0]
    root["module.x"] = torch.ones(1).numpy()[0]
    saved({"m": root})(tmp_path)
    document = examined(ckptool, "model.pth", *(("--key", key) if key else ()))
    alternatives = [one for found in document["complaints"] for one in found["alternatives"]]
    assert len(alternatives) == 1
    assert alternatives[0].startswith("ckptool convert model.pth model.safetensors")
    run(ckptool, [*document["commands"], *alternatives])
    Net().load_state_dict(read("model.safetensors"))


def test_an_alternative_that_would_fail_is_not_proposed(ckptool, tmp_path):
    net = tied()
    root = net.state_dict() | {"2.weight": torch.ones(4, 4).to_sparse()}
    document = examined(ckptool, saved(root)(tmp_path))
    (complaint,) = [one for one in document["complaints"] if one["kind"] == "ties"]
    assert complaint["alternatives"] == []


def test_the_attribute_of_a_lightning_module_may_come_off(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = OrderedDict((f"net.{name}", value) for name, value in healthy().items())
    saved({"pytorch-lightning_version": "2.0", "state_dict": inner})(tmp_path)
    document = examined(ckptool, "model.pth")
    run(ckptool, document["commands"])
    (complaint,) = [one for one in document["complaints"] if one["kind"] == "lightning"]
    run(ckptool, complaint["alternatives"])
    Net().load_state_dict(torch.load("model.renamed.pth"))


@pytest.mark.parametrize(
    "name", ["a b;$(x).pth", "-m.pth", "it's.pth", "new\nline.pth", "x.pth.tar"]
)
def test_any_name_of_a_file_is_quoted(ckptool, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    saved(wrapped("module"), pickle_protocol=4)(tmp_path).rename(name)
    document = ckptool("doctor", "--quick", "--json", "--", name).document
    run(ckptool, document["commands"])
    Net().load_state_dict(torch.load(document["target"]))


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash reads what is printed")
@pytest.mark.parametrize("name", [b"tab\there.pth", b"new\nline.pth", b"\x1b[2J.pth", b"\xff.pth"])
def test_names_that_no_terminal_shows_are_printed_so_that_they_run(
    ckptool, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    try:
        saved(wrapped("module"))(tmp_path).rename(os.fsdecode(name))
    except OSError:
        pytest.skip("no such name on this file system")
    done = ckptool("doctor", "--quick", os.fsdecode(name))
    command = done.out.partition("To fix 1:\n")[2].strip()
    words = subprocess.run(
        ["bash", "-c", command.replace("ckptool", r"printf %s\\0", 1)], capture_output=True
    )
    run(ckptool, [shlex.join(map(os.fsdecode, [b"ckptool", *words.stdout.split(b"\0")[:-1]]))])
    (made,) = tmp_path.glob("*.fixed.pth")
    Net().load_state_dict(torch.load(made))


def test_a_long_name_is_cut(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "ä" * 50 + "x" * 150 + ".pth"
    saved(wrapped("module"))(tmp_path).rename(name)
    document = examined(ckptool, name)
    assert len(os.fsencode(document["target"])) <= 255
    run(ckptool, document["commands"])
    Net().load_state_dict(torch.load(document["target"]))


def test_a_target_that_is_there_is_not_proposed(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(wrapped("module"))(tmp_path)
    (tmp_path / "model.fixed.pth").write_text("mine")
    document = examined(ckptool, "model.pth")
    assert document["target"] == "model.fixed-2.pth"
    run(ckptool, document["commands"])
    assert (tmp_path / "model.fixed.pth").read_text() == "mine"


def test_a_reference_tells_what_does_not_fit(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Net(classes=7).state_dict(), "reference.pth")
    saved(training_run)(tmp_path)
    document = examined(ckptool, "model.pth", "--like", "reference.pth")
    (complaint,) = [one for one in document["complaints"] if one["kind"] == "size-mismatch"]
    assert complaint["where"] == ["head.weight", "head.bias"]
    assert "the shape in current model is torch.Size([7, 5])" in complaint["why"]
    run(ckptool, [*document["commands"], *complaint["alternatives"]])
    net = Net(classes=7)
    fitted = torch.load("model.fitting.pth")
    assert net.load_state_dict(fitted, strict=False).missing_keys == complaint["where"]
    rest = torch.load("model.fixed.pth")
    for name in complaint["where"]:  # what the remedy says
        del rest[name]
    found = Net(classes=7).load_state_dict(rest, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["head.weight", "head.bias"], [])


def test_code_that_builds_the_model_is_a_reference(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(lambda: {"state_dict": wrapped("module")(), "epoch": 3})(tmp_path)
    word = f"{Net.__module__}:Net"
    document = examined(ckptool, "model.pth", "--like", word)
    assert kinds(document)[:2] == ["level", "wrappers"]
    assert shlex.split(document["all_at_once"])[-2:] == ["--like", word]
    run(ckptool, document["commands"])
    Net().load_state_dict(torch.load(document["target"]), strict=True)
    assert examined(ckptool, document["target"], "--like", word)["ok"]
    done = ckptool("doctor", "model.pth", "--like", f"{Net.__module__}:healthy_")
    assert (done.code, done.out) == (2, "")
    assert "has no attribute 'healthy_'" in done.err


def test_devices_of_another_machine_can_be_given(ckptool, tmp_path):
    path = retagged(saved(healthy), "cuda:1")(tmp_path)
    assert kinds(examined(ckptool, path, "--devices", "cuda:0,cuda:1")) == ["one-gpu"]
    assert kinds(examined(ckptool, path, *GPU)) == ["device", "one-gpu"]
    done = ckptool("doctor", path, "--devices", "GPU 1")
    assert (done.code, done.out) == (2, "")
    assert "is not a device" in done.err


def test_several_files_have_the_exit_code_of_the_worst(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(wrapped("module"))(tmp_path).rename("wrong.pth")
    saved(healthy)(tmp_path).rename("well.pth")
    for names, code in [
        (["well.pth", "well.pth"], 0),
        (["well.pth", "wrong.pth"], 1),
        (["wrong.pth", "gone.pth", "well.pth"], 2),
    ]:
        done = ckptool("doctor", "--quick", "--json", *names)
        document = done.document
        assert (done.code, document["ok"]) == (code, code == 0)
        assert document["schema"] == "ckptool.doctor/2"
        here = [name for name in names if name != "gone.pth"]
        single = [ckptool("doctor", "--quick", "--json", name).document for name in here]
        assert document["files"] == single
        assert [one["file"] for one in document["errors"]] == ["gone.pth"] * (code == 2)
        shown = ckptool("doctor", "--quick", *names)
        assert shown.code == code
        verdicts = re.findall(r"(\S+)(?:: | does not load )", shown.out)
        assert [name for name in verdicts if name in here] == here


@pytest.mark.parametrize("fault", MENDED, ids=lambda fault: fault.id)
def test_a_fix_writes_what_the_command_writes(ckptool, tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    path = fault.make(tmp_path)
    options = ("--quick", *(fault.options or CPU))
    document = examined(ckptool, path, *(fault.options or CPU))
    agreed = [
        word for word in ("--model-only", "--drop-objects") if word in document["commands"][0]
    ]
    done = ckptool("doctor", path, "--fix", "--json", *agreed, *options)
    assert done.code == 0, done.err
    after = ckptool("doctor", document["target"], "--json", *options)
    assert (done.document, after.code) == (after.document, 0)
    Net().load_state_dict(read(document["target"]), strict=True)


def test_a_fix_that_loses_something_needs_its_flag(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    retagged(saved(training_run), "cuda:3")(tmp_path)
    words = ("doctor", "model.pth", "--quick", "--fix", *CPU)
    done = ckptool(*words)
    assert (done.code, done.out, sorted(os.listdir())) == (2, "", ["model.pth"])
    assert "hint: add --model-only to accept that; or, to keep all: ckptool convert " in done.err
    done = ckptool(*words, "--model-only", "-o", "out.safetensors")
    assert (done.code, done.out.startswith("out.safetensors: ")) == (0, True)
    Net().load_state_dict(read("out.safetensors"))


def test_a_fix_that_leaves_a_choice_or_has_no_command_is_refused(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved({"model": healthy(), "model_ema": healthy()})(tmp_path)
    (tmp_path / "lfs.pth").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    before = sorted(os.listdir())
    for name, says, hint in [
        ("model.pth", "several fixes are possible; choose one", "--key model --model-only"),
        ("lfs.pth", "no ckptool command fixes it", "git lfs install"),
    ]:
        done = ckptool("doctor", name, "--quick", "--fix")
        assert (done.code, done.out) == (2, "")
        assert f"{name}: {says}" in done.err
        assert hint in done.err
    assert sorted(os.listdir()) == before
    for words in (["--model-only"], ["-o", "x.pth"]):
        assert "needs --fix" in ckptool("doctor", "model.pth", *words).err
    assert "--fix accepts one file" in ckptool("doctor", "model.pth", "lfs.pth", "--fix").err


def test_a_healthy_file_is_left_as_it_is_by_a_fix(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(healthy)(tmp_path)
    done = ckptool("doctor", "model.pth", "--fix", "--quick")
    assert (done.code, os.listdir()) == (0, ["model.pth"])
    assert "no problem" in done.out
