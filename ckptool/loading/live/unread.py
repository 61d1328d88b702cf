"""A state dict whose tensors are read when someone asks for them, which most hooks never do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Unread", "UnreadDict", "is_unread", "raw"]

_MISSING = object()


class Unread:
    """A value that nobody has asked for; read once, and then the same for all."""

    __slots__ = ("_read", "_value", "tensor")

    def __init__(self, tensor: torch.Tensor, read: Callable[[], Any]) -> None:
        """`tensor`: the model's, that it is for."""
        self.tensor, self._read, self._value = tensor, read, _MISSING

    def is_for(self, tensor: torch.Tensor) -> bool:
        """Whether it is that tensor's, and nobody has it in hand, who may have changed it."""
        return self.tensor is tensor and self._value is _MISSING

    def value(self) -> Any:
        """The value itself."""
        if self._value is _MISSING:
            self._value = self._read()
        return self._value


class _Items(ItemsView[str, Any]):
    def __reversed__(self) -> Iterator[tuple[str, Any]]:
        held: Any = self._mapping  # type: ignore[attr-defined]
        return ((name, held[name]) for name in reversed(held))


class _Values(ValuesView[Any]):
    def __reversed__(self) -> Iterator[Any]:
        held: Any = self._mapping  # type: ignore[attr-defined]
        return (held[name] for name in reversed(held))


class UnreadDict(OrderedDict[str, Any]):
    """A dict like any other, for code that asks it; `raw` has its items without reading them."""

    changes = 0
    """How often anything in it was changed."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Put a value in, which is a change."""
        self.changes += 1
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        """Take one out, which is a change."""
        self.changes += 1
        super().__delitem__(name)

    def clear(self) -> None:
        """Take all out, which is a change."""
        self.changes += 1
        super().clear()

    def read(self) -> None:
        """Read all that is left: it is kept longer than its file is open."""
        for name in self:
            self[name] = self[name]

    def __getitem__(self, name: str) -> Any:
        """The value, read."""
        value = super().__getitem__(name)
        return value.value() if type(value) is Unread else value

    def get(self, name: str, default: Any = None) -> Any:
        """The value, read, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, default: Any = _MISSING) -> Any:
        """The value, read, that is no longer in it."""
        if name not in self:
            if default is _MISSING:
                raise KeyError(name)
            return default
        value = self[name]
        del self[name]
        return value

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        """The last item, or the first, that is no longer in it."""
        self.changes += 1
        name, value = super().popitem(last)
        return name, value.value() if type(value) is Unread else value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value, read, or from now on the default."""
        if name not in self:
            self[name] = default
        return self[name]

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """The items, read one by one."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The values, read one by one."""
        return _Values(self)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        """A plain one, all read."""
        return OrderedDict(self.items())

    def __eq__(self, other: object) -> bool:
        """Whether it has the same items, read."""
        return self.copy() == other

    def __ne__(self, other: object) -> bool:
        """Whether it has not."""
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        """A copy, or what is pickled, is a plain one."""
        return OrderedDict, (list(self.items()),)


def is_unread(value: Any, tensor: torch.Tensor) -> bool:
    """Whether it is what is for a tensor, and nobody has asked for it."""
    return type(value) is Unread and value.is_for(tensor)


def raw(state: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """The items of any dict as they are, unread ones too."""
    return OrderedDict.items(state) if isinstance(state, UnreadDict) else state.items()
