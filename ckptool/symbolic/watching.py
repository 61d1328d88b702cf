"""The pickle machine with an observer: it reports each import, call and change, and goes on.

The ordinary machine stops where pickle itself would go on: items set in a module, names that a call
computes, numbers of the extension registry. Here each of these is an event, and what cannot be
known is a symbol, `unknown`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from ckptool.limits import Limits
from ckptool.model import Global, Opaque, children
from ckptool.symbolic.machine import Machine
from ckptool.symbolic.opcodes import HANDLERS, Handler, decimal, opcode
from ckptool.symbolic.text import parse_text_pid

__all__ = ["Event", "Watcher", "is_unknown"]

UNKNOWN = "unknown"
"""The maker of a symbol for which nothing in the file stands."""
JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
_MODULE = re.compile(r"[\w.<>-]+")


class Event(NamedTuple):
    """One step of a pickle that does more than make plain data."""

    kind: str
    """`import`, `call`, `new`, `build`, `set`, `append` or `unknown`."""
    offset: int
    """Of its opcode, from the start of the data."""
    opcode: str
    what: Any
    """The `Global` imported, the `Opaque` made, or what is changed."""
    items: Any = None
    """The state or the items that `what` is given; why it is unknown."""


def is_unknown(node: Any) -> bool:
    """Return whether the file does not say what the symbol is."""
    return isinstance(node, Opaque) and node.maker == UNKNOWN


class Watcher(Machine):
    """A machine that recognises no calls: each is an event, and leaves an `Opaque`."""

    __slots__ = ("as_joblib", "cut", "observe", "pids")
    handlers: ClassVar = list(HANDLERS)

    def __init__(
        self,
        data: bytes,
        *,
        file: str,
        limits: Limits,
        observe: Callable[[Event], None],
        as_joblib: bool = False,
    ) -> None:
        """Prepare to run over `data`; `as_joblib` skips raw arrays, as joblib's unpickler does."""
        super().__init__(data, file=file, limits=limits)
        self.observe = observe
        self.as_joblib = as_joblib
        self.pids: list[Any] = []
        self.cut = False
        """Whether a line was read that ends with the data, and may go on behind it."""

    def named(self, module: str, name: str, position: int, by: str) -> Global:
        """Return the `Global` of that name, which is reported when it is first named."""
        if not _MODULE.fullmatch(module):
            raise ValueError(f"no module is called {module[:80]!r}")
        is_new = (module, name) not in self.globals
        found = self.find(module, name)
        if is_new:
            self.observe(Event("import", position - 1, by, found))
        return found

    def made(self, kind: str, position: int, by: str, func: Any, args: Any, kwargs: Any) -> Opaque:
        """Report a call, and return its result."""
        result = Opaque(func, args, kwargs, maker="newobj" if kind == "new" else "reduce")
        self.observe(Event(kind, position - 1, by, result))
        return result

    def line(self, position: int) -> tuple[bytes, int]:
        """Return a line; the last one may lack its newline, as for pickle's code in Python."""
        end = self.data.find(b"\n", position)
        self.cut = end < 0
        end = end if end >= 0 else len(self.data) - 1
        if end < position:
            raise EOFError
        return self.data[position:end], end + 1

    def unknown(self, position: int, by: str, why: str) -> Opaque:
        """Report and return a symbol for what the file does not tell."""
        result = Opaque(None, (why,), maker=UNKNOWN)
        self.observe(Event("unknown", position - 1, by, result, why))
        return result

    def changed(self, kind: str, position: int, by: str, items: Any) -> bool:
        """Report a change of the object on top of the stack; False for plain data."""
        target = self.stack[-1]
        if isinstance(target, (Global, Opaque)):
            self.observe(Event(kind, position - 1, by, target, items))
        if isinstance(target, Opaque):
            target.steps.append((kind, items))
        return isinstance(target, (Global, Opaque))

    def behind_array(self, position: int) -> int:
        """Return where the opcodes go on behind the raw bytes of an array of joblib's."""
        made = self.stack[-1]
        if not isinstance(made, Opaque) or made.class_name != JOBLIB_ARRAY:
            return position
        state = made.attributes
        shape, dtype = state.get("shape"), state.get("dtype")
        code = dtype.args[0] if isinstance(dtype, Opaque) and dtype.args else None
        if not isinstance(code, str) or not isinstance(shape, tuple):
            raise ValueError("an array of joblib's has no shape or no element type")
        if _holds_objects(dtype):
            inner = Watcher(self.data, file=self.file, limits=self.limits, observe=self.observe)
            return inner.run(position)[1]
        if state.get("numpy_array_alignment_bytes") is not None:
            position += 1 + self.data[position]
        end = position + math.prod(shape) * _width(code, dtype)
        if not position <= end <= len(self.data):
            raise EOFError
        return int(end)


def _holds_objects(dtype: Any) -> bool:
    """Return whether an element type, or one of a field, is of objects."""
    todo, seen = [dtype], set[int]()
    while todo:
        node = todo.pop()
        match node:
            case Opaque(args=(str() as code, *_)) if not re.search("O|object", code):
                pass
            case Opaque():
                return True
        if isinstance(node, (Opaque, tuple, dict)) and id(node) not in seen:
            seen.add(id(node))
            todo += node.values() if isinstance(node, dict) else children(node)
    return False


def _width(code: str, dtype: Any) -> int:
    """Return the bytes of one element, which the state of a type of text may change."""
    found = re.fullmatch(r"[<>=|]?([biufcmMSUV])(\d+)", code)
    if found is None:
        raise ValueError(f"nobody writes the element type {code[:80]!r}")
    match found[1], dtype.steps:
        case "S" | "U" | "V", [*_, ("build", (_, _, _, _, _, int() as size, *_))] if size >= 0:
            return size
    return int(found[2]) * (4 if found[1] == "U" else 1)


def _watched(code: bytes) -> Callable[[Callable[[Watcher, int], int]], Handler]:
    """Register a handler of the watcher alone."""
    return opcode(code, table=Watcher.handlers)  # type: ignore[return-value]


@_watched(b"c")
def _global(machine: Watcher, position: int) -> int:
    start = position
    module, position = machine.line(position)
    name, position = machine.line(position)
    found = machine.named(str(module, "utf-8"), str(name, "utf-8"), start, "GLOBAL")
    machine.stack.append(found)
    return position


@_watched(b"\x93")
def _stack_global(machine: Watcher, position: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    found: Any
    if isinstance(name, str) and isinstance(module, str):
        found = machine.named(module, name, position, "STACK_GLOBAL")
    elif isinstance(name, Opaque) or isinstance(module, Opaque):
        found = machine.unknown(position, "STACK_GLOBAL", "a name that a call computes")
    else:
        raise TypeError("a global is named by something that is not text")
    machine.stack.append(found)
    return position


def _making(code: bytes, kind: str, by: str, *, named: bool = False) -> None:
    """Register an opcode that calls what lies below the arguments (`named`: and keywords)."""

    @_watched(code)
    def make(machine: Watcher, position: int) -> int:
        kwargs = machine.stack.pop() if named else None
        args = machine.stack.pop()
        func = machine.stack[-1]
        machine.stack[-1] = machine.made(kind, position, by, func, args, kwargs)
        return position


_making(b"R", "call", "REDUCE")
_making(b"\x81", "new", "NEWOBJ")
_making(b"\x92", "new", "NEWOBJ_EX", named=True)


@_watched(b"i")
def _inst(machine: Watcher, position: int) -> int:
    start = position
    module, position = machine.line(position)
    name, position = machine.line(position)
    args = tuple(machine.pop_mark())
    found = machine.named(str(module, "utf-8"), str(name, "utf-8"), start, "INST")
    machine.stack.append(machine.made("call", start, "INST", found, args, None))
    return position


@_watched(b"o")
def _obj(machine: Watcher, position: int) -> int:
    cls, *args = machine.pop_mark()
    machine.stack.append(machine.made("call", position, "OBJ", cls, tuple(args), None))
    return position


@_watched(b"b")
def _build(machine: Watcher, position: int) -> int:
    state = machine.stack.pop()
    if not machine.changed("build", position, "BUILD", state) and state not in (None, (None, {})):
        raise TypeError(f"state is given to a {type(machine.stack[-1]).__name__}")
    return machine.behind_array(position) if machine.as_joblib else position


def _changing(code: bytes, kind: str, *, many: bool, by: str) -> None:
    """Register an opcode that adds to the object below the items on the stack."""
    base, taken = HANDLERS[code[0]], 2 if kind == "set" else 1

    @_watched(code)
    def change(machine: Watcher, position: int) -> int:
        if many and not machine.stack:  # of no items, pickle does not ask what they are added to
            machine.pop_mark()
            return position
        target = machine.marks[-1][-1] if many else machine.stack[-taken - 1]
        is_list = kind == "set" and isinstance(target, list)
        if not is_list and not isinstance(target, (Global, Opaque)):
            return base(machine, position)
        items = machine.pop_mark() if many else [machine.stack.pop() for _ in range(taken)][::-1]
        pairs = list(zip(items[::2], items[1::2], strict=True)) if kind == "set" else items
        for index, item in pairs if is_list else ():
            target[index] = item
        machine.changed(kind, position, by, pairs)
        return position


_changing(b"s", "set", many=False, by="SETITEM")
_changing(b"u", "set", many=True, by="SETITEMS")
_changing(b"a", "append", many=False, by="APPEND")
_changing(b"e", "append", many=True, by="APPENDS")
_changing(b"\x90", "add", many=True, by="ADDITEMS")


@_watched(b"I")
@_watched(b"L")
def _number(machine: Watcher, position: int) -> int:
    """Push an integer: pickle takes 0x10, too."""
    text, end = machine.line(position)
    has_base = text.strip().lstrip(b"+-")[1:2].isalpha()
    machine.stack.append(int(text.removesuffix(b"L"), 0 if has_base else 10))
    return end


def _getting(code: bytes, index_of: Callable[[Watcher, int], tuple[int, int]], by: str) -> None:
    """Register an opcode that recalls from the memo, where something may be missing."""
    base = HANDLERS[code[0]]

    @_watched(code)
    def get(machine: Watcher, position: int) -> int:
        try:
            return base(machine, position)
        except KeyError:
            index, end = index_of(machine, position)
            why = f"memo {index} was never filled"
            machine.stack.append(machine.unknown(position, by, why))
            return end


def _decimal(machine: Watcher, position: int) -> tuple[int, int]:
    text, end = machine.line(position)
    return decimal(text, machine.limits), end


def _little(width: int) -> Callable[[Watcher, int], tuple[int, int]]:
    def read(machine: Watcher, position: int) -> tuple[int, int]:
        raw = machine.counted(position, width)
        return int.from_bytes(raw, "little"), position + width

    return read


_getting(b"g", _decimal, "GET")
_getting(b"h", _little(1), "BINGET")
_getting(b"j", _little(4), "LONG_BINGET")


def _extension(code: bytes, width: int) -> None:
    """Register an opcode that names a class by its number in a registry."""
    index_of = _little(width)

    @_watched(code)
    def extension(machine: Watcher, position: int) -> int:
        index, end = index_of(machine, position)
        why = f"number {index} of the copyreg extension registry"
        machine.stack.append(machine.unknown(position, "EXT", why))
        return end


_extension(b"\x82", 1)
_extension(b"\x83", 2)
_extension(b"\x84", 4)


@_watched(b"\x97")
def _next_buffer(machine: Watcher, position: int) -> int:
    why = "a buffer that is not in the file"
    machine.stack.append(machine.unknown(position, "NEXT_BUFFER", why))
    return position


@_watched(b"Q")
def _binpersid(machine: Watcher, position: int) -> int:
    machine.stack.append(_persistent(machine, machine.stack.pop()))
    return position


@_watched(b"P")
def _persid(machine: Watcher, position: int) -> int:
    text, position = machine.line(position)
    machine.stack.append(_persistent(machine, parse_text_pid(str(text, "ascii"), machine.find)))
    return position


def _persistent(machine: Watcher, pid: Any) -> Any:
    """Return what torch loads for a persistent id: a class with its source text, or a storage."""
    machine.pids.append(pid)
    match pid:
        case ("module", cls, *_):
            return cls
        case (Global() as cls, _, _):  # of torch 0.1's tar
            return cls
    return Opaque(None, (pid,), maker="persid")
