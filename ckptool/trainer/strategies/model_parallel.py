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
from ckptool.trainer.data import first_shape, move_tensors
from ckptool.trainer.devices import resolve_device
from ckptool.trainer.events import Traced
from ckptool.trainer.strategies.base import Strategy, find_blocks, find_tied_parameters


class ModelParallel(Strategy):
    """One process and `--devices cuda:0,cuda:1`; a checkpoint has the tags of all these devices.

    The batch goes through one device after the other, while the others wait: a model that does not
    fit on one device can be trained, but no run becomes faster. Names stay the model's own.
    """

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of `--devices`, or all GPUs."""
        words = self.config.devices or [f"cuda:{at}" for at in range(torch.cuda.device_count())]
        devices = tuple(map(resolve_device, words))
        if len(devices) < 2:
            raise TrainingError(
                f"model-parallel needs several devices, given {devices[0] if devices else 'none'}",
                hint="use --devices cuda:0,cuda:1, or --devices cpu,cpu on any machine",
            )
        return devices

    @contextmanager
    def trace_shapes(self) -> Iterator[None]:
        """Report the inputs and outputs of each stage: the blocks in a row on one device."""
        input_shapes: list[tuple[int, ...]] = []

        def record_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Keep the input shape of a stage, until its output is known."""
            input_shapes.append(first_shape((args, kwargs)))

        def report_stage(device: torch.device, _: nn.Module, __: Any, outputs: Any) -> None:
            """Report the input and output shapes of a stage."""
            self.observer.tell(Traced(False, str(device), input_shapes.pop(), first_shape(outputs)))

        with ExitStack() as hooks:
            for device, blocks in self._stages:
                hooks.enter_context(
                    blocks[0].register_forward_pre_hook(record_inputs, with_kwargs=True)
                )
                hooks.enter_context(blocks[-1].register_forward_hook(partial(report_stage, device)))
            yield

    def wrap(self, model: nn.Module) -> None:
        """Move every block to its device, and add a hook that moves its arguments there.

        Tensors of the model outside the blocks are on the first device, as the inputs are.

        Raises:
            TrainingError: the model has fewer blocks with parameters than there are devices.
        """
        devices = self.devices
        blocks = find_blocks(model)
        device_numbers = self._assign_devices(blocks)
        for block, device_number in zip(blocks, device_numbers, strict=True):
            block.to(devices[device_number])
            block.register_forward_pre_hook(_Moving(devices[device_number]), with_kwargs=True)
        modules_of_blocks = {tensor for block in blocks for tensor in block.modules()}
        for module in model.modules():
            if module not in modules_of_blocks:
                module._apply(  # type: ignore[no-untyped-call]
                    lambda tensor: tensor.to(devices[0]), recurse=False
                )
        self.module = self.model = model
        groups = groupby(zip(device_numbers, blocks, strict=True), key=lambda tensor: tensor[0])
        self._stages = [
            (devices[device_number], [block for _, block in group])
            for device_number, group in groups
        ]

    def _assign_devices(self, blocks: Sequence[nn.Module]) -> list[int]:
        """Return the number of the device of each block.

        A block that shares parameters with an earlier one, such as a head with the weights of the
        embedding, is on the same device.
        """
        count = len(self.devices)
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        layers = sum(size > 0 for size in sizes)
        places = partition_stages(sizes, count) if layers >= count else [0] * len(blocks)
        shared = find_tied_parameters(list(blocks))
        device_of_parameter: dict[int, int] = {}
        for index, block in enumerate(blocks):
            ids = {id(parameter) for parameter in block.parameters()} & shared
            places[index] = next(
                (
                    device_of_parameter[parameter]
                    for parameter in ids
                    if parameter in device_of_parameter
                ),
                places[index],
            )
            device_of_parameter.update(dict.fromkeys(ids, places[index]))
        if len(set(places)) < count:
            raise TrainingError(
                f"the model has {layers} layers with parameters, too few for {count} devices",
                hint="use fewer --devices, or --strategy single",
            )
        return places


def partition_stages(sizes: Sequence[int], count: int) -> list[int]:
    """Return the stage number of each block; the largest of the `count` stages is minimal.

    Every stage has a block with parameters; a block without parameters follows the one before.
    """
    heavy = [index for index, size in enumerate(sizes) if size]
    sums = [0, *accumulate(sizes[index] for index in heavy)]

    @cache
    def find_best(parts: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest of the parts before `end`, and the starts of the later parts."""
        if parts == 1:
            return sums[end], ()
        before = ((cut, *find_best(parts - 1, cut)) for cut in range(parts - 1, end))
        return min((max(size, sums[end] - sums[cut]), (*cuts, cut)) for cut, size, cuts in before)

    firsts = {heavy[cut] for cut in find_best(count, len(heavy))[1]}
    return list(accumulate(int(index in firsts) for index in range(len(sizes))))


class _Moving:
    """A hook that moves the arguments of a block; a class, so that the model can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return move_tensors(args, self._device), move_tensors(kwargs, self._device)
