"""The README's commands run, and what they write loads."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import in_shell
from tests.pages.prepared import loads, prepare
from tests.sources import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")

FOREIGN = re.compile(r"Traceback|Warning|NumPy|Numpy|W\d{4} |\[W")
"""What standard error has only where torch or Python say something that the README does not."""


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    heading: str
    language: str
    text: str

    @property
    def lines(self):
        """Its commands, without comments."""
        return [line for line in self.text.splitlines() if line.split("#")[0].strip()]


def blocks(language):
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = [
        Block(part.partition("\n")[0], language, text)
        for part in re.split(r"^#+ ", README, flags=re.MULTILINE)
        for text in fence.findall(part)
    ]
    return [pytest.param(block, id=f"{n}-{block.heading}") for n, block in enumerate(found)]


@pytest.fixture
def folder(tmp_path):
    """A folder with every file that the README names, of its content."""
    prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks("sh"))
def test_a_shell_block_runs(block, folder):
    before = set(folder.iterdir())
    for line in block.lines:
        word = line.split()[0]
        if word == "make":
            assert re.search(rf"^{line.split()[1]}:", makefile(), re.MULTILINE), line
            continue
        if word == "pip":
            continue
        assert word == "ckptool", f"what is {line!r}?"
        wanted = re.search(r"exit code (\d+)", line)
        done = in_shell(line, folder)
        assert done.returncode == (int(wanted[1]) if wanted else 0), f"{line}\n{done.stderr}"
        assert not FOREIGN.search(done.stderr), f"{line}\n{done.stderr}"
        assert done.stdout.strip() or done.stderr.strip()
    for path in set(folder.iterdir()) - before - {folder / "__pycache__"}:  # of net.py
        files = filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            is_text = file.suffix in (".json", ".jsonl", ".html") or "tfevents" in file.name
            assert is_text or loads(file), f"{file.name} is empty"


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(block, folder):
    (folder / "block.py").write_text(block.text)
    done = in_shell("python block.py", folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("block", blocks("console"))
def test_a_transcript_is_what_comes_out(block, folder):
    for step in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        done = in_shell(f"{command} 2>&1", folder)
        assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def test_the_file_that_the_readme_says_is_written_is_written(folder):
    said = re.findall(r"^(ckptool .*?) +# writes (\S+)$", README, re.MULTILINE)
    assert said
    for command, name in said:
        assert in_shell(command, folder).returncode == 0
        assert (folder / name).exists(), command


def test_a_file_remapped_to_the_cpu_needs_no_map_location(folder):
    import torch

    assert in_shell("ckptool remap --to cpu model.pth", folder).returncode == 0
    state = torch.load(folder / "model.cpu.pth")["state_dict"]
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def makefile():
    return (PROJECT / "Makefile").read_text(encoding="utf-8")
