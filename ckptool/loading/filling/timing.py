"""When each tensor is filled: in the end, or where torch comes to its module, for someone looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.loading.filling.reading import Fill, can_fill, fill
from ckptool.loading.live.memory import Memory, memory_of
from ckptool.loading.live.unread import Unread, is_unread
from ckptool.loading.live.watching import Watch, looks

if TYPE_CHECKING:
    import torch

__all__ = ["Fills"]


class Fills:
    """What of a model is filled without torch's doing."""

    def __init__(self, fills: Iterable[Fill], watch: Mapping[int, Watch]) -> None:
        """Tell those that wait until all is done from those that somebody may look at before."""
        every = {id(one.tensor): one for one in fills}
        self._early = {key: one for key, one in every.items() if watch[key] is not Watch.NONE}
        self._places = {key: _place(one.tensor) for key, one in self._early.items()}
        self.late = [one for key, one in every.items() if key not in self._early]
        """Those that nobody looks at before the end."""
        self._all = every.keys()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether it is filled here."""
        return id(tensor) in self._all

    @property
    def late_bytes(self) -> int:
        """How many bytes those are that wait for the end."""
        return sum(one.tensor.nbytes for one in self.late)

    @property
    def are_seen(self) -> bool:
        """Whether somebody looks at any of them."""
        return bool(self._early)

    def given(self, tensor: torch.Tensor, read: Callable[[], Any]) -> torch.Tensor | Unread:
        """What is in the dict for torch: the tensor itself, or what `read` makes if it is asked."""
        return Unread(tensor, read) if id(tensor) in self._early else tensor

    def before(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Fill the tensors of a module that torch has come to; the rest is torch's, as ever.

        That is what nobody has in hand, and what is where it was when all was planned.
        """
        own = dict(self._own(module, state, prefix))
        for name, one in own.items():
            state[name] = one.tensor
        fill({id(one.tensor): one for one in own.values()}.values())

    def _own(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str
    ) -> Iterator[tuple[str, Fill]]:
        if looks(module) is Watch.BEFORE:
            return
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                one = self._early.get(id(tensor))
                if tensor is None or one is None:
                    continue
                value = dict.get(state, prefix + name)  # as it is, unread
                if is_unread(value, tensor) and self._is_as_planned(one):
                    yield prefix + name, one

    def _is_as_planned(self, one: Fill) -> bool:
        """Whether a tensor can be filled still: hooks may have put other data into it."""
        place = self._places[id(one.tensor)]
        return _place(one.tensor) == place and can_fill(one.tensor, one.source)


def _place(tensor: torch.Tensor) -> tuple[int, Memory | None]:
    return tensor.data_ptr(), memory_of(tensor)
