"""Layers spread over devices in their order: activations move between devices, weights do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import accumulate, groupby
from operator import itemgetter
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
        all_gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = tuple(map(resolve_device, self.config.devices or all_gpus))
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
            inputs = input_shapes.pop()
            self.observer.tell(
                Traced(
                    outside=False, device=str(device), inputs=inputs, outputs=first_shape(outputs)
                )
            )

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
        for block, number in zip(blocks, device_numbers, strict=True):
            block.to(devices[number])
            block.register_forward_pre_hook(_Moving(devices[number]), with_kwargs=True)
        modules_in_blocks = {module for block in blocks for module in block.modules()}
        for module in model.modules():
            if module not in modules_in_blocks:  # move its own tensors, but not its children
                module._apply(  # type: ignore[no-untyped-call]
                    lambda tensor: tensor.to(devices[0]), recurse=False
                )
        self.module = self.model = model
        # A stage is a row of neighboring blocks on one device.
        stages = groupby(zip(device_numbers, blocks, strict=True), key=itemgetter(0))
        self._stages = [
            (devices[number], [block for _, block in numbered_blocks])
            for number, numbered_blocks in stages
        ]

    def _assign_devices(self, blocks: Sequence[nn.Module]) -> list[int]:
        """Return the number of the device of each block, so that the largest share is minimal.

        A block that shares parameters with an earlier one, such as a head with the weights of the
        embedding, is on the same device.

        Raises:
            TrainingError: a device gets no block.
        """
        count = len(self.devices)
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        layers = sum(size > 0 for size in sizes)
        has_enough = layers >= count  # otherwise all on the first device, which is refused below
        numbers = partition_stages(sizes, count) if has_enough else [0] * len(blocks)
        all_tied_ids = find_tied_parameters(list(blocks))
        number_by_tied_id: dict[int, int] = {}
        for index, block in enumerate(blocks):
            tied_ids = {id(parameter) for parameter in block.parameters()} & all_tied_ids
            for tied_id in tied_ids & number_by_tied_id.keys():
                numbers[index] = number_by_tied_id[tied_id]
            number_by_tied_id.update(dict.fromkeys(tied_ids, numbers[index]))
        if len(set(numbers)) < count:
            raise TrainingError(
                f"the model has {layers} layers with parameters, too few for {count} devices",
                hint="use fewer --devices, or --strategy single",
            )
        return numbers


def partition_stages(sizes: Sequence[int], count: int) -> list[int]:
    """Return the stage number of each block; the largest of the `count` stages is minimal.

    Every stage has a block with parameters; a block without parameters follows the one before.
    """
    heavy = [index for index, size in enumerate(sizes) if size]
    sums = [0, *accumulate(sizes[index] for index in heavy)]
    """Entry n is the size of the first n blocks that have parameters."""

    @cache
    def find_cuts(stages: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Divide the first `end` blocks with parameters into this number of stages.

        Return the size of the largest stage, and the starts of all stages but the first.
        """
        if stages == 1:
            return sums[end], ()
        candidates = []
        for last_start in range(stages - 1, end):
            largest, starts = find_cuts(stages - 1, last_start)
            last_size = sums[end] - sums[last_start]
            candidates.append((max(largest, last_size), (*starts, last_start)))
        return min(candidates)

    _, starts = find_cuts(count, len(heavy))
    first_blocks = {heavy[start] for start in starts}
    return list(accumulate(int(index in first_blocks) for index in range(len(sizes))))


class _Moving:
    """A hook that moves the arguments of a block; a class, so that the model can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on the device of the block, which torch passes to it."""
        return move_tensors(args, self._device), move_tensors(kwargs, self._device)
