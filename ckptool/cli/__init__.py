"""The command line: parse options, one library call, one render call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ckptool` with `arguments` (`sys.argv` if None) and return its exit code."""
    from ckptool.cli.console import run

    code = run(arguments)
    if arguments is None:
        processes = sys.modules.get("ckptool.trainer.processes")
        if processes is not None:
            processes.end_if_connected(code)
        # The process ends: to search all of torch for cycles first takes a fifth of a second.
        gc.freeze()
    return code
