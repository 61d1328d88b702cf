"""Verdicts on the steps of a pickle, by the called functions and their arguments.

The only table of names has the known constructors of data (`_DATA`): everything else of the
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
from ckptool.symbolic.encoder import find_blocked_names
from ckptool.symbolic.text import MEMORY_FORMATS, to_bytes
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
_CLASS_OR_METHOD = re.compile(rf"{_CLASS.pattern}(\.(?!__)\w+)?", re.ASCII)
_PARTIAL, _LOADER = "functools.partial", "torch.storage._load_from_bytes"
_UFUNC_FINDERS = tuple(f"numpy.{where}_ufunc_reconstruct" for where in ("", "core.", "_core."))
_FINDERS = frozenset(
    {"builtins.getattr", "_operator.getitem", "operator.getitem", "logging.getLogger", _PARTIAL}
    | {*_UFUNC_FINDERS}
)
"""Functions whose result may be a function, or an object that the file did not make."""
_CALLS_FIRST_ARGUMENT = re.compile(r"(\w+\.)+_rebuild_from_type(_v2)?")
"""Functions of torch, fastai and others that call their first argument, and set a state."""
_MAPPINGS = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_MAX_LISTED_CALLS, _MAX_PARTS = 100, 2_000_000
_MAX_FREE_PARTS = 100
"""Rows up to this length are not counted."""
_MAX_SEARCHED = 1000
"""The most nodes, and parts of each, that are searched for pickles in arguments."""


class SuspectCall(NamedTuple):
    """A step that runs something, or whose effect is unknown."""

    text: str
    """The call as Python."""
    offset: int
    opcode: str
    verdict: str


_Nested = Callable[[bytes], tuple[str, tuple[SuspectCall, ...]]]


def worst_verdict(*verdicts: str) -> str:
    """Return the worst of some verdicts; `data` if there are none."""
    return max(verdicts, key=VERDICTS.index, default=DATA)


class Judge(Watcher):
    """One pickle and its verdict, traced to its end or to a fault."""

    def __init__(self, data: bytes, nested: _Nested, base: int = 0, **options: Any) -> None:
        """Take the bytes, at offset `base` of the file; `options` are of `Watcher`.

        `nested` judges bytes in arguments, which may be pickles. `watch` traces the pickle.
        """
        super().__init__(data, **options)
        self.judge_nested = nested
        self.base = base
        self.verdict = DATA
        """The worst verdict so far."""
        self.calls: list[SuspectCall] = []
        """The first calls that run something, or with an unknown effect."""
        self.names: dict[str, None] = {}
        """Classes and functions that are imported and not on torch's allow list."""
        self.run_count = 0
        """The number of calls that run something, including calls that are not listed."""
        self.evidence_count = 0
        """The number of calls and known names: bytes that are no pickle have none by chance."""
        self.has_harmful_name = False
        """True if the pickle names a function or class that may do harm when called."""
        self.has_unclear_name = False
        """True if it names a function of unknown effect."""
        self.parts_left = _MAX_PARTS
        """The number of arguments and their parts still to be examined, which bounds the time."""
        self.root: Any = None
        """The object of the pickle; None if it has a fault."""
        self.end: int | None = None
        """The offset of its end; None if it has a fault."""
        self.fault = ""
        """The message of the error at which tracing ended, or ""."""
        self.failed: type[CheckpointError] | None = None
        """The class of that error."""

    def watch(self, start: int) -> Judge:
        """Trace the pickle at `start`, and return this object."""
        try:
            self.root, self.end = self.run(start)
        except CheckpointError as error:
            # The error itself has frames, which refer to this object.
            self.fault, self.failed = error.message, type(error)
        return self

    def report(self, kind: str, node: Any, items: Any = None) -> Any:
        """Judge one step of the pickle: an import, a call, or a change of an object.

        A call that runs something, or that reads a storage from bytes, may have pickles among its
        arguments: these are judged too. The step leaves `node` as it is.
        """
        if kind == "import":
            self._judge_name(node)
        elif kind in ("call", "new"):
            self.evidence_count += 1
            verdict = self.judge_call(node.func, node.args, node.kwargs, is_new=kind == "new")
            if verdict == RUNS or (verdict != DATA and node.class_name == _LOADER):
                self._judge_nested_pickles(node)
            self.record_step(verdict, kind, node)
        else:
            self.record_step(self.judge_change(kind, node, items), kind, node, items)
        return node

    def _judge_name(self, reference: Global) -> None:
        """Judge a reference to a class or function; each name counts once.

        A name that goes through another module, such as `torch.os.system`, runs something.
        """
        name = reference.qualified
        kind = _classify_name(name)
        if kind == DATA or name in self.names:
            return
        self.names[name] = None
        self.evidence_count += kind != "unknown"
        self.has_harmful_name |= _may_act(reference)
        self.has_unclear_name |= name in _FINDERS or _may_act(reference, strict=True)
        is_through_module = reference.name not in _CONSTANTS and any(
            _classify_name(owner) != "unknown" for owner in reference.name.split(".")[:-1]
        )
        self.record_step(RUNS if is_through_module else NEEDS_CODE, "import", reference)

    def record_step(self, verdict: str, kind: str, node: Any, items: Any = None) -> None:
        """Add a step to the verdict, and list it if it runs something or is unknown."""
        if verdict != self.verdict:
            self.verdict = worst_verdict(self.verdict, verdict)
        self.run_count += verdict == RUNS
        if verdict in (RUNS, CANNOT_TELL) and len(self.calls) < _MAX_LISTED_CALLS:
            from pickletools import code2op  # type: ignore[attr-defined]  # few files need it

            text, opcode = _format_step(kind, node, items), code2op[chr(self.data[self.at])].name
            self.calls.append(SuspectCall(text, self.base + self.at, opcode, verdict))

    def _judge_nested_pickles(self, called: Opaque) -> None:
        """Judge pickles among the arguments of a call, and list their calls with those of this one.

        None is judged if the list is full: then the verdict is known.
        """
        if len(self.calls) >= _MAX_LISTED_CALLS:
            return
        for raw in _find_bytes(called.args):
            verdict, calls = self.judge_nested(raw)
            self.verdict = worst_verdict(self.verdict, verdict)
            self.run_count += sum(call.verdict == RUNS for call in calls)
            prefix = f"in a pickle at {self.base + self.at:,}: "
            room = max(_MAX_LISTED_CALLS - len(self.calls), 0)
            self.calls += [call._replace(opcode=prefix + call.opcode) for call in calls[:room]]

    def judge_call(self, func: Any, args: Any, kwargs: Any = None, *, is_new: bool = False) -> str:
        """Return the verdict on a call of `func`, or of `func.__new__` (`is_new`).

        Known constructors are data or need code, if no argument may do harm when they call it. An
        unknown class needs code, and an unknown function runs something.
        """
        func = func if isinstance(func, Global) else _resolve_getattr(func)
        if not isinstance(func, Global):
            return self._judge_object_call(func, args, kwargs, is_new=is_new)
        parts = args if isinstance(args, tuple) else (args,)
        name = func.qualified
        pairs: list[Any] = []  # of a mapping, which hashes (and so calls) the keys in its lists
        if name in _MAPPINGS:
            pairs = [part for part in parts if isinstance(part, (list, tuple))]
        if not self._has_budget_for(parts, *pairs):
            return CANNOT_TELL
        verdict = self._judge_by_arguments(name, parts)
        if verdict:
            return verdict
        kind = _classify_name(name)
        if kind in (DATA, NEEDS_CODE):
            objects = [part for row in (parts, *pairs) for part in row if isinstance(part, Opaque)]
            if objects and _can_iterate_library_object(name, objects):
                return RUNS
            calls_no_argument = func.name.startswith("_rebuild")  # as in torch._utils
            # A constructor of data only calls objects; one that needs code may call any argument.
            arguments = parts if kind == NEEDS_CODE else objects
            return kind if self.is_harmless(arguments, strict=not calls_no_argument) else RUNS
        if kind == "numeric":  # only an empty object, a new one, or one made of numbers, is safe
            is_class = bool(_CLASS.fullmatch(func.name))
            are_numbers = bool(parts) and all(type(part) in (int, float, bool) for part in parts)
            is_empty = is_new and not (parts or kwargs)
            is_fine = is_empty or (is_class and (is_new or are_numbers))
        elif kind == "unknown":  # a class of the user, or a method such as Config.from_dict
            is_fine = is_new or bool(_CLASS_OR_METHOD.fullmatch(func.name))
        else:
            is_fine = False
        return NEEDS_CODE if is_fine and self.is_harmless((*parts, kwargs)) else RUNS

    def _judge_object_call(self, func: Any, args: Any, kwargs: Any, *, is_new: bool) -> str:
        """Return the verdict on a call of an object that the pickle made.

        A `functools.partial` is judged by its function, any other object runs something, and so
        does its `__new__` (`is_new`). pickle fails if `func` is plain data, and an unknown object
        may be any function.
        """
        if not isinstance(func, Opaque) or is_unknown(func):
            return CANNOT_TELL
        wrapped_call = None if is_new else _unwrap_partial(func, args, kwargs)
        if wrapped_call is None:
            return RUNS
        return worst_verdict(NEEDS_CODE, self.judge_call(*wrapped_call))

    def _judge_by_arguments(self, name: str, parts: tuple[Any, ...]) -> str:
        """Return the verdict on a call with arguments that decide; "" for any other.

        Each case is a function that data files call, in the form in which they call it. The same
        function with other arguments runs something.
        """
        match name, parts:
            case "builtins.getattr", (owner, str() as attribute, *_):  # a method or enum member
                owner = _resolve_getattr(owner)
                is_class = isinstance(owner, Global) and bool(_CLASS.match(owner.name))
                is_made = isinstance(owner, Opaque) and not _is_imported_object(owner)
                is_fine = (is_class or is_made) and not attribute.startswith("__")
            case "_operator.getitem" | "operator.getitem", (Global() as owner, key):  # list[int]
                is_fine = bool(_CLASS.fullmatch(owner.name)) and isinstance(key, (Global, str, int))
            case "operator.itemgetter" | "operator.attrgetter" | "_operator.itemgetter", _:
                is_fine = all(
                    isinstance(part, (str, int)) and "__" not in str(part) for part in parts
                )
            case "builtins.iter", _:
                is_fine = len(parts) == 1 and isinstance(parts[0], (list, tuple, str, bytes, dict))
            case "builtins.type", (part,):  # the class of an object; not the metaclass of a class
                is_fine = not isinstance(part, Global)
            case "builtins.eval", ("data", {"data": Opaque(), **more}):  # an array of Paddle
                is_fine = not more
            case "functools.partial", (func, *arguments):
                is_function = isinstance(func, Opaque) or (
                    isinstance(func, Global) and not _may_act(func)
                )
                is_fine = is_function and self.is_harmless((func, arguments))
            case "torch.storage._load_from_bytes", (part,):  # the pickle in the bytes is judged
                is_fine = _to_bytes(part) is not None
            case "copyreg._reconstructor", (cls, base, *state):  # `object`, or a base such as dict
                return worst_verdict(
                    self.judge_call(base, (*state,)), self.judge_call(cls, (), is_new=True)
                )
            case "copyreg.__newobj__", (cls, *arguments):
                return self.judge_call(cls, (*arguments,), is_new=True)
            case "copyreg.__newobj_ex__", (cls, tuple() as arguments, dict() as kwargs):
                return self.judge_call(cls, arguments, kwargs, is_new=True)
            case _, (str() as module, str()) if name in _UFUNC_FINDERS:
                is_fine = module.partition(".")[0] in ("numpy", "scipy")
            case _, (Global() as func, tuple() as func_args, *_) if (
                name in JAX_ARRAYS and func.qualified in NUMPY_ARRAYS
            ):
                return self.judge_call(func, func_args)
            case _, (func, _, func_args, *_) if _CALLS_FIRST_ARGUMENT.fullmatch(name):
                # A function that looks up an object in a module: that may be any function.
                is_finder = _is_imported_object(Opaque(func))
                return RUNS if is_finder else self.judge_call(func, func_args)
            case _:
                return ""
        return NEEDS_CODE if is_fine else RUNS

    def judge_change(self, kind: str, target: Any, items: Any) -> str:
        """Return the verdict on items or a state that the pickle gives to `target`.

        A change of a class, a function or an object of a library runs something, as does any change
        after a state, which may have replaced the method that is called.
        """
        if isinstance(target, Global):
            return RUNS
        if is_unknown(target):
            return CANNOT_TELL
        parts = items if isinstance(items, tuple) else (items,)
        if not self._has_budget_for(parts):
            return CANNOT_TELL
        name = target.class_name
        if target.steps and target.steps[-1][0] == "build":
            return RUNS  # the state may have set the function that is called now
        if kind == "build" and name == _PARTIAL:
            return self._judge_by_arguments(name, parts) or RUNS
        if _is_imported_object(target) or _classify_name(name) == "system":
            return RUNS
        if kind != "build":
            return DATA
        if _can_iterate_library_object(name, parts):  # while it sets the state of a container
            return RUNS
        return DATA if _classify_name(name) == DATA else NEEDS_CODE

    def _has_budget_for(self, *rows: Sequence[Any]) -> bool:
        """Count the parts of long rows; return False above the limit for all calls together.

        Many calls may share one long row, so that the time is not limited by the size of the file.
        """
        for row in rows:
            self.parts_left -= len(row) if len(row) > _MAX_FREE_PARTS else 0
        return self.parts_left >= 0

    def is_harmless(self, args: Any, *, strict: bool = False) -> bool:
        """Return True if no argument is a function that may do harm when called.

        With `strict`, nor a function of unknown effect, because some constructors call their
        arguments. False also beyond the limit on parts.
        """
        if not (self.has_harmful_name or (strict and self.has_unclear_name)):
            return True
        pending, seen = [args], set()
        while pending:
            node = pending.pop()
            if isinstance(node, Global):
                if _may_act(node, strict=strict):
                    return False
            elif strict and _is_imported_object(node):
                return False
            elif isinstance(node, (Opaque, list, tuple, dict)) and id(node) not in seen:
                seen.add(id(node))
                parts = list(get_children(node))
                self.parts_left -= 1 + len(parts)
                if self.parts_left < 0:
                    return False
                if isinstance(node, Opaque):
                    del parts[0]  # the constructor, whose call has been judged
                pending += parts
        return True


@lru_cache(1 << 14)
def _classify_name(name: str) -> str:
    """Return the verdict on a known constructor, `data` or `needs code`, else a kind of library.

    `system`: the standard library and tools, which may do anything. `numeric`: NumPy, torch and
    others, which compute. `unknown`: any other library, and the user's own code.
    """
    is_accepted = not find_blocked_names((name,))  # by weights_only=True
    if is_accepted or name in _CONSTANTS:
        return DATA
    if _DATA.fullmatch(name):
        return NEEDS_CODE
    owner = name.partition(".")[0]
    return "system" if owner in _SYSTEM else "numeric" if owner in _NUMERIC else "unknown"


def is_data_constructor(name: str) -> bool:
    """Return True for the name of a known constructor of data."""
    return _classify_name(name) in (DATA, NEEDS_CODE)


def _may_act(func: Global, *, strict: bool = False) -> bool:
    """Return True if a name may be a function or class that does more than compute.

    With `strict`, also for functions of numeric and unknown libraries. A name is a function unless
    it is spelled like a class.
    """
    kind = _classify_name(func.qualified)
    is_unclear = kind in ("numeric", "unknown") and not _CLASS.fullmatch(func.name)
    return kind == "system" or (strict and is_unclear)


def _resolve_getattr(node: Any) -> Any:
    """Return the class or method in a call of `getattr`, with which protocols below 4 name it."""
    match node:
        case Opaque(
            func=Global(qualified="builtins.getattr"), args=(Global() as owner, str() as name)
        ) if _CLASS.fullmatch(owner.name):
            return Global(owner.module, f"{owner.name}.{name}")
    return node


def _unwrap_partial(func: Opaque, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """Return the function, arguments and keywords that a call of a `functools.partial` leads to.

    None if it is not a partial of a function that the file names. The state that pickle gives to a
    partial, `(function, args, kwargs, dict)`, replaces the arguments of its constructor.
    """
    is_partial = func.class_name == _PARTIAL
    if not is_partial or len(func.steps) > 1:  # pickle gives one state
        return None
    partial_args = func.args if isinstance(func.args, tuple) else ()
    partial_state: Any = (*partial_args[:1], partial_args[1:], func.kwargs or {}, None)
    for kind, state in func.steps:
        if kind == "build":
            partial_state = state
    match partial_state, args:
        case (Global() as inner, tuple() as first_args, first_kwargs, _), tuple():
            return inner, (*first_args, *args), {**(first_kwargs or {}), **(kwargs or {})}
    return None


def _is_imported_object(node: Any) -> bool:
    """Return True if an object was found in a module, not created by the file."""
    func = node.func if isinstance(node, Opaque) else None
    return isinstance(func, Global) and func.qualified in _FINDERS


def _can_iterate_library_object(name: str, nodes: Iterable[Any]) -> bool:
    """Return True if a container, by its name, may iterate over one of `nodes` that runs code.

    Containers are those of the standard library, and `torch.Size`. An object of that library, of
    NumPy or of torch may have an `__iter__` that runs something.
    """
    is_container = name.partition(".")[0] in _SYSTEM or name == "torch.Size"
    return is_container and any(
        isinstance(node, Opaque) and _classify_name(node.class_name) in ("system", "numeric")
        for node in nodes
    )


def _to_bytes(node: Any) -> bytes | None:
    """Return a node that is bytes, or the bytes that a call of `_codecs.encode` makes of text."""
    match node:
        case bytes():
            return node
        case Opaque(func=Global(qualified="_codecs.encode"), args=(str() as text, "latin1")):
            return to_bytes(text)
    return None


def _find_bytes(args: Any) -> Iterator[bytes]:
    """Yield the byte strings in arguments: the first parts of each of the first nodes inside.

    A single byte is no pickle.
    """
    for node in islice(walk_everything((args,)), _MAX_SEARCHED):
        for part in islice(get_children(node), _MAX_SEARCHED):
            raw = _to_bytes(part)
            if raw and len(raw) > 1:
                yield raw


def _format_step(kind: str, node: Any, items: Any) -> str:
    """Return a step as Python code, with the first of several items."""
    target = to_python(node)
    match kind, items:
        case "import", _:  # listed only if it is found through another module
            return f"{target}  # through a module"
        case "call" | "new" | "unknown", _:
            return target
        case "set", [(key, value), *_]:
            return f"{target}[{to_python(key)}] = {to_python(value)}"
        case "append" | "add", [item, *_]:
            return f"{target}.{kind}({to_python(item)})"
    return f"{target}.__setstate__({to_python(items)})"


_MAX_TEXT_LENGTH, _MAX_ITEMS, _MAX_DEPTH, _MAX_NODES = 120, 6, 8, 200


def to_python(value: Any) -> str:
    """Return a value as Python code, shortened to a few lines."""
    nodes_left = _MAX_NODES

    def format_items(items: Collection[Any], depth: int) -> str:
        """Return the first items, separated by commas."""
        shown = [format_node(item, depth + 1) for item in islice(items, _MAX_ITEMS)]
        return ", ".join(shown + ["..."] * (len(items) > _MAX_ITEMS))

    def format_node(node: Any, depth: int) -> str:
        """Return a node as Python code, or `...` below the deepest level or after many nodes."""
        nonlocal nodes_left
        nodes_left -= 1
        if depth > _MAX_DEPTH or nodes_left < 0:
            return "..."
        match node:
            case Global():  # the names in Python code; pickle stores the module of the platform
                return re.sub(r"^(posix|nt)\.", "os.", node.qualified)
            case str() | bytes():
                return repr(node[:_MAX_TEXT_LENGTH]) + "..." * (len(node) > _MAX_TEXT_LENGTH)
            case int() if node.bit_length() > 999:  # Python refuses to print 4,301 digits or more
                return hex(node)[:_MAX_TEXT_LENGTH] + "..."
            case list():
                return f"[{format_items(node, depth)}]"
            case tuple():
                return f"({format_items(node, depth)}{',' * (len(node) == 1)})"
            case dict():
                pairs = [
                    f"{format_node(key, depth + 1)}: {format_node(item, depth + 1)}"
                    for key, item in islice(node.items(), _MAX_ITEMS)
                ]
                return f"{{{', '.join(pairs + ['...'] * (len(node) > _MAX_ITEMS))}}}"
            case Opaque(maker="persid"):
                return "persistent_load(...)"
            case Opaque() if is_unknown(node):  # its only argument is a description
                return f"<{node.args[0]}>"
            case Opaque():
                if isinstance(node.args, tuple):
                    arguments = format_items(node.args, depth)
                else:
                    arguments = f"*{format_node(node.args, depth + 1)}"
                if node.kwargs:
                    arguments += f", **{format_node(node.kwargs, depth + 1)}"
                method = ".__new__" if node.maker == "newobj" else ""
                return f"{format_node(node.func, depth + 1)}{method}({arguments})"
        return repr(node)[:_MAX_TEXT_LENGTH]

    return format_node(value, 0)
