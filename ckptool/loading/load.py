"""`load` and `load_state_dict`: the content of a checkpoint as Python and torch objects.

Objects of a fixed set of builtin classes are plain data and are created. All others stay an inert
`Opaque`, regardless of their class name.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool._lazy import pause_gc
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import (
    ByteString,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
    copy_with_items,
)
from ckptool.core.names import N_AVERAGED
from ckptool.core.sections import find_model_state_dict, list_value_keys, list_wrappable_keys
from ckptool.core.tree import name_of
from ckptool.errors import LimitExceeded, UsageError, warn
from ckptool.formats import open_or_reuse
from ckptool.loading.inert import InertObject
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors import Materializer, is_one_part, only_part_error, set_attributes
from ckptool.tensors.storages import MapLocation
from ckptool.transforms.extraction import copy_state_dict
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_FACTORY_BY_NAME: dict[str, type[Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (dict, float, int, list, set, str)
}


_HINT_BY_TORCH_ARGUMENT = {
    "device": "use map_location, as in torch.load",
    "weights_only": "leave it out: ckptool never runs code from a file",
}
"""Arguments of other loaders, with the replacement for each."""


@refuse_renamed_arguments(**_HINT_BY_TORCH_ARGUMENT)
@pause_gc()
def load(
    path: str | os.PathLike[str] | Checkpoint,
    map_location: MapLocation = "cpu",
    *,
    mmap: bool = False,
) -> Any:
    """Return the whole content of a checkpoint, as `torch.load` does, without running its code.

    Containers, ties, cycles, `_metadata`, parameters, dtypes and sizes are preserved. A numpy array
    becomes a tensor, a numpy scalar a number, and a tensor subclass a plain tensor. Other objects
    stay inert and show their state as attributes (`load(path)["args"].lr`). A DTensor or
    ShardedTensor is returned as a `ckptool.results.TensorRef`. Tensor attributes that would hide
    one of the class are left out with a warning.

    Args:
        path: A file, an index of shards, a model folder, or an open checkpoint.
        map_location: The device of the tensors, as in `torch.load`; `"meta"` reads no tensor data.
        mmap: Map the file privately. Do not truncate it while the tensors exist.

    Raises:
        UnreadableFile: if the file cannot be opened as a checkpoint; see `ckptool.open`.
        DeviceError: if the device of a tensor is not available; the message includes its path.
    """
    with open_with_warnings(path) as checkpoint:
        return make_tree(checkpoint.root, map_location=map_location, mmap=mmap, views=True)


@contextmanager
def open_with_warnings(path: str | os.PathLike[str] | Checkpoint) -> Iterator[Checkpoint]:
    """Open a checkpoint, and warn about values that its reader changed, such as a ZeRO-3 cast."""
    with open_or_reuse(path) as checkpoint:
        if not isinstance(path, Checkpoint):  # its caller already has the `changes`
            for change in checkpoint.changes:
                warn(f"{checkpoint.path}: {change.text}")
        yield checkpoint


def make_tree(
    root: Any,
    *,
    originals: Mapping[int, Any] = MappingProxyType({}),
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
    views: bool = False,
) -> Any:
    """Create the objects of the tree `root`, each node once, so that shared nodes stay shared.

    `originals` maps nodes to existing objects. Errors are those of `TreeMaker`.
    """
    maker = TreeMaker(
        root,
        originals=originals,
        map_location=map_location,
        mmap=mmap,
        dtype=dtype,
        views=views,
    )
    try:
        return maker.make(root)
    finally:
        maker.forget()  # it is a reference cycle, which would keep the tensors alive


class TreeMaker:
    """Creates the objects of a tree, or of parts of it; each node once."""

    def __init__(
        self,
        root: Any,
        *,
        originals: Mapping[int, Any] = MappingProxyType({}),
        map_location: MapLocation = "cpu",
        mmap: bool = False,
        dtype: torch.dtype | str | None = None,
        views: bool = False,
    ) -> None:
        """Plan the tensors below `root`.

        `originals` maps the `id` of a node to an existing object, which is returned unchanged. With
        `views`, objects become `InertObject`, otherwise `Opaque`. Errors are those of
        `Materializer`.
        """
        self._originals = originals
        self._views = views
        self._tensors = Materializer(
            root, convert=self.make_node, map_location=map_location, mmap=mmap, dtype=dtype
        )
        self._made_by_id: dict[int, tuple[Any, Any]] = {}
        """By `id` of a node: the node, so that its `id` stays in use, and its object."""
        self._current_path: list[Any] = []
        """The keys on the way to the node that is being made, for messages."""
        self._maker_by_type: dict[type[Any], Callable[[Any], Any]] = {
            OrderedMap: self._make_mapping,
            dict: self._make_mapping,
            list: self._make_sequence,
            tuple: self._make_sequence,
            Size: self._make_size,
            TensorRef: self._make_tensor,
            StorageRef: self._make_storage,
            DeviceValue: _make_device,
            Global: _find_torch_constant,
            Opaque: self._make_object,
            ByteString: str,  # the text without its bytes
        }

    def make(self, node: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return the object of `node`; `path` is its path for messages."""
        self._current_path = list(path)
        try:
            return self.make_node(node)
        except RecursionError as error:
            raise LimitExceeded(
                "containers are nested deeper than Python's stack",
                hint="raise the limit with sys.setrecursionlimit",
            ) from error

    def make_node(self, node: Any) -> Any:
        """Return the object of a node; containers and objects call it for their items."""
        if type(node) in _PLAIN_TYPES:
            return node
        if id(node) in self._originals:
            return self._originals[id(node)]
        known = self._made_by_id.get(id(node))
        if known is not None:
            return known[1]
        new = self._maker_by_type[type(node)](node)
        # A cycle may already have created a tuple or an object for this node: use that.
        return self._made_by_id.setdefault(id(node), (node, new))[1]

    def forget(self) -> None:
        """Release all created objects."""
        self._made_by_id.clear()
        self._tensors.forget()

    def _remember(self, node: Any, new: Any) -> None:
        """Register the object of a node before its items are made, for cycles."""
        self._made_by_id[id(node)] = (node, new)

    # Each tree level costs two Python stack frames, so do not add helpers in between.

    def _make_mapping(self, node: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict, or an `OrderedDict` with its attributes."""
        new: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedMap) else {}
        self._remember(node, new)
        for key, value in node.items():
            new_key = self.make_node(key)
            self._current_path.append(key)
            new_value = self.make_node(value)
            self._current_path.pop()
            try:
                new[new_key] = new_value
            except TypeError:  # the file has a set as a key
                new[key] = new_value
        if isinstance(node, OrderedMap):
            attributes = self.make_node(node.attributes)
            where = printable(name_of(tuple(self._current_path))) or "the root"
            set_attributes(new, attributes, where)
        return new

    def _make_sequence(self, node: Sequence[Any]) -> Any:
        """Return a list or tuple."""
        new: list[Any] = []
        if isinstance(node, list):  # a tuple exists only after its items
            self._remember(node, new)
        for index, item in enumerate(node):
            self._current_path.append(index)
            new.append(self.make_node(item))
            self._current_path.pop()
        return new if isinstance(node, list) else tuple(new)

    def _make_size(self, node: Size) -> Any:
        """Return a `torch.Size`, or a tuple if an item is no integer: a Size has only these."""
        import torch

        items = self._make_sequence(node)
        return torch.Size(items) if all(type(item) is int for item in items) else items

    def _make_tensor(self, node: TensorRef) -> Any:
        """Return a tensor, or the node if it is one rank's part."""
        if is_one_part(node):
            return node  # such as a DTensor, which needs all ranks
        return self._tensors.make_tensor(node, name_of(tuple(self._current_path)))

    def _make_storage(self, node: StorageRef) -> Any:
        return self._tensors.make_storage(node, name_of(tuple(self._current_path)))

    def _make_object(self, node: Opaque) -> Any:
        """Return a builtin object, or an inert view of any other object."""
        if node.find is not None:  # it is in a separate file
            return self.make_node(node.find())
        new = rebuild_builtin(node, self.make_node)
        if new is not node:
            return new
        copy = replace(node, steps=[])
        view = InertObject(copy) if self._views else copy
        self._remember(node, view)  # before its content, which may refer to the object
        copy.args, copy.kwargs = self.make_node(node.args), self.make_node(node.kwargs)
        copy.steps.extend((kind, self.make_node(value)) for kind, value in node.steps)
        return view


def rebuild_builtin(node: Opaque, make: Callable[[Any], Any]) -> Any:
    """Return the object if its class is a known builtin class, otherwise the node.

    These are the collections in `_COLLECTION_BY_NAME`, bytearray and defaultdict, in the forms that
    pickle writes, for example `set([1, 2])`; `make` creates the values inside. Numbers that the
    reader has already computed (`plain`) and `torch.layout` constants are returned too.
    """
    if node.plain is not None:
        return node.plain[1]
    if node.kwargs or not isinstance(node.func, Global) or not isinstance(node.args, tuple):
        return node
    name = node.func.qualified
    match node.args:
        case () if name in _COLLECTION_BY_NAME and not node.steps:
            return _COLLECTION_BY_NAME[name](())
        case (list() | tuple() | dict() as content,) if (
            name in _COLLECTION_BY_NAME and not node.steps
        ):
            try:
                return _COLLECTION_BY_NAME[name](make(content))
            except TypeError:  # an unhashable item
                return node
        case (bytes() as raw,) if name == "builtins.bytearray":
            return bytearray(raw)
        case (str() as text, "latin-1") if name == "builtins.bytearray":  # written by protocol 2
            return bytearray(text, "latin-1")
        case (str() as layout,) if name == "torch.serialization._get_layout":
            constant = _find_torch_constant(Global("torch", layout.removeprefix("torch.")))
            is_unknown = isinstance(constant, Global)
            return node if is_unknown else constant
    return _rebuild_defaultdict(node, make) if name == "collections.defaultdict" else node


_COLLECTION_BY_NAME: dict[str, Callable[[Any], Any]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.Counter": Counter,
}


def _rebuild_defaultdict(node: Opaque, make: Callable[[Any], Any]) -> Any:
    """Return a `defaultdict` with its items, if the factory is a builtin class or missing.

    Otherwise, or if the pickle also sets attributes, the node is returned.
    """
    match node.args:
        case () | (None,):
            result: defaultdict[Any, Any] = defaultdict()
        case (Global() as factory,) if factory.qualified in _FACTORY_BY_NAME:
            result = defaultdict(_FACTORY_BY_NAME[factory.qualified])
        case _:
            return node
    if any(step != "set" for step, _ in node.steps):
        return node
    for _, items in node.steps:
        result.update(make(dict(items)))
    return result


def _find_torch_constant(node: Global) -> Any:
    """Return the torch dtype, layout, memory format or qscheme of a global, or the global itself.

    Only names that torch has already loaded are looked up, so that nothing is imported.
    """
    import torch

    if node.module != "torch":
        return node
    value = vars(torch).get(node.name)
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return value if isinstance(value, kinds) else node


def _make_device(node: DeviceValue) -> torch.device | DeviceValue:
    """Return the `torch.device`, or the inert value if this torch does not know the device."""
    import torch

    try:
        return torch.device(node.tag)
    except RuntimeError:
        return node


@refuse_renamed_arguments(**_HINT_BY_TORCH_ARGUMENT)
@pause_gc()
def load_state_dict(
    path: str | os.PathLike[str] | Checkpoint,
    map_location: MapLocation = "cpu",
    *,
    key: Any = None,
    wrappers: str = "strip",
    dtype: torch.dtype | str | None = None,
    mmap: bool = False,
) -> OrderedDict[str, Any]:
    """Return the state dict of a model, ready for `model.load_state_dict`.

    `_metadata` is included. For a pickled module or a TorchScript archive, the result equals the
    module's `state_dict()`. Tied tensors stay tied, and a Parameter stays a Parameter. Entries that
    no model loads (values, and `n_averaged` of an `AveragedModel`) are left out with a
    `CheckpointWarning`.

    Args:
        path: A file, an index of shards, a model folder, or an open checkpoint.
        map_location: The device of the tensors, as in `torch.load`.
        key: The path of the state dict, such as `"ema"`, if the file has several.
        wrappers: `"strip"` or `"keep"` the prefixes of DataParallel, `torch.compile` and others.
        dtype: Cast floating-point tensors to this dtype.
        mmap: Map the file privately. Do not truncate it while the tensors exist.

    Raises:
        UnreadableFile: if the file cannot be opened as a checkpoint; see `ckptool.open`.
        NotFound: if the file has no state dict, or none at `key` (`AmbiguousName`: if several).
        NameCollision: if two tensors have the same key without wrapper prefixes.
        DeviceError: if the device of a tensor is not available; the message includes its path.
        UnsupportedFormat: if the file has only one rank's part of a DTensor or ShardedTensor.
        UsageError: if `wrappers` has another value, or `dtype` is not a floating-point dtype.
    """
    if wrappers not in ("strip", "keep"):
        raise UsageError(f"wrappers={wrappers!r} is not 'strip' or 'keep'")
    with open_with_warnings(path) as checkpoint:
        section = find_model_state_dict(checkpoint, key)
        if section.unread:
            unread = listed(section.unread)
            warn(f"{checkpoint.path}: left out of the state dict: {unread}")
        chosen = checkpoint.with_root(copy_state_dict(checkpoint, section))
        if wrappers == "strip":
            chosen = _strip_wrappers(chosen)
        for name, value in chosen.root.items():
            if isinstance(value, TensorRef) and is_one_part(value):
                raise only_part_error(value, str(name))
        chosen = _leave_out(chosen, list_value_keys(chosen.root), "no model loads")
        state_dict: OrderedDict[str, Any] = make_tree(
            chosen.root, map_location=map_location, mmap=mmap, dtype=dtype
        )
        return state_dict


def _strip_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Remove wrapper prefixes, and with a warning the counter of a removed `AveragedModel`."""
    stripped = checkpoint.strip_module()
    counters = [  # a layer may have a buffer of this name, which stays
        new_key
        for old_key, new_key in zip(checkpoint.root, stripped.root, strict=True)
        if new_key == N_AVERAGED and _is_average_counter(old_key, checkpoint)
    ]
    return _leave_out(stripped, counters, "belongs to the wrapper that was removed")


def _is_average_counter(key: str, checkpoint: Checkpoint) -> bool:
    """Return True if all other tensors are in a `module` next to this counter.

    An `AveragedModel` has only these two children.
    """
    prefix = f"{key.removesuffix(N_AVERAGED)}module."
    return all(
        other == key or other.startswith(prefix) for other in list_wrappable_keys(checkpoint.root)
    )


def _leave_out(checkpoint: Checkpoint, keys: list[Any], reason: str) -> Checkpoint:
    """Leave out entries, with a warning: "left out of the state dict: KEYS, which REASON"."""
    if not keys:
        return checkpoint
    shown = listed(f"'{key}'" for key in keys)
    warn(f"{checkpoint.path}: left out of the state dict: {shown}, which {reason}")
    dropped_keys = frozenset(keys)
    kept = ((key, value) for key, value in checkpoint.root.items() if key not in dropped_keys)
    return checkpoint.with_root(copy_with_items(checkpoint.root, kept))
