"""Tab, in the shells that are here: a real one on a terminal of its own."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptool.cli import main
from tests.pages.cli_page import COMPLETION

STARTED = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEFORE = {"zsh": "autoload -U compinit; compinit -u -D\n"}
PATIENCE = 60


class Terminal:
    """A shell that believes that a person types."""

    def __init__(self, shell, folder):
        self.screen, theirs = pty.openpty()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {
            "PATH": path,
            "HOME": str(folder),
            "TERM": "dumb" if shell != "fish" else "xterm",
            "PS1": "",
        }
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *STARTED[shell]],  # fish wants a terminal that it controls
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
        )
        os.close(theirs)
        self.read = ""

    def types(self, text):
        self.read = ""
        os.write(self.screen, text.encode())

    def shows(self, wanted):
        end = time.monotonic() + PATIENCE
        while wanted not in self.read:
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {wanted!r} in {self.read!r}"
            self.read += os.read(self.screen, 4096).decode(errors="replace")
        return True

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


@pytest.fixture(params=["bash", "zsh", "fish"])
def terminal(request, tmp_path):
    shell = request.param
    if not (shutil.which(shell) and shutil.which("setsid")):
        pytest.skip(f"{shell} (or setsid) is not installed")
    (tmp_path / "epoch-seventeen.pth").touch()
    opened = Terminal(shell, tmp_path)
    line, _ = COMPLETION[shell]
    try:
        opened.types(f"{BEFORE.get(shell, '')}{line}\n")
        opened.types("echo re''ady\n")
        assert opened.shows("ready\r\n")
        yield opened
    finally:
        opened.close()


def test_values_are_completed(monkeypatch, capsys):
    monkeypatch.setenv("_CKPTOOL_COMPLETE", "bash_complete")
    for words, shown in (
        ("cast model.pth --dtype bf", "bfloat16"),
        ("convert a b --dtype float8_e5m2f", "float8_e5m2fnuz"),
        ("list model.pth --fmt markd", "markdown"),
        ("strip-module model.pth --only _orig", "_orig_mod"),
        ("convert a b --like epoch", "file,"),  # the shell knows its files
        ("average a b --ints fi", "first"),
    ):
        monkeypatch.setenv("COMP_WORDS", f"ckptool {words}")
        monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        assert shown in capsys.readouterr().out, words


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("ckptool strip-", "strip-module"),
        ("ckptool convert --wrap", "--wrappers"),
        ("ckptool convert a b --wrappers st", "strip"),
        ("ckptool list epoch-", "epoch-seventeen.pth"),
    ],
)
def test_tab_completes(terminal, typed, shown):
    terminal.types(f"{typed}\t")
    assert terminal.shows(shown.removeprefix(typed.split()[-1]))
