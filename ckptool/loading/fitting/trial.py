"""What a model's own loading makes of the names: tried on a twin, with tensors of the shapes."""

from __future__ import annotations

import copy
import random
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.errors import CheckpointError
from ckptool.loading.fitting.models import label_of, state_dict_of
from ckptool.loading.fitting.states import State
from ckptool.loading.live.memory import memory_of
from ckptool.loading.live.reach import reaches
from ckptool.loading.live.spreading import is_spread, sharded
from ckptool.loading.live.torch_loading import torch_load
from ckptool.loading.live.twins import twin_of
from ckptool.loading.live.undoing import Snapshot, tensors_of
from ckptool.tensors import torch_dtype
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["Trial", "tried"]

_COPIED = 128 << 20
"""Bytes of a model that are copied, in case that its own code writes to them."""
_MISMATCH = re.compile(r"size mismatch for (.+?): copying a param with shape", re.DOTALL)


@dataclass(frozen=True)
class Trial:
    """What torch says, and what was done."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    mismatched: frozenset[str]
    filled: frozenset[str]
    """Names of the model whose elements were written, or whose tensor was replaced."""
    origins: Mapping[str, str]
    """Of those the ones that are an entry as it was given, each with its name."""


def tried(
    model: torch.nn.Module,
    state: State,
    names: Mapping[str, str],
    metadata: Mapping[str, Any] | None,
    *,
    exact: bool = False,
) -> Trial | None:
    """Give a twin of `model` entries of `state`, by the names that it is to see.

    `exact`: those are all that it has been found to want, see `torch_load`.

    Nothing is read but extra states, and nothing is done to the model. None where it cannot be
    tried: it cannot be copied, or its code wants numbers, or refuses what it gets, or leads to the
    model itself. What knows that by a global is met when it has written to it: up to 128 MiB are
    put back.

    Raises:
        CheckpointError: it has written to a larger model.
    """
    if sharded(model) or any(map(is_spread, tensors_of(model))):
        return None
    keeps = sum(tensor.nbytes for tensor in _real(model)) <= _COPIED
    before = Snapshot(model, copied=lambda tensor: keeps, where_it_differs=True)
    places = [(tensor, *_version(tensor)) for tensor in tensors_of(model)]
    try:
        found = _found(model, state, names, metadata, exact)
        touched = [one for one, *at in places if [*_version(one)] != at]
        touched += [one for one in before.differing() if not any(one is other for other in touched)]
    finally:
        before.restore()  # code that knows the model by another way may have changed it
    if touched and not keeps:
        raise _changed(model, touched)
    return None if touched else found


def _found(
    model: torch.nn.Module,
    state: State,
    names: Mapping[str, str],
    metadata: Mapping[str, Any] | None,
    exact: bool,
) -> Trial | None:
    import torch

    # Where the code builds layers, those are to have no elements either: that is tried second, as
    # numbers that it makes for itself would have none then.
    for place in (nullcontext(), torch.device("meta")):
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _same_dice(), place:
                warnings.simplefilter("ignore")
                given = {name: _stand_in(state, own) for name, own in names.items()}
                return _tried(model, given, metadata, exact)
        except Exception:  # of whatever code of the user's there is
            continue
    return None


def _real(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Its tensors that have elements."""
    from torch.nn.parameter import is_lazy

    return (one for one in tensors_of(model) if not is_lazy(one) and not one.is_meta)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes where a tensor is written to, and where it gets other data."""
    from torch.nn.parameter import is_lazy

    place = memory_of(tensor)
    at = 0 if place is None or is_lazy(tensor) else tensor.data_ptr()
    return -1 if tensor.is_inference() else tensor._version, at


def _changed(model: torch.nn.Module, touched: Sequence[torch.Tensor]) -> CheckpointError:
    named = (*model.named_parameters(), *model.named_buffers())
    names = [printable(name) for name, one in named if any(one is other for other in touched)]
    return CheckpointError(
        f"{printable(label_of(model))}'s own loading was tried on a twin, and has written to the "
        f"model itself, which it knows by a global: {listed(names)} changed",
        hint="load the model anew, by model.load_state_dict(ckptool.load_state_dict(path))",
    )


@contextmanager
def _same_dice() -> Iterator[None]:
    """Leave the random numbers of Python, and of numpy where it is there, as they were."""
    numpy = sys.modules.get("numpy.random")
    state, others = random.getstate(), numpy.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.set_state(others)


def _stand_in(state: State, own: str) -> Any:
    """What stands for an entry: without elements, where it is a tensor."""
    import torch

    slot = state.slots[own]
    if slot.kind == "extra":
        return copy.deepcopy(state.value(own))
    if slot.shape is None or slot.dtype is None:
        raise ValueError("its shape is not known")
    shape = [size or 0 for size in slot.shape]
    return torch.empty(shape, dtype=torch_dtype(slot.dtype), device="meta")


def _tried(
    model: torch.nn.Module,
    given: dict[str, Any],
    metadata: Mapping[str, Any] | None,
    exact: bool,
) -> Trial:
    twin = _apart(model)
    try:
        return _done(twin, given, metadata, frozenset(), exact)
    except RuntimeError as error:
        mismatched = _mismatched(error)
        del twin
    if not mismatched:
        raise ValueError("torch refuses it for another reason than shapes")
    # Torch says no more than that then.
    given = {name: value for name, value in given.items() if name not in mismatched}
    return _done(_apart(model), given, metadata, mismatched, exact)


def _apart(model: torch.nn.Module) -> torch.nn.Module:
    """A twin that does not lead to the model."""
    twin = twin_of(model)
    if reaches(twin, model):
        raise ValueError("its code leads to the model itself")
    return twin


def _done(
    twin: torch.nn.Module,
    given: dict[str, Any],
    metadata: Mapping[str, Any] | None,
    mismatched: frozenset[str],
    exact: bool,
) -> Trial:
    """Load the twin, and look at what was done to it."""
    before = {name: _storage(tensor) for name, tensor in _entries(twin).items()}
    with _writes(given) as written:
        missing, unexpected = _load(twin, given, metadata, exact)
    entries = _entries(twin)
    places = {name: _storage(tensor) for name, tensor in entries.items()}
    filled = {
        name for name, at in places.items() if at in written.storages or at != before.get(name)
    }
    found = {name: written.origin(entries[name]) for name in filled}
    origins = {name: origin for name, origin in found.items() if origin is not None}
    return Trial(frozenset(missing), frozenset(unexpected), mismatched, frozenset(filled), origins)


def _mismatched(error: RuntimeError) -> frozenset[str]:
    """Names of which torch says that their shapes differ, and nothing else."""
    heading, *told = str(error).split("\n\t")
    found = [_MISMATCH.match(line) for line in told]
    if not (heading.startswith("Error(s) in loading state_dict") and all(found)):
        return frozenset()
    return frozenset(match[1] for match in found if match)


def _load(
    twin: torch.nn.Module,
    given: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    exact: bool,
) -> tuple[list[str], list[str]]:
    held = None if metadata is None else copy.deepcopy(dict(metadata))
    return torch_load(twin, OrderedDict(given), held, exact=exact)


def _entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    import torch

    state = state_dict_of(model)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _storage(tensor: torch.Tensor) -> int:
    """Which storage it has; the tensor itself where it has none yet."""
    from torch.nn.parameter import is_lazy

    return id(tensor) if is_lazy(tensor) else tensor.untyped_storage()._cdata


def _writes(given: Mapping[str, Any]) -> Any:
    """A context in which the storages that operations write to are noted, in `storages`.

    `origin` says which of the entries given a tensor is, element by element; None: it is of none,
    or of several, or in another order.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.storages: set[int] = set()
            self._whole: dict[int, tuple[str, torch.Tensor]] = {}
            for name, value in given.items():
                self._take(value, name)

        def _take(self, tensor: Any, name: str | None) -> None:
            """From now on the tensor is this entry, or none."""
            if isinstance(tensor, torch.Tensor):
                self._whole.pop(_storage(tensor), None)
                if name is not None:  # held, so that no other storage gets its number
                    self._whole[_storage(tensor)] = name, tensor.detach()

        def origin(self, tensor: Any) -> str | None:
            """The entry that a tensor is."""
            if not isinstance(tensor, torch.Tensor):
                return None
            name, whole = self._whole.get(_storage(tensor), (None, tensor))
            return name if name is not None and _layout(tensor) == _layout(whole) else None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            packet = func._overloadpacket.__name__
            name = self.origin(args[_SOURCE[packet]]) if packet in _SOURCE else None
            if packet == "copy_" and args[0].numel() != args[1].numel():
                name = None
            made = func(*args, **(kwargs or {}))
            for argument, value in zip(func._schema.arguments, args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(value, torch.Tensor):
                    self.storages.add(_storage(value))
                    self._take(value, name)
            if name is not None and packet != "copy_":
                self._take(made, name)
            return made

    return Writes()


_SOURCE = {"copy_": 1, "clone": 0, "_to_copy": 0}
"""Operations that copy a tensor, each with the argument that it is."""


def _layout(tensor: torch.Tensor) -> Any:
    """Which elements of its storage it has, in which order; a lone one is that in any shape."""
    return tensor.numel() == 1 or (tensor.shape, tensor.stride(), tensor.storage_offset())
