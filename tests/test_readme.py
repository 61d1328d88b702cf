"""The README's commands run, and what they write loads."""

import re
from pathlib import Path

import pytest

from tests.forks import in_shell
from tests.pages.prepared import loads, prepare
from tests.sources import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")

FOREIGN = re.compile(r"Traceback|Warning|NumPy|Numpy|W\d{4} |\[W")
"""What standard error has only where torch or Python say something that the README does not."""


BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
AROUND = ("make", "pip")
"""Words of commands that need the clone, or change the environment."""


SHOWN = {
    "doctor": r'every key in state_dict starts with "module\."',
    "info": r"cuda:3 \(27\)",
    "list": r"27 tensors",
    "show": r"^94$|module\.fc\.weight",
    "match": r"module\. removed",
    "diff": r"[1-9] of \d+ common entries differ",
    "verify": r"ok \(",
    "scan": r"data \(1 pickle\)|runs code \(imports io\)",
    "stats": r"mean",
    "report": r"wrote model.html",
    "strip-module": r'removed "module\." from 9 keys',
    "add-module": r'added "module\." to 9 keys',
    "rename": r"renamed 9 keys",
    "remap": r"moved 27 tensors from cuda:3",
    "convert": r"wrote \S+ \(",
    "extract": r"kept 9 of \d+ tensors",
    "cast": r"lost precision",
    "average": r"the mean of 2 files",
    "compact": r"saved [1-9]",
    "merge-lora": r"merged lora",
    "recipes": r"llama-meta-to-hf",
    "model.pth": r"does not load on this machine",
    "train": r"Trained to step",
}
"""What the output of each command shows, which is what the README promises of it."""


@pytest.fixture
def folder(tmp_path):
    """A folder with every file that the README names, of its content."""
    prepare(tmp_path)
    return tmp_path


def test_everything_runs_from_top_to_bottom_in_one_folder(folder):
    before = set(folder.iterdir())
    runs = {
        "text": hold_opening,
        "sh": run_commands,
        "console": hold_transcript,
        "python": run_python,
    }
    for language, text in BLOCK.findall(README):
        runs[language](text, folder)
    for path in set(folder.iterdir()) - before - {folder / "__pycache__"}:  # of net.py
        files = filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            is_text = file.suffix in (".json", ".jsonl", ".html", ".py") or "tfevents" in file.name
            assert is_text or loads(file), f"{file.name} is empty"


def hold_opening(text, folder):
    error, *commands, result = text.splitlines()
    before, after = folder / "model.pth", folder / "laptop.pth"
    for part in error.split("..."):
        assert part.strip() in loaded(before, folder)
    for command in commands:
        assert in_shell(command.removeprefix("$ "), folder).returncode == 0
    assert loaded(after, folder).strip() == result


def loaded(path, folder):
    """What torch says of the weights of a file and their model."""
    state = f"torch.load({path.name!r}, 'cpu')['state_dict']"
    line = f'python -c "import net, torch; print(net.Net().load_state_dict({state}))"'
    return in_shell(line, folder, together=True).stdout


def run_commands(text, folder):
    for line in text.splitlines():
        word, *rest = line.split("#")[0].split() or [""]
        if word in AROUND:
            assert word != "make" or re.search(rf"^{rest[0]}:", makefile(), re.MULTILINE), line
        elif word:
            assert word in ("ckptool", "cp"), f"what is {line!r}?"
            wanted = re.search(r"exit code (\d+)", line)
            done = in_shell(line, folder)
            assert done.returncode == (int(wanted[1]) if wanted else 0), f"{line}\n{done.stderr}"
            assert not FOREIGN.search(done.stderr), f"{line}\n{done.stderr}"
            said = done.stdout + done.stderr
            assert word == "cp" or re.search(SHOWN[rest[0]], said), f"{line}\n{said}"
            written = re.search(r"# writes (\S+)$", line)
            assert not written or (folder / written[1]).exists(), line


FOUND = {"doctor", "diff", "scan"}
"""Commands whose files in the table have something to find: exit code 1; so has a cut file."""


def test_every_command_of_the_tables_runs(folder):
    rows = re.findall(r"^\|.*\| `ckptool ([^`]+)` \|$", README, re.MULTILINE)
    local = [words for words in rows if "://" not in words]
    assert len(local) > 25
    for words in local:
        done = in_shell(f"ckptool {words}", folder)
        verb = words.split()[0]
        wanted = int(verb in FOUND or "--salvage" in words)
        assert done.returncode == wanted, f"{words}\n{done.stderr}"
        assert re.search(SHOWN[verb], done.stdout + done.stderr), f"{words}\n{done.stderr}"


def run_python(text, folder):
    (folder / "block.py").write_text(text)
    done = in_shell("python block.py", folder)
    assert (done.returncode, done.stderr) == (0, "")


def hold_transcript(text, folder):
    for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        done = in_shell(command, folder, together=True)
        assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def makefile():
    return (PROJECT / "Makefile").read_text(encoding="utf-8")
