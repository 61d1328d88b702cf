"""Text for people and JSON for programs, from the dataclasses of the library.

Each result has a page, the lines of the command line, and one line for `repr`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptool.errors import CheckpointError
from ckptool.render.text import shorten
from ckptool.words import clean

_LONGEST = 200
"""The most characters of a line, because names may be as long as the file."""
_TEXTS = {
    "Checkpoint": ("info", "checkpoint_lines", "file_line"),
    "Diagnosis": ("verdicts", "diagnosis_lines", ""),
    "Diff": ("diff", "diff_lines", "diff_line"),
    "Info": ("info", "info_lines", "file_line"),
    "Listing": ("listing", "listing_lines", "listing_line"),
    "MatchReport": ("match", "match_lines", "match_line"),
    "Opaque": ("listing", "", "object_line"),
    "PageReceipt": ("page", "page_lines", "page_line"),
    "Receipt": ("receipt", "receipt_lines", "receipt_line"),
    "Recovery": ("receipt", "recovery_lines", ""),
    "Scan": ("verdicts", "scan_lines", ""),
    "Section": ("info", "", "section_line"),
    "Stats": ("figures", "stats_lines", "stats_line"),
    "Storage": ("listing", "", "storage_line"),
    "TensorRef": ("listing", "", "tensor_line"),
    "Verdict": ("verdicts", "verdict_lines", ""),
}
"""The module of each class, and its functions for the page and the line."""


def page_of(result: object) -> str:
    """Return the text that the command line prints for a result, or its line."""
    _, lines, _ = _functions(result)
    return "\n".join(lines(result)) if lines else line_of(result)


def line_of(result: object) -> str:
    """Return `<Listing model.pth: 27 tensors, 363 elements, 1.4 KiB>`; of other classes alike."""
    name, lines, short = _functions(result)
    try:
        text = short(result) if short else next(iter(lines(result)))
    except CheckpointError as error:  # what cannot be walked can be shown
        text = error.sentence
    return f"<{name} {clean(shorten(text, _LONGEST))}>"


def _functions(result: object) -> tuple[str, Any, Any]:
    """Return the name of the class of a result, and the functions for its page and its line."""
    name = next(one.__name__ for one in type(result).__mro__ if one.__name__ in _TEXTS)
    room, lines, short = _TEXTS[name]
    module = import_module(f"ckptool.render.{room}")
    return name, getattr(module, lines, None), getattr(module, short, None)
