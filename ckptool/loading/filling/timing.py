"""When each tensor is filled: in the end, or where torch comes to its module, for someone looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.loading.filling.reading import Fill, fill
from ckptool.loading.filling.undoing import Snapshot
from ckptool.loading.filling.watching import Watch, has_extra_state

if TYPE_CHECKING:
    import torch

__all__ = ["Fills"]


class Fills:
    """What of a model is filled without torch's doing. In the dict for torch each is itself."""

    def __init__(self, fills: Iterable[Fill], watch: Mapping[int, Watch]) -> None:
        """Tell those that wait until all is done from those that a hook wants to see."""
        self._all = {id(one.tensor): one for one in fills}
        seen = {key: watch[key] for key in self._all}
        self._late = {key: self._all[key] for key in seen if seen[key] <= Watch.ABOVE}
        self._waiting = {key: one for key, one in self._all.items() if key not in self._late}
        """Those of the others that torch has not come to."""
        self._is_seen = any(seen.values())

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether it is filled here."""
        return id(tensor) in self._all

    @property
    def late(self) -> list[Fill]:
        """Those that nobody looks at before the end."""
        return list(self._late.values())

    @property
    def late_bytes(self) -> int:
        """How many bytes those are."""
        return sum(one.tensor.nbytes for one in self._late.values())

    def visitor(self, snapshot: Snapshot, value: Callable[[str], Any]) -> Visit | None:
        """What is to be done on torch's way through the model; None: nothing.

        `value` makes what the file has under a name.
        """
        return Visit(self, snapshot, value) if self._is_seen else None

    def fill_own(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Fill the tensors of a module that torch copies onto themselves next."""
        found: dict[int, Fill] = {}
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                one = None if id(tensor) in self._late else self._all.get(id(tensor))
                if one is not None and state.get(prefix + name) is tensor:
                    found[id(tensor)] = one
        fill(found.values())
        for key in found:
            self._waiting.pop(key, None)

    def left_to_torch(self, tensor: Any) -> Fill | None:
        """A fill that torch is to make in the place of this; None: it is none."""
        for some in (self._late, self._waiting):
            some.pop(id(tensor), None)
        return self._all.get(id(tensor))

    def end(self) -> None:
        """What torch did not come to is filled with the rest."""
        self._late.update(self._waiting)


class Visit:
    """Torch on its way through a model, with what is filled there."""

    def __init__(self, fills: Fills, snapshot: Snapshot, value: Callable[[str], Any]) -> None:
        """See `Fills.visitor`."""
        self._fills, self._snapshot, self._value = fills, snapshot, value
        self._inside: list[tuple[str, int]] = []

    def before(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Fill what its extra state and hooks will see."""
        self._fills.fill_own(module, state, prefix)
        self._inside = _inside(module)

    def after(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Where an extra state has made what is inside anew, torch gets the real elements."""
        if self._inside == _inside(module):
            return
        for name, value in state.items():
            inside = "." in name[len(prefix) :]
            one = self._fills.left_to_torch(value) if inside else None
            if one is not None:
                self._snapshot.keep(one.tensor)
                state[name] = self._value(one.name)


def _inside(module: torch.nn.Module) -> list[tuple[str, int]]:
    """Which tensors are in the modules inside one that has an extra state, and where."""
    if not has_extra_state(module):
        return []
    return [
        (f"{path}.{name}", id(tensor))
        for path, one in module.named_modules(remove_duplicate=False)
        if one is not module
        for held in (one._parameters, one._buffers)
        for name, tensor in held.items()
    ]
