"""One node of a checkpoint: a value, a tensor's head and statistics, or an object's parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import without_query
from ckptool.inspection.listing import RepeatedBytes, StorageNames, TensorRow, tensor_row
from ckptool.inspection.numbers import Statistics, decode, statistics
from ckptool.inspection.values import class_of, is_value, json_path, json_value, summarise
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import Opaque, Path, TensorRef
from ckptool.modules import module_state
from ckptool.tree import name_of, resolve, settled

__all__ = ["Shown", "ShownContainer", "ShownObject", "ShownTensor", "ShownValue", "show"]

HEAD = 8
_Entries = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shown(ABC):
    """The part that every answer of `show` has."""

    file: str
    path: tuple[str | int, ...]
    name: str

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.show/1`."""
        return {
            "schema": "ckptool.show/1",
            "file": self.file,
            "path": self.path,
            "name": self.name,
            **self._content(),
        }

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """Return the keys of this kind of answer."""


@dataclass(frozen=True, slots=True)
class ShownTensor(Shown):
    """A tensor: its row, first elements, and statistics over all of it."""

    row: TensorRow
    head: tuple[Any, ...]
    """The first elements in row-major order; empty where the kind has no plain elements."""
    statistics: Statistics | None
    parts: _Entries = ()
    """The parts of a tensor that is not plainly strided."""

    def _content(self) -> dict[str, Any]:
        row = self.row.to_dict()
        facts = {key: row[key] for key in row if key not in ("path", "name")}
        stats = self.statistics
        return {
            "what": "tensor",
            **facts,
            "head": [json_value(number) for number in self.head],
            "min": json_value(stats.minimum) if stats else None,
            "max": json_value(stats.maximum) if stats else None,
            "mean": json_value(stats.mean) if stats else None,
            "nan": stats.nan if stats else None,
            "infinite": stats.infinite if stats else None,
            "parts": dict(self.parts),
        }


@dataclass(frozen=True, slots=True)
class ShownValue(Shown):
    """A plain value."""

    type: str
    value: Any

    def _content(self) -> dict[str, Any]:
        return {"what": "value", "type": self.type, "value": json_value(self.value)}


@dataclass(frozen=True, slots=True)
class ShownObject(Shown):
    """An object of any other class: its arguments and content, in words."""

    class_name: str
    arguments: tuple[str, ...]
    attributes: _Entries
    items: _Entries

    def _content(self) -> dict[str, Any]:
        return {
            "what": "object",
            "class": self.class_name,
            "arguments": list(self.arguments),
            "attributes": [list(entry) for entry in self.attributes],
            "items": [list(entry) for entry in self.items],
        }


@dataclass(frozen=True, slots=True)
class ShownContainer(Shown):
    """A dict, list or tuple: its entries, in words."""

    type: str
    entries: _Entries

    def _content(self) -> dict[str, Any]:
        return {
            "what": "container",
            "type": self.type,
            "entries": [list(entry) for entry in self.entries],
        }


def show(
    checkpoint: Checkpoint,
    name: Any,
    *,
    count: int = HEAD,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Shown:
    """Show the node at the address `name`; of a tensor, the first `count` elements.

    Raises:
        NotFound: no node has the address (`AmbiguousName`: several nodes have it).
        LimitExceeded: the strides of a tensor repeat more bytes than `limits` allows.
    """
    path, node = _attribute(checkpoint, str(name)) or resolve(checkpoint, name)
    node = settled(node)
    place = (without_query(checkpoint.path), json_path(path), name_of(path))
    if isinstance(node, TensorRef):
        return _tensor(place[0], path, node, count, progress, RepeatedBytes(limits))
    if isinstance(node, Opaque) and node.plain is not None:
        return ShownValue(*place, *node.plain)
    if is_value(node):
        return ShownValue(*place, type(node).__name__, node)
    if isinstance(node, (dict, list, tuple)):
        return ShownContainer(*place, _container_name(node), _entries(node))
    return _object(place, node)


def _attribute(checkpoint: Checkpoint, name: str) -> tuple[Path, Any] | None:
    """Return an attribute of a pickled module, such as `model/names`, which is in no state dict."""
    for part in checkpoint.sections:
        if part.kind == "module":
            held = part.holder.attributes
            attribute = name.removeprefix(f"{part.name}/")
            if (part.name == "") == (attribute == name) and attribute in held:
                return (*part.path, attribute), held[attribute]
    return None


def _tensor(
    file: str,
    path: Path,
    tensor: TensorRef,
    count: int,
    progress: Callable[[int, int], None] | None,
    repeated: RepeatedBytes,
) -> ShownTensor:
    head: tuple[Any, ...] = ()
    spans = None
    if tensor.has_content:
        once = tensor.unrepeated
        repeated.add(path, once)
        head = _head(tensor, count)
        done = 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, once.nbytes)

        spans = statistics(tensor, tell)
    row = tensor_row(path, tensor, StorageNames())
    parts = tuple((str(key), summarise(part)) for key, part in (tensor.parts or {}).items())
    return ShownTensor(file, row.path, row.name, row, head, spans, parts)


def _head(tensor: TensorRef, count: int) -> tuple[Any, ...]:
    """Return the first `count` elements; read no more than the first blocks that hold them."""
    wanted = min(count, tensor.numel) * tensor.itemsize
    data = b""
    for block in tensor.content():
        data += block[: wanted - len(data)]
        if len(data) >= wanted:
            break
    numbers = decode(tensor.dtype, data)
    return tuple(map(bool, numbers)) if tensor.dtype == "bool" else tuple(numbers)


def _object(place: tuple[str, tuple[str | int, ...], str], node: Any) -> ShownObject:
    if not isinstance(node, Opaque):
        return ShownObject(*place, class_of(node), (summarise(node),), (), ())
    module = module_state(node)
    if module is not None:
        return ShownObject(*place, node.class_name, (), (), _entries(module))
    arguments = node.args if isinstance(node.args, tuple) else (node.args,)
    attributes: Any = node.attributes
    if not attributes and node.state is not None:
        attributes = {"state": node.state}
    return ShownObject(
        *place,
        node.class_name,
        tuple(summarise(argument) for argument in arguments),
        _entries(attributes),
        tuple(_items(node.steps)),
    )


def _items(steps: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the items of an object that is filled like a list, set or dict."""
    for kind, value in steps:
        if kind == "set":
            yield from ((_key(key), summarise(item)) for key, item in value)
        elif kind in ("append", "add"):
            yield from ((str(index), summarise(item)) for index, item in enumerate(value))


def _entries(node: Any) -> _Entries:
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    return tuple((_key(key), summarise(value)) for key, value in pairs)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def _container_name(node: Any) -> str:
    names = {"OrderedMap": "OrderedDict", "Size": "torch.Size"}
    return names.get(type(node).__name__, type(node).__name__)
