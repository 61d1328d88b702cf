"""What is built installs without torch, runs, and tells a type checker its types."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.cli.group import VERBS
from tests.sources import PACKAGE, PROJECT

FIXTURE = PROJECT / "fixtures" / "torch-2.13.0" / "dp_full_cuda3.pth"
CONSUMER = """
import ckptool

with ckptool.open("model.pth") as checkpoint:
    devices: dict[str, int] = checkpoint.devices
    for path, tensor in checkpoint.tensors():
        reveal_type(tensor.shape)
    written: ckptool.Receipt = checkpoint.strip_module().remap({"*": "cpu"}).save("ready.pth")
size: int = ckptool.convert("model.pth", "model.safetensors", ckptool.Strip()).size
found: ckptool.Diff = ckptool.diff("a.pth", "b.pth")
reveal_type(found.identical)
try:
    ckptool.load_state_dict("model.pth")
except ckptool.NotACheckpoint as error:
    hint: str | None = error.hint
ckptool.open(3)
ckptool.verify("model.pth").fine
"""


def run(*words, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a wheel and an sdist, built from a copy of what git has."""
    above = tmp_path_factory.mktemp("built")
    copy = above / "copy"
    names = [path.relative_to(PROJECT) for path in PACKAGE.rglob("*") if path.is_file()]
    names = [name for name in names if "__pycache__" not in name.parts]
    for name in [*names, *map(Path, ("pyproject.toml", "README.md", "LICENSE"))]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((PROJECT / name).read_bytes())
    code, _, said = run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", above / "dist", copy),
        cwd=above,
    )
    assert code == 0, said
    return above / "dist", {name.as_posix() for name in names}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The interpreter of an environment with the wheel and what `--no-deps` wants beside it."""
    above = tmp_path_factory.mktemp("installed")
    assert run(sys.executable, "-m", "venv", "--without-pip", above, cwd=above)[0] == 0
    python = above / "bin" / "python"
    (wheel,) = built[0].glob("*.whl")
    code, _, said = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"),
        wheel,
        cwd=above,
    )
    assert code == 0, said
    (site,) = above.glob("lib/python*/site-packages")
    for name in ("click", "google_crc32c", "tabulate"):
        origin = Path(importlib.util.find_spec(name).origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (site / origin.name).symlink_to(origin)
    return python


def test_the_wheel_has_the_package_its_types_and_nothing_else(built):
    (wheel,) = built[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (script,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "ckptool = ckptool.cli:main" in archive.read(script).decode().splitlines()
    assert names == built[1]
    assert "ckptool/py.typed" in names


def test_the_sdist_builds_the_same(built):
    (sdist,) = built[0].glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= built[1] | {"pyproject.toml", "README.md", "LICENSE"}
    assert not any(name.startswith(("tests/", "fixtures/", "benchmarks/")) for name in names)


def test_the_version_stands_in_one_place(built):
    (wheel,) = built[0].glob("*.whl")
    assert wheel.name.startswith(f"ckptool-{ckptool.__version__}-py3-none-any")
    assert importlib.metadata.version("ckptool") == ckptool.__version__
    said = [
        path.relative_to(PROJECT)
        for path in [PROJECT / "pyproject.toml", *PACKAGE.rglob("*.py")]
        if f'"{ckptool.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert said == [Path("ckptool/_version.py")]


def test_what_is_installed_runs_without_torch(installed, tmp_path):
    command = installed.with_name("ckptool")
    assert run(command, "--version", cwd=tmp_path)[1] == f"ckptool {ckptool.__version__}\n"
    assert run(installed, "-c", "import torch", cwd=tmp_path)[0] == 1
    code, shown, said = run(command, "list", FIXTURE, cwd=tmp_path)
    assert (code, said) == (0, "")
    assert "state_dict/module.conv1.weight" in shown
    for target in ("plain.pth", "plain.safetensors"):
        code, _, said = run(
            *(command, "convert", FIXTURE, target, "--wrappers", "strip", "--to", "cpu"),
            cwd=tmp_path,
        )
        assert code == 0, said
        assert run(command, "verify", target, cwd=tmp_path)[0] == 0
    assert run(command, "report", FIXTURE, "-o", "page.html", cwd=tmp_path)[0] == 0


WITHOUT_TORCH = {
    "list": ["list a.pth", "list a.pth --hash"],
    "info": ["info a.pth"],
    "show": ["show a.pth state_dict/module.fc.weight"],
    "verify": ["verify a.pth --values"],
    "scan": ["scan a.pth"],
    "doctor": ["doctor a.pth", "doctor a.pth --like b.pth"],
    "match": ["match a.pth --like b.pth"],
    "diff": ["diff a.pth a.pth", "diff a.pth b.pth", "diff a.pth b.pth --stat"],
    "report": ["report a.pth -o o.html", "report a.pth b.pth -o p.html"],
    "strip-module": ["strip-module a.pth -o 1.pth"],
    "add-module": ["add-module a.pth -o 2.pth"],
    "rename": ["rename a.pth --prefix module=net -o 3.pth"],
    "remap": ["remap a.pth --to cpu -o 4.pth"],
    "extract": ["extract a.pth --model-only -o 5.pth"],
    "compact": ["compact a.pth -o 6.pth"],
    "convert": ["convert a.pth 7.safetensors"],
    "recover": ["recover a.pth"],
    "recipes": ["recipes"],
}
"""Of each command, what it does without torch."""
WITH_TORCH = {
    "stats": "stats a.pth",
    "diff": "diff a.pth b.pth --rtol 0.1",
    "match": "match a.pth --like torch.nn:Identity",
    "doctor": "doctor a.pth --like torch.nn:Identity",
    "convert": "convert a.pth 8.pth --dtype bfloat16",
    "cast": "cast a.pth --dtype bfloat16 -o 9.pth",
    "average": "average a.pth b.pth -o 10.pth",
    "merge-lora": "merge-lora base.safetensors plain -o 11.safetensors",
    "train": "train --out run",
}
"""Of each command, what it needs torch for."""


@pytest.fixture
def two_files(tmp_path):
    """A checkpoint, one with other values, and an adapter with its base."""
    shutil.copy(FIXTURE, tmp_path / "a.pth")
    state = torch.load(FIXTURE, "cpu", weights_only=False)
    state["state_dict"]["module.fc.weight"] += 1
    torch.save(state, tmp_path / "b.pth")
    shutil.copy(PROJECT / "fixtures/lora/base.safetensors", tmp_path)
    shutil.copytree(PROJECT / "fixtures/lora/plain", tmp_path / "plain")
    return tmp_path


def test_each_command_does_without_torch_what_it_can(installed, two_files):
    commands = {name for names in VERBS.values() for name in names}
    assert {*WITHOUT_TORCH, *WITH_TORCH} == commands
    for line in (line for lines in WITHOUT_TORCH.values() for line in lines):
        code, _, said = run(installed.with_name("ckptool"), *line.split(), cwd=two_files)
        assert code in (0, 1), (line, said)
        assert "unexpected error" not in said
    for line in WITH_TORCH.values():
        before = sorted(two_files.iterdir())
        code, shown, said = run(installed.with_name("ckptool"), *line.split(), cwd=two_files)
        assert (code, shown) == (2, ""), line
        assert said.endswith("\nhint: pip install torch\n"), (line, said)
        assert sorted(two_files.iterdir()) == before


def test_a_project_that_uses_it_sees_its_types(installed, tmp_path):
    (tmp_path / "consumer.py").write_text(CONSUMER)
    code, said, error = run(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", installed),
        *("--no-error-summary", "--hide-error-context", "--no-color-output", "consumer.py"),
        cwd=tmp_path,
    )
    assert (code, error) == (1, "")
    lines = [line.partition(": ")[2] for line in said.splitlines()]
    assert lines == [
        'note: Revealed type is "tuple[int | None, ...]"',
        'note: Revealed type is "bool"',
        'error: Argument 1 to "open" has incompatible type "int"; '
        'expected "str | PathLike[str]"  [arg-type]',
        'error: "Verdict" has no attribute "fine"  [attr-defined]',
    ]
