"""Live Python and torch objects as a checkpoint's tree: plain data, and tensors over their memory.

What is no plain data is refused, with the place where it stands and what would help: nothing is
pickled whose class a reader would have to import.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ckptool.checkpoint import Checkpoint
from ckptool.errors import NotRepresentable
from ckptool.loading.saving.advice import remedy, spelled
from ckptool.loading.saving.live_tensors import LiveTensors
from ckptool.model import DeviceValue, Global, Opaque, OrderedMap, Size

__all__ = ["frozen"]

_AS_THEY_ARE = frozenset((type(None), bool, float, complex, str, bytes))
_MOST_BITS = 8 * 255 - 1
"""Of an integer that torch's safe unpickler reads."""
_KEYS = (str, int, float, complex, bytes, bool, type(None), tuple, DeviceValue, Global)


def frozen(root: Any, *, instead: Mapping[int, Any], file: str) -> Checkpoint:
    """The checkpoint that is to become `file`; no tensor is copied or moved yet.

    What is one object, or lies in one storage, stays so; storages are cut down to what tensors see.
    `instead` has what is taken in the place of some objects, by `id`. Tensors are detached, on the
    CPU, and no Parameters.

    Raises:
        NotRepresentable: something that is no plain data, a tensor that has no elements here.
    """
    freezer = _Freezer(instead, file)
    try:
        checkpoint = Checkpoint(freezer.node(root), "torch-zip", file)
    except RecursionError as error:
        text = "containers are nested deeper than Python's stack"
        raise NotRepresentable(text, file=file) from error
    return checkpoint.compact() if freezer.tensors.see_parts else checkpoint


class _Freezer:
    """One pass over a tree."""

    def __init__(self, instead: Mapping[int, Any], file: str) -> None:
        import torch

        self._instead = instead
        self._file = file
        self.tensors = LiveTensors()
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()
        self._path: list[Any] = []
        self._tensor = torch.Tensor
        self._makers: dict[type[Any], Callable[[Any], Any]] = {
            dict: self._mapping,
            OrderedDict: self._mapping,
            list: self._list,
            tuple: self._tuple,
            set: self._set,
            Counter: self._counter,
            torch.Size: self._size,
            torch.device: lambda node: DeviceValue(str(node)),
            torch.dtype: lambda node: Global("torch", str(node).removeprefix("torch.")),
        }

    def node(self, node: Any) -> Any:
        """What stands for `node` in the tree."""
        if type(node) in _AS_THEY_ARE:
            return node
        if type(node) is int:
            return self._integer(node)
        node = self._instead.get(id(node), node)
        known = self._done.get(id(node))
        if known is not None:
            return known[1]
        if id(node) in self._open:
            self._refuse(node, "holds itself")
        self._open.add(id(node))
        made = self._made(node)
        self._open.discard(id(node))
        return self._remember(node, made)

    def _made(self, node: Any) -> Any:
        maker = self._makers.get(type(node))
        if maker is not None:
            return maker(node)
        if isinstance(node, self._tensor):
            return self._tensor_over(node)
        number = _plain_number(node)
        return self._refuse(node) if number is None else self.node(number)

    def _tensor_over(self, node: Any) -> Any:
        try:
            return self.tensors.frozen(node)
        except NotRepresentable as error:
            message = f"{self._place()}: {error.message}"
            raise NotRepresentable(message, file=self._file, hint=error.hint) from error

    def _remember(self, node: Any, made: Any) -> Any:
        self._done[id(node)] = (node, made)
        return made

    def _refuse(self, node: Any, fact: str = "is no plain data") -> NoReturn:
        kind = type(node)
        owner = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise NotRepresentable(
            f"{self._place()}: {owner}{kind.__qualname__} {fact}",
            file=self._file,
            hint=remedy(node, self._path),
        )

    def _place(self) -> str:
        """Where the pass is."""
        return spelled(self._path)

    def _below(self, key: Any, node: Any) -> Any:
        self._path.append(key)
        made = self.node(node)
        self._path.pop()
        return made

    def _integer(self, node: int) -> int:
        if node.bit_length() > _MOST_BITS:
            self._refuse(node, f"of {node.bit_length():,} bits is more than torch reads")
        return node

    def _mapping(self, node: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedMap() if isinstance(node, OrderedDict) else {}
        self._remember(node, made)
        for key, value in node.items():
            made[self._key(key)] = self._below(key, value)
        if isinstance(made, OrderedMap) and vars(node):
            made.attributes = {key: self._below(key, value) for key, value in vars(node).items()}
        return made

    def _key(self, key: Any) -> Any:
        if type(key) is str:
            return key
        made = self._below(key, key)
        if not isinstance(made, _KEYS):
            self._refuse(key, "is a key, and no plain one")
        return made

    def _list(self, node: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._remember(node, made)
        made.extend(self._below(at, item) for at, item in enumerate(node))
        return made

    def _tuple(self, node: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._below(at, item) for at, item in enumerate(node)])

    def _size(self, node: tuple[int, ...]) -> Size:
        return Size(self._tuple(node))

    def _set(self, node: set[Any]) -> Opaque:
        """In order, where its items have one: equal sets make equal files."""
        try:
            items = sorted(node)
        except TypeError:
            items = list(node)
        return Opaque(Global("builtins", "set"), ([self._key(item) for item in items],))

    def _counter(self, node: Counter[Any]) -> Opaque:
        return Opaque(Global("collections", "Counter"), (self._mapping(dict(node)),))


def _plain_number(node: Any) -> Any:
    """The number, text or truth value that a numpy scalar is; None for anything else."""
    if not any((kind.__module__, kind.__name__) == _SCALAR for kind in type(node).__mro__):
        return None
    number = node.item()
    return number if type(number) in (bool, int, float, complex, str, bytes) else None


_SCALAR = ("numpy", "generic")
