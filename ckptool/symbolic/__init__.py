"""Pickle without execution: read as a tree of data here, written back by `encoder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckptool.errors import LimitExceeded, TruncatedFile
from ckptool.files import ByteRange
from ckptool.files.inflated import refuse_bomb
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.symbolic import opcodes  # noqa: F401 (they register)
from ckptool.symbolic.machine import Machine, frames_fit

_WHOLE, _FIRST_WINDOW = 64 << 20, 1 << 20


class Unpickled(NamedTuple):
    """One object of a pickle, as data."""

    root: Any
    end: int
    """Position behind its STOP, in the range that was read."""
    protocol: int
    globals: tuple[str, ...]
    """Classes and functions that the pickle names, today's spelling, in order."""
    opcodes: tuple[str, ...]
    """Opcodes used that `weights_only=True` refuses."""
    tidy: bool = True
    """Whether it numbers what it remembers in a row and leaves nothing behind on its stack."""
    framed: bool = True
    """Whether its frames, if it has any, are where a pickler puts them."""


def unpickle(
    data: ByteRange,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    nested: Callable[[bytes], Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    start: int = 0,
) -> Unpickled:
    """Return the object whose pickle begins at `start`; nothing is imported or called.

    A pickle does not tell its length, so of a large file a window is read, and one eight times as
    large where the pickle goes on. `persistent_load` gets each persistent id and returns what it
    stands for; `nested` gets the bytes of a whole torch file inside the pickle.

    Raises:
        CorruptFile: no pickle, or a damaged one.
        LimitExceeded: it is longer, or asks for more, than `limits` allows.
    """
    refuse_bomb(data, limits.max_header_inflation)
    file = data.source.name
    rest = data.length - start
    # A record of an archive is a pickle to its end, as is a file that ends with STOP; behind the
    # pickles of other files are tensors, which are not to be read for a header.
    ends = data.length < data.source.size or rest <= 0 or data.read(data.length - 1, 1) == b"."
    window = rest if rest <= (_WHOLE if ends else _FIRST_WINDOW) else _FIRST_WINDOW
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
            if window == rest:
                raise
            window = min(window * 8, rest)
            continue
        found = tuple(dict.fromkeys(known.qualified for known in machine.globals.values()))
        return Unpickled(
            root,
            start + end,
            machine.protocol,
            found,
            tuple(machine.opcodes),
            machine.is_tidy,
            "FRAME" not in machine.opcodes or frames_fit(machine.data, end),
        )
