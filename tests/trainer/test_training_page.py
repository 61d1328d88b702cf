"""The commands of docs/training.md run, one after the other in one folder."""

import os
import re
from functools import partial

import pytest

from tests.forks import in_shell
from tests.sources import PROJECT

PAGE = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Does a line of a shell in the folder in which all commands of the page have run.

    They run here, because another worker may have the test of an earlier block.
    """
    run = partial(in_shell, cwd=tmp_path_factory.mktemp("page"))
    for line in "".join(blocks("sh")).splitlines():
        done = run(line)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    return run


def test_its_commands_run(run):
    assert "last.pth" in os.listdir(run.keywords["cwd"] / "flats")  # the fixture has run them


@pytest.mark.parametrize("block", blocks("python"))
def test_its_code_gives_what_it_says(block, run):
    (said,) = re.findall(r"# (.*)$", block, re.MULTILINE)
    (run.keywords["cwd"] / "block.py").write_text(block)
    done = run("python block.py")
    assert (done.stdout.strip(), done.stderr) == (said, "")


@pytest.mark.parametrize("block", blocks("console"))
def test_its_transcript_is_what_comes_out(block, run):
    command, _, shown = block.removeprefix("$ ").partition("\n")
    assert run(command).stdout.splitlines() == shown.splitlines()


def test_every_strategy_is_in_every_table():
    from ckptool.trainer.config import STRATEGIES

    for strategy in STRATEGIES:
        assert PAGE.count(f"| `{strategy}` |") >= 2, strategy
