"""Whether what is built installs and runs: `make packages`, or `python tests/compat/packages.py`.

Builds a wheel and an sdist as `python -m build` does, installs each into a clean environment of
each Python (found as `run.py` finds them), without torch and with it, and runs the main jobs there;
with torch every command of the README, beside what is declared and nothing else. Then the wheel by
`pipx run`. Prints a table; exit code 1 where anything fails. Needs the package index.

    python tests/compat/packages.py [--python 3.11 ...] [--torch 3.13=2.9.0 ...] [--no-torch]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from run import interpreter
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURE = ROOT / "fixtures" / "torch-2.13.0" / "dp_full_cuda3.pth"
PYTHONS = ("3.11", "3.12", "3.13")
LIGHT = ("click>=8.1", "google-crc32c>=1.5", "tabulate>=0.9")
LOADS = """
import sys, torch, ckptool
state = ckptool.load_state_dict(sys.argv[1])
assert len(state) == 9 and all(tensor.device.type == "cpu" for tensor in state.values())
assert list(torch.load("plain.pth", weights_only=True)["state_dict"]) == list(state)
"""


class Failed(Exception):
    """A step that did not end well, and what it said."""


def run(*words: object, cwd: Path, **more: str) -> str:
    """The output of a program.

    Raises:
        Failed: it ended otherwise than with 0.
    """
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), **more}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words))}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def built(folder: Path) -> list[Path]:
    """A wheel and an sdist, from what git has."""
    copy = folder / "copy"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    venv = environment(Path(sys.executable), folder / "build")
    run(venv / "pip", "install", "-q", "build", cwd=folder)
    run(venv / "python", "-m", "build", "--outdir", folder / "dist", copy, cwd=folder)
    return sorted((folder / "dist").iterdir(), reverse=True)


def environment(python: Path, folder: Path) -> Path:
    """The programs of a new environment."""
    run(python, "-m", "venv", "--clear", folder, cwd=folder.parent)
    return folder / "bin"


def try_without_torch(package: Path, programs: Path, folder: Path) -> str:
    """The main jobs, where torch is not."""
    run(programs / "pip", "install", "-q", *LIGHT, cwd=folder)
    run(programs / "pip", "install", "-q", "--no-deps", package, cwd=folder)
    command = programs / "ckptool"
    run(command, "--help", cwd=folder)
    assert "module.conv1.weight" in run(command, "list", FIXTURE, cwd=folder)
    run(command, "info", FIXTURE, "--json", cwd=folder)
    for name in ("plain.pth", "plain.safetensors"):
        run(
            *(command, "convert", FIXTURE, name, "--wrappers", "strip", "--to", "cpu", "--force"),
            cwd=folder,
        )
        run(command, "verify", name, cwd=folder)
    return run(command, "--version", cwd=folder).strip()


def try_with_torch(package: Path, torch: str, programs: Path, folder: Path) -> str:
    """Tensors, and every command of the README, with what is declared and nothing else."""
    declared = [package, f"torch=={torch}"]
    run(programs / "pip", "install", "-q", *declared, cwd=folder)
    run(programs / "pip", "check", cwd=folder)
    run(programs / "python", "-c", LOADS, FIXTURE, cwd=folder)
    readme = (sys.executable, "-m", "pytest", "-q", "-x", "tests/test_readme.py")
    run(*readme, cwd=ROOT, CKPTOOL_PROGRAMS=str(programs))
    return torch


def try_pipx(wheel: Path, folder: Path) -> str:
    """`pipx run`, with all that the wheel asks for."""
    programs = environment(Path(sys.executable), folder / "pipx")
    run(programs / "pip", "install", "-q", "pipx", cwd=folder)
    spec = ("run", "--spec", wheel, "ckptool")
    run(programs / "pipx", *spec, "list", FIXTURE, cwd=folder)
    return run(programs / "pipx", *spec, "--version", cwd=folder).strip()


def tried(step: Callable[..., str], *arguments: object) -> str:
    """What a step comes to, in a word; what went wrong goes to standard error."""
    try:
        return step(*arguments)
    except (Failed, AssertionError) as error:
        print(error, file=sys.stderr)
        return "FAILED"


def main() -> int:
    """Every package in every Python; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=[], metavar="PYTHON=VERSION")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    versions = dict(pair.split("=") for pair in options.torch)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = built(folder)
        for version in options.python:
            python = Path(interpreter(version))
            for package in packages:
                programs = environment(python, folder / "venv")
                alone = tried(try_without_torch, package, programs, folder)
                torch = "-"
                if package.suffix == ".whl" and not options.no_torch:
                    torch = versions.get(version, "2.13.0")
                    torch = tried(try_with_torch, package, torch, programs, folder)
                rows.append([version, package.name, alone, torch])
                print(*rows[-1], file=sys.stderr)
        if not options.no_torch:
            wheel = next(one for one in packages if one.suffix == ".whl")
            rows.append(["pipx run", wheel.name, tried(try_pipx, wheel, folder), "-"])
    headers = ["Python", "package", "without torch", "with torch"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    return 1 if any("FAILED" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
