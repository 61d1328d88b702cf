"""One JSON document, one row a line: fast for 100,000 rows, and fit for `grep` and `diff`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["json_lines"]

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False).encode
"""Without an indent, so that the C encoder does the work; ASCII, so that nothing is obeyed."""


def json_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a document: a line for each key, and one for each item of a list of objects."""
    last = len(document) - 1
    yield "{"
    for index, (key, value) in enumerate(document.items()):
        comma = "," if index < last else ""
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"  {_encode(key)}: ["
            for row in value[:-1]:
                yield f"    {_encode(row)},"
            yield f"    {_encode(value[-1])}"
            yield f"  ]{comma}"
        else:
            yield f"  {_encode(key)}: {_encode(value)}{comma}"
    yield "}"
