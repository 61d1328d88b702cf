"""What is kept of each parameter, made for the optimizer that takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptool.loading.fitting.contents import loss_of
from ckptool.loading.fitting.states import State
from ckptool.loading.live.memory import dtype_name
from ckptool.loading.live.spreading import is_spread, spread_like
from ckptool.loading.objects.plain import unpickled
from ckptool.loading.optimizers.saved import Kept, Saved, place_of
from ckptool.loading.optimizers.undo import innermost, layers
from ckptool.matching import Cast
from ckptool.matching.slots import holds
from ckptool.model import Opaque, TensorRef
from ckptool.tensors import is_one_part
from ckptool.tree import name_of, walk
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["Maker", "casts", "casts_state", "holds_inert", "undealt", "unmade"]

_MANY = 64
"""Numbers from which a search through a list is slower than a question."""
_PLAIN = (int, float, str, bytes, type(None))
"""What needs not be made: options mostly, of which there are many where there are many groups."""


def unmade(saved: Saved, kept: Mapping[int, Kept]) -> str | None:
    """What of the state no torch object can be made of, as a sentence; None where all can."""
    for one in kept.values():
        for path, leaf in walk(one.state):
            what = ""
            if isinstance(leaf, TensorRef) and is_one_part(leaf):
                what = "the part that one rank had of a tensor, or a tensor of a class of its own"
            elif _is_inert(leaf):
                what = f"a {printable(leaf.class_name)}, which is never made"
            if what:
                return f"{printable(place_of(saved, one.key, *path))} is {what}"
    return None


def undealt(
    saved: Saved, kept: Mapping[int, Kept], parameters: Sequence[torch.Tensor]
) -> str | None:
    """Why state cannot be dealt out to the ranks that have parts of a parameter; None: it can.

    It is cut as the parameter is; of a tensor of another shape nobody knows which part is whose.
    """
    for number, one in kept.items():
        if not is_spread(parameters[number]):
            continue
        shape = tuple(parameters[number].shape)
        for path, leaf in walk(one.state):
            if isinstance(leaf, TensorRef) and leaf.shape not in ((), shape):
                return (
                    f"{printable(place_of(saved, one.key, *path))} has the shape "
                    f"{list(leaf.shape)}, and its parameter, a DTensor, {list(shape)}: which part "
                    "of it is which rank's is not known"
                )
    return None


def _is_inert(node: Any) -> bool:
    return isinstance(node, Opaque) and unpickled(node, lambda inside: inside) is node


def holds_inert(node: Any) -> bool:
    """Whether it is, or holds, an object that is never made."""
    return any(_is_inert(leaf) for _, leaf in walk(node))


def casts(
    state: State,
    saved: Saved,
    kept: Mapping[int, Kept],
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
) -> Iterator[Cast]:
    """The tensors whose elements change type, as `Optimizer.load_state_dict` changes them.

    All of a floating parameter's state gets its type, but for `step`. What is lost is looked for
    where the types could lose something.
    """
    for number, one in kept.items():
        parameter = parameters[number]
        if not parameter.is_floating_point():
            continue
        after = dtype_name(parameter)
        for path, leaf in walk(one.state):
            if not isinstance(leaf, TensorRef) or leaf.dtype == after or path[-1:] == ("step",):
                continue
            lossy, told = not holds(after, leaf.dtype), ""
            if lossy:
                value = partial(state.made, leaf, map_location="cpu", mmap=False)
                loss = loss_of(leaf, value, after)
                told = "" if loss is None else str(loss)
                lossy = loss is None or bool(told)
            where = place_of(saved, one.key, *path)
            yield Cast(name_of((names[number], *path)), where, leaf.dtype, after, lossy, told)


def casts_state(optimizer: Any) -> bool:
    """Whether the state is put into the types of the parameters, as torch does it."""
    import torch

    *_, innermost = layers(optimizer)
    return type(innermost).load_state_dict is torch.optim.Optimizer.load_state_dict


def _holds_text(node: Any) -> bool:
    containers = (str, list, tuple, dict)
    return isinstance(node, containers) and any(isinstance(leaf, str) for _, leaf in walk(node))


class _Numbers(list[int]):
    """Numbers in a row; torch asks the list of a group for each of its parameters' tensors."""

    def __contains__(self, number: object) -> bool:
        """Whether it is one of them, without a search."""
        return isinstance(number, int) and bool(self) and self[0] <= number <= self[-1]


@dataclass(frozen=True)
class Maker:
    """Makes the state dict that the optimizer itself takes, position by position."""

    state: State
    saved: Saved
    kept: Mapping[int, Kept]
    groups: Sequence[int]
    """For each group of the optimizer that of the file."""
    names: Sequence[str | None]
    """What the model inside all wrappers calls the parameters."""

    def stored(self) -> Iterator[tuple[str, TensorRef]]:
        """Every tensor of it, with its address."""
        for path, leaf in walk(self.saved.section.node):
            if isinstance(leaf, TensorRef):
                yield name_of((*self.saved.section.path, *path)), leaf

    def load(self, optimizer: Any) -> None:
        """Have the optimizer load it, by its own `load_state_dict`.

        Of a text torch makes the name of a generator's object: such are put right.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `State.made`.
        """
        optimizer.load_state_dict(self.state_dict(optimizer))
        if not casts_state(optimizer):
            return
        optimizer = innermost(optimizer)
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        for number, one in self.kept.items():
            for key, node in one.state.items() if isinstance(one.state, dict) else ():
                if _holds_text(node):
                    parameter = parameters[number]
                    texts = self._of_parameter({key: node}, parameter)
                    optimizer.state[parameter].update(texts)

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """A new one, tensors where their parameters are; `step` and what is nobody's on the CPU.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `State.made`.
        """
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        made: dict[Any, Any] = {
            number: self._of_parameter(one.state, parameters[number])
            for number, one in self.kept.items()
        }
        for key, node in self.saved.shared.items():
            if not holds_inert(node):
                made[key] = self._here(node)
        beside = {
            key: self._here(node)
            for key, node in self.saved.section.node.items()
            if key not in ("state", "param_groups") and not holds_inert(node)
        }
        return {**beside, "state": made, "param_groups": list(self._groups(optimizer))}

    def _of_parameter(self, node: Any, parameter: torch.Tensor) -> Any:
        """What is kept of one, on its device; this rank's part, where it is spread over ranks."""
        device = str(parameter.device) if parameter.device.type == "cuda" else "cpu"
        if not isinstance(node, dict) or (device == "cpu" and not is_spread(parameter)):
            return self._here(node, device)
        return {
            key: _dealt(self._here(value, "cpu" if key == "step" else device), key, parameter)
            for key, value in node.items()
        }

    def _here(self, node: Any, device: str = "cpu") -> Any:
        """A node made on a device. Nothing of it is the caller's own: steps will change it."""
        made = self.state.made(node, map_location=device, mmap=False)
        if self.saved.tree.format != "memory":
            return made
        return _mapped(made, lambda tensor: tensor.detach().to(device, copy=True))

    def _groups(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        """The options of the file, and those of the optimizer that the file has not."""
        first = 0
        for own, number in zip(optimizer.param_groups, self.groups, strict=True):
            options = {
                key: self._option(node, own.get(key))
                for key, node in self.saved.options[number].items()
                if key not in ("params", "param_names") and not holds_inert(node)
            }
            group = {key: value for key, value in own.items() if key != "params"} | options
            after = first + len(own["params"])
            names = self.names[first:after]
            if "param_names" in self.saved.options[number] and None not in names:
                group.setdefault("param_names", list(names))
            numbers = range(first, after)
            yield {**group, "params": (list if len(numbers) < _MANY else _Numbers)(numbers)}
            first = after

    def _option(self, node: Any, own: Any) -> Any:
        """A learning rate that is a tensor stays on the device that the optimizer has its on."""
        import torch

        if isinstance(node, _PLAIN):
            return node
        made = self._here(node)
        if isinstance(made, torch.Tensor) and isinstance(own, torch.Tensor):
            return made.to(own.device)
        return made


def _dealt(node: Any, key: Any, parameter: torch.Tensor) -> Any:
    """What is of the whole of a parameter, spread as that is; `step` is a number."""
    if key == "step" or not is_spread(parameter):
        return node
    return _mapped(
        node, lambda one: spread_like(parameter, one) if one.shape == parameter.shape else one
    )


def _mapped(node: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree with other tensors, in new containers."""
    import torch

    if isinstance(node, torch.Tensor):
        return change(node)
    if isinstance(node, dict):
        return {key: _mapped(value, change) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)([_mapped(value, change) for value in node])
    return node
