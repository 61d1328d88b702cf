"""`docs/cookbook.md`: written by hand, but for what the commands print."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.forks import in_shell
from tests.sources import PROJECT

SOURCE = PROJECT / "docs" / "cookbook.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One heading and what stands below it, up to the next one."""

    title: str
    text: str

    def fences(self, language: str) -> list[str]:
        """What is in its fenced blocks."""
        return [text for found, text in _FENCE.findall(self.text) if found == language]


def entries(text: str) -> list[Entry]:
    """Every part of the page, in order, together all of it."""
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    return [Entry(part.partition("\n")[0].lstrip("# "), part) for part in parts if part]


def filled(entry: Entry, folder: Path) -> str:
    """An entry with what its commands print, run in order in a folder."""

    def block(found: re.Match[str]) -> str:
        if found[1] != "console":
            return found[0]
        shown = [_shown(command, folder) for command in _COMMAND.findall(found[2])]
        return f"```console\n{''.join(shown)}```"

    return _FENCE.sub(block, entry.text)


def _shown(command: str, folder: Path) -> str:
    done = in_shell(command, folder, together=True)
    lines = done.stdout.replace(str(folder), "/data").splitlines()
    return "\n".join([f"$ {command}", *(line.rstrip() for line in lines), ""])
