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


def format_page(result: object) -> str:
    """Return the text that the command line prints for a result, or its line."""
    _, lines, _ = _find_formatters(result)
    return "\n".join(lines(result)) if lines else format_line(result)


def format_line(result: object) -> str:
    """Return `<Listing model.pth: 27 tensors, 363 elements, 1.4 KiB>`; other classes alike."""
    name, lines, short = _find_formatters(result)
    try:
        text = short(result) if short else next(iter(lines(result)))
    except CheckpointError as error:  # a damaged tree still has a line
        text = error.sentence
    return f"<{name} {clean(shorten(text, _LONGEST))}>"


def _find_formatters(result: object) -> tuple[str, Any, Any]:
    """Return the class name of a result, and its functions for a page and a line, if any."""
    name = next(base.__name__ for base in type(result).__mro__ if base.__name__ in _TEXTS)
    module_name, page_function, line_function = _TEXTS[name]
    module = import_module(f"ckptool.render.{module_name}")
    return name, getattr(module, page_function, None), getattr(module, line_function, None)
