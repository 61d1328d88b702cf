"""A pickle machine that reports each import, call and change, and continues.

The ordinary machine stops at steps that pickle itself would run: items set in a module, computed
names, numbers of the extension registry. This one reports each of them, and represents an unknown
object as a symbol, `report_unknown`.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, ClassVar

from ckptool.core.model import Global, Opaque
from ckptool.core.tree import walk_everything
from ckptool.errors import CorruptFile
from ckptool.limits import Limits
from ckptool.symbolic.machine import Machine
from ckptool.symbolic.opcodes import HANDLERS, Handler

UNKNOWN = "unknown"
"""The maker of a symbol for an object that is not in the file."""
JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
_MODULE = re.compile(r"[\w.<>-]+")
_ELEMENT = re.compile(r"[<>=|]?(?:(O|object)\d*|([biufcmMSUV])(\d+))")
"""The code of a `numpy.dtype`: objects, or a kind with a size: `O8`, `<f4`, `U3`."""
_NEWOBJ_EX, _STACK_GLOBAL, _FRAME = 0x92, 0x93, 0x95
_REGISTRY_NUMBER_SIZES = {0x82: 1, 0x83: 2, 0x84: 4}
"""The bytes of the number after EXT1, EXT2 and EXT4."""


def is_unknown(node: Any) -> bool:
    """Return True if the symbol represents an unknown object."""
    return isinstance(node, Opaque) and node.maker == UNKNOWN


class Watcher(Machine):
    """A machine that recognizes no calls: each is reported, and leaves an `Opaque`."""

    __slots__ = ("as_joblib", "at", "frame_end", "has_cut_line", "pids")
    handlers: ClassVar = list(HANDLERS)

    def __init__(self, data: bytes, *, file: str, limits: Limits, as_joblib: bool = False) -> None:
        """Prepare to run over `data`; `as_joblib` skips raw arrays, as joblib's unpickler does."""
        self.pids: list[Any] = []
        """The persistent ids of classes and storages, in the order of their use."""
        load = partial(_load_persistent, self.pids)
        super().__init__(data, file=file, limits=limits, persistent_load=load)
        self.as_joblib = as_joblib
        self.at = 0
        """The position of the current opcode, if it may report something."""
        self.frame_end = 0
        """The end of the last frame that was stated."""
        self.has_cut_line = False
        """True if a line ended with the data, and may continue after it."""

    def report(self, kind: str, what: Any, items: Any = None) -> Any:
        """Handle a step that does more than make plain data, and return `what`.

        Args:
            kind: `import`, `call`, `new`, `build`, `set`, `append`, `add` or `report_unknown`.
            what: The `Global` imported, the `Opaque` made, or what is changed.
            items: The state or the items set on `what`, or the reason why it is unknown.
        """
        raise NotImplementedError

    def run(self, position: int) -> tuple[Any, int]:
        """Run from `position`; return the object, and the position after its STOP.

        Raises:
            CorruptFile: as for any machine, or a frame continues after STOP, so that some
                unpicklers continue after the frame.
        """
        root, end = super().run(position)
        if end < self.frame_end:
            raise CorruptFile("a frame of the pickle continues past its end", file=self.file)
        return root, end

    def report_unknown(self, why: str) -> Opaque:
        """Report and return a symbol for an unknown object."""
        symbol: Opaque = self.report("unknown", Opaque(None, (why,), maker=UNKNOWN), why)
        return symbol

    def find_global(self, module: str, name: str) -> Global:
        """Return the `Global` of that name, and report it if an opcode imports it."""
        node = super().find_global(module, name)
        # Only GLOBAL, INST and STACK_GLOBAL import it; opcodes of sets call this too.
        if self.data[self.at] in b"ci\x93":
            if not _MODULE.fullmatch(module):
                raise ValueError(f"no module is named {module[:80]!r}")
            self.report("import", node)
        return node

    def call(self, func: Any, args: Any) -> Any:
        """Report a call, and return its result."""
        return self.report("call", Opaque(func, args))

    def record_change(self, kind: str, target: Any, items: Any) -> None:
        """Report a change of a class, function or object; change plain data as pickle does."""
        if isinstance(target, (Global, Opaque)):
            self.report(kind, target, items)
        if isinstance(target, Opaque):
            target.steps.append((kind, items))
        elif isinstance(target, list) and kind == "set":
            for index, item in items:
                target[index] = item
        # Plain data accepts no items and an empty state (`(None, {})` with slots), unchanged.
        elif not isinstance(target, Global) and items and items != (None, {}):
            raise TypeError(f"invalid {kind} on a {type(target).__name__}")

    def read_line(self, position: int) -> tuple[bytes, int]:
        """Return a line; the last one may lack its newline, as in the Python version of pickle.

        Then its last byte is taken for the newline, as there, and `has_cut_line` becomes True.
        """
        end = self.data.find(b"\n", position)
        self.has_cut_line = end < 0
        end = end if end >= 0 else len(self.data) - 1
        if end < position:
            raise EOFError
        return self.data[position:end], end + 1

    def skip_array(self, position: int) -> int:
        """Return the position after the raw bytes of a joblib array, if one is on the stack.

        An array of objects is another pickle there, which this machine runs with its own stack.
        """
        wrapper = self.stack[-1]
        if not isinstance(wrapper, Opaque) or wrapper.class_name != JOBLIB_ARRAY:
            return position
        if position < self.frame_end:  # joblib would read the array after the frame
            raise ValueError("a joblib array is inside a frame")
        state = wrapper.attributes
        width = _parse_element_width(state["dtype"])
        if not width:  # an array of objects is a pickle of its own
            outer = self.stack, self.marks, self.memo, self.sparse_memo
            self.stack, self.marks, self.memo, self.sparse_memo = [], [], [], {}
            _, end = self.run(position)
            self.stack, self.marks, self.memo, self.sparse_memo = outer
            return end
        if state.get("numpy_array_alignment_bytes") is not None:
            position += 1 + self.data[position]  # the length of the padding, and the padding
        end = position + math.prod(state["shape"]) * width
        if not position <= end <= len(self.data):
            raise EOFError
        return int(end)


def _parse_element_width(dtype: Any) -> int:
    """Return the bytes per element of an array, 0 for objects.

    The code of a `numpy.dtype` gives them: `<f4` is 4, `<U3` is 3 characters of 4 bytes.

    Raises:
        ValueError: `dtype` is not one, or has an unknown code.
    """
    # A dtype with fields contains the dtypes of the fields; all must be dtypes.
    types = [node for node in walk_everything(dtype) if isinstance(node, Opaque)]
    codes = [_ELEMENT.fullmatch(node.args[0]) for node in types if node.class_name == "numpy.dtype"]
    if not types or len(codes) < len(types) or not all(codes):
        raise ValueError("no library writes this element type")
    if any(code and code[1] for code in codes):  # a code of objects
        return 0
    _, kind, size = codes[0].groups()  # type: ignore[union-attr]
    match kind, dtype.steps:  # the state of texts and bytes states the width of an element, too
        case "S" | "U" | "V", [*_, ("build", (_, _, _, _, _, int() as stated, *_))] if stated >= 0:
            return stated
    return int(size) * (4 if kind == "U" else 1)


def _load_persistent(pids: list[Any], pid: Any) -> Any:
    """Return the object of a persistent id: a class with its source text, or a storage.

    The id is added to `pids`.
    """
    pids.append(pid)
    match pid:
        case ("module", Global() as cls, *_) | (Global() as cls, _, _):  # (of torch 0.1's tar)
            return cls
    return Opaque(None, (pid,), maker="persid")


def _register_watched(code: int, handler: Handler) -> None:
    """Register a watcher handler that may report something."""

    def record_position(machine: Any, position: int) -> int:
        """Remember the position of the opcode, and run its handler."""
        machine.at = position - 1  # `position` is that after the opcode, which is one byte
        return handler(machine, position)

    Watcher.handlers[code] = record_position


def _report_new(machine: Watcher, position: int) -> int:
    """Report and push an object of the class below the arguments."""
    stack = machine.stack
    has_kwargs = machine.data[machine.at] == _NEWOBJ_EX
    kwargs = stack.pop() if has_kwargs else None
    args = stack.pop()
    stack[-1] = machine.report("new", Opaque(stack[-1], args, kwargs, maker="newobj"))
    return position


def _report_build(machine: Watcher, position: int) -> int:
    """Report the state of the object below it, and skip the bytes of a joblib array."""
    state = machine.stack.pop()
    machine.record_change("build", machine.stack[-1], state)
    return machine.skip_array(position) if machine.as_joblib else position


def _enter_frame(machine: Watcher, position: int) -> int:
    """Remember the end of the frame that begins here."""
    end = HANDLERS[_FRAME](machine, position)
    machine.frame_end = end + int.from_bytes(machine.data[position:end], "little")
    return end


def _push_number(machine: Watcher, position: int) -> int:
    """Push an integer, also in forms such as 0x10, as pickle does."""
    text, end = machine.read_line(position)
    digits = text.removesuffix(b"L")  # written by the opcode LONG
    has_base = text.strip().lstrip(b"+-")[1:2].isalpha()
    machine.stack.append(int(digits, 0 if has_base else 10))
    return end


def _push_global(machine: Watcher, position: int) -> int:
    """Push the class or function with the names on the stack, or a symbol for a computed name."""
    if any(isinstance(name, Opaque) for name in machine.stack[-2:]):
        machine.stack[-2:] = [machine.report_unknown("a computed name")]
        return position
    return HANDLERS[_STACK_GLOBAL](machine, position)


def _push_outside_object(machine: Watcher, position: int) -> int:
    """Push a symbol for a class in the extension registry, or for a buffer."""
    width = _REGISTRY_NUMBER_SIZES.get(machine.data[machine.at])
    if width is None:  # NEXT_BUFFER, which has no argument
        machine.stack.append(machine.report_unknown("an out-of-band buffer"))
        return position
    number = int.from_bytes(machine.read_exactly(position, width), "little")
    why = f"number {number} of the copyreg extension registry"
    machine.stack.append(machine.report_unknown(why))
    return position + width


def _register_recall(code: int, width: int) -> None:
    """Register an opcode that reads the memo, where an entry may be missing.

    Its index has `width` bytes, or is a line if that is 0.
    """

    def recall_or_report(machine: Any, position: int) -> int:
        """Push the memoized object, or a symbol if the memo does not have it."""
        try:
            return HANDLERS[code](machine, position)
        except KeyError as error:
            machine.at = position - 1
            machine.stack.append(machine.report_unknown(f"memo {error.args[0]} was never set"))
            # After the argument: `width` bytes, or a line for the text opcodes.
            return position + width if width else machine.read_line(position)[1]

    Watcher.handlers[code] = recall_or_report


for _code in b"cioRP\x8f\x91\x96suae\x90":
    _register_watched(_code, HANDLERS[_code])
for _codes, _handler in {
    b"\x81\x92": _report_new, b"b": _report_build, b"IL": _push_number, b"\x93": _push_global,
    b"\x95": _enter_frame, b"\x82\x83\x84\x97": _push_outside_object,
}.items():  # fmt: skip
    for _code in _codes:
        _register_watched(_code, _handler)  # type: ignore[arg-type]
for _code, _bytes in (ord("g"), 0), (ord("h"), 1), (ord("j"), 4):
    _register_recall(_code, _bytes)
