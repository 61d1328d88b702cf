"""Read pickles as trees of data, without running them; `encoder` writes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckptool.errors import LimitExceeded, TruncatedFile
from ckptool.files import ByteRange
from ckptool.files.inflated import refuse_bomb
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.symbolic import opcodes  # noqa: F401 (they register)
from ckptool.symbolic.machine import Machine, has_regular_frames

_MAX_FULL_READ = 64 << 20
"""Bytes of a pickle that are read at once, if nothing but the pickle is there."""
_FIRST_WINDOW = 1 << 20
"""Bytes that are read first of any other pickle."""


class Unpickled(NamedTuple):
    """One object of a pickle, as data."""

    root: Any
    end: int
    """The position after its STOP, in the range that was read."""
    protocol: int
    globals: tuple[str, ...]
    """The classes and functions that the pickle uses, by their current names, in order."""
    opcodes: tuple[str, ...]
    """The opcodes in it that `weights_only=True` rejects."""
    tidy: bool = True
    """True if the memo is numbered without gaps and the stack is empty at the end."""
    framed: bool = True
    """True if its frames, if any, are where a pickler puts them."""


def unpickle(
    data: ByteRange,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    nested: Callable[[bytes], Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    start: int = 0,
) -> Unpickled:
    """Return the object of the pickle at `start`; nothing is imported or called.

    A pickle does not state its length, so a window of a large file is read, and then windows eight
    times as large until the pickle ends. `persistent_load` converts each persistent id to its
    object; `nested` reads the bytes of a torch file inside the pickle.

    Raises:
        CorruptFile: it is not a pickle, or is damaged.
        LimitExceeded: it is longer, or needs more, than `limits` allows.
    """
    refuse_bomb(data, limits.max_header_inflation)
    file = data.source.name
    remaining = data.length - start
    # A record of an archive is one pickle, as is a file that ends with STOP; after the
    # pickles of other files are tensors, which must not be read for a header.
    is_only_pickle = (
        data.length < data.source.size or remaining <= 0 or data.read(data.length - 1, 1) == b"."
    )
    window = min(remaining, _FIRST_WINDOW)
    if is_only_pickle and remaining <= _MAX_FULL_READ:
        window = remaining
    while True:
        if window > limits.max_pickle_bytes:
            raise LimitExceeded(
                f"the pickle is longer than {limits.max_pickle_bytes:,} bytes", file=file
            )
        machine = Machine(
            data.read(start, window),
            file=file,
            limits=limits,
            persistent_load=persistent_load,
            nested=nested,
        )
        try:
            root, end = machine.run(0)
        except TruncatedFile:
            if window == remaining:
                raise
            window = min(window * 8, remaining)
            continue
        return Unpickled(
            root,
            start + end,
            machine.protocol,
            globals=tuple(dict.fromkeys(node.qualified for node in machine.globals.values())),
            opcodes=tuple(machine.opcodes),
            tidy=machine.is_tidy,
            framed="FRAME" not in machine.opcodes or has_regular_frames(machine.data, end),
        )
