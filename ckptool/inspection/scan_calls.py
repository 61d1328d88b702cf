"""Verdicts on the steps of a pickle, by the called functions and their arguments.

The only table of names is that of known constructors of data (`_DATA`): everything else of the
standard library and of the libraries in `_TOOLS` and `_NUMERIC` counts as running.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from ckptool.core.model import Global, Opaque, get_children
from ckptool.core.tree import walk_everything
from ckptool.errors import CheckpointError
from ckptool.symbolic.calls import JAX_ARRAYS, NUMPY_ARRAYS
from ckptool.symbolic.encoder import blocking
from ckptool.symbolic.text import MEMORY_FORMATS, raw_bytes
from ckptool.symbolic.watching import Watcher, is_unknown

VERDICTS = DATA, NEEDS_CODE, CANNOT_TELL, RUNS = "data", "needs code", "cannot tell", "runs"
"""The verdicts, from best to worst."""
_TOOLS = "aiohttp cloudpickle dill joblib pip pkg_resources requests setuptools six"
_OTHER_PYTHONS = """
aifc annotationlib asynchat asyncore audioop cgi cgitb chunk compression crypt distutils imghdr imp
lib2to3 mailcap msilib nntplib pipes smtpd sndhdr sunau telnetlib uu xdrlib
"""
_SYSTEM = frozenset(
    {*sys.stdlib_module_names, *IMPORT_MAPPING, *_OTHER_PYTHONS.split(), *_TOOLS.split()}
)
"""Libraries whose classes may act on their state, for example delete a file in `__del__`."""
_NUMERIC = frozenset({"numpy", "pandas", "scipy", "sklearn", "torch"})
"""Libraries whose functions may be arguments, because they only compute."""
# What is listed keeps or parses its arguments, and neither imports, opens nor calls what they name.
# A class whose __setstate__ or __del__ does more stays out.
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
    r"(numpy|pandas|scipy|sklearn)\.([\w.]+\.)?(__pyx_unpickle_\w+|_\w*unpickle\w*|_(ma)?reconstruct|"
    r"newObj|__newobj__|_frombuffer|_new_\w*Index|\w+D[Tt]ype)|"
    r"numpy\.(dtype|ndarray|_?core\.multiarray\.scalar|([\w.]+\.)?(matrix|record|recarray)|"
    r"random\.(\w*\.?_pickle\.\w+|(\w+\.)?__\w+_ctor))|inspect\.(Signature|Parameter|_empty|_ParameterKind)|"
    r"pandas\.(Period|Interval|Timestamp|Timedelta|core\.indexes\.range\.RangeIndex|"
    r"core\.internals\.(managers\.\w*BlockManager|blocks\.new_block)|_libs\.tslibs\.offsets\.\w+)|"
    r"sklearn\.([\w.]+\.)?(_tree\.Tree|_\w*\.Cy\w+Loss)|scipy\.([\w.]+\.)?_?c?kdtree\.cKDTree|"
    r"(\w+\.)*_loss\.(_?loss\.)?(__pyx_unpickle_)?Cy\w+|joblib\.numpy_pickle\.N\w*ArrayWrapper|"
    r"(\w+\.)+_(\w+_)?rebuild_\w*tensor\w*|"  # fastai and others, after torch._utils
    r"torch\.(nn\.backends\.thnn\._get_thnn_function_backend|jit\._pickle\.\w+|"
    r"_utils\._rebuild_\w+|_tensor\._rebuild_\w+|tensor\._rebuild_\w+|_C\.Generator|Generator|"
    r"serialization\._get_layout|storage\._(Untyped|Typed)Storage|"
    r"distributed\.(\w+\.)*(_?MEM_FORMAT_ENCODING|ShardingStrategy|StateDictType)|"
    r"nested\._internal\.nested_tensor\._rebuild_njt|nn\.parameter\.\w+Parameter|"
    r"(nn\.)?quantized\.\w+\._?rebuild\w*|_C\.(AttributeDict|DispatchKeySet))"
)
"""Qualified names of functions and classes that only turn their arguments into data."""
_CONSTANTS = frozenset(f"torch.{name}" for name in MEMORY_FORMATS)
_CLASS = re.compile(
    r"(?!_*(Popen|\w+DLL|FileIO|InteractiveConsole|Process|Timer)\b)_*[A-Z]\w*(\._*[A-Z]\w*)*",
    re.ASCII,
)
"""How classes are spelled; those are left out that do something when made, wherever imported."""
_METHOD = re.compile(rf"{_CLASS.pattern}(\.(?!__)\w+)?", re.ASCII)
_PARTIAL, _LOADER = "functools.partial", "torch.storage._load_from_bytes"
_UFUNCS = tuple(f"numpy.{where}_ufunc_reconstruct" for where in ("", "core.", "_core."))
_FINDERS = frozenset(
    {"builtins.getattr", "_operator.getitem", "operator.getitem", "logging.getLogger", _PARTIAL}
    | {*_UFUNCS}
)
"""Functions whose result may be a function, or an object that the file did not make."""
_APPLIER = re.compile(r"(\w+\.)+_rebuild_from_type(_v2)?")
"""Functions of torch, fastai and others that call their first argument, and set a state."""
_MAPPINGS = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_MOST_LISTED, _MOST_PARTS = 100, 2_000_000


class SuspectCall(NamedTuple):
    """A step that runs something, or whose effect is unknown."""

    text: str
    """The call as Python."""
    offset: int
    opcode: str
    verdict: str


_Nested = Callable[[bytes], tuple[str, tuple[SuspectCall, ...]]]


def worst(*verdicts: str) -> str:
    """Return the worst of some verdicts."""
    return max(verdicts, key=VERDICTS.index, default=DATA)


class Judge(Watcher):
    """One pickle and its verdict, traced to its end or to a fault."""

    def __init__(self, data: bytes, nested: _Nested, base: int = 0, **how: Any) -> None:
        """Prepare to run over `data`, which stands at `base`; for `how` see `Watcher`.

        Bytes in arguments, which may be pickles, are judged by `nested`.
        """
        super().__init__(data, **how)
        self.look_into = nested
        self.base = base
        self.verdict = DATA
        self.calls: list[SuspectCall] = []
        self.names: dict[str, None] = {}
        self.told = 0
        """Calls that run something, those that are not kept included."""
        self.seen = 0
        """Calls, and names in known libraries: what no other kind of file has by chance."""
        self.danger = 0
        """1: something is named of which it is not known what it does; 2: that may do harm."""
        self.parts_left = _MOST_PARTS
        self.root: Any = None
        self.end: int | None = None
        """Where it ends; None where it has a fault."""
        self.fault = ""
        self.failed: type[CheckpointError] | None = None

    def watch(self, start: int) -> Judge:
        """Run from `start`, and return itself."""
        try:
            self.root, self.end = self.run(start)
        except CheckpointError as error:
            self.fault, self.failed = error.message, type(error)  # not its frames, which hold this
        return self

    def report(self, kind: str, what: Any, items: Any = None) -> Any:
        """Judge one step."""
        if kind == "import":
            self._name(what)
        elif kind in ("call", "new"):
            self.seen += 1
            found = self.judge_call(what.func, what.args, what.kwargs, is_new=kind == "new")
            if found == RUNS or (found != DATA and what.class_name == _LOADER):
                self._look_inside(what)
            self.tell(found, kind, what)
        else:
            self.tell(self.judge_change(kind, what, items), kind, what, items)
        return what

    def _name(self, what: Global) -> None:
        """Judge a reference to a class or function."""
        name = what.qualified
        kind = _kind(name)
        if kind == DATA or name in self.names:
            return
        self.names[name] = None
        self.seen += kind != "unknown"
        unclear = name in _FINDERS or _is_doer(what, strict=True)
        self.danger = max(self.danger, 2 * _is_doer(what), unclear)
        is_through = what.name not in _CONSTANTS and any(
            _kind(owner) != "unknown" for owner in what.name.split(".")[:-1]
        )
        self.tell(RUNS if is_through else NEEDS_CODE, "import", what)

    def tell(self, verdict: str, kind: str, what: Any, items: Any = None) -> None:
        """Note a step, and report it if it runs something or is unknown."""
        if verdict != self.verdict:
            self.verdict = worst(self.verdict, verdict)
        self.told += verdict == RUNS
        if verdict in (RUNS, CANNOT_TELL) and len(self.calls) < _MOST_LISTED:
            from pickletools import code2op  # type: ignore[attr-defined]  # few files need it

            text, opcode = _told(kind, what, items), code2op[chr(self.data[self.at])].name
            self.calls.append(SuspectCall(text, self.base + self.at, opcode, verdict))

    def _look_inside(self, made: Opaque) -> None:
        """Judge pickles among the arguments of a call."""
        for raw in _bytes_in(made.args) if len(self.calls) < _MOST_LISTED else ():
            verdict, calls = self.look_into(raw)
            self.verdict = worst(self.verdict, verdict)
            self.told += sum(call.verdict == RUNS for call in calls)
            place = f"in a pickle at {self.base + self.at:,}: "
            room = max(_MOST_LISTED - len(self.calls), 0)
            self.calls += [call._replace(opcode=place + call.opcode) for call in calls[:room]]

    def judge_call(self, func: Any, args: Any, kwargs: Any = None, *, is_new: bool = False) -> str:
        """Return the verdict on a call, or on `func.__new__` (`is_new`)."""
        func = func if isinstance(func, Global) else _meant(func)
        if not isinstance(func, Global):  # pickle stops where it is no object either
            is_made = isinstance(func, Opaque) and not is_unknown(func)
            wrapped = _wrapped(func, args, kwargs) if is_made and not is_new else None
            if wrapped is not None:
                return worst(NEEDS_CODE, self.judge_call(*wrapped))
            return RUNS if is_made else CANNOT_TELL
        parts = args if isinstance(args, tuple) else (args,)
        name = func.qualified
        pairs = (
            [one for one in parts if isinstance(one, (list, tuple))] if name in _MAPPINGS else []
        )
        if not self._affords(parts, *pairs):
            return CANNOT_TELL
        found = self._by_arguments(name, parts)
        if found:
            return found
        kind = _kind(name)
        if kind in (DATA, NEEDS_CODE):
            objects = [one for row in (parts, *pairs) for one in row if isinstance(one, Opaque)]
            strict = not func.name.startswith("_rebuild")
            is_fine = self.is_harmless(parts if kind == NEEDS_CODE else objects, strict=strict)
            return kind if is_fine and not (objects and _goes_through(name, objects)) else RUNS
        is_class = bool(_CLASS.fullmatch(func.name))
        if kind == "numeric":
            is_counted = bool(parts) and all(type(part) in (int, float, bool) for part in parts)
            is_fine = (is_class and (is_new or is_counted)) or (is_new and not (parts or kwargs))
        else:
            is_fine = kind == "unknown" and (is_new or bool(_METHOD.fullmatch(func.name)))
        return NEEDS_CODE if is_fine and self.is_harmless((*parts, kwargs)) else RUNS

    def _by_arguments(self, name: str, parts: tuple[Any, ...]) -> str:
        """Return the verdict on a call whose arguments decide; nothing for any other."""
        match name, parts:
            case "builtins.getattr", (owner, str() as attribute, *_):
                owner = _meant(owner)
                is_class = isinstance(owner, Global) and bool(_CLASS.match(owner.name))
                is_made = isinstance(owner, Opaque) and not _is_found(owner)
                fine = (is_class or is_made) and not attribute.startswith("__")
            case "_operator.getitem" | "operator.getitem", (Global() as owner, key):
                fine = bool(_CLASS.fullmatch(owner.name)) and isinstance(key, (Global, str, int))
            case "operator.itemgetter" | "operator.attrgetter" | "_operator.itemgetter", _:
                fine = all(isinstance(one, (str, int)) and "__" not in str(one) for one in parts)
            case "builtins.iter", _:
                fine = len(parts) == 1 and isinstance(parts[0], (list, tuple, str, bytes, dict))
            case "builtins.type", (one,):
                fine = not isinstance(one, Global)
            case "builtins.eval", ("data", {"data": Opaque(), **more}):  # an array of Paddle's
                fine = not more
            case "functools.partial", (func, *rest):
                is_function = isinstance(func, Opaque) or (
                    isinstance(func, Global) and not _is_doer(func)
                )
                fine = is_function and self.is_harmless((func, rest))
            case "torch.storage._load_from_bytes", (one,):  # what is in the bytes decides
                fine = _raw(one) is not None
            case "copyreg._reconstructor", (cls, base, *state):
                return worst(
                    self.judge_call(base, (*state,)), self.judge_call(cls, (), is_new=True)
                )
            case "copyreg.__newobj__", (cls, *rest):
                return self.judge_call(cls, (*rest,), is_new=True)
            case "copyreg.__newobj_ex__", (cls, tuple() as rest, dict() as kwargs):
                return self.judge_call(cls, rest, kwargs, is_new=True)
            case _, (str() as module, str()) if name in _UFUNCS:
                fine = module.partition(".")[0] in ("numpy", "scipy")
            case _, (Global() as func, tuple() as inner, *_) if (
                name in JAX_ARRAYS and func.qualified in NUMPY_ARRAYS
            ):
                return self.judge_call(func, inner)
            case _, (func, _, inner, *_) if _APPLIER.fullmatch(name):
                return RUNS if _is_found(Opaque(func)) else self.judge_call(func, inner)
            case _:
                return ""
        return NEEDS_CODE if fine else RUNS

    def judge_change(self, kind: str, target: Any, items: Any) -> str:
        """Return the verdict on items or a state given to `target`."""
        if isinstance(target, Global):
            return RUNS
        if is_unknown(target):
            return CANNOT_TELL
        parts = items if isinstance(items, tuple) else (items,)
        if not self._affords(parts):
            return CANNOT_TELL
        name = target.class_name
        if target.steps and target.steps[-1][0] == "build":  # which may have set what is called now
            return RUNS
        if kind == "build" and name == _PARTIAL:
            return self._by_arguments(name, parts) or RUNS
        if _is_found(target) or _kind(name) == "system":
            return RUNS
        if kind != "build":
            return DATA
        if _goes_through(name, parts):
            return RUNS
        return DATA if _kind(name) == DATA else NEEDS_CODE

    def _affords(self, *rows: Sequence[Any]) -> bool:
        """Count the parts of long rows, which calls may share; return whether there may be more."""
        for row in rows:
            self.parts_left -= len(row) if len(row) > 100 else 0
        return self.parts_left >= 0

    def is_harmless(self, args: Any, *, strict: bool = False) -> bool:
        """Return True if no argument is a function that may do harm when called.

        `strict`: nor one of which that is not known, as some constructors call what they are given.
        """
        if self.danger + strict < 2:
            return True
        todo, seen = [args], set()
        while todo:
            node = todo.pop()
            if isinstance(node, Global):
                if _is_doer(node, strict=strict):
                    return False
            elif strict and _is_found(node):
                return False
            elif isinstance(node, (Opaque, list, tuple, dict)) and id(node) not in seen:
                seen.add(id(node))
                inside = list(get_children(node))
                self.parts_left -= 1 + len(inside)
                if self.parts_left < 0:
                    return False
                todo += inside[isinstance(node, Opaque) :]  # whose own call has been judged
        return True


@lru_cache(1 << 14)
def _kind(name: str) -> str:
    """Return what is known of a name: a verdict, or `system`, `numeric` or `unknown`."""
    if not blocking((name,)) or name in _CONSTANTS:
        return DATA
    if _DATA.fullmatch(name):
        return NEEDS_CODE
    owner = name.partition(".")[0]
    return "system" if owner in _SYSTEM else "numeric" if owner in _NUMERIC else "unknown"


def makes_data(name: str) -> bool:
    """Return True for the name of a known constructor of data."""
    return _kind(name) in (DATA, NEEDS_CODE)


def _is_doer(func: Global, *, strict: bool = False) -> bool:
    """Return True if a name may be a function or class that does more than compute."""
    kind = _kind(func.qualified)
    is_unclear = strict and kind in ("numeric", "unknown") and not _CLASS.fullmatch(func.name)
    return kind == "system" or is_unclear


def _meant(node: Any) -> Any:
    """Return the class or method that a call of `getattr` stands for in protocols below 4."""
    match node:
        case Opaque(
            func=Global(qualified="builtins.getattr"), args=(Global() as owner, str() as name)
        ) if _CLASS.fullmatch(owner.name):
            return Global(owner.module, f"{owner.name}.{name}")
    return node


def _wrapped(func: Opaque, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """Return the function and the arguments that a call of a `functools.partial` leads to.

    None if it is no partial of a function that the file names. The state that pickle gives a
    partial, `(function, args, kwargs, dict)`, takes the place of what it was made with.
    """
    made = func.args if isinstance(func.args, tuple) else ()
    given: Any = (*made[:1], made[1:], func.kwargs or {}, None)
    match [step for step in func.steps if step[0] == "build"]:
        case [(_, state)]:
            given = state
    match given, args:
        case (Global() as inner, tuple() as first, first_named, _), tuple():
            if func.class_name == _PARTIAL and len(func.steps) < 2:
                return inner, (*first, *args), {**(first_named or {}), **(kwargs or {})}
    return None


def _is_found(node: Any) -> bool:
    """Return True if an object was found in a module, not created by the file."""
    func = node.func if isinstance(node, Opaque) else None
    return isinstance(func, Global) and func.qualified in _FINDERS


def _goes_through(name: str, nodes: Iterable[Any]) -> bool:
    """Return whether a container, by its name, goes through an object of a library's own code."""
    return (name.partition(".")[0] in _SYSTEM or name == "torch.Size") and any(
        isinstance(node, Opaque) and _kind(node.class_name) in ("system", "numeric")
        for node in nodes
    )


def _raw(node: Any) -> bytes | None:
    """Return the bytes that a node is, also where it is the call that makes them of text."""
    match node:
        case bytes():
            return node
        case Opaque(func=Global(qualified="_codecs.encode"), args=(str() as text, "latin1")):
            return raw_bytes(text)
    return None


def _bytes_in(args: Any) -> Iterator[bytes]:
    """Yield the byte strings among arguments."""
    for node in islice(walk_everything((args,)), 1000):
        for one in islice(get_children(node), 1000):
            raw = _raw(one)
            if raw and len(raw) > 1:
                yield raw


def _told(kind: str, what: Any, items: Any) -> str:
    """Return a step as Python."""
    target = as_python(what)
    match kind, items:
        case "import", _:
            return f"{target}  # through a module"
        case "call" | "new" | "unknown", _:
            return target
        case "set", [(key, value), *_]:
            return f"{target}[{as_python(key)}] = {as_python(value)}"
        case "append" | "add", [item, *_]:
            return f"{target}.{kind}({as_python(item)})"
    return f"{target}.__setstate__({as_python(items)})"


_LONGEST, _WIDEST, _DEEPEST, _PIECES = 120, 6, 8, 200


def as_python(node: Any) -> str:
    """Return a value as Python code, shortened to a few lines."""
    pieces = [_PIECES]

    def joined(items: Collection[Any], depth: int) -> str:
        shown = [spelled(one, depth + 1) for one in islice(items, _WIDEST)]
        return ", ".join(shown + ["..."] * (len(items) > _WIDEST))

    def spelled(one: Any, depth: int) -> str:
        pieces[0] -= 1
        if depth > _DEEPEST or pieces[0] < 0:
            return "..."
        match one:
            case Global():
                return re.sub(r"^(posix|nt)\.", "os.", one.qualified)
            case str() | bytes():
                return repr(one[:_LONGEST]) + "..." * (len(one) > _LONGEST)
            case int() if one.bit_length() > 999:  # Python prints few digits of those
                return hex(one)[:_LONGEST] + "..."
            case list():
                return f"[{joined(one, depth)}]"
            case tuple():
                return f"({joined(one, depth)}{',' * (len(one) == 1)})"
            case dict():
                pairs = [
                    f"{spelled(key, depth + 1)}: {spelled(value, depth + 1)}"
                    for key, value in islice(one.items(), _WIDEST)
                ]
                return f"{{{', '.join(pairs + ['...'] * (len(one) > _WIDEST))}}}"
            case Opaque(maker="persid"):
                return "persistent_load(...)"
            case Opaque() if is_unknown(one):
                return f"<{one.args[0]}>"
            case Opaque():
                is_plain = isinstance(one.args, tuple)
                inner = joined(one.args, depth) if is_plain else f"*{spelled(one.args, depth + 1)}"
                inner += f", **{spelled(one.kwargs, depth + 1)}" if one.kwargs else ""
                new = ".__new__" * (one.maker == "newobj")
                return f"{spelled(one.func, depth + 1)}{new}({inner})"
        return repr(one)[:_LONGEST]

    return spelled(node, 0)
