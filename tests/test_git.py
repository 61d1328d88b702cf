"""The commands of docs/git.md, in a real git repository."""

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from tests.sources import PROJECT

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

BLOCKS = dict(
    re.findall(
        r"^## `git (\w+)`.*?^```sh\n(.*?)^```",
        (PROJECT / "docs" / "git.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)


def state():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return {"epoch": 1, "state_dict": net.state_dict()}


@pytest.fixture
def shell(tmp_path):
    """Run a command in a new repository, with `ckptool` on the path and no other configuration."""
    script = tmp_path / "bin" / "ckptool"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptool "$@"\n')
    script.chmod(0o755)
    repository = tmp_path / "repository"
    repository.mkdir()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(script.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(PROJECT),
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }

    def run(command):
        done = subprocess.run(
            command,
            shell=True,
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    run("git init -q && git config user.email a@b.c && git config user.name A")
    run.repository = repository
    return run


def commit(shell, **files):
    """A commit with these checkpoints; None removes one."""
    for name, content in files.items():
        path = shell.repository / f"{name}.pth"
        if content is None:
            path.unlink()
        else:
            torch.save(content, path)
    shell("git add -A && git commit -q -m x")


@pytest.fixture
def textconv(shell):
    for line in BLOCKS["diff"].splitlines():
        shell(line)
    commit(shell, model=state())
    return shell


def changed_lines(text):
    return re.findall(r"^[-+](?![-+]{2} )(.*)$", text, re.MULTILINE)


def test_git_diff_shows_the_tensors_and_values_that_changed(textconv):
    changed = state()
    changed["state_dict"]["1.bias"] += 1
    changed["epoch"] = 2
    commit(textconv, model=changed)
    lines = changed_lines(textconv("git diff HEAD~1"))
    assert sorted(line.split("\t")[0] for line in lines) == [
        "epoch",
        "epoch",
        "state_dict/1.bias",
        "state_dict/1.bias",
    ]


def test_a_tensor_more_changes_one_line(textconv):
    changed = state()
    changed["state_dict"]["a.much.longer.name.than.the.others"] = torch.zeros(2)
    commit(textconv, model=changed)
    (line,) = changed_lines(textconv("git show"))
    assert line.startswith("state_dict/a.much.longer.name.than.the.others\tfloat32\t[2]\tcpu")


def test_equal_content_saved_otherwise_is_no_difference(textconv):
    path = textconv.repository / "model.pth"
    before = path.read_bytes()
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    assert path.read_bytes() != before
    assert textconv("git diff --name-only") == "model.pth\n"
    assert changed_lines(textconv("git diff")) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_has_no_elements_of_its_own_is_compared_too(textconv):
    def tree(one):
        return {
            "sparse": torch.tensor([0.0, one]).to_sparse(),
            "quantised": torch.quantize_per_tensor(torch.tensor([1.0, one]), 0.5, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.tensor([one])]),
            "names": {"a", str(one)},
            "blob": b"x" * 1000 + str(one).encode(),
            "args": Namespace(lr=one),
        }

    commit(textconv, model=tree(1.0))
    torch.save(tree(1.0), textconv.repository / "model.pth", _use_new_zipfile_serialization=False)
    assert changed_lines(textconv("git diff")) == []
    commit(textconv, model=tree(2.0))
    lines = changed_lines(textconv("git diff HEAD~1"))
    assert {line.split("\t")[0] for line in lines} == set(tree(1.0))


def test_git_difftool_gives_the_figures_and_goes_on(shell):
    commit(shell, model=state(), other=state())
    changed = state()
    changed["state_dict"]["1.bias"] += 1
    commit(shell, model=changed, other=changed)
    configure, use = BLOCKS["difftool"].splitlines()
    shell(configure)
    out = shell(use)
    assert out.count("1 of 5 common entries differ") == 2
    assert re.search(r"state_dict/1\.bias +value +[\d.]+ +1 ", out)


def test_git_difftool_of_files_that_come_and_go(shell):
    commit(shell, gone=state())
    commit(shell, gone=None, new={"step": 3})
    configure, use = BLOCKS["difftool"].splitlines()
    shell(configure)
    out = shell(use)
    assert "no keys in common: 5 only in A" in out
    assert "no keys in common: 1 only in B" in out
