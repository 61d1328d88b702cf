"""When each tensor is filled: in the end, or where torch comes to its module, for someone looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.loading.filling.reading import Fill, can_fill, fill
from ckptool.loading.live.undoing import Snapshot
from ckptool.loading.live.unread import Unread, is_unread, raw
from ckptool.loading.live.watching import Watch, has_extra_state, looks

if TYPE_CHECKING:
    import torch

__all__ = ["Fills"]


class Fills:
    """What of a model is filled without torch's doing."""

    def __init__(self, fills: Iterable[Fill], watch: Mapping[int, Watch]) -> None:
        """Tell those that wait until all is done from those that a hook wants to see."""
        self._all = {id(one.tensor): one for one in fills}
        self._shapes = {key: one.tensor.shape for key, one in self._all.items()}
        seen = self._seen = {key: watch[key] for key in self._all}
        self._late = {key: self._all[key] for key in seen if seen[key] <= Watch.ABOVE}
        self._waiting = {key: self._all[key] for key in seen if seen[key] is Watch.AFTER}
        """What torch has not come to, of those that wait for it."""

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

    @property
    def are_seen(self) -> bool:
        """Whether somebody looks at any of them."""
        return any(self._seen.values())

    def visitor(self, snapshot: Snapshot, value: Callable[[str], Any]) -> Visit | None:
        """What is to be done on torch's way through the model; None: nothing.

        `value` makes what the file has under a name.
        """
        return Visit(self, snapshot, value) if self.are_seen else None

    def given(self, tensor: torch.Tensor, read: Callable[[], Any]) -> torch.Tensor | Unread:
        """What is in the dict for torch: the tensor itself, or what `read` makes if it is asked."""
        return Unread(tensor, read) if self._seen[id(tensor)] is Watch.BEFORE else tensor

    def own(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str
    ) -> Iterator[tuple[str, Fill]]:
        """The fills of a module whose values nobody has in hand, with their names."""
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                one = self._all.get(id(tensor))
                if tensor is None or one is None:
                    continue
                value = dict.get(state, prefix + name)  # as it is, unread
                if self._seen[id(tensor)] is not Watch.BEFORE:
                    is_left = value is tensor
                else:
                    is_left = is_unread(value, tensor) and looks(module) < Watch.BEFORE
                if is_left:
                    yield prefix + name, one

    def is_as_planned(self, one: Fill) -> bool:
        """Whether a tensor can be filled still: hooks may have put other data into it."""
        tensor = one.tensor
        return tensor.shape == self._shapes[id(tensor)] and can_fill(tensor, one.source)

    def fill_now(self, fills: Iterable[Fill]) -> None:
        """Fill those that do not wait for the end."""
        now = {id(one.tensor): one for one in fills if id(one.tensor) not in self._late}
        fill(now.values())
        for key in now:
            self._waiting.pop(key, None)

    def of(self, value: Any) -> Fill | None:
        """The fill of what stands for itself in the dict for torch; None: it is none."""
        return self._all.get(id(value))

    def leave(self, one: Fill) -> None:
        """Fill it no more: torch does."""
        for some in (self._late, self._waiting):
            some.pop(id(one.tensor), None)

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
        own: list[Fill] = []
        for name, one in self._fills.own(module, state, prefix):
            if self._fills.is_as_planned(one):
                own.append(one)
                state[name] = one.tensor
            else:
                self._leave(one)
                state[name] = self._value(one.name)
        self._fills.fill_now(own)
        self._inside = _inside(module)

    def after(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Where an extra state has made what is inside anew, torch gets the real elements."""
        if self._inside == _inside(module):
            return
        for name, value in list(raw(state)):
            one = self._fills.of(value) if "." in name[len(prefix) :] else None
            if one is not None:
                self._leave(one)
                state[name] = self._value(one.name)

    def _leave(self, one: Fill) -> None:
        """Leave a tensor to torch, after all."""
        self._snapshot.copy(one.tensor)
        self._fills.leave(one)


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
