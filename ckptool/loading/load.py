"""`load` and `load_state_dict`: what a checkpoint holds, as ordinary Python and torch objects.

Objects of a fixed table of builtin classes are plain data and are made; any other stays an inert
`Opaque`, whatever it is called.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool._lazy import uncollected
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
    remade,
)
from ckptool.core.names import N_AVERAGED
from ckptool.core.sections import model_state_dict, values_inside, wrapped_names
from ckptool.core.tree import name_of
from ckptool.errors import LimitExceeded, UsageError, warn
from ckptool.formats import opened
from ckptool.loading.inert import InertObject
from ckptool.renamed import renamed_arguments
from ckptool.tensors import Materializer, is_one_part, only_a_part, set_attributes
from ckptool.tensors.materialize import MapLocation
from ckptool.transforms.extraction import plain_state_dict
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_AS_THEY_ARE = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_FACTORIES: dict[str, type[Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (dict, float, int, list, set, str)
}


_TORCH_ARGUMENTS = {
    "device": "it is map_location, as in torch.load",
    "weights_only": "leave it out, because ckptool never runs code of a file",
}
"""Arguments of other loaders, with what to give instead."""


@renamed_arguments(**_TORCH_ARGUMENTS)
@uncollected()
def load(
    path: str | os.PathLike[str] | Checkpoint,
    map_location: MapLocation = "cpu",
    *,
    mmap: bool = False,
) -> Any:
    """Return the whole content of a checkpoint, as `torch.load` does, and run no code of the file.

    Containers, ties, cycles, `_metadata`, parameters, dtypes and sizes are as they were saved. A
    numpy array becomes a tensor, a numpy scalar a number, a tensor subclass a plain tensor. Other
    objects stay inert and show their state as attributes (`load(path)["args"].lr`); a DTensor or
    ShardedTensor is a `ckptool.results.TensorRef`. A tensor attribute that would hide one of the
    class is left out with a warning.

    Args:
        path: A file, an index of shards, the folder of a model, or an open checkpoint.
        map_location: Where to put the tensors, as in `torch.load`; `"meta"` reads no tensor.
        mmap: Map the file privately; it must not be truncated while the tensors live.

    Raises:
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        DeviceError: the device of a tensor is not available; the message names the tensor.
    """
    with opened_and_told(path) as checkpoint:
        return made_tree(checkpoint.root, map_location=map_location, mmap=mmap, views=True)


@contextmanager
def opened_and_told(path: str | os.PathLike[str] | Checkpoint) -> Iterator[Checkpoint]:
    """Open a checkpoint, and warn of what its reader did to the numbers: a cast, by ZeRO-3."""
    with opened(path) as checkpoint:
        if not isinstance(path, Checkpoint):
            for change in checkpoint.changes:
                warn(f"{checkpoint.path}: {change.text}")
        yield checkpoint


def made_tree(
    root: Any,
    *,
    originals: Mapping[int, Any] = MappingProxyType({}),
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
    views: bool = False,
) -> Any:
    """Make the tree `root` of a file; each node once, so that what is shared stays shared.

    `originals` has what nodes stand for, and errors are those of `TreeMaker`.
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
        return maker.made(root)
    finally:
        maker.forget()  # it refers to itself, and would keep the tensors until a collection


class TreeMaker:
    """Makes a tree, or parts of it one by one: each node is made once."""

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

        `originals` has what nodes stand for, by their `id`: those are returned as they are. With
        `views` an object becomes an `InertObject`, else an `Opaque`. Errors are those of
        `Materializer`.
        """
        self._originals = originals
        self._views = views
        self._tensors = Materializer(
            root, convert=self.node, map_location=map_location, mmap=mmap, dtype=dtype
        )
        self._done: dict[int, tuple[Any, Any]] = {}
        self._path: list[Any] = []
        self._makers: dict[type[Any], Callable[[Any], Any]] = {
            OrderedMap: self._mapping,
            dict: self._mapping,
            list: self._sequence,
            tuple: self._sequence,
            Size: self._size,
            TensorRef: self._tensor,
            StorageRef: self._storage,
            DeviceValue: _device,
            Global: _torch_constant,
            Opaque: self._opaque,
            ByteString: str,
        }

    def made(self, node: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return the object that `node` stands for; `path` is its place, for messages."""
        self._path = list(path)
        try:
            return self.node(node)
        except RecursionError as error:
            raise LimitExceeded(
                "containers are nested deeper than Python's stack",
                hint="sys.setrecursionlimit raises it",
            ) from error

    def node(self, node: Any) -> Any:
        """Return the object that a node on the way down stands for."""
        if type(node) in _AS_THEY_ARE:
            return node
        if id(node) in self._originals:
            return self._originals[id(node)]
        known = self._done.get(id(node))
        if known is not None:
            return known[1]
        made = self._makers[type(node)](node)
        # A circle has made a tuple or an object on the way already: that one counts.
        return self._done.setdefault(id(node), (node, made))[1]

    def forget(self) -> None:
        """Release everything that was made."""
        self._done.clear()
        self._tensors.forget()

    def _remember(self, node: Any, made: Any) -> None:
        self._done[id(node)] = (node, made)

    # One level of the tree costs two frames of Python's stack: no helper between them.

    def _mapping(self, node: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedMap) else {}
        self._remember(node, made)
        for key, value in node.items():
            made_key = self.node(key)
            self._path.append(key)
            made_value = self.node(value)
            self._path.pop()
            try:
                made[made_key] = made_value
            except TypeError:  # a set that the file has in the place of a key
                made[key] = made_value
        if isinstance(node, OrderedMap):
            attributes = self.node(node.attributes)
            where = printable(name_of(tuple(self._path))) or "the root"
            set_attributes(made, attributes, where)
        return made

    def _sequence(self, node: Sequence[Any]) -> Any:
        made: list[Any] = []
        if isinstance(node, list):
            self._remember(node, made)
        for at, item in enumerate(node):
            self._path.append(at)
            made.append(self.node(item))
            self._path.pop()
        return made if isinstance(node, list) else tuple(made)

    def _size(self, node: Size) -> Any:
        import torch

        made = self._sequence(node)
        return torch.Size(made) if all(type(item) is int for item in made) else made

    def _tensor(self, node: TensorRef) -> Any:
        if is_one_part(node):
            return node  # a DTensor or its like: only the whole cluster could make it
        return self._tensors.tensor(node, name_of(tuple(self._path)))

    def _storage(self, node: StorageRef) -> Any:
        return self._tensors.storage(node, name_of(tuple(self._path)))

    def _opaque(self, node: Opaque) -> Any:
        if node.find is not None:
            return self.node(node.find())
        made = unpickled(node, self.node)
        if made is not node:
            return made
        copy = replace(node, steps=[])
        shown = InertObject(copy) if self._views else copy
        self._remember(node, shown)
        copy.args, copy.kwargs = self.node(node.args), self.node(node.kwargs)
        copy.steps.extend((kind, self.node(value)) for kind, value in node.steps)
        return shown


def unpickled(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """Return the object of a known builtin class; the node itself for any other class.

    `made` makes the values inside.
    """
    if node.plain is not None:
        return node.plain[1]
    if node.kwargs or not isinstance(node.func, Global) or not isinstance(node.args, tuple):
        return node
    name = node.func.qualified
    match node.args:
        case () if name in _COLLECTIONS and not node.steps:
            return _COLLECTIONS[name](())
        case (list() | tuple() | dict() as held,) if name in _COLLECTIONS and not node.steps:
            try:
                return _COLLECTIONS[name](made(held))
            except TypeError:  # an item that cannot be hashed
                return node
        case (bytes() as raw,) if name == "builtins.bytearray":
            return bytearray(raw)
        case (str() as text, "latin-1") if name == "builtins.bytearray":  # as protocol 2 writes it
            return bytearray(text, "latin-1")
        case (str() as layout,) if name == "torch.serialization._get_layout":
            found = _torch_constant(Global("torch", layout.removeprefix("torch.")))
            return node if isinstance(found, Global) else found
    return _defaultdict(node, made) if name == "collections.defaultdict" else node


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.Counter": Counter,
}


def _defaultdict(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """Make `defaultdict(factory)` and SETITEMS, where the factory is a builtin class."""
    match node.args:
        case () | (None,):
            result: defaultdict[Any, Any] = defaultdict()
        case (Global() as factory,) if factory.qualified in _FACTORIES:
            result = defaultdict(_FACTORIES[factory.qualified])
        case _:
            return node
    if any(step != "set" for step, _ in node.steps):
        return node
    for _, items in node.steps:
        result.update(made(dict(items)))
    return result


def _torch_constant(node: Global) -> Any:
    """Return the dtype, layout, memory format or qscheme that a global names, or the global.

    It is looked up in what torch has loaded already, so that nothing is imported.
    """
    import torch

    if node.module != "torch":
        return node
    found = vars(torch).get(node.name)
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return found if isinstance(found, kinds) else node


def _device(node: DeviceValue) -> torch.device | DeviceValue:
    """Return the `torch.device`; the inert value where this torch knows no such device."""
    import torch

    try:
        return torch.device(node.tag)
    except RuntimeError:
        return node


@renamed_arguments(**_TORCH_ARGUMENTS)
@uncollected()
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

    `_metadata` comes with it. A pickled module or a TorchScript archive gives what the module's
    `state_dict()` returns. Tied tensors stay tied, a Parameter stays one. Entries that no model
    loads are left out with a `CheckpointWarning`: values, and `n_averaged` of an `AveragedModel`.

    Args:
        path: A file, an index of shards, the folder of a model, or an open checkpoint.
        map_location: Where to put the tensors, as in `torch.load`.
        key: The address of the state dict (such as `"ema"`), if the file has several.
        wrappers: `"strip"` or `"keep"` the prefixes of DataParallel, `torch.compile` and others.
        dtype: The type that floating tensors are cast to.
        mmap: Map the file privately; it must not be truncated while the tensors live.

    Raises:
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        NotFound: there is no state dict, or none at `key` (`AmbiguousName`: there are several).
        NameCollision: two tensors have the same key without the wrapper.
        DeviceError: the device of a tensor is not available; the message names the tensor.
        UnsupportedFormat: the file has only one rank's part of a DTensor or ShardedTensor.
        UsageError: `wrappers` is neither word, or `dtype` is not a floating type.
    """
    if wrappers not in ("strip", "keep"):
        raise UsageError(f"wrappers={wrappers!r} is neither 'strip' nor 'keep'")
    with opened_and_told(path) as checkpoint:
        section = model_state_dict(checkpoint, key)
        if section.unread:
            unread = listed(section.unread)
            warn(f"{checkpoint.path}: the state dict is returned without {unread}")
        chosen = checkpoint.with_root(plain_state_dict(checkpoint, section))
        if wrappers == "strip":
            chosen = _stripped(chosen)
        for name, value in chosen.root.items():
            if isinstance(value, TensorRef) and is_one_part(value):
                raise only_a_part(value, str(name))
        chosen = _without(chosen, values_inside(chosen.root), "no model takes")
        made: OrderedDict[str, Any] = made_tree(
            chosen.root, map_location=map_location, mmap=mmap, dtype=dtype
        )
        return made


def _stripped(chosen: Checkpoint) -> Checkpoint:
    """Remove wrapper names, and the counter of an `AveragedModel`."""
    stripped = chosen.strip_module()
    counters = [
        new
        for old, new in zip(chosen.root, stripped.root, strict=True)
        if new == N_AVERAGED and _counts_averages(old, chosen)
    ]
    return _without(stripped, counters, "counts what was averaged, in a wrapper that is gone")


def _counts_averages(name: str, chosen: Checkpoint) -> bool:
    """Return whether all other tensors are in a `module` beside it, and none beside that."""
    inside = f"{name.removesuffix(N_AVERAGED)}module."
    return all(other == name or other.startswith(inside) for other in wrapped_names(chosen.root))


def _without(chosen: Checkpoint, names: list[Any], reason: str) -> Checkpoint:
    """Leave some entries out, with a warning."""
    if not names:
        return chosen
    shown = listed(f"'{name}'" for name in names)
    warn(f"{chosen.path}: the state dict is returned without {shown}, which {reason}")
    gone = frozenset(names)
    left = ((name, value) for name, value in chosen.root.items() if name not in gone)
    return chosen.with_root(remade(chosen.root, left))
