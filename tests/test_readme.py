"""The README's commands run, and what they write loads."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import in_shell
from tests.sources import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
FIXTURES = PROJECT / "fixtures"
CURRENT = FIXTURES / "torch-2.13.0"

PREPARED = {
    "model.pth": CURRENT / "dp_full_cuda3.pth",
    "single.pth": CURRENT / "single.pth",
    "whole.pth": CURRENT / "whole_dp.pth",
    "scripted.pt": CURRENT / "scripted.pt",
    "with-args.pth": CURRENT / "misc.pth",
    "compiled.pth": FIXTURES / "ecosystem" / "dp_compiled.pth",
    "ema.pth": FIXTURES / "ecosystem" / "ema.pth",
    "run.pth": CURRENT / "dp_full.pth",
    "epoch1.pth": CURRENT / "dp.pth",
    "epoch2.pth": CURRENT / "dp.pth",
    "jax.npz": FIXTURES / "numpy" / "jax.npz",
    "old.pth": FIXTURES / "torch-1.4.0" / "dp_full_cuda0.pth",
}
"""What each name of a file in the README stands for."""

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 83000000
"""
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)
"""


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
    import torch

    for name, source in PREPARED.items():
        shutil.copyfile(source, tmp_path / name)
    state = torch.load(PREPARED["single.pth"])
    torch.save(state, tmp_path / "protocol4.pth", pickle_protocol=4)
    (tmp_path / "pointer.pth").write_text(POINTER)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def loads(path):
    """That torch (or safetensors) reads it, without running anything."""
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


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
        assert "Traceback" not in done.stderr
        assert done.stdout.strip() or done.stderr.strip()
    for path in set(folder.iterdir()) - before - {folder / "__pycache__"}:  # of net.py
        files = filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            is_text = file.suffix in (".json", ".jsonl", ".html") or "tfevents" in file.name
            assert is_text or loads(file), f"{file.name} is empty"


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(block, folder):
    (folder / "block.py").write_text(block.text)
    done = in_shell(f"'{sys.executable}' block.py", folder)
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
