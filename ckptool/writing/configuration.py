"""The copy of a model's `config.json`, updated with the changes of the weights.

Only changed values are edited; every other byte stays the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.words import listed, printable

_MOST = 1 << 20
"""The most bytes to parse."""
_SPACE = re.compile(r"[ \t\n\r]*")
_QUANTIZATION = ("quantization_config", "quantization")
"""The key of transformers, then of MLX, which writes both."""
_ROWS, _TYPES, _TEXT = "vocab_size", ("torch_dtype", "dtype"), "text_config"


class Edited(NamedTuple):
    """A configuration to write."""

    data: bytes | None = None
    """The new text. None: unchanged."""
    notes: tuple[str, ...] = ()
    warnings: tuple[Change, ...] = ()


class _Member(NamedTuple):
    """The positions of a key and a value in the text."""

    key: str
    value: object
    start: int
    at: int
    stop: int


def edited(path: str, checkpoint: Checkpoint) -> Edited:
    """Return a configuration with the changes of a checkpoint."""
    changes = checkpoint.changes
    plain = any(one.kind == "dequantize" for one in changes)
    rows = {one.was: one.now for one in changes if one.kind == "resize" and one.was != one.now}
    types = {one.was: one.now for one in changes if one.kind == "cast" and one.now is not None}
    if not (plain or rows or types):
        return Edited()
    with open(path, "rb") as file:
        raw = file.read(_MOST + 1)
    try:
        text = raw.decode()
        if len(raw) > _MOST or not isinstance(json.loads(text), dict):
            raise ValueError
    except (ValueError, RecursionError):
        warning = "config.json is not a valid JSON object, so it does not reflect the change"
        return Edited(warnings=(Change("warning", f"{warning} of the weights"),))
    work = _Work(text, checkpoint, rows, types)
    work.follow(text.index("{"), "", plain=plain)
    return Edited(work.text().encode(), tuple(work.notes), tuple(work.warnings))


class _Work:
    """The edits of one text."""

    def __init__(
        self, text: str, checkpoint: Checkpoint, rows: dict[int, int], types: dict[str, str]
    ) -> None:
        """Begin without edits."""
        self._text, self._rows, self._types = text, rows, types
        tensors = [one for _, one in checkpoint.tensors()]
        self._kept = {one.sizes[0] for one in tensors if one.shape} - {*rows.values()}
        self._edits: list[tuple[int, int, str]] = []
        self.notes: list[str] = []
        self.warnings: list[Change] = []

    def follow(self, start: int, prefix: str, *, plain: bool = False) -> None:
        """Edit the object that starts at `start`, and that of the text model in it."""
        members = list(_members(self._text, start))
        gone = [plain and one.key in _QUANTIZATION for one in members]
        leading = next((at for at, is_gone in enumerate(gone) if not is_gone), len(gone))
        if leading:
            last = members[leading].start if leading < len(gone) else members[-1].stop
            self._edits.append((members[0].start, last, ""))
        for at, one in enumerate(members):
            name = f"{prefix}{one.key}"
            if gone[at]:
                self.notes.append(f"config.json: removed {name}")
                if at > leading:
                    self._edits.append((members[at - 1].stop, one.stop, ""))
            elif one.key == _ROWS and self._rows and type(one.value) is int:
                self._follow_rows(one, name)
            elif one.key in _TYPES and self._types and isinstance(one.value, str):
                self._follow_type(one, name)
            elif one.key == _TEXT and isinstance(one.value, dict) and not prefix:
                self.follow(one.at, f"{_TEXT}.", plain=plain)

    def _follow_rows(self, one: _Member, name: str) -> None:
        new = self._rows.get(one.value) if isinstance(one.value, int) else None
        if new is not None:
            self._replace(one, name, new)
        elif one.value not in self._kept:
            had = listed(map(str, self._rows))
            text = f"config.json: {name} is {one.value}, but the resized tensors had {had} rows"
            self.warnings.append(Change("warning", text))

    def _follow_type(self, one: _Member, name: str) -> None:
        [new] = {*self._types.values()}
        old = str(one.value).removeprefix("torch.")
        if old in (new, "auto"):
            return
        if old not in self._types:
            text = f"config.json: {name} was {printable(old)}, but the file had "
            self.warnings.append(Change("warning", text + listed(self._types)))
        self._replace(one, name, str(one.value).removesuffix(old) + new)

    def _replace(self, one: _Member, name: str, new: object) -> None:
        self.notes.append(f"config.json: {name} {printable(str(one.value))} -> {new}")
        self._edits.append((one.at, one.stop, json.dumps(new)))

    def text(self) -> str:
        """Return the text with all edits."""
        made = self._text
        for start, stop, new in sorted(self._edits, reverse=True):
            made = made[:start] + new + made[stop:]
        return made


def _members(text: str, start: int) -> Iterator[_Member]:
    """Yield the members of the well-formed JSON object at `start`."""
    decoder = json.JSONDecoder()

    def after(at: int) -> int:
        return found.end() if (found := _SPACE.match(text, at)) else at

    at = after(start + 1)
    while text[at] != "}":
        key, stop = decoder.raw_decode(text, at)
        own = after(after(stop) + 1)
        value, stop = decoder.raw_decode(text, own)
        yield _Member(key, value, at, own, stop)
        at = after(stop)
        at = after(at + 1) if text[at] == "," else at
