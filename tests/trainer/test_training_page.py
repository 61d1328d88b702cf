"""The commands of docs/training.md run, one after the other in one folder."""

import re
from functools import partial

from tests.forks import in_shell
from tests.sources import PROJECT

PAGE = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_its_blocks_do_what_they_say(tmp_path):
    """One test, because each block uses what the earlier ones have written."""
    run = partial(in_shell, cwd=tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        done = run(line)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    for block in blocks("python"):
        (said,) = re.findall(r"# (.*)$", block, re.MULTILINE)
        (tmp_path / "block.py").write_text(block)
        done = run("python block.py")
        assert (done.stdout.strip(), done.stderr) == (said, "")
    for block in blocks("console"):
        command, _, shown = block.removeprefix("$ ").partition("\n")
        assert run(command).stdout.splitlines() == shown.splitlines()


def test_every_strategy_is_in_every_table():
    from ckptool.trainer.config import STRATEGIES

    for strategy in STRATEGIES:
        assert PAGE.count(f"| `{strategy}` |") >= 2, strategy
