"""Layers spread over devices in their order: activations move between devices, weights do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn

from ckptool.errors import TrainingError
from ckptool.trainer.data import moved, shape
from ckptool.trainer.devices import device_of
from ckptool.trainer.events import Traced
from ckptool.trainer.strategies.base import Strategy, blocks_of, tied


class ModelParallel(Strategy):
    """One process and `--devices cuda:0,cuda:1`; a checkpoint has the tags of all these devices.

    The batch goes through one device after the other, while the others wait: a model that does not
    fit on one device can be trained, but no run becomes faster. Names stay the model's own.
    """

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of `--devices`, or all GPUs."""
        words = self.config.devices or [f"cuda:{at}" for at in range(torch.cuda.device_count())]
        devices = tuple(map(device_of, words))
        if len(devices) < 2:
            raise TrainingError(
                f"model-parallel needs several devices, given {devices[0] if devices else 'none'}",
                hint="use --devices cuda:0,cuda:1, or --devices cpu,cpu on any machine",
            )
        return devices

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Report the inputs and outputs of each stage: the blocks in a row on one device."""
        given: list[tuple[int, ...]] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append(shape((args, kwargs)))

        def after(device: torch.device, _: nn.Module, __: Any, outputs: Any) -> None:
            self.observer.tell(Traced(False, str(device), given.pop(), shape(outputs)))

        with ExitStack() as hooks:
            for device, blocks in self._stages:
                hooks.enter_context(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(blocks[-1].register_forward_hook(partial(after, device)))
            yield

    def wrap(self, model: nn.Module) -> None:
        """Move every block to its device, and add a hook that moves its arguments there.

        Tensors of the model outside the blocks are on the first device, as the inputs are.

        Raises:
            TrainingError: the model has fewer blocks with parameters than there are devices.
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
        runs = groupby(zip(places, blocks, strict=True), key=lambda one: one[0])
        self._stages = [(devices[place], [block for _, block in run]) for place, run in runs]

    def _places(self, blocks: Sequence[nn.Module]) -> list[int]:
        """Return the number of the device of each block.

        A block that shares parameters with an earlier one, as a head with the weights of the
        embedding, is on the same device.
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
                f"the model has {layers} layers with parameters, too few for {count} devices",
                hint="use fewer --devices, or --strategy single",
            )
        return places


def stages(sizes: Sequence[int], count: int) -> list[int]:
    """Return the stage of each block, for `count` stages whose largest is as small as possible.

    Every stage has a block with parameters; a block without parameters follows the one before.
    """
    heavy = [at for at, size in enumerate(sizes) if size]
    sums = [0, *accumulate(sizes[at] for at in heavy)]

    @cache
    def best(parts: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest of the parts before `end`, and where the later parts begin."""
        if parts == 1:
            return sums[end], ()
        before = ((cut, *best(parts - 1, cut)) for cut in range(parts - 1, end))
        return min((max(size, sums[end] - sums[cut]), (*cuts, cut)) for cut, size, cuts in before)

    firsts = {heavy[cut] for cut in best(count, len(heavy))[1]}
    return list(accumulate(int(at in firsts) for at in range(len(sizes))))


class _Moving:
    """A hook that moves the arguments of a block; a class, so that the model can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return moved(args, self._device), moved(kwargs, self._device)
