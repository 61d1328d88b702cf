"""`ckptool remap`."""

from __future__ import annotations

import click

from ckptool.checkpoint import Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import (
    Target,
    file_argument,
    parsed_rules,
    repeatable,
    target_options,
    verb,
    visible_option,
)
from ckptool.errors import UsageError
from ckptool.transforms import remap
from ckptool.transforms import visible_devices as renumber

__all__ = ["command"]


@verb(
    "remap",
    "ckptool remap --to cpu model.pth",
    "ckptool remap --map cuda:3=cuda:0 model.pth",
    "ckptool remap --map cuda:0=cuda:1 --map cuda:1=cuda:0 model.pth -o swapped.pth",
    "ckptool remap --visible-devices 0,2 model.pth",
)
@file_argument
@click.option("--to", "device", metavar="DEVICE", help="Move all tensors to it: cpu, cuda:0.")
@repeatable(
    "--map",
    "A=B",
    "Move tensors on device A to device B; cuda:* is any index. Repeatable, all at once.",
    "rules",
)
@visible_option
@target_options()
def command(
    file: str,
    device: str | None,
    rules: tuple[str, ...],
    visible_devices: tuple[int, ...] | None,
    target: Target,
) -> None:
    """Change the devices that tensors are tagged with.

    Optimizer state and torch.device values are changed as well; the bytes of the tensors stay. The
    result loads with torch.load without map_location. With --to cpu the result of model.pth goes
    to model.cpu.pth, with --map to model.remapped.pth.
    """
    if sum(map(bool, (device is not None, rules, visible_devices is not None))) != 1:
        raise UsageError(
            "remap takes exactly one of --to, --map and --visible-devices",
            hint="ckptool remap --to cpu FILE",
        )
    mapping = {"*": device} if device is not None else parsed_rules(rules)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        if visible_devices is None:
            return remap(checkpoint, mapping)
        return renumber(checkpoint, visible_devices)

    write_changed(file, change, target, word=device.replace(":", "") if device else "remapped")
