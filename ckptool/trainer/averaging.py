"""A moving average of the weights (EMA), which is often the better model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckptool.loading.ranks import spread_like

__all__ = ["Average"]


class Average:
    """`average = decay * average + (1 - decay) * weights` after every step; buffers are copied.

    B. Polyak, A. Juditsky: Acceleration of stochastic approximation by averaging, 1992; as
    `torch.optim.swa_utils.get_ema_multi_avg_fn` has it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin with the weights that `module`, the bare one, has now."""
        self._module, self._decay = module, decay
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew, with the weights that the model has now."""
        self._state = {name: one.detach().clone() for name, one in self._live().items()}

    def _live(self) -> dict[str, torch.Tensor]:
        state = self._module.state_dict()
        return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of one more step."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for name, now in self._live().items():
            if name in parameters and now.is_floating_point():
                self._state[name].lerp_(now.detach(), 1 - self._decay)
            else:
                self._state[name].copy_(now)

    def state(self) -> dict[str, Any]:
        """The average by the names of the bare model: a state dict to be loaded into it."""
        return dict(self._state)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from an average of the same model; False: it is of another, nothing is done."""
        if state.keys() != self._state.keys():
            return False
        for name, own in self._state.items():
            own.copy_(spread_like(own, state[name]))
        return True
