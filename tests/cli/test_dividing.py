"""One command in several processes: the bytes of one, a failure in all, a kill and what follows."""

import json
import socket
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.cli import main
from tests.forks import ended, finished, start
from tests.sources import PROJECT

DEADLINE = 240
CHANGED = ["--max-shard-size", "40KB", "--dtype", "bfloat16"]

PROGRAM = """
import os, sys
import click
import ckptool.writing.divided as divided
from ckptool.cli import main
name, work = os.environ.get("STEP", "").partition("=")[::2]
rank, at = os.environ["RANK"], work.partition(":")
done, replace = [], os.replace
def counted(*names):
    replace(*names)
    if not str(names[1]).endswith(".whole"):
        return
    done.append(names)
    if name == "kill" and rank == at[0] and len(done) == int(at[2]):
        os.kill(os.getpid(), 9)
    if name == "fail" and rank == at[0]:
        raise OSError(28, "No space left on device")
    if name == "fail":  # until the others know of it
        click.get_current_context().meta["ckptool.team"]._store.wait(["failed"])
divided.os.replace = counted
sys.argv[0] = "__main__.py"
sys.exit(main())
"""
"""`python -m ckptool`, in which one process may end, or fail, in the middle."""


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    torch.save({f"l.{i}.w": torch.randn(50, 40) for i in range(20)}, tmp_path / "m.pth")
    return tmp_path / "m.pth"


def ckptool_does(*words, exit_code=0):
    ran = finished("ckptool", *words, cwd=PROJECT, timeout=DEADLINE)
    assert ran.returncode == exit_code, ran.stderr
    return ran


def torchrun(words, program, *, nodes=1, nproc=2, step=""):
    """Run the processes of all nodes; what they wrote, and whether all ended well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    launcher = ["--nnodes", nodes, "--nproc-per-node", nproc, "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    launcher += ["--local-addr", "127.0.0.1", program]
    said = program.with_name("said")
    said.unlink(missing_ok=True)
    running = [
        start("torch.distributed.run", *launcher, *words, environment={"STEP": step}, said=said)
        for _ in range(nodes)
    ]
    codes = ended(running, timeout=DEADLINE)
    return said.read_text(), codes == [0] * nodes


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def files_in(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_workers_write_and_tell_what_one_process_does(model, tmp_path):
    one = ckptool.convert(
        model,
        tmp_path / "one" / "m.safetensors.index.json",
        ckptool.Cast("bfloat16"),
        max_shard_size="40KB",
    )
    index = tmp_path / "two" / "m.safetensors.index.json"
    ran = ckptool_does("convert", model, index, *CHANGED, "--workers", 2, "--json")
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert len(files_in(tmp_path / "one")) == 3
    outcomes = json.loads(ran.stdout)["outcomes"]
    assert outcomes == one.to_dict()["outcomes"]
    assert sum(one["kind"] == "precision" for one in outcomes) == 20


def test_a_folder_of_dcp_is_written_by_workers(model, tmp_path):
    ckptool.convert(model, tmp_path / "one", format="dcp", max_shard_size="60KB")
    words = ["--format", "dcp", "--max-shard-size", "60KB", "--workers", 2]
    ckptool_does("convert", model, tmp_path / "two", *words)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


def test_shards_are_cast_by_workers(model, tmp_path):
    index = tmp_path / "whole" / "m.safetensors.index.json"
    ckptool.convert(model, index, max_shard_size="80KB")
    with ckptool.open(index) as checkpoint:
        checkpoint.then(ckptool.Cast("float16")).save(tmp_path / "one" / index.name)
    target = tmp_path / "two" / index.name
    ckptool_does("cast", index, "--dtype", "float16", "-o", target, "--workers", 2)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


def test_a_recipe_makes_the_files_of_one_process(program, tmp_path):
    folder = PROJECT / "fixtures" / "recipes" / "llama3-meta-two"
    there = ["--recipe", "llama-meta-to-hf", "--max-shard-size", "8kB"]
    back = ["--recipe", "llama-meta-to-hf", "--reverse", "--param", "rank=2"]
    back += ["--files-from", folder / "source"]
    for name, source, words in (
        ("hf/", folder / "source", there),
        ("meta/", folder / "target.safetensors", back),
    ):
        ckptool_does("convert", source, f"{tmp_path}/one/{name}", *words)
        told, ended_well = torchrun(["convert", source, f"{tmp_path}/two/{name}", *words], program)
        assert ended_well, told
        assert files_in(tmp_path / "one" / name) == files_in(tmp_path / "two" / name)
        assert len(files_in(tmp_path / "one" / name)) == (5 if name == "hf/" else 3)


def test_a_single_file_is_written_by_one_of_them(model, tmp_path):
    ckptool_does("convert", model, tmp_path / "m.safetensors", "--workers", 2)
    assert ckptool.diff(model, tmp_path / "m.safetensors").identical


def test_what_one_process_cannot_write_fails_in_all(model, tmp_path):
    state = torch.load(model)
    state["l.19.w"][0] = 1e30
    torch.save(state, model)
    words = ["convert", model, tmp_path / "m.safetensors.index.json", "--max-shard-size", "40KB"]
    ran = ckptool_does(*words, "--dtype", "float16", "--workers", 2, exit_code=2)
    assert "l.19.w' cannot be cast" in ran.stderr
    assert ran.stderr.count("cannot be cast") == 1
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("*.json")) + list(tmp_path.glob("*.safetensors"))


def test_a_rerun_goes_on_after_a_kill_on_one_of_two_nodes(model, program, tmp_path):
    index = tmp_path / "out" / "m.safetensors.index.json"
    words = ["convert", model, index, "--max-shard-size", "20KB"]
    told, ended_well = torchrun(words, program, nodes=2, nproc=1, step="kill=1:3")
    assert not ended_well, told
    assert not list((tmp_path / "out").glob("*.json"))
    assert not list((tmp_path / "out").glob("*.safetensors"))
    whole = {path.stat().st_ino for path in (tmp_path / "out").glob(".*.whole")}
    assert len(whole) >= 3
    told, ended_well = torchrun(words, program, nodes=2, nproc=1)
    assert ended_well, told
    made = {path.stat().st_ino for path in (tmp_path / "out").glob("*.safetensors")}
    assert whole <= made
    assert len(list((tmp_path / "out").iterdir())) == 11
    assert ckptool.diff(model, index).identical


def test_after_a_failure_the_others_begin_no_further_file(model, program, tmp_path):
    words = ["convert", model, tmp_path / "out" / "m.safetensors.index.json"]
    told, ended_well = torchrun([*words, "--max-shard-size", "20KB"], program, step="fail=1:1")
    assert not ended_well
    assert "No space left on device" in told
    whole = len(list((tmp_path / "out").glob(".*.whole")))
    assert whole in (1, 2), told  # of 10; 1: the other had not begun its first


def test_an_old_set_keeps_its_names_until_the_new_one_is_whole(model, program, tmp_path):
    index = tmp_path / "out" / "m.safetensors.index.json"
    ckptool.convert(model, index, max_shard_size="20KB")
    before = files_in(tmp_path / "out")
    words = ["convert", model, index, "--max-shard-size", "20KB", "--dtype", "float16", "--force"]
    torchrun(words, program, step="kill=1:2")
    now = files_in(tmp_path / "out")
    assert {name: now[name] for name in before} == before
    ckptool.convert(model, index, max_shard_size="20KB", overwrite=True)
    assert files_in(tmp_path / "out") == before  # what was left is gone


def test_a_verb_that_is_not_divided_says_so(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert main(["strip-module", str(model), "-o", str(tmp_path / "s.pth")]) == 2
    assert "strip-module runs in one process, but torchrun started 2" in capsys.readouterr().err
    assert not (tmp_path / "s.pth").exists()
