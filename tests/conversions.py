"""`convert` by the options of the command line, for tests that are tables of them."""

from typing import Any

import ckptool
from ckptool.conversion import make_steps

_OF_WRITING = {
    "format", "max_shard_size", "files_from", "strict", "overwrite", "in_place", "dry_run",
    "verify", "progress",
}  # fmt: skip


def convert_by_options(
    source: Any, target: Any, *steps: ckptool.results.Step, **options: Any
) -> ckptool.results.Receipt:
    """Convert with the steps given, and those that the options ask for."""
    how = {name: options.pop(name) for name in _OF_WRITING & options.keys()}
    return ckptool.convert(source, target, *steps, *make_steps(options), **how)
