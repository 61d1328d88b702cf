"""Layers spread over devices in their order: the activations travel, the weights stay."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from ckptool.errors import TrainingError
from ckptool.trainer.data import moved, shape
from ckptool.trainer.devices import device_of
from ckptool.trainer.events import Observer, Traced
from ckptool.trainer.strategies.base import Strategy, blocks_of, tied

__all__ = ["ModelParallel", "stages"]


class ModelParallel(Strategy):
    """One process and `--devices cuda:0,cuda:1`; a checkpoint has the tags of all of them.

    The batch goes through one device after the other, while the others wait: that makes room for a
    model that no device holds, and no run faster. Names stay the model's own.
    """

    name: ClassVar[str] = "model-parallel"

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Those of `--devices`, or all GPUs."""
        words = self.config.devices or [f"cuda:{at}" for at in range(torch.cuda.device_count())]
        devices = tuple(map(device_of, words))
        if len(devices) < 2:
            raise TrainingError(
                "layers are spread over several devices, and there "
                + (f"is {devices[0]} alone" if devices else "are none here"),
                hint="--devices cuda:0,cuda:1; --devices cpu,cpu shows it on any machine",
            )
        return devices

    @property
    def device(self) -> torch.device:
        """Where inputs go: the first."""
        return self.devices[0]

    def tracing(self) -> AbstractContextManager[Any]:
        """Do nothing: the hooks of the stages report."""
        return nullcontext()

    def wrap(self, model: nn.Module) -> None:
        """Move every block to its device, with a hook that moves its arguments there.

        What is the model's own, and in no block, is on the first device, as are the inputs.

        Raises:
            TrainingError: it has fewer blocks with parameters than there are devices.
        """
        devices = self.devices
        blocks = blocks_of(model)
        places = self._places(blocks)
        for block, place in zip(blocks, places, strict=True):
            block.to(devices[place])
            block.register_forward_pre_hook(_Moving(devices[place]), with_kwargs=True)
        inside = {one for block in blocks for one in block.modules()}
        for module in model.modules():
            if module not in inside:
                module._apply(  # type: ignore[no-untyped-call]
                    lambda one: one.to(devices[0]), recurse=False
                )
        self.module = self.model = model
        if self.config.trace_batches:
            self._trace(blocks, places)

    def _places(self, blocks: Sequence[nn.Module]) -> list[int]:
        """Return the number of the device of each block.

        One that shares parameters with an earlier one is where that is, as a head that has the
        weights of the embedding: a tensor is on one device.
        """
        count = len(self.devices)
        sizes = [sum(one.numel() for one in block.parameters()) for block in blocks]
        layers = sum(size > 0 for size in sizes)
        places = stages(sizes, count) if layers >= count else [0] * len(blocks)
        shared = tied(list(blocks))
        home: dict[int, int] = {}
        for at, block in enumerate(blocks):
            ids = {id(one) for one in block.parameters()} & shared
            places[at] = next((home[one] for one in ids if one in home), places[at])
            home.update(dict.fromkeys(ids, places[at]))
        if len(set(places)) < count:
            raise TrainingError(
                f"the model's layers, {layers} with parameters, cannot be spread over {count} "
                "devices",
                hint="fewer --devices, or --strategy single",
            )
        return places

    def _trace(self, blocks: Sequence[nn.Module], places: Sequence[int]) -> None:
        """Report what each stage, the blocks in a row on one device, is given and gives."""
        borders = [0, *(at for at in range(1, len(places)) if places[at] != places[at - 1])]
        for first, after in pairwise([*borders, len(places)]):
            stage = _Stage(self.observer, self.devices[places[first]])
            blocks[first].register_forward_pre_hook(stage.given, with_kwargs=True)
            blocks[after - 1].register_forward_hook(stage.gave)


def stages(sizes: Sequence[int], count: int) -> list[int]:
    """Return the stage of each block, of `count` stages, so that the largest one is smallest.

    Every stage has a block with parameters. A block without any is in the stage of the one before.
    """
    heavy = [at for at, size in enumerate(sizes) if size]
    weights = [sizes[at] for at in heavy]
    firsts = {heavy[cut] for cut in _cuts(weights, count)}
    return list(accumulate(int(at in firsts) for at in range(len(sizes))))


def _cuts(weights: Sequence[int], count: int) -> list[int]:
    """Return the first items of all parts but the first, so that the heaviest part is lightest."""
    sums = [0, *accumulate(weights)]

    @cache
    def best(parts: int, end: int) -> tuple[int, tuple[int, ...]]:
        if parts == 1:
            return sums[end], ()
        before = ((cut, *best(parts - 1, cut)) for cut in range(parts - 1, end))
        return min((max(size, sums[end] - sums[cut]), (*cuts, cut)) for cut, size, cuts in before)

    return list(best(count, len(weights))[1])


class _Moving:
    """A hook that moves what a block is called with; a class, so that the model can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return moved(args, self._device), moved(kwargs, self._device)


class _Stage:
    """Hooks on the first and the last block of a stage, which tell of it."""

    def __init__(self, observer: Observer, device: torch.device) -> None:
        self._observer, self._device = observer, device
        self._inputs: tuple[int, ...] = ()

    def given(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the inputs of the first block."""
        self._inputs = shape((args, kwargs))

    def gave(self, _: nn.Module, __: Any, outputs: Any) -> None:
        """Report the outputs of the last block."""
        self._observer.tell(Traced(False, str(self._device), self._inputs, shape(outputs)))
