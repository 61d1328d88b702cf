"""A model as it was, to be put back where loading into it fails half way."""

from __future__ import annotations

import copy
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import memory_of
from ckptool.loading.live.spreading import is_spread

if TYPE_CHECKING:
    import torch

__all__ = ["Snapshot", "held_back", "tensors_of"]


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer, once each, also those that no state dict has."""
    seen: set[int] = set()
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for tensor in list(held.values()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


class Snapshot:
    """What a model is made of: its modules' attributes, its tensors, its extra states."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        copied: Callable[[torch.Tensor], bool],
        where_it_differs: bool = False,
    ) -> None:
        """Look at the model; of the tensors that are `copied` the elements are kept too.

        An extra state is set again unless it is surely as it was; or only `where_it_differs`.
        """
        self._modules = [_Attributes(module) for module in model.modules()]
        self._tensors = [_Held(tensor, copied=copied(tensor)) for tensor in tensors_of(model)]
        self._by_id: dict[int, _Held] | None = None
        self._extra = [
            _Extra(module, where_it_differs) for module in model.modules() if _has(module)
        ]

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy the elements of one after all, as they are now."""
        if self._by_id is None:
            self._by_id = {id(held.tensor): held for held in self._tensors}
        found = self._by_id.get(id(tensor))
        if found is not None and found.content is None:
            found.copy()

    def differing(self) -> list[torch.Tensor]:
        """Those that are copied, and have other elements now."""
        return [held.tensor for held in self._tensors if held.differs()]

    def restore(self) -> None:
        """Put everything back, the same objects as before. What is not copied is left alone.

        That is parameters, buffers, modules, their attributes, and what is directly in a dict, set
        or list among those. What other objects hold, and the elements of a tensor that is a plain
        attribute, only where an extra state has it, by the module's own setter.

        Where a part cannot be put back, the others are all the same; the first error is raised.
        """
        failed: list[Exception] = []
        parts: tuple[_Attributes | _Extra | _Held, ...]
        parts = (*self._modules, *self._extra, *self._tensors)
        for part in parts:
            try:
                part.restore()
            except Exception as error:  # an extra state's setter may raise anything
                failed.append(error)
        if failed:
            raise failed[0]


class _Attributes:
    """The attributes of a module, and what its own containers hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._kind = type(module)
        self._held = dict(vars(module))
        self._inside = [
            (value, value.copy() if value else ())
            for value in self._held.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        if type(self._module) is not self._kind:
            self._module.__class__ = self._kind
        attributes = vars(self._module)
        for name in [name for name in attributes if name not in self._held]:
            del attributes[name]
        attributes.update(self._held)
        for container, content in self._inside:
            _refill(container, content)


_CONTAINERS = frozenset((dict, OrderedDict, set, list))


def _refill(container: Any, content: Any) -> None:
    """Make a dict, set or list hold what it held, where it does not."""
    if _holds(container) == _holds(content):
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _holds(container: Any) -> list[Any]:
    """What a container holds, by identity: tensors have no equality of one answer."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(item) for item in container]


class _Held:
    """A tensor, where its elements lie, and where wanted what they are."""

    __slots__ = ("content", "data", "is_leaf", "kind", "memory", "requires_grad", "tensor")

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self.tensor, self.kind = tensor, type(tensor)
        self.data, self.memory = tensor.data, memory_of(tensor)
        self.requires_grad, self.is_leaf = tensor.requires_grad, tensor.is_leaf
        self.content: torch.Tensor | None = None
        if copied:
            self.copy()

    def copy(self) -> None:
        """Copy the elements, where it has any."""
        from torch.nn.parameter import is_lazy

        if not is_lazy(self.tensor) and not self.data.is_meta:
            home = self.data.device if is_spread(self.tensor) else "cpu"
            self.content = _unrepeated(self.data).to(home, copy=True)

    def differs(self) -> bool:
        """Whether it is copied, and its elements are others, bit for bit."""
        import torch

        if self.content is None:
            return False
        now, then = (_unrepeated(one) for one in (self.data, self.content))
        if now.layout is not torch.strided or now.is_nested or now.is_quantized:
            return False
        now, then = (one.contiguous().reshape(-1).view(torch.uint8) for one in (now, then))
        return not torch.equal(now.cpu(), then)

    def restore(self) -> None:
        import torch

        tensor = self.tensor
        if type(tensor) is not self.kind or memory_of(tensor) != self.memory:
            tensor.data = self.data
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        if self.content is not None:
            with torch.no_grad():
                _unrepeated(self.data).copy_(self.content)
        if self.is_leaf and not tensor.is_leaf:
            tensor.detach_()  # a hook computed what it holds from what asks for gradients
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements that an expanded tensor repeats: those can be written to."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


class _Extra:
    """The extra state of a module."""

    def __init__(self, module: torch.nn.Module, where_it_differs: bool) -> None:
        self._module = module
        self._state = _extra_state(module)
        self._is_same = (None, True) if where_it_differs else (True,)

    def restore(self) -> None:
        # The module's attributes are what they were; what they hold may have been changed in place.
        if _equal(self._module.get_extra_state(), self._state) not in self._is_same:
            self._module.set_extra_state(self._state)


def _has(module: torch.nn.Module) -> bool:
    """Whether it has an extra state that can be set."""
    import torch

    base, kind = torch.nn.Module, type(module)
    return (
        kind.set_extra_state is not base.set_extra_state
        and kind.get_extra_state is not base.get_extra_state
    )


def _extra_state(module: torch.nn.Module) -> Any:
    """A copy of it, as loading may change what it holds in place; itself where there is none."""
    state = module.get_extra_state()
    try:
        return copy.deepcopy(state)
    except Exception:  # whatever an object's own copying raises
        return state


def _equal(one: Any, other: Any) -> bool | None:
    """Whether two extra states are the same; None: that cannot be told."""
    import torch

    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (dict, list, tuple)):
        if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
            return False
        pairs = ((one[at], other[at]) for at in (one if isinstance(one, dict) else range(len(one))))
        found = {_equal(*pair) for pair in pairs}
        return False if False in found else None if None in found else True
    comparing: Any = type(one).__eq__
    if comparing is object.__eq__:
        return None
    try:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if type(one).__module__ == "numpy":
            return (one.dtype, one.shape, one.tobytes()) == (
                other.dtype,
                other.shape,
                other.tobytes(),
            )
        return bool(one == other)
    except Exception:  # whatever an object's own comparing raises
        return None


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C, and a request to end that the program handles, only count when this is through.

    Each that came is handled then, whatever the handlers before it, or what is done, raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread
        return
    came: list[tuple[Callable[..., Any], int, FrameType | None]] = []
    before: dict[int, Callable[..., Any]] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append((before[number], number, frame))

    try:
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _handle(came)


def _handle(came: Sequence[tuple[Callable[..., Any], int, FrameType | None]]) -> None:
    if came:
        handler, number, frame = came[0]
        try:
            handler(number, frame)
        finally:
            _handle(came[1:])
