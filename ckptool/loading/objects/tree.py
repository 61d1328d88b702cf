"""The tree of a checkpoint as ordinary Python and torch objects; what is a class stays inert."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool.errors import LimitExceeded
from ckptool.loading.objects.plain import torch_constant, unpickled
from ckptool.model import (
    ByteString,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
)
from ckptool.tensors import Materialiser, is_one_part, set_attributes
from ckptool.tree import name_of
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["TreeMaker", "made_tree"]

_AS_THEY_ARE = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))


def made_tree(root: Any, **options: Any) -> Any:
    """What stands for the tree `root` in Python and torch; `options` as `Materialiser`'s.

    Each node of the file is made once: what is shared or circular stays so.

    Raises:
        TorchMissing, DeviceError, CorruptFile, UnsupportedFormat, UsageError: as `Materialiser`.
        LimitExceeded: it is nested deeper than Python can follow.
    """
    maker = TreeMaker(root, **options)
    try:
        return maker.made(root)
    finally:
        maker.forget()  # it refers to itself, and would keep the tensors until a collection


class TreeMaker:
    """One pass over a tree, or over parts of it: each node is made once."""

    def __init__(
        self, root: Any, *, originals: Mapping[int, Any] = MappingProxyType({}), **options: Any
    ) -> None:
        """Plan the tensors below `root`; `options` as `Materialiser`'s.

        `originals` has what nodes of these `id`s stand for, which is taken as it is.

        Raises:
            TorchMissing, DeviceError, UsageError: as `Materialiser`.
        """
        self._originals = originals
        self._tensors = Materialiser(root, convert=self.node, **options)
        self._done: dict[int, tuple[Any, Any]] = {}
        self._path: list[Any] = []
        self._makers: dict[type[Any], Callable[[Any], Any]] = {
            OrderedMap: self._mapping,
            dict: self._mapping,
            list: self._list,
            tuple: self._tuple,
            Size: self._size,
            TensorRef: self._tensor,
            StorageRef: self._storage,
            DeviceValue: _device,
            Global: torch_constant,
            Opaque: self._opaque,
            ByteString: str,
        }

    def made(self, node: Any, path: tuple[Any, ...] = ()) -> Any:
        """What stands for `node` in Python; `path` is where it stands, for messages.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `Materialiser.tensor`.
            LimitExceeded: it is nested deeper than Python can follow.
        """
        self._path = list(path)
        try:
            return self.node(node)
        except RecursionError as error:
            raise LimitExceeded(
                "containers are nested deeper than Python's stack",
                hint="sys.setrecursionlimit raises it",
            ) from error

    def node(self, node: Any) -> Any:
        """The same for a node on the way down."""
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
        """Let go of all that was made."""
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
            made[made_key if _hashable(made_key) else key] = self.node(value)
            self._path.pop()
        if isinstance(node, OrderedMap):
            attributes = self.node(node.attributes)
            where = printable(name_of(tuple(self._path))) or "the root"
            set_attributes(made, attributes, where)
        return made

    def _list(self, node: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._remember(node, made)
        for at, item in enumerate(node):
            self._path.append(at)
            made.append(self.node(item))
            self._path.pop()
        return made

    def _tuple(self, node: tuple[Any, ...]) -> tuple[Any, ...]:
        made: list[Any] = []
        for at, item in enumerate(node):
            self._path.append(at)
            made.append(self.node(item))
            self._path.pop()
        return tuple(made)

    def _size(self, node: Size) -> tuple[Any, ...]:
        import torch

        made = self._tuple(node)
        return torch.Size(made) if all(type(item) is int for item in made) else made

    def _tensor(self, node: TensorRef) -> Any:
        if is_one_part(node):
            return node  # a DTensor or its like: only the whole cluster could make it
        return self._tensors.tensor(node, name_of(tuple(self._path)))

    def _storage(self, node: StorageRef) -> Any:
        return self._tensors.storage(node, name_of(tuple(self._path)))

    def _opaque(self, node: Opaque) -> Any:
        made = unpickled(node, self.node)
        if made is not node:
            return made
        copy = replace(node, steps=[])
        self._remember(node, copy)
        copy.args, copy.kwargs = self.node(node.args), self.node(node.kwargs)
        copy.steps.extend((kind, self.node(value)) for kind, value in node.steps)
        return copy


def _device(node: DeviceValue) -> torch.device | DeviceValue:
    """The `torch.device`; the inert value where this torch knows no such kind of device."""
    import torch

    try:
        return torch.device(node.tag)
    except RuntimeError:
        return node


def _hashable(key: Any) -> bool:
    """Whether it can be a key: a set that the file has in one's place cannot."""
    if not isinstance(key, Hashable):
        return False
    try:
        hash(key)
    except TypeError:  # a tuple with a list inside
        return False
    return True
