"""`docs/pictures/`: what commands print on a terminal of 80 columns, and the page of `report`."""

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from html import escape

from tests.forks import in_shell
from tests.render.page.browser import CHROMIUM, FLAGS
from tests.sources import PROJECT

COMMANDS = {
    "help": "ckptool --help",
    "info": "ckptool info model.pth",
    "doctor": "ckptool doctor model.pth",
    "tree": "ckptool list single.pth --tree",
    "diff": "ckptool diff epoch1.pth epoch2.pth",
    "match": "ckptool match lightning.ckpt --like train.pth.tar",
}
"""By picture: the command that prints it, in the folder of `prepared`."""

PAGE = "ckptool report epoch1.pth epoch2.pth -o epochs.html"
WINDOWS = {"report": (1280, 900), "report-narrow": (400, 900)}
"""By picture of the page: width and height of the browser's window, in pixels."""

_COLUMNS = 80
_WIDTH, _HEIGHT, _MARGIN = 8, 18, 16
_STYLE = """text{font:13px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre;fill:#d1d7e0}
.b{font-weight:bold;fill:#fff}.f{fill:#8b949e}.r{fill:#ff7b72}.p{fill:#7ee787}"""
_CODES = {"1": "b", "2": "f", "31": "r"}
_CODE = re.compile(r"\x1b\[(\d*)m")


def picture(name, folder):
    """Return the SVG of a command that runs in a folder."""
    command = COMMANDS[name]
    lines = [[("p", "$ "), ("b", command)], *map(_runs, _printed(command, folder).splitlines())]
    width = max(_COLUMNS, *(sum(len(text) for _, text in line) for line in lines))
    wide, high = width * _WIDTH + 2 * _MARGIN, len(lines) * _HEIGHT + 2 * _MARGIN
    texts = "\n".join(filter(None, (_text(row, line) for row, line in enumerate(lines))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" role="img"><title>{escape(command)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect width="{wide}" height="{high}" rx="8" fill="#161b22"/>\n{texts}\n</svg>\n'
    )


def looks(folder, target):
    """Draw the page of two files of a folder; return the pictures: none without a browser."""
    if CHROMIUM is None:
        return []
    in_shell(PAGE, folder).check_returncode()
    made = [target / f"{name}.png" for name in WINDOWS]
    for path, (wide, high) in zip(made, WINDOWS.values(), strict=True):
        flags = (
            *FLAGS,
            f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=5000",
            f"--window-size={wide},{high}",
            f"--screenshot={path}",
        )
        address = f"file://{folder}/epochs.html"
        subprocess.run([CHROMIUM, *flags, address], check=True, timeout=60, capture_output=True)
    shutil.rmtree(f"{folder}/profile")
    return made


def _text(row, line):
    """Return the runs of a line, each as wide as its characters, whatever the font is."""
    y, column, made = _MARGIN + (row + 1) * _HEIGHT - 5, 0, []
    for kind, text in line:
        shown = text.strip(" ")
        if shown:
            x = _MARGIN + (column + len(text) - len(text.lstrip(" "))) * _WIDTH
            style = f' class="{kind}"' if kind else ""
            place = f'x="{x}" y="{y}" textLength="{len(shown) * _WIDTH}"'
            made.append(f"<text {place}{style}>{escape(shown)}</text>")
        column += len(text)
    return "".join(made)


def _runs(line):
    """Return the pieces of a line, each with the class of its style."""
    kind, found = "", []
    for at, piece in enumerate(_CODE.split(line)):
        if at % 2:
            kind = _CODES.get(piece, "")
        elif piece:
            found.append((kind, piece))
    return found


def _printed(command, folder):
    """Return what a command writes to a terminal."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"COLUMNS": str(_COLUMNS), "TERM": "xterm", "PYTHONPATH": str(PROJECT)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", *shlex.split(command)]
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=theirs)
    os.close(theirs)
    text = bytearray()
    try:
        while piece := os.read(ours, 1 << 16):
            text += piece
    except OSError:  # Linux says so that the other end is closed
        pass
    finally:
        os.close(ours)
        process.wait(timeout=60)
    return text.decode().replace("\r\n", "\n")
