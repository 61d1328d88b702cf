"""Read the JSON files next to weights: configurations and the state of trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from ckptool.errors import CheckpointError
from ckptool.files.source import FileSource


def read_json_object(path: str, max_bytes: int = 1 << 20) -> Mapping[str, Any]:
    """Return the object in a JSON file of at most `max_bytes` bytes; empty without an object."""
    # `FileSource` refuses a pipe, where a plain `open` would wait for its writer.
    with suppress(CheckpointError, ValueError, RecursionError), closing(FileSource(path)) as source:
        content = json.loads(source.read(0, min(source.size, max_bytes)))
        if isinstance(content, dict):
            return content
    return {}
