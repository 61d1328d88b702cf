"""Addresses inside a checkpoint: walk it, find a node by name, select by glob."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptool.errors import AmbiguousName, NotFound
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Path,
    Storage,
    StorageRef,
    TensorRef,
)
from ckptool.modules import Visits, held_apart, is_module, module_state
from ckptool.rebuilding import everything, rebuild
from ckptool.words import listed, printable

if TYPE_CHECKING:
    from ckptool.checkpoint import Checkpoint

__all__ = [
    "everything",
    "held_items",
    "name_of",
    "rebuild",
    "resolve",
    "selected",
    "walk",
]

Leaf = Any
Entries = Iterator[tuple[Any, Any]]

_CONTAINERS = (dict, list, tuple, Opaque)
_LEAF_TYPES = frozenset((
    bool, int, float, complex, str, type(None), bytes, bytearray,
    TensorRef, StorageRef, Storage, DeviceValue, Global,
))  # fmt: skip
_MISSING = object()


def name_of(path: Path) -> str:
    """The address of a path: its keys joined with `/`."""
    return "/".join([key if type(key) is str else _key_text(key) for key in path])


def _key_text(key: Any) -> str:
    """A key in short: objects by their class, for their repr may be as big as the file."""
    match key:
        case Opaque():
            return f"<{key.class_name}>"
        case TensorRef():
            return "<torch.Tensor>"
        case StorageRef():
            return f"<{key.class_name}>"
        case DeviceValue():
            return repr(key)
        case Global():
            return key.qualified
        case tuple():
            return f"({', '.join(map(_key_text, key))})"
    return str(key)


def walk(
    root: Any,
    limits: Limits = DEFAULT_LIMITS,
    enter: Callable[[Path, Any], bool] | None = None,
) -> Iterator[tuple[Path, Leaf]]:
    """Every listed leaf with its path, in the order of the file.

    Leaves are tensors, plain values and objects. A pickled module gives the tensors that its
    `state_dict()` would have, each under its full name as one key, then what is
    `held_apart`. Any other object is given itself, then what it holds as a list or dict, then
    the tensors among its attributes and arguments. A container that holds itself is not entered
    again. `enter` is asked before each container, module or object is entered; what it refuses is
    left out.

    Raises:
        LimitExceeded: nested deeper, or mentioned more often, than `limits` allows.
    """
    if not isinstance(root, _CONTAINERS):
        yield (), root
        return
    frames = _Frames(limits, enter)
    found: tuple[Path, Any, bool] | None = ((), root, False)
    while found is not None:
        here, node, only_tensors = found
        if not only_tensors and isinstance(node, Opaque) and frames.module(node) is None:
            yield here, node
        frames.open(here, node, only_tensors)
        found = None
        while found is None and frames.stack:
            _, path, entries, only_tensors, _ = frames.stack[-1]
            for key, child in entries:
                if type(child) not in _LEAF_TYPES and isinstance(child, _CONTAINERS):
                    found = (*path, key), child, only_tensors
                    break
                if not only_tensors or type(child) is TensorRef:
                    yield (*path, key), child
            else:
                frames.close()


class _Frames:
    """The containers that a walk has open, innermost last.

    Each with its path, what is left of it, whether only tensors are wanted from that, and the
    entries to go on with from which only tensors are.
    """

    def __init__(self, limits: Limits, enter: Callable[[Path, Any], bool] | None) -> None:
        self.stack: list[tuple[Any, Path, Entries, bool, Entries | None]] = []
        self._enter = enter
        self._limits = limits
        self._visits = Visits(limits)
        self._open_ids: set[int] = set()
        self._modules: dict[int, OrderedMap | None] = {}

    def module(self, node: Opaque) -> OrderedMap | None:
        """Its state, where it is a pickled module; made once."""
        if id(node) not in self._modules:
            self._modules[id(node)] = module_state(node, self._limits)
        return self._modules[id(node)]

    def open(self, path: Path, node: Any, only_tensors: bool) -> None:
        """Put a container on the stack, unless it is there already or not to be entered."""
        if id(node) in self._open_ids or (self._enter and not self._enter(path, node)):
            return
        module = self.module(node) if isinstance(node, Opaque) else None
        size, entries, hidden = _contents(node, module)
        self._visits.enter(node, size, len(self.stack))
        self._open_ids.add(id(node))
        self.stack.append((node, path, entries, only_tensors, hidden))

    def close(self) -> None:
        """Go on with the innermost container's hidden entries, or leave it."""
        node, path, _, _, hidden = self.stack.pop()
        if hidden is not None:
            self.stack.append((node, path, hidden, True, None))
        else:
            self._open_ids.discard(id(node))


def _contents(node: Any, module: Any) -> tuple[int, Entries, Entries | None]:
    """How many entries a container has, those to list, and those to search for tensors only."""
    if isinstance(node, dict):
        return len(node), iter(node.items()), None
    if isinstance(node, (list, tuple)):
        return len(node), enumerate(node), None
    if module is not None:
        apart = held_apart(node)
        return len(module) + len(apart), chain(module.items(), apart.items()), None
    held = held_items(node)
    hidden = list(_hidden_items(node, len(held)))
    return len(held) + len(hidden), iter(held), iter(hidden)


def held_items(node: Opaque) -> list[tuple[Any, Any]]:
    """What an object holds as a list or dict (a `defaultdict`, a `deque`), keys first."""
    held: list[tuple[Any, Any]] = []
    if _is_counter(node):
        held.extend(node.args[0].items())
    for kind, value in node.steps:
        if kind == "set":
            held.extend(value)
        elif kind in ("append", "add"):
            held.extend(enumerate(value, start=len(held)))
    return held


def _is_counter(node: Opaque) -> bool:
    """Whether it is a `Counter`, which is pickled as the call on the dict that it holds."""
    called = isinstance(node.args, tuple) and len(node.args) == 1 and isinstance(node.args[0], dict)
    return called and node.class_name == "collections.Counter"


def _hidden_items(node: Opaque, held: int) -> Entries:
    """Attributes by name, then arguments, numbered on from what the object holds."""
    state = node.attributes
    if state:
        yield from state.items()
    elif node.state is not None:
        yield "state", node.state
    if isinstance(node.args, tuple) and not _is_counter(node):
        yield from enumerate(node.args, start=held)
    if isinstance(node.kwargs, dict):
        yield from node.kwargs.items()


def resolve(
    checkpoint: Checkpoint, address: Any, accept: Callable[[Any], bool] | None = None
) -> tuple[Path, Any]:
    """The path and node of an address: an exact name, else a unique suffix after a `/`.

    Containers answer as well as leaves; `accept` narrows to those it is true of. A tuple or list
    is taken as a path first.

    Raises:
        NotFound: nothing answers to it; the message lists what is near.
        AmbiguousName: several do; the message lists them.
    """
    wanted = str(address)
    if isinstance(address, (tuple, list)):
        wanted = name_of(tuple(address))
        node = _descend(checkpoint.root, tuple(address))
        if node is not _MISSING and (accept is None or accept(node)):
            return tuple(address), node
    exact, ending = [], []
    suffix = f"/{wanted}"
    for path, node in _named_nodes(checkpoint.root):
        name = name_of(path)
        if name.endswith(wanted) and (accept is None or accept(node)):
            if len(name) == len(wanted):
                exact.append((path, node))
            elif name.endswith(suffix):
                ending.append((path, node))
    found = exact or ending
    if len(found) != 1:
        raise _unresolved(checkpoint, wanted, [path for path, _ in found])
    return found[0]


def _unresolved(checkpoint: Checkpoint, wanted: str, found: list[Path]) -> NotFound:
    file = checkpoint.path or None
    names = [name_of(path) for path in found]
    if len(set(names)) > 1:
        return AmbiguousName(
            f"{printable(wanted)!r} could be any of {listed(names)}",
            file=file,
            hint="give more of the name",
        )
    if found:
        return AmbiguousName(
            f"{printable(wanted)!r} could be any of {listed(repr(list(path)) for path in found)}",
            file=file,
            hint="in Python, give the path as a tuple",
        )
    every = [(len(path), name_of(path)) for path, _ in _named_nodes(checkpoint.root) if path]
    if any(name == wanted for _, name in every):
        return NotFound(
            f"{printable(wanted)!r} is there, and is nothing that holds a state dict",
            file=file,
            hint=f"ckptool info {file}" if file else None,
        )
    near = [name for _, name in every if wanted.lower() in name.lower()]
    return NotFound(
        f"there is nothing named {printable(wanted)!r}; "
        f"there is {listed(near or (name for depth, name in every if depth == 1))}",
        file=file,
        hint=f"ckptool list {file}" if file else None,
    )


def _named_nodes(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every leaf and every container with its path, the containers after what they hold."""
    containers: list[tuple[Path, Any]] = []

    def note(path: Path, node: Any) -> bool:
        if not isinstance(node, Opaque) or is_module(node):
            containers.append((path, node))
        return True

    yield from walk(root, enter=note)
    yield from containers


def _descend(node: Any, path: Path) -> Any:
    """The node at exactly this path, as `walk` gives paths; `_MISSING` where there is none."""
    for key in path:
        if isinstance(node, dict):
            node = node.get(key, _MISSING)
        elif isinstance(node, (list, tuple)):
            inside = isinstance(key, int) and 0 <= key < len(node)
            node = node[key] if inside else _MISSING
        elif isinstance(node, Opaque):
            _, entries, hidden = _contents(node, module_state(node))
            every = chain(entries, hidden or ())
            node = next((value for name, value in every if name == key), _MISSING)
        else:
            return _MISSING
    return node


def selected(path: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> bool:
    """Whether the globs let a tensor through.

    A glob is held against the tensor's own name (the last key), or against the whole name when
    it has a `/`. No `include` means all.
    """
    return (not include or _matches(path, include)) and not _matches(path, exclude)


def _matches(path: Path, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name_of(path if "/" in glob else path[-1:]), glob) for glob in globs)
