"""The pickle machine: runs the opcodes of protocols 0 to 5 over symbols, and checks frames."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

from ckptool.core.model import Global, Opaque
from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, TruncatedFile
from ckptool.limits import Limits
from ckptool.symbolic import calls
from ckptool.symbolic.opcodes import HANDLERS, STOP
from ckptool.symbolic.text import MEMORY_FORMATS, to_modern_name

_FRAME_OPCODE = 0x95
_PROTO_BYTES, _FRAME_BYTES = 2, 9
_FULL_FRAME = 64 << 10
"""A frame of so many bytes is closed; a longer opcode is outside of frames."""
_MIN_FRAME = 4
"""The fewest bytes that get a frame."""
_LONG_ARGUMENTS = {ord("B"): 4, ord("X"): 4, 0x8B: 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
"""Opcodes of bytes, text, integers and bytearrays, and the size of their length field."""


def has_regular_frames(pickle: bytes, end: int) -> bool:
    """Return True if the frames of a pickle of `end` bytes are where a pickler puts them.

    A pickler writes opcodes into frames of 64 KiB, except for long arguments. A few bytes may be
    without a frame: at the beginning, or after a full frame or a long argument.
    """
    position, allows_gap = _PROTO_BYTES, True
    while position < end:
        if pickle[position] == _FRAME_OPCODE:
            length = int.from_bytes(pickle[position + 1 : position + _FRAME_BYTES], "little")
            position += _FRAME_BYTES + length
            allows_gap = length >= _FULL_FRAME
            continue
        stop = _find_long_argument_end(pickle, position, end, allows_gap)
        if stop is None:
            return allows_gap and end - position < _MIN_FRAME
        position, allows_gap = stop, True
    return position == end


def _find_long_argument_end(pickle: bytes, position: int, end: int, allows_gap: bool) -> int | None:
    """Return the end of the opcode at `position` if its argument needs no frame, else None.

    With `allows_gap`, a few bytes may precede it: picklers write less than `_MIN_FRAME` unframed.
    """
    for start in range(position, min(position + (_MIN_FRAME if allows_gap else 1), end)):
        digits = _LONG_ARGUMENTS.get(pickle[start])
        if digits is None:
            continue
        length = int.from_bytes(pickle[start + 1 : start + 1 + digits], "little")
        stop = start + 1 + digits + length
        if stop - start > _FULL_FRAME and stop <= end:
            return stop
    return None


_LARGE_INTEGER = (1 << 61) - 1
"""The integer from which on the hashes of integers repeat."""

_PLAIN_KEYS = frozenset({str, int, bool, float, bytes, type(None), complex})
"""Types of keys that Python hashes without running code of the file."""


class Machine:
    """One run over one pickle: stack, memo, and the names and opcodes found."""

    __slots__ = (
        "calls_by_id",
        "data",
        "file",
        "globals",
        "large_keys",
        "limits",
        "marks",
        "memo",
        "nested",
        "opcodes",
        "persistent_load",
        "protocol",
        "scans_left",
        "sparse_memo",
        "stack",
    )  # fmt: skip

    handlers: ClassVar = HANDLERS

    def __init__(
        self,
        data: bytes,
        *,
        file: str,
        limits: Limits,
        persistent_load: Callable[[Any], Any] | None = None,
        nested: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Start with an empty stack, to run over `data` of `file`; for the rest see `unpickle`."""
        self.data = data
        self.file = file
        self.limits = limits
        self.persistent_load = persistent_load
        self.nested = nested
        self.stack: list[Any] = []
        """The objects above the last mark."""
        self.marks: list[list[Any]] = []
        """The stacks below the marks."""
        # Picklers count memo indexes up from 0, so a list stores them; a dict stores all others.
        self.memo: list[Any] = []
        self.sparse_memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        """Each class or function by the module and name in the pickle."""
        self.calls_by_id: dict[int, calls.Call] = {}
        """The handler of each recognized `Global`, by its id."""
        self.opcodes: dict[str, None] = {}
        """The names of opcodes that `weights_only=True` rejects."""
        self.protocol = 0
        self.large_keys = 0
        """The number of integer keys beyond 2**61."""
        self.scans_left = 1_000_000
        """Memo entries that `replace_top` may still search."""

    def run(self, position: int) -> tuple[Any, int]:
        """Run from `position`; return the object and the position after its STOP.

        Raises:
            CorruptFile: an opcode does not exist, or does not fit the stack.
            LimitExceeded: a key or an integer exceeds the limits.
        """
        data, handlers = self.data, self.handlers
        start = position
        try:
            while True:
                start = position
                opcode = data[start]
                if opcode == STOP:
                    return self.stack.pop(), start + 1
                position = handlers[opcode](self, start + 1)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if start >= len(data) - 1:  # the data ends before a STOP
                raise self.truncated_error() from error
            raise self.damaged_error(start, error) from error
        except (EOFError, struct.error) as error:
            raise self.truncated_error() from error
        except RecursionError as error:
            raise LimitExceeded(
                "calls in the pickle are nested too deeply", file=self.file
            ) from error

    @property
    def is_tidy(self) -> bool:
        """True if the stack is empty, and the memo is numbered without gaps.

        The numbers begin with 0, or with 1 in Python 2's C pickler. Every pickler does this.
        """
        sparse_memo = self.sparse_memo
        is_consecutive = not sparse_memo or (
            not self.memo and sparse_memo.keys() == set(range(1, len(sparse_memo) + 1))
        )
        return is_consecutive and not self.stack and not self.marks

    def truncated_error(self) -> CorruptFile:
        """Return the error for a truncated pickle."""
        return TruncatedFile("the pickle is truncated", file=self.file)

    def damaged_error(self, position: int, error: Exception) -> CorruptFile:
        """Return the error for an opcode that cannot run."""
        reason = f" ({error})" if str(error) else ""
        opcode = self.data[position : position + 1]
        return CorruptFile(
            f"the pickle is damaged at byte {position:,}: cannot run opcode {opcode!r}{reason}",
            file=self.file,
        )

    def pop_mark(self) -> list[Any]:
        """Remove the topmost mark, and return the items above it."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def find_global(self, module: str, name: str) -> Global:
        """Return the `Global` of this name, the same one each time in a pickle."""
        node = self.globals.get((module, name))
        if node is None:
            owner, _, last = name.partition(".")
            if owner == "torch" and last in MEMORY_FORMATS and module.startswith("torch."):
                # Protocol 4 names a memory format by any module of torch that imports torch.
                return self.find_global("torch", last)
            modern_name = to_modern_name(module, name)
            node = Global(module, name, modern_name if modern_name != f"{module}.{name}" else "")
            self.globals[module, name] = node
            call = calls.RECOGNIZED.get(node.qualified)
            if call is not None:
                self.calls_by_id[id(node)] = call
        return node

    def call(self, func: Any, args: Any) -> Any:
        """Return the result of REDUCE: an object of ours for a known function, else an `Opaque`."""
        recognized = self.calls_by_id.get(id(func))
        if recognized is None:
            return Opaque(func, args)
        result = recognized(self, args)
        return Opaque(func, args) if result is NotImplemented else result  # for unknown arguments

    def record_change(self, kind: str, target: Any, items: Any) -> None:
        """Record items that are added to an object (`set`, `append` or `add`)."""
        if not isinstance(target, Opaque):
            raise TypeError(f"items are added to a {type(target).__name__}")
        target.steps.append((kind, items))

    def replace_top(self, old: Any, new: Any) -> None:
        """Replace the top with `new`, also in the memo, where `old` was stored just now.

        The memo is searched from its end, and no longer after many searches in one pickle.
        """
        if new is old:
            return
        self.stack[-1] = new
        for index in chain(tuple(self.sparse_memo), range(len(self.memo) - 1, -1, -1)):
            self.scans_left -= 1
            if self.recall(index) is old:
                self.memoize(index, new)
                return
            if self.scans_left < 0:
                return

    def memoize(self, index: int, node: Any) -> None:
        """Memoize `node` under `index`.

        Once the dict is in use, the list stops growing: no index is in both.
        """
        if 0 <= index < len(self.memo):
            self.memo[index] = node
        elif index == len(self.memo) and not self.sparse_memo:
            self.memo.append(node)
        else:
            self.sparse_memo[index] = node

    def recall(self, index: int) -> Any:
        """Return the object memoized under `index`; KeyError if there is none."""
        return self.memo[index] if 0 <= index < len(self.memo) else self.sparse_memo[index]

    def check_key(self, key: Any) -> None:
        """Refuse a dict key that cannot be hashed, or is slow to hash or to find.

        Raises:
            LimitExceeded: it is a tuple of too many parts, or the pickle has too many keys that are
                large integers: a file can choose these so that all have one hash.
            CorruptFile: it is or contains a list or dict.
        """
        if type(key) in _PLAIN_KEYS and type(key) is not int:
            return
        todo, parts = [key], 0
        while todo:
            part = todo.pop()
            parts += 1
            if parts > self.limits.max_key_parts:
                raise LimitExceeded(
                    f"a dict key has more than {self.limits.max_key_parts} parts", file=self.file
                )
            if isinstance(part, tuple):
                todo.extend(part)
            elif type(part) is int and not -_LARGE_INTEGER < part < _LARGE_INTEGER:
                self.large_keys += 1
                if self.large_keys > self.limits.max_large_keys:
                    raise LimitExceeded(
                        f"more than {self.limits.max_large_keys:,} dict keys are integers beyond "
                        "2**61, which can be chosen to collide",
                        file=self.file,
                    )
            elif isinstance(part, (list, dict)):
                raise CorruptFile(f"a {type(part).__name__} is used as a dict key", file=self.file)

    def read_line(self, position: int) -> tuple[bytes, int]:
        """Return the argument that ends with a newline, and the position after it."""
        end = self.data.find(b"\n", position)
        if end < 0:
            raise EOFError
        return self.data[position:end], end + 1

    def read_exactly(self, position: int, length: int) -> bytes:
        """Return exactly `length` bytes from `position`."""
        part = self.data[position : position + length]
        if len(part) != length:
            raise EOFError
        return part
