"""Record a model and its optimizer, to restore both if loading fails halfway."""

from __future__ import annotations

import copy
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckptool.errors import warn
from ckptool.loading.ranks import is_dtensor
from ckptool.tensors.live import locate_tensor
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_CONTAINERS = frozenset((dict, OrderedDict, set, list))


def list_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return every parameter and buffer once, including those that no state dict contains."""
    tensors = (
        tensor
        for module in model.modules()
        for owned in (module._parameters, module._buffers)
        for tensor in owned.values()
    )
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def iterate_layers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and the optimizers that it wraps (in accelerate, Lightning, ZeRO)."""
    seen: list[Any] = []
    while hasattr(optimizer, "__dict__") and not any(optimizer is layer for layer in seen):
        seen.append(optimizer)
        yield optimizer
        attributes = vars(optimizer)
        candidates = (attributes.get(name) for name in ("optimizer", "_optimizer", "optim"))
        optimizer = next((value for value in candidates if hasattr(value, "load_state_dict")), None)


class Snapshot:
    """The content of a model and an optimizer: attributes, tensors, extra states."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        copied: Callable[[torch.Tensor], bool],
        with_state: bool = False,
    ) -> None:
        """Remember everything; copy the elements of the model's tensors for which `copied` is True.

        With `with_state`, also copy those of the optimizer's state: torch's own code makes new
        tensors and leaves the old ones unchanged, other code may write to them.
        """
        self._label = type(model).__name__
        self._classes = [(module, type(module)) for module in model.modules()]
        """Each module with its class: a lazy module changes it when it runs."""
        self._containers = [
            _ContainerState(attributes)
            for module, _ in self._classes
            for attributes in (vars(module), *vars(module).values())
            if type(attributes) in _CONTAINERS
        ]
        self._tensors = [
            _TensorState(tensor, copied=copied(tensor)) for tensor in list_tensors(model)
        ]
        for layer in iterate_layers(optimizer):
            self._record_optimizer(layer, with_state=with_state)
        self._extra_states = [
            _ExtraState(module) for module, _ in self._classes if _has_extra(module)
        ]

    def _record_optimizer(self, optimizer: Any, *, with_state: bool) -> None:
        """Remember the attributes, groups and state of an optimizer.

        Tensors among the options of a group, such as a learning rate, are always copied.
        """
        import torch

        groups, state = getattr(optimizer, "param_groups", ()), getattr(optimizer, "state", {})
        parameter_ids = {id(parameter) for group in groups for parameter in group["params"]}
        self._containers.append(_ContainerState(vars(optimizer)))
        option_by_id = _collect_mutable(groups, {})
        node_by_id = _collect_mutable(state, dict(option_by_id))
        for node_id, node in node_by_id.items():
            if not isinstance(node, torch.Tensor):
                self._containers.append(_ContainerState(node))
            elif node_id not in parameter_ids:  # parameters are among the model's tensors
                is_copied = with_state or node_id in option_by_id
                self._tensors.append(_TensorState(node, copied=is_copied))

    def restore(self) -> None:
        """Restore everything in the same objects; elements only if they were copied.

        Elements of tensors that are plain attributes, and the content of other objects, are
        restored only if an extra state has them. A part that cannot be restored causes a warning.
        """
        for module, old_class in self._classes:
            if type(module) is not old_class:  # a lazy module that has run
                module.__class__ = old_class
        parts: list[Any] = [*self._containers, *self._extra_states, *self._tensors]
        for part in parts:
            try:
                part.restore()
            except Exception as error:  # the setter of an extra state may raise anything
                text = printable(str(error))
                warn(f"could not fully restore {printable(self._label)}: {text}")


def _collect_mutable(node: Any, collected: dict[int, Any]) -> dict[int, Any]:
    """Add the dicts, lists and tensors in a node to `collected` by their `id`, and return it."""
    import torch

    if id(node) in collected:
        return collected
    if isinstance(node, (dict, list, torch.Tensor)):
        collected[id(node)] = node
    if isinstance(node, (dict, list, tuple)):
        for value in list(node.values()) if isinstance(node, dict) else node:
            _collect_mutable(value, collected)
    return collected


class _ContainerState:
    """A dict, list or set, and its content."""

    def __init__(self, container: Any) -> None:
        """Copy the container, but not its items."""
        self._container = container
        # Most containers of a module, such as those of its hooks, are empty: no copy saves time.
        self._content = container.copy() if container else ()

    def restore(self) -> None:
        """Put the old content back, if it has changed."""
        container, content = self._container, self._content
        if _list_identities(container) == _list_identities(content):
            return
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _list_identities(container: Any) -> list[Any]:
    """Return the identities of the items: tensors have no single answer to equality."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(item) for item in container]


class _TensorState:
    """A tensor, the address of its elements, and a copy of them if requested."""

    __slots__ = ("content", "data", "is_leaf", "kind", "memory", "requires_grad", "tensor")

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        """Remember the tensor; with `copied`, also copy its elements to the CPU, if it has any."""
        from torch.nn.parameter import is_lazy

        self.tensor, self.kind = tensor, type(tensor)
        self.data, self.memory = tensor.data, locate_tensor(tensor)
        """A second tensor over the same memory, which keeps it alive, and its location."""
        self.requires_grad, self.is_leaf = tensor.requires_grad, tensor.is_leaf
        self.content: torch.Tensor | None = None
        """The copied elements; those of a DTensor stay on its device."""
        if copied and not is_lazy(tensor) and not self.data.is_meta:
            device = self.data.device if is_dtensor(tensor) else "cpu"
            self.content = _remove_repeats(self.data).to(device, copy=True)

    def restore(self) -> None:
        """Restore the class, memory, elements and `requires_grad` of the tensor."""
        import torch

        tensor = self.tensor
        has_other_class = type(tensor) is not self.kind  # a lazy parameter that has got its shape
        if has_other_class or locate_tensor(tensor) != self.memory:
            tensor.data = self.data
        if has_other_class:
            tensor.__class__ = self.kind
        if self.content is not None:
            with torch.no_grad():
                _remove_repeats(self.data).copy_(self.content)  # torch cannot write repeats
        if self.is_leaf and not tensor.is_leaf:
            tensor.detach_()  # a hook assigned a result that asks for gradients
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)


def _remove_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a writable view of an expanded tensor, without the repeated elements."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


class _ExtraState:
    """The extra state of a module, copied: loading may change objects inside it in place."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Copy the extra state of the module; one that cannot be copied is kept itself."""
        self._module = module
        state = module.get_extra_state()
        try:
            self._state = copy.deepcopy(state)
        except Exception:  # whatever an object's own copying raises
            self._state = state

    def restore(self) -> None:
        """Set the old extra state again, if it has changed."""
        # The attributes of the module are restored already, which is enough for most states.
        try:
            is_same = bool(self._module.get_extra_state() == self._state)
        except Exception:  # tensors inside, or whatever an object's own comparing raises
            is_same = False
        if not is_same:
            self._module.set_extra_state(self._state)


def _has_extra(module: torch.nn.Module) -> bool:
    """Return True if the module has an extra state that can be set."""
    import torch

    base, kind = torch.nn.Module, type(module)
    return (
        kind.set_extra_state is not base.set_extra_state
        and kind.get_extra_state is not base.get_extra_state
    )


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay Ctrl-C, and a SIGTERM that the program handles, until the block has ended.

    Each signal is handled then, even if the block or an earlier handler raises an error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread
        return
    signals: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[..., Any]] = {}
    try:
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda *received: signals.append(received))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as handled:  # which calls all, the last one first
            for number, frame in reversed(signals):
                handled.callback(handlers[number], number, frame)
