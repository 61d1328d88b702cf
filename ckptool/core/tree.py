"""The tree of a checkpoint: its nodes by path, and new trees made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from ckptool.core.model import (
    ByteString,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Path,
    Size,
    Storage,
    StorageRef,
    TensorRef,
    get_children,
)
from ckptool.core.modules import Visits, find_opaque_content, to_model_state
from ckptool.errors import NameCollision
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import printable

_PLAIN = frozenset((
    bool, int, float, complex, str, ByteString, type(None), bytes, bytearray, Global,
))  # fmt: skip
_PLAIN_VALUES = _PLAIN - {Global}
_HOLDERS = frozenset((dict, OrderedMap, list, tuple, Size, Opaque))
"""Types of nodes with content that is rebuilt; tensors only have some if they have components."""


def walk_everything(root: Any) -> Iterator[Any]:
    """Yield `root` and every node below it once, except plain values.

    Unlike `walk`, it visits the content of objects, keys, and components of tensors (not
    storages).
    """
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if type(node) in _PLAIN or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        content = (
            _list_components(node) if isinstance(node, TensorRef) else list(get_children(node))
        )
        pending.extend(reversed(content))


Link = tuple[Any, Any] | None
"""The keys that lead to a node, last one first; shared, because depth has no limit here."""


def walk_mentions(root: Any, enter: Callable[[Any], bool]) -> Iterator[tuple[Link, Any]]:
    """Yield every mention of an object, class or tensor below `root`, with its link.

    Like `walk_everything`, it visits objects, keys, and components of tensors. The content of a
    node is visited only at its first mention, and that of an object, class or tensor only if
    `enter` returns True for it.
    """
    seen: set[int] = set()
    pending: list[tuple[Link, Any]] = [(None, root)]
    while pending:
        link, node = pending.pop()
        if type(node) in _PLAIN_VALUES:
            continue
        is_mentioned = isinstance(node, (Opaque, TensorRef, Global))
        if is_mentioned:
            yield link, node
        if id(node) in seen or (is_mentioned and not enter(node)):
            continue
        seen.add(id(node))
        pending.extend(
            ((link, key), child) for key, child in reversed(list(_iterate_entries(node)))
        )


def to_path(link: Link) -> Path:
    """Return the path of a link."""
    keys = []
    while link is not None:
        link, key = link
        keys.append(key)
    return tuple(reversed(keys))


def _iterate_entries(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the content of a node, including dict keys, each with its key in paths.

    A tensor has its parts, and the hooks, class and state of each layer that makes it a Parameter
    or a subclass instance.
    """
    if isinstance(node, dict):
        yield from chain(zip(node, node, strict=True), node.items())
        yield from node.attributes.items() if isinstance(node, OrderedMap) else ()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    elif isinstance(node, Opaque):
        items = list_items(node)
        yield from chain(
            ((key, key) for key, _ in items), items, _iterate_hidden_items(node, len(items))
        )
    elif isinstance(node, TensorRef):
        yield from (("_backward_hooks", node.hooks), *_get_own_parts(node).items())
        for layer in node.wrapping:
            yield from (("_backward_hooks", layer.hooks), ("__class__", layer.type))
            yield from layer.state.items() if isinstance(layer.state, dict) else ()


def _list_components(tensor: TensorRef) -> list[Any]:
    """Return the components of a tensor except its storage; empty for nearly every tensor.

    A pickled numpy array, also one that carries a TPU tensor, counts as its storage.
    """
    parts = _get_own_parts(tensor)
    if not (parts or tensor.wrapping) and tensor.hooks is None:
        return []
    layers = [part for layer in tensor.wrapping for part in (layer.hooks, layer.type, layer.state)]
    return [tensor.hooks, *parts.values(), *layers]


def _get_own_parts(tensor: TensorRef) -> Mapping[str, Any]:
    """Return the parts of a tensor; none if these are its numpy array, or the tensor it came from.

    The array and the carrier (of a device without storages) have the same bytes as the storage.
    """
    parts = tensor.parts or {}
    return {} if "carrier" in parts or "array" in parts else parts


def rebuild(
    root: Any,
    leaf: Callable[[Any], Any] | None = None,
    mapping: Callable[[dict[Any, Any]], dict[Any, Any]] | None = None,
) -> Any:
    """Return a new tree with leaves replaced by `leaf` and dicts by `mapping`; keep identity.

    `leaf` gets each Storage, StorageRef, TensorRef, DeviceValue, Opaque and Global, and returns its
    replacement, or the same node:

    - A Global may also be the function that creates an object or a tensor.
    - The parts of a tensor, and the layers around it, are rebuilt before the tensor is passed; its
      storage (or its carrier, on a TPU) is not: `leaf` replaces it along with the tensor.
    - An Opaque is passed before its content is rebuilt.

    `mapping` gets each dict of the source, and returns the one to use, or the same dict. A
    replacement that is a container or object is rebuilt in turn. Plain values stay. The source does
    not change, and nesting may have any depth.

    Raises:
        NameCollision: if two keys of one dict become equal.
    """
    return _Rebuilder(leaf, mapping).run(root)


class _Rebuilder:
    """One pass, which makes empty copies of mutable nodes, and fills them when all exist.

    This ends cycles (each has a mutable node), and keeps shared nodes shared.
    """

    def __init__(
        self, leaf: Callable[[Any], Any] | None, mapping: Callable[[Any], Any] | None
    ) -> None:
        """Start with no node copied; for the arguments see `rebuild`."""
        self.leaf = leaf
        self.mapping = mapping
        self.done: dict[int, Any] = {}
        """By id of a node, the copy or rebuilt node in the new tree."""
        self.replacements: dict[int, Any] = {}
        """By id of a leaf, the node that `leaf` returned."""
        self.copies: list[tuple[Any, Any]] = []
        """The containers and objects to copy content from, each with its empty copy."""

    def run(self, root: Any) -> Any:
        """Return the new tree of `root`.

        A node is opened first, which puts its content on `pending`. A tuple, tensor or replaced
        object is finished after its content; a mutable node is filled at the end.
        """
        pending: list[tuple[Any, bool]] = []
        self._replace_leaves((root,), pending)
        while pending:
            node, is_content_done = pending.pop()
            if id(node) in self.done:
                continue
            if is_content_done:
                self.done[id(node)] = self._finish(node)
            else:
                self._open(node, pending)
        for source, copy in self.copies:
            self._fill(source, copy)
        return self._get_replacement(root)

    def _replace_leaves(self, nodes: Iterable[Any], pending: list[tuple[Any, bool]]) -> None:
        """Replace the leaves among the nodes; push nodes with content on `pending`."""
        done, leaf = self.done, self.leaf
        for node in nodes:
            kind = type(node)
            if kind in _PLAIN_VALUES or id(node) in done:
                continue
            if kind in _HOLDERS or (kind is TensorRef and leaf and _list_components(node)):
                pending.append((node, False))  # False: its content is not done
            else:
                done[id(node)] = leaf(node) if leaf else node

    def _open(self, node: Any, pending: list[tuple[Any, bool]]) -> None:
        """Make an empty copy of a mutable node, to be filled when all nodes exist.

        Any other node goes back on `pending`, below its content: `_finish` makes it from that.
        """
        if isinstance(node, (dict, list)):
            source = self.mapping(node) if self.mapping and isinstance(node, dict) else node
            self._register_copy(node, source, type(source)(), pending)
        elif isinstance(node, Opaque):
            self._open_object(node, pending)
        else:
            pending.append((node, True))
            self._replace_leaves(
                node if isinstance(node, tuple) else _list_components(node), pending
            )

    def _open_object(self, node: Opaque, pending: list[tuple[Any, bool]]) -> None:
        """Copy an object, or push its replacement on `pending` if `leaf` gives another node."""
        if id(node) not in self.replacements:
            self.replacements[id(node)] = self.leaf(node) if self.leaf else node
        replacement = self.replacements[id(node)]
        if replacement is node:
            self._register_copy(node, node, replace(node, steps=[]), pending)
        else:
            pending.append((node, True))  # to be finished after the replacement
            self._replace_leaves((replacement,), pending)

    def _register_copy(
        self, node: Any, source: Any, copy: Any, pending: list[tuple[Any, bool]]
    ) -> None:
        """Register an empty copy of a node, to be filled from `source`; replace the leaves in that.

        `source` is the node, or the dict that `mapping` returned for it.
        """
        self.done[id(node)] = self.done[id(source)] = copy
        self.copies.append((source, copy))
        self._replace_leaves(get_children(source), pending)

    def _finish(self, node: Any) -> Any:
        """Return the replacement of a tuple, tensor or object whose content is done."""
        if isinstance(node, tuple):
            items = [self._get_replacement(item) for item in node]
            if all(new is old for new, old in zip(items, node, strict=True)):
                return node
            return Size(items) if isinstance(node, Size) else tuple(items)
        if isinstance(node, TensorRef):
            return self.leaf(self._rebuild_tensor(node)) if self.leaf else node
        replacement = self.replacements[id(node)]  # by `leaf`, with content that may be replaced
        return self._get_replacement(replacement)

    def _rebuild_tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor over rebuilt parts, or the same tensor if none changed."""
        if all(self._get_replacement(part) is part for part in _list_components(tensor)):
            return tensor
        parts = {name: self._get_replacement(part) for name, part in _get_own_parts(tensor).items()}
        return replace(
            tensor,
            hooks=self._get_replacement(tensor.hooks),
            # The numpy array or TPU tensor that it was pickled as stays: `leaf` replaces it.
            parts=parts or tensor.parts,
            wrapping=tuple(
                replace(
                    layer,
                    hooks=self._get_replacement(layer.hooks),
                    type=self._get_replacement(layer.type),
                    state=self._get_replacement(layer.state),
                )
                for layer in tensor.wrapping
            ),
        )

    def _fill(self, source: Any, copy: Any) -> None:
        """Fill an empty copy with the replacements of the source's content.

        Raises:
            NameCollision: if two keys become equal.
        """
        if isinstance(source, Opaque):
            copy.func = self._get_replacement(source.func)
            copy.args = self._get_replacement(source.args)
            copy.kwargs = self._get_replacement(source.kwargs)
            copy.steps.extend((kind, self._get_replacement(value)) for kind, value in source.steps)
        elif isinstance(source, list):
            copy.extend(map(self._get_replacement, source))
        else:
            copy.update(
                (self._get_replacement(key), self._get_replacement(value))
                for key, value in source.items()
            )
            if len(copy) != len(source):
                raise NameCollision(
                    f"only {len(copy)} of {len(source)} keys of a dict remain distinct"
                )
        if isinstance(source, OrderedMap):
            copy.attributes = {
                key: self._get_replacement(value) for key, value in source.attributes.items()
            }

    def _get_replacement(self, node: Any) -> Any:
        """Return the node that replaces this one; plain values replace themselves."""
        return node if type(node) in _PLAIN_VALUES else self.done[id(node)]


def with_late_values(root: Any) -> Any:
    """Return the tree with the values in separate files read.

    Raises:
        UnreadableFile: if one cannot be read.
    """
    return rebuild(
        root, lambda node: node.find() if isinstance(node, Opaque) and node.find else node
    )


Entries = Iterator[tuple[Any, Any]]

_CONTAINERS = (dict, list, tuple, Opaque)
_LEAF_TYPES = _PLAIN | {TensorRef, StorageRef, Storage, DeviceValue}
MISSING = object()
"""The result of `descend` if there is no node."""


def is_within(path: Path, outer: Path) -> bool:
    """Return True if a path is `outer` or below it."""
    return path[: len(outer)] == outer


def name_of(path: Path) -> str:
    """Return a path as text: its keys joined with `/`."""
    return "/".join([key if type(key) is str else format_key(key) for key in path])


def describe_path(path: Path) -> str:
    """Return a path as text for a sentence."""
    return printable(name_of(path)) or "the root"


def describe_location(path: Path) -> str:
    """Return " in PATH" as the end of a sentence; empty for the root."""
    return f" in {describe_path(path)}" if path else ""


def format_key(key: Any) -> str:
    """Return a key as short text: objects by class, because their repr may be huge."""
    match key:
        case Opaque() | StorageRef():
            return f"<{key.class_name}>"
        case TensorRef():
            return "<torch.Tensor>"
        case Global():
            return key.qualified
        case tuple():
            return f"({', '.join(map(format_key, key))})"
    return str(key)


def walk(
    root: Any,
    limits: Limits = DEFAULT_LIMITS,
    enter: Callable[[Path, Any], bool] | None = None,
) -> Iterator[tuple[Path, Any]]:
    """Yield every listed leaf with its path, in the order of the file.

    Leaves are tensors, plain values and objects. A pickled module yields the tensors of its
    `state_dict()`, each with its full name as one key, then its content that only its class can
    save. Any other object yields itself, then its items as a list or dict, then the tensors among
    its attributes and arguments. A container inside itself is not entered again. Containers,
    modules and objects are left out if `enter` returns False.

    Raises:
        LimitExceeded: if nested deeper, or mentioned more often, than `limits` allows.
    """
    if not _is_container(root):
        yield (), root
        return
    frames = _Frames(limits, enter)
    entry: tuple[Path, Any, bool] | None = ((), root, False)
    while entry is not None:
        node_path, node, only_tensors = entry  # only tensors: inside attributes of an object
        if not only_tensors and isinstance(node, Opaque) and frames.get_module_state(node) is None:
            yield node_path, node
        frames.open(node_path, node, only_tensors)
        # Continue with the innermost container up to the next container in it, which is opened.
        entry = None
        while entry is None and frames.stack:
            _, path, entries, only_tensors, _ = frames.stack[-1]
            for key, child in entries:  # the iterator goes on where it stopped
                if _is_container(child):
                    entry = (*path, key), child, only_tensors
                    break
                if not only_tensors or type(child) is TensorRef:
                    yield (*path, key), child
            else:
                frames.close()


def _is_container(node: Any) -> bool:
    """Return True if a node may have content; numpy dtypes do not, and are very frequent."""
    if type(node) is Opaque:
        return not node.is_numpy
    return type(node) not in _LEAF_TYPES and isinstance(node, _CONTAINERS)


class _Frames:
    """The open containers of a walk, innermost last."""

    def __init__(self, limits: Limits, enter: Callable[[Path, Any], bool] | None) -> None:
        """Start with no open container."""
        self.stack: list[tuple[Any, Path, Entries, bool, Entries | None]] = []
        """For each level the container, its path, the remaining entries, True if only tensors are
        listed from these, and its hidden entries, from which only tensors are listed later."""
        self._enter = enter
        self._limits = limits
        self._visits = Visits(limits)
        self._open_ids: set[int] = set()
        self._modules: dict[int, OrderedMap | None] = {}
        """The state of each pickled module by id; None for another object."""

    def get_module_state(self, node: Opaque) -> OrderedMap | None:
        """Return the state of a pickled module, computed once; None for any other node."""
        if id(node) not in self._modules:
            self._modules[id(node)] = to_model_state(node, self._limits)
        return self._modules[id(node)]

    def open(self, path: Path, node: Any, only_tensors: bool) -> None:
        """Push a container, unless it is open already or must not be entered.

        With `only_tensors`, the walk lists nothing else from it.
        """
        if id(node) in self._open_ids or (self._enter and not self._enter(path, node)):
            return
        module = self.get_module_state(node) if isinstance(node, Opaque) else None
        size, entries, hidden = _list_contents(node, module)
        self._visits.enter(node, size, len(self.stack))
        self._open_ids.add(id(node))
        self.stack.append((node, path, entries, only_tensors, hidden))

    def close(self) -> None:
        """Continue with the tensors in hidden entries of the innermost container, or leave it."""
        node, path, _, _, hidden = self.stack.pop()
        if hidden is not None:
            only_tensors = True
            self.stack.append((node, path, hidden, only_tensors, None))
        else:
            self._open_ids.discard(id(node))


def _list_contents(node: Any, module: Any) -> tuple[int, Entries, Entries | None]:
    """Return the entry count of a container, entries to list, and entries to search for tensors.

    `module` is the `state_dict()` of a pickled module, None for any other node. Only an object has
    entries that are searched for tensors: its attributes and arguments.
    """
    if isinstance(node, dict):
        return len(node), iter(node.items()), None
    if isinstance(node, (list, tuple)):
        return len(node), enumerate(node), None
    if module is not None:
        opaque = find_opaque_content(node)
        return len(module) + len(opaque), chain(module.items(), opaque.items()), None
    items = list_items(node)
    hidden = list(_iterate_hidden_items(node, len(items)))
    return len(items) + len(hidden), iter(items), iter(hidden)


def list_items(node: Opaque) -> list[tuple[Any, Any]]:
    """Return the keys (or indexes) and values of an object like a dict or list (`deque`).

    They are in the steps that changed the object, or in the argument of a `Counter`.
    """
    items: list[tuple[Any, Any]] = []
    if _is_counter(node):
        items.extend(node.args[0].items())
    for kind, value in node.steps:
        if kind == "set":
            items.extend(value)
        elif kind in ("append", "add"):
            items.extend(enumerate(value, start=len(items)))
    return items


def _is_counter(node: Opaque) -> bool:
    """Return True for a `Counter`, which is pickled as a call with its dict."""
    has_one_dict = (
        isinstance(node.args, tuple) and len(node.args) == 1 and isinstance(node.args[0], dict)
    )
    return has_one_dict and node.class_name == "collections.Counter"


def _iterate_hidden_items(node: Opaque, item_count: int) -> Entries:
    """Yield attributes by name, then arguments, numbered after the items of the object."""
    state = node.attributes
    if state:
        yield from state.items()
    elif node.state is not None:
        yield "state", node.state
    if isinstance(node.args, tuple) and not _is_counter(node):  # whose argument is its items
        yield from enumerate(node.args, start=item_count)
    if isinstance(node.kwargs, dict):
        yield from node.kwargs.items()


def drop_ties(tensors: Iterable[tuple[Path, TensorRef]]) -> list[tuple[Path, TensorRef]]:
    """Return the tensors, with only the first key of each tie."""
    first_by_place: dict[Any, tuple[Path, TensorRef]] = {}
    for path, tensor in tensors:
        first_by_place.setdefault(tensor.place or path, (path, tensor))  # ties share a place
    return list(first_by_place.values())


def find_ties(tensors: Iterable[tuple[Path, TensorRef]]) -> list[tuple[str, ...]]:
    """Return the keys of each tie: tensors with the same `place`."""
    groups: dict[Any, list[str]] = {}
    for path, tensor in tensors:
        if tensor.place is not None:
            groups.setdefault(tensor.place, []).append(name_of(path))
    return [tuple(names) for names in groups.values() if len(names) > 1]


def walk_nodes(root: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf and container with its path, first all leaves, then all containers."""
    containers: list[tuple[Path, Any]] = []

    def record_container(path: Path, node: Any) -> bool:
        """Record a container, and let the walk enter it.

        Objects are entered too, but only modules are recorded: `walk` yields the others as leaves.
        """
        if not isinstance(node, Opaque) or to_model_state(node) is not None:
            containers.append((path, node))
        return True

    yield from walk(root, enter=record_container)
    yield from containers


def descend(node: Any, path: Path) -> Any:
    """Return the node at exactly this path of `walk`, or `MISSING`."""
    for key in path:
        if isinstance(node, dict):
            node = node.get(key, MISSING)
        elif isinstance(node, _CONTAINERS):
            _, entries, hidden_entries = _list_contents(node, to_model_state(node))
            all_entries = chain(entries, hidden_entries or ())  # hidden: attributes, arguments
            node = next((value for name, value in all_entries if name == key), MISSING)
        else:
            return MISSING
    return node
