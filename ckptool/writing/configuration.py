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
    """The edit of a configuration: its new text, notes and warnings."""

    data: bytes | None = None
    """The new text. None: unchanged."""
    notes: tuple[str, ...] = ()
    warnings: tuple[Change, ...] = ()


class _Member(NamedTuple):
    """A key and a value of a JSON object, with their positions in the text: key, value, end."""

    key: str
    value: object
    start: int
    at: int
    stop: int


def edit_configuration(path: str, checkpoint: Checkpoint) -> Edited:
    """Return a configuration with the changes of a checkpoint."""
    changes = checkpoint.changes
    is_dequantized = any(change.kind == "dequantize" for change in changes)
    rows = {
        change.was: change.now
        for change in changes
        if change.kind == "resize" and change.was != change.now
    }
    types = {
        change.was: change.now
        for change in changes
        if change.kind in ("cast", "dequantize") and change.now is not None
    }
    if not (is_dequantized or rows or types):
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
    work.edit_object(text.index("{"), "", is_dequantized=is_dequantized)
    return Edited(work.apply_edits().encode(), tuple(work.notes), tuple(work.warnings))


class _Work:
    """The edits of the text of one configuration."""

    def __init__(
        self, text: str, checkpoint: Checkpoint, rows: dict[int, int], types: dict[str, str]
    ) -> None:
        """Start without edits; `rows` and `types` map the old to the new values."""
        self._text, self._rows, self._types = text, rows, types
        tensors = [tensor for _, tensor in checkpoint.tensors()]
        self._kept = {tensor.sizes[0] for tensor in tensors if tensor.shape} - {*rows.values()}
        self._edits: list[tuple[int, int, str]] = []
        self.notes: list[str] = []
        self.warnings: list[Change] = []

    def edit_object(self, start: int, prefix: str, *, is_dequantized: bool = False) -> None:
        """Edit the object at `start` of the text, and the object of the text model in it."""
        members = list(_iterate_members(self._text, start))
        removed = [is_dequantized and member.key in _QUANTIZATION for member in members]
        first_kept = next(
            (index for index, is_gone in enumerate(removed) if not is_gone), len(removed)
        )
        if first_kept:
            last = members[first_kept].start if first_kept < len(removed) else members[-1].stop
            self._edits.append((members[0].start, last, ""))
        for index, member in enumerate(members):
            name = f"{prefix}{member.key}"
            if removed[index]:
                self.notes.append(f"config.json: removed {name}")
                if index > first_kept:
                    self._edits.append((members[index - 1].stop, member.stop, ""))
            elif member.key == _ROWS and self._rows and type(member.value) is int:
                self._edit_rows(member, name)
            elif member.key in _TYPES and self._types and isinstance(member.value, str):
                self._edit_dtype(member, name)
            elif member.key == _TEXT and isinstance(member.value, dict) and not prefix:
                self.edit_object(member.at, f"{_TEXT}.", is_dequantized=is_dequantized)

    def _edit_rows(self, member: _Member, name: str) -> None:
        """Edit the number of rows, or warn if no resized tensor had this number."""
        new = self._rows.get(member.value) if isinstance(member.value, int) else None
        if new is not None:
            self._replace(member, name, new)
        elif member.value not in self._kept:
            had = listed(map(str, self._rows))
            text = f"config.json: {name} is {member.value}, but the resized tensors had {had} rows"
            self.warnings.append(Change("warning", text))

    def _edit_dtype(self, member: _Member, name: str) -> None:
        """Edit the dtype; warn if no tensor that was cast had it."""
        new = [*self._types.values()][-1]
        old = str(member.value).removeprefix("torch.")
        if old in (new, "auto"):
            return
        if old not in self._types and None not in self._types:  # None: of a dequantized weight
            text = f"config.json: {name} was {printable(old)}, but the file had "
            self.warnings.append(Change("warning", text + listed(self._types)))
        self._replace(member, name, str(member.value).removesuffix(old) + new)

    def _replace(self, member: _Member, name: str, new: object) -> None:
        """Add the edit of a value, and a note."""
        self.notes.append(f"config.json: {name} {printable(str(member.value))} -> {new}")
        self._edits.append((member.at, member.stop, json.dumps(new)))

    def apply_edits(self) -> str:
        """Return the text with all edits."""
        text = self._text
        for start, stop, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[stop:]
        return text


def _iterate_members(text: str, start: int) -> Iterator[_Member]:
    """Yield the members of the well-formed JSON object at `start`."""
    decoder = json.JSONDecoder()

    def skip_space(position: int) -> int:
        """Return the position after the white space at a position."""
        return match.end() if (match := _SPACE.match(text, position)) else position

    position = skip_space(start + 1)
    while text[position] != "}":
        key, stop = decoder.raw_decode(text, position)
        value_start = skip_space(skip_space(stop) + 1)
        value, stop = decoder.raw_decode(text, value_start)
        yield _Member(key, value, position, value_start, stop)
        position = skip_space(stop)
        position = skip_space(position + 1) if text[position] == "," else position
