"""Read the JSON files next to weights: configurations and the state of trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from ckptool.errors import CheckpointError
from ckptool.files.source import FileSource


def json_object(path: str, most: int = 1 << 20) -> Mapping[str, Any]:
    """Return the object in a JSON file of at most `most` bytes; empty if there is none."""
    # This refuses a pipe, where a plain `open` would wait for its writer.
    with suppress(CheckpointError, ValueError, RecursionError), closing(FileSource(path)) as source:
        found = json.loads(source.read(0, min(source.size, most)))
        if isinstance(found, dict):
            return found
    return {}
