"""The commands of docs/training.md run, one after the other in one folder."""

import os
import re
import subprocess
import sys

import pytest

from tests.sources import PROJECT

PAGE = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    script = folder / "bin" / "ckptool"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptool "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}

    def run(line):
        return subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.mark.parametrize("block", blocks("sh"))
def test_its_commands_run(block, run):
    for line in block.splitlines():
        done = run(line)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("block", blocks("python"))
def test_its_code_gives_what_it_says(block, run):
    (said,) = re.findall(r"# (.*)$", block, re.MULTILINE)
    done = run(f'"{sys.executable}" - <<"EOF"\n{block}EOF\n')
    assert (done.stdout.strip(), done.stderr) == (said, "")


@pytest.mark.parametrize("block", blocks("console"))
def test_its_transcript_is_what_comes_out(block, run):
    command, _, shown = block.removeprefix("$ ").partition("\n")
    assert run(command).stdout.splitlines() == shown.splitlines()


def test_every_strategy_is_in_every_table():
    from ckptool.trainer.config import STRATEGIES

    for strategy in STRATEGIES:
        assert PAGE.count(f"| `{strategy}` |") >= 2, strategy
