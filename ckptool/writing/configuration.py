"""The copy of a model's `config.json`, updated with the changes of the weights.

Only changed values are edited; every other byte stays the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.words import listed, printable

_MAX_BYTES = 1 << 20
"""The most bytes to parse."""
_SPACE = re.compile(r"[ \t\n\r]*")
_QUANTIZATION_KEYS = ("quantization_config", "quantization")
"""The key of transformers, then of MLX, which writes both."""
_VOCABULARY_KEY, _DTYPE_KEYS, _TEXT_CONFIG_KEY = (
    "vocab_size",
    ("torch_dtype", "dtype"),
    "text_config",
)


class Edited(NamedTuple):
    """The edit of a configuration: its new text, notes and warnings."""

    data: bytes | None = None
    """The new text. None: unchanged."""
    notes: tuple[str, ...] = ()
    warnings: tuple[Change, ...] = ()


class _Member(NamedTuple):
    """A key and a value of a JSON object, with their positions in the text."""

    key: str
    value: object
    key_start: int
    value_start: int
    value_end: int


def edit_configuration(path: str, checkpoint: Checkpoint) -> Edited:
    """Return the edit that makes a configuration reflect the changes of a checkpoint.

    It is empty if no change concerns it: dequantized, resized and cast tensors do. A file that is
    not a JSON object only gets a warning.
    """
    changes = checkpoint.changes
    is_dequantized = any(change.kind == "dequantize" for change in changes)
    new_rows = {
        change.was: change.now
        for change in changes
        if change.kind == "resize" and change.was != change.now
    }
    new_dtypes = {
        change.was: change.now
        for change in changes
        if change.kind in ("cast", "dequantize") and change.now is not None
    }
    if not (is_dequantized or new_rows or new_dtypes):
        return Edited()
    with open(path, "rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    try:
        text = raw.decode()
        if len(raw) > _MAX_BYTES or not isinstance(json.loads(text), dict):
            raise ValueError
    except (ValueError, RecursionError):
        warning = "config.json is not a valid JSON object, so it does not reflect the change"
        return Edited(warnings=(Change("warning", f"{warning} of the weights"),))
    edits = _ConfigurationEdits(text, checkpoint, new_rows, new_dtypes)
    edits.edit_object(text.index("{"), "", is_dequantized=is_dequantized)
    return Edited(edits.apply_edits().encode(), tuple(edits.notes), tuple(edits.warnings))


class _ConfigurationEdits:
    """The edits of the text of one configuration."""

    def __init__(
        self,
        text: str,
        checkpoint: Checkpoint,
        new_rows: dict[int, int],
        new_dtypes: dict[str, str],
    ) -> None:
        """Start without edits; `new_rows` (numbers of rows) and `new_dtypes` map old to new."""
        self._text, self._new_rows, self._new_dtypes = text, new_rows, new_dtypes
        row_counts = {tensor.sizes[0] for _, tensor in checkpoint.tensors() if tensor.shape}
        self._unchanged_row_counts = row_counts - {*new_rows.values()}
        """Numbers of rows of tensors that were not resized."""
        self._edits: list[tuple[int, int, str]] = []
        """Start, end and new text of each edit, by positions in the old text."""
        self.notes: list[str] = []
        self.warnings: list[Change] = []

    def edit_object(self, start: int, prefix: str, *, is_dequantized: bool = False) -> None:
        """Edit the object at `start` of the text, and the object of the text model in it.

        `prefix` is that of its keys in notes. `is_dequantized` removes the quantization.
        """
        members = list(_iterate_members(self._text, start))
        if is_dequantized:
            self._remove_quantization(members, prefix)
        for member in members:
            name = f"{prefix}{member.key}"
            if is_dequantized and member.key in _QUANTIZATION_KEYS:
                continue
            if member.key == _VOCABULARY_KEY and self._new_rows and type(member.value) is int:
                self._edit_rows(member, name)
            elif member.key in _DTYPE_KEYS and self._new_dtypes and isinstance(member.value, str):
                self._edit_dtype(member, name)
            elif member.key == _TEXT_CONFIG_KEY and isinstance(member.value, dict) and not prefix:
                self.edit_object(
                    member.value_start, f"{_TEXT_CONFIG_KEY}.", is_dequantized=is_dequantized
                )

    def _remove_quantization(self, members: list[_Member], prefix: str) -> None:
        """Remove the members that state the quantization, each with one comma, and note them.

        Members before the first one that stays are removed with the comma after them, later ones
        with the comma before them: `{"a": 1, "quantization": 2}` becomes `{"a": 1}`.
        """
        removed = [member for member in members if member.key in _QUANTIZATION_KEYS]
        self.notes += (f"config.json: removed {prefix}{member.key}" for member in removed)
        kept = next((member for member in members if member not in removed), None)
        if members and kept is not members[0]:
            end = members[-1].value_end if kept is None else kept.key_start
            self._edits.append((members[0].key_start, end, ""))
        for before, member in pairwise(members):
            if member in removed and kept is not None and kept.key_start < member.key_start:
                self._edits.append((before.value_end, member.value_end, ""))

    def _edit_rows(self, member: _Member, name: str) -> None:
        """Edit the number of rows, or warn if no tensor has this number, resized or not."""
        new = self._new_rows.get(member.value) if isinstance(member.value, int) else None
        if new is not None:
            self._replace(member, name, new)
        elif member.value not in self._unchanged_row_counts:
            had = listed(map(str, self._new_rows))
            text = f"config.json: {name} is {member.value}, but the resized tensors had {had} rows"
            self.warnings.append(Change("warning", text))

    def _edit_dtype(self, member: _Member, name: str) -> None:
        """Edit the dtype; warn if no tensor that was cast had it."""
        new = [*self._new_dtypes.values()][-1]  # the dtype of the last cast
        old = str(member.value).removeprefix("torch.")
        if old in (new, "auto"):
            return
        # A dequantized weight has None for its old dtype: its codes have no dtype of a model.
        if old not in self._new_dtypes and None not in self._new_dtypes:
            text = f"config.json: {name} was {printable(old)}, but the file had "
            self.warnings.append(Change("warning", text + listed(self._new_dtypes)))
        self._replace(member, name, str(member.value).removesuffix(old) + new)

    def _replace(self, member: _Member, name: str, new: object) -> None:
        """Add the edit of a value, and a note."""
        self.notes.append(f"config.json: {name} {printable(str(member.value))} -> {new}")
        self._edits.append((member.value_start, member.value_end, json.dumps(new)))

    def apply_edits(self) -> str:
        """Return the text with all edits."""
        text = self._text
        for start, stop, new in sorted(self._edits, reverse=True):  # earlier offsets stay valid
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
