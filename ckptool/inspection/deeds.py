"""What a step of a pickle does, judged by what is called with which arguments.

The only table of names is that of known constructors of data (`_DATA`): everything else of the
standard library and of the libraries in `_LIBRARIES` counts as running.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ckptool.model import Global, Opaque, children
from ckptool.symbolic.encoder import blocking
from ckptool.symbolic.text import raw_bytes
from ckptool.symbolic.watching import Event, is_unknown

__all__ = ["CANNOT_TELL", "DATA", "NEEDS_CODE", "RUNS", "VERDICTS", "Judge", "as_python"]

VERDICTS = DATA, NEEDS_CODE, CANNOT_TELL, RUNS = "data", "needs code", "cannot tell", "runs"
"""From the best to the worst."""
_OTHERS = """
aiohttp cloudpickle dill distutils joblib numpy pandas pip pkg_resources requests scipy setuptools
six sklearn torch
"""
_LIBRARIES = frozenset({*sys.stdlib_module_names, *IMPORT_MAPPING, *_OTHERS.split()})
_NUMERIC = frozenset({"numpy", "pandas", "scipy", "sklearn", "torch"})
"""Libraries of which a function may be an argument: it computes with what it is given."""
_SYSTEM = _LIBRARIES - _NUMERIC
"""Libraries whose classes may do something from their state alone, as `__del__` deletes a file."""
_DATA = re.compile(
    r"builtins\.(slice|range|object|bytes|bytearray|complex|frozenset|set|list|tuple|dict|int|float"
    r"|str|bool|iter|StopIteration|KeyboardInterrupt|SystemExit)|"
    r"[\w.]+\.[A-Z]\w*(Error|Exception|Warning)|builtins\.(Exception|Warning)|"
    r"collections\.(deque|OrderedDict|Counter|defaultdict|User(Dict|List|String))|ipaddress\.IPv\w+|"
    r"_?io\.(Bytes|String)IO|UserString\.UserString|string\.Template|"
    r"logging\.((Root)?Logger|Manager|PlaceHolder|LogRecord)|"
    r"dataclasses\.(_MISSING_TYPE|_HAS_DEFAULT_FACTORY_CLASS)|"
    r"configparser\.((Raw)?ConfigParser|SectionProxy|ConverterMapping|\w*Interpolation)|_codecs\.encode|"
    r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path|decimal\.Decimal|fractions\.Fraction|"
    r"datetime\.(date|datetime|time|timedelta|timezone)|zoneinfo\.ZoneInfo\._unpickle|"
    r"uuid\.(UUID|SafeUUID)|re\._compile|_sre\.compile|logging\.getLogger|random\.Random|"
    r"argparse\.Namespace|types\.SimpleNamespace|array\._array_reconstructor|signal\.Signals|"
    r"numpy\.(_?core\.(multiarray|_internal)\.(_reconstruct|scalar)|_?core\.numeric\._frombuffer|"
    r"dtype|ndarray|((rec|matrixlib\.defmatrix|_?core\.records)\.)?(matrix|record|recarray)|random\.bit_generator\.__pyx_unpickle_SeedSequence|ma\.core\._mareconstruct|random\.\w*\.?_pickle\.\w+|"
    r"(dtypes|core\.multiarray)\.\w+DType)|"
    r"pandas\.(\w+Dtype|Period|Interval|Timestamp|Timedelta|"
    r"core\.(indexes\.(\w+\._new_\w*Index|range\.RangeIndex)|internals\.(managers\."
    r"(BlockManager|SingleBlockManager)|blocks\.new_block)|dtypes\.dtypes\.\w+Dtype)|"
    r"_libs\.(internals\._unpickle_block|\w+\.__pyx_unpickle_\w+|"
    r"tslibs\.(timestamps\._unpickle_timestamp|timedeltas\._timedelta_unpickle|"
    r"nattype\._nat_unpickle|period\._period_unpickle|offsets\.\w+)))|"
    r"sklearn\.(\w+\.)*(_tree\.Tree|_kd_tree\.newObj|_ball_tree\.newObj|__pyx_unpickle_\w+|"
    r"__newobj__|_\w*\.Cy\w+Loss|_?dist_metrics\.newObj)|"
    r"(sklearn\.)?(\w+\.)*_loss\.(_?loss\.)?(__pyx_unpickle_)?Cy\w+|"
    r"scipy\.(\w+\.)*_?c?kdtree\.cKDTree|joblib\.numpy_pickle\.N\w*ArrayWrapper|"
    r"torch\.(nn\.backends\.thnn\._get_thnn_function_backend|jit\._pickle\.\w+|"
    r"_utils\._rebuild_\w+|_tensor\._rebuild_\w+|tensor\._rebuild_\w+|_C\.Generator|Generator|"
    r"serialization\._get_layout|storage\._(Untyped|Typed)Storage|"
    r"distributed\.(\w+\.)*(_?MEM_FORMAT_ENCODING|ShardingStrategy|StateDictType)|"
    r"nested\._internal\.nested_tensor\._rebuild_njt|nn\.parameter\.\w+Parameter|"
    r"(nn\.)?quantized\.\w+\._?rebuild\w*|_C\.(AttributeDict|DispatchKeySet))|"
    r"torch\.\w+_format"
)
"""Qualified names of functions and classes that make data of their arguments, and do no more."""
_PLAIN_BASES = frozenset(
    f"builtins.{name}"
    for name in (
        "object", "dict", "list", "tuple", "int", "float", "str", "set", "frozenset", "bytes",
        "bytearray", "complex",
    )
)  # fmt: skip
_RERUN = frozenset(
    {
        "Popen",
        "CDLL",
        "PyDLL",
        "WinDLL",
        "OleDLL",
        "FileIO",
        "InteractiveConsole",
        "Process",
        "Timer",
    }
)
"""Classes of the standard library that do something when made; any module may import them."""
_CLASS = re.compile(r"_*[A-Z]\w*(\._*[A-Z]\w*)*", re.ASCII)
_APPLIERS = re.compile(r"torch\._?tensor\._rebuild_from_type(_v2)?")
_PARTIAL = "functools.partial"
_UFUNCS = tuple(f"numpy.{where}_ufunc_reconstruct" for where in ("", "core.", "_core."))
_LOADER = "torch.storage._load_from_bytes"
_MOST_TOLD, _MOST_PARTS = 100, 1_000_000


class Deed(NamedTuple):
    """A step that runs something, or that cannot be told."""

    text: str
    """The call as Python."""
    offset: int
    opcode: str
    verdict: str


class Judge:
    """The verdict on one pickle, while its steps come in."""

    def __init__(self, nested: Callable[[bytes], tuple[str, tuple[Deed, ...]]]) -> None:
        """Judge bytes in arguments, which may be pickles, by `nested`."""
        self.nested = nested
        self.verdict = DATA
        self.deeds: list[Deed] = []
        self.names: dict[str, None] = {}
        self.told = 0
        """Calls that run something, those that are not kept included."""
        self.seen = 0
        """Calls, and names in known libraries: what no other kind of file has by chance."""
        self.base = 0
        self.doers = self.functions = False
        """Whether something was named that may do harm, or of which that is not known."""
        self.parts_left = _MOST_PARTS

    def observe(self, event: Event) -> None:
        """Take one step into account."""
        if event.kind == "import":
            name = event.what.qualified
            found = DATA if _is_allowed(name) else NEEDS_CODE
            if found == NEEDS_CODE:
                self.names.setdefault(name)
                self.seen += name.partition(".")[0] in _LIBRARIES
                self.doers |= _is_doer(event.what)
                self.functions |= _is_doer(event.what, strict=True) or name in (*_FINDERS, _PARTIAL)
                *owners, _ = event.what.name.split(".")
                if not _LIBRARIES.isdisjoint(owners):
                    self.tell(RUNS, event, f"{name}  # through a module")
        elif event.kind in ("call", "new"):
            self.seen += 1
            made = event.what
            found = self.call(made.func, made.args, made.kwargs, is_new=event.kind == "new")
            if found == RUNS and len(self.deeds) < _MOST_TOLD:
                self._look_inside(made, event)
        elif event.kind == "unknown":
            found = CANNOT_TELL
        else:
            found = self.change(event.kind, event.what, event.items)
        if found in (RUNS, CANNOT_TELL):
            self.tell(found, event)
        else:
            self.worsen(found)

    def tell(self, verdict: str, event: Event, text: str = "") -> None:
        """Note a step for the user."""
        self.worsen(verdict)
        self.told += verdict == RUNS
        if len(self.deeds) < _MOST_TOLD:
            text = text or _told(event)
            self.deeds.append(Deed(text, self.base + event.offset, event.opcode, verdict))

    def worsen(self, verdict: str) -> None:
        """Let the verdict be no better than `verdict`."""
        if verdict != self.verdict:
            self.verdict = max(self.verdict, verdict, key=VERDICTS.index)

    def call(self, func: Any, args: Any, kwargs: Any = None, *, is_new: bool = False) -> str:
        """Return the verdict on a call, or on `func.__new__` (`is_new`)."""
        parts = args if isinstance(args, tuple) else (args,)
        if isinstance(func, Opaque):
            return self._call_of_result(func, parts, is_new=is_new)
        if not isinstance(func, Global):
            return CANNOT_TELL  # pickle stops here: it is no function
        name = func.qualified
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, parts)
        if _APPLIERS.fullmatch(name) and parts:
            return self.call(parts[0], parts[2] if len(parts) > 2 else ())
        if _consumes(name, parts):
            return RUNS
        if _is_allowed(name):  # which may go through what it is given
            made = [part for part in parts if isinstance(part, Opaque)]
            fine = self.is_harmless(made, strict=not func.name.startswith("_"))
            return DATA if fine else RUNS
        if _is_data(name):
            return NEEDS_CODE if self.is_harmless(parts, strict=True) else RUNS
        owner = func.qualified.partition(".")[0]
        if is_new and not parts and not kwargs and owner not in _SYSTEM:
            return NEEDS_CODE
        is_class = bool(_CLASS.fullmatch(func.name)) and func.name not in _RERUN
        is_counted = bool(parts) and all(type(part) in (int, float, bool) for part in parts)
        is_made = is_class and (is_new or is_counted) and owner in _NUMERIC  # or an enum
        if (owner in _LIBRARIES and not is_made) or func.name in _RERUN:
            return RUNS
        if not (is_class or is_new):
            return RUNS
        return NEEDS_CODE if self.is_harmless((*parts, kwargs)) else RUNS

    def _call_of_result(self, func: Opaque, args: tuple[Any, ...], *, is_new: bool) -> str:
        """Return the verdict on a call of something that a call made."""
        if is_unknown(func):
            return CANNOT_TELL
        match func:
            case Opaque(
                func=Global(module="builtins" | "__builtin__", name="getattr"),
                args=(Global() as owner, str() as name),
            ) if _CLASS.fullmatch(owner.name) and not name.startswith("__"):
                inner = Global(owner.module, f"{owner.name}.{name}")
                if is_new or _CLASS.fullmatch(name):
                    return self.call(inner, args, is_new=is_new)
                library = owner.qualified.partition(".")[0] in _LIBRARIES
                tabled = _is_data(inner.qualified)
                return NEEDS_CODE if (tabled or not library) and self.is_harmless(args) else RUNS
        return RUNS

    def change(self, kind: str, target: Any, items: Any) -> str:
        """Return the verdict on items or a state given to `target`."""
        if is_unknown(target):
            return CANNOT_TELL
        if isinstance(target, Global) or _is_found(target):
            return RUNS
        if target.steps and target.steps[-1][0] == "build":  # which may have set what is called now
            return RUNS
        if kind == "build" and _name_of(target) == _PARTIAL:
            return self._partial(items if isinstance(items, tuple) else ())
        name = _name_of(target)
        if name.partition(".")[0] in _SYSTEM and not (_is_allowed(name) or _is_data(name)):
            return RUNS
        if kind == "build":
            return DATA if _is_allowed(_name_of(target)) else NEEDS_CODE
        return DATA

    def is_harmless(self, args: Any, *, strict: bool = False) -> bool:
        """Return whether nothing in the arguments is a function that may do harm when called.

        `strict`: nor one of which that is not known, as some constructors call what they are given.
        """
        if not (self.functions if strict else self.doers):
            return True
        todo, seen = [args], set()
        while todo:
            node = todo.pop()
            if isinstance(node, Global):
                if _is_doer(node, strict=strict):
                    return False
            elif strict and (_is_found(node) or _name_of(node) == _PARTIAL):
                return False
            elif isinstance(node, (Opaque, list, tuple, dict)) and id(node) not in seen:
                seen.add(id(node))
                self.parts_left -= 1
                if self.parts_left < 0:
                    return False
                inside = list(children(node))
                todo += inside[isinstance(node, Opaque) :]  # whose own call has been judged
        return True

    def _look_inside(self, made: Opaque, event: Event) -> None:
        """Judge pickles among the arguments of a call that runs something."""
        for raw in _bytes_in(made.args):
            verdict, deeds = self.nested(raw)
            self.worsen(verdict)
            room = max(_MOST_TOLD - len(self.deeds), 0)
            self.deeds += [
                deed._replace(opcode=f"in a pickle at {self.base + event.offset:,}: {deed.opcode}")
                for deed in deeds[:room]
            ]

    # Calls whose arguments decide

    def _getattr(self, args: tuple[Any, ...]) -> str:
        match args:
            case (Global() as owner, str() as name, *_):
                fine = bool(_CLASS.match(owner.name)) or not _is_doer(owner)
            case (_, str() as name, *_):
                fine = True
            case _:
                return RUNS
        return NEEDS_CODE if fine and not name.startswith("__") else RUNS

    def _ufunc(self, args: tuple[Any, ...]) -> str:
        """Judge what finds a function of numpy or scipy, as of any other module."""
        match args:
            case (str() as module, str()) if module.partition(".")[0] in ("numpy", "scipy"):
                return NEEDS_CODE
        return RUNS

    def _getitem(self, args: tuple[Any, ...]) -> str:
        match args:
            case (Global() as owner, Global() | str() | int()) if _CLASS.fullmatch(owner.name):
                return NEEDS_CODE
        return RUNS

    def _partial(self, args: tuple[Any, ...]) -> str:
        func = args[0] if args else None
        if isinstance(func, Global):
            return RUNS if _is_doer(func) or not self.is_harmless(args[1:]) else NEEDS_CODE
        return NEEDS_CODE if isinstance(func, Opaque) and self.is_harmless(args) else RUNS

    def _getter(self, args: tuple[Any, ...]) -> str:
        plain = all(isinstance(arg, (str, int)) for arg in args)
        return NEEDS_CODE if plain and not any("__" in str(arg) for arg in args) else RUNS

    def _iter(self, args: tuple[Any, ...]) -> str:
        fine = len(args) == 1 and isinstance(args[0], (list, tuple, str, bytes, dict))
        return NEEDS_CODE if fine else RUNS

    def _type(self, args: tuple[Any, ...]) -> str:
        return NEEDS_CODE if len(args) == 1 and not isinstance(args[0], Global) else RUNS

    def _reconstructor(self, args: tuple[Any, ...]) -> str:
        cls, base, state = (*args, None, None, None)[:3]
        if isinstance(base, Global) and base.qualified in _PLAIN_BASES:
            if _consumes(base.qualified, (state,)) or not self.is_harmless((state,), strict=True):
                return RUNS
            return self.call(cls, (), is_new=True)
        return self.call(base, (state,))

    def _newobj(self, args: tuple[Any, ...]) -> str:
        return self.call(args[0], args[1:], is_new=True) if args else RUNS

    def _newobj_ex(self, args: tuple[Any, ...]) -> str:
        match args:
            case (cls, tuple() as inner, dict() as kwargs):
                return self.call(cls, inner, kwargs, is_new=True)
        return RUNS

    def _paddle(self, args: tuple[Any, ...]) -> str:
        """Judge `eval('data', {'data': array})`, which Paddle writes for each array."""
        match args:
            case ("data", {"data": Opaque(), **more}) if not more:
                return NEEDS_CODE
        return RUNS

    def _load(self, args: tuple[Any, ...]) -> str:
        """Judge the file of torch inside a pickle: what is in it decides."""
        raws = list(_bytes_in(args))
        if len(raws) != 1:
            return RUNS
        verdict, deeds = self.nested(raws[0])
        self.deeds += deeds[: max(_MOST_TOLD - len(self.deeds), 0)]
        self.told += sum(deed.verdict == RUNS for deed in deeds)
        return max(verdict, NEEDS_CODE, key=VERDICTS.index)


_SPECIAL: dict[str, Callable[[Judge, tuple[Any, ...]], str]] = {
    "builtins.getattr": Judge._getattr,
    "builtins.iter": Judge._iter,
    "builtins.type": Judge._type,
    "builtins.eval": Judge._paddle,
    "_operator.getitem": Judge._getitem,
    "operator.getitem": Judge._getitem,
    _PARTIAL: Judge._partial,
    "operator.itemgetter": Judge._getter,
    "operator.attrgetter": Judge._getter,
    "_operator.itemgetter": Judge._getter,
    "copyreg._reconstructor": Judge._reconstructor,
    "copyreg.__newobj__": Judge._newobj,
    "copyreg.__newobj_ex__": Judge._newobj_ex,
    _LOADER: Judge._load,
    **dict.fromkeys(_UFUNCS, Judge._ufunc),
}


@lru_cache
def _is_allowed(name: str) -> bool:
    return not blocking((name,))


@lru_cache
def _is_data(name: str) -> bool:
    return _DATA.fullmatch(name) is not None


def _is_doer(func: Global, *, strict: bool = False) -> bool:
    """Return whether a name may be a function or class that does more than compute."""
    name = func.qualified
    if _is_allowed(name) or _is_data(name):
        return False
    owner = name.partition(".")[0]
    if _CLASS.fullmatch(func.name):
        return func.name in _RERUN or (owner in _SYSTEM)
    return strict or (owner in _SYSTEM)


def _is_found(node: Any) -> bool:
    """Return whether an object was not made by the file, but found in a module."""
    if not isinstance(node, Opaque) or not isinstance(node.func, Global):
        return False
    func: Any = node.func
    args = node.args
    if _APPLIERS.fullmatch(func.qualified) and isinstance(args, tuple):
        func = next(iter(args), None)
    return isinstance(func, Global) and func.qualified in _FINDERS


def _consumes(name: str, parts: tuple[Any, ...]) -> bool:
    """Return whether a container goes through an object whose class is a library's own code."""
    return name.startswith(("builtins.", "collections.", "torch.Size")) and any(
        owner.partition(".")[0] in _LIBRARIES and not _is_allowed(owner) and not _is_data(owner)
        for owner in map(_name_of, parts)
    )


_FINDERS = frozenset(
    {"builtins.getattr", "_operator.getitem", "operator.getitem", "logging.getLogger", *_UFUNCS}
)


def _name_of(node: Any) -> str:
    """Return the name of the class or function that made an object."""
    return node.class_name if isinstance(node, Opaque) else ""


def _bytes_in(args: Any) -> Iterator[bytes]:
    """Yield the runs of bytes among arguments, also those that a call inside makes of text."""
    todo, left = [args], 1000
    while todo and left:
        node = todo.pop()
        left -= 1
        match node:
            case Opaque(func=Global(name="encode"), args=(str() as text, *_)):
                raw = raw_bytes(text)
            case bytes():
                raw = node
            case Opaque():
                todo.append(node.args)
                continue
            case list() | tuple():
                todo.extend(node[:1000])
                continue
            case _:
                continue
        if raw and len(raw) > 1:
            yield raw


def _told(event: Event) -> str:
    """Return a step as Python."""
    if event.kind in ("call", "new"):
        return as_python(event.what)
    target = as_python(event.what)
    match event.kind, event.items:
        case "set", [(key, value), *_]:
            return f"{target}[{as_python(key)}] = {as_python(value)}"
        case "append" | "add", [item, *_]:
            return f"{target}.{event.kind}({as_python(item)})"
    return f"{target}.__setstate__({as_python(event.items)})"


_LONGEST, _WIDEST, _DEEPEST, _PIECES = 120, 6, 8, 200


def as_python(node: Any) -> str:
    """Return a value as Python spells it, cut to what fits on a few lines."""
    pieces = [_PIECES]

    def spelled(one: Any, depth: int) -> str:
        pieces[0] -= 1
        if depth > _DEEPEST or pieces[0] < 0:
            return "..."
        match one:
            case Global():
                return re.sub(r"^(posix|nt)\.", "os.", one.qualified)
            case str() | bytes():
                cut = one[:_LONGEST]
                return repr(cut) + ("..." if len(one) > len(cut) else "")
            case list() | tuple() | dict():
                pairs = list(one.items()) if isinstance(one, dict) else [(item,) for item in one]
                shown = [": ".join(spelled(p, depth + 1) for p in pair) for pair in pairs[:_WIDEST]]
                inner = ", ".join([*shown, "..."] if len(pairs) > _WIDEST else shown)
                if isinstance(one, tuple):
                    return f"({inner},)" if len(pairs) == 1 else f"({inner})"
                return f"{{{inner}}}" if isinstance(one, dict) else f"[{inner}]"
            case Opaque(maker="persid"):
                return "persistent_load(...)"
            case Opaque() if is_unknown(one):
                return f"<{one.args[0]}>"
            case Opaque():
                args = one.args if isinstance(one.args, tuple) else (f"*{one.args!r}"[:20],)
                inner = ", ".join(spelled(arg, depth + 1) for arg in args[:_WIDEST])
                more = ", ..." if len(args) > _WIDEST else ""
                named = "" if not one.kwargs else f", **{spelled(one.kwargs, depth + 1)}"
                new = ".__new__" if one.maker == "newobj" else ""
                return f"{spelled(one.func, depth + 1)}{new}({inner}{more}{named})"
        return repr(one)[:_LONGEST]

    return spelled(node, 0)
