"""`ckptool convert`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ckptool.checkpoint import Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.devices import parsed_rules, parsed_visible
from ckptool.cli.options import Target, target_options, verb
from ckptool.conversion import converted, device_rules
from ckptool.writing import target_format

__all__ = ["command"]


@verb(
    "convert",
    "ckptool convert model.pth model.safetensors",
    "ckptool convert model.pth laptop.pth --wrappers strip --to cpu",
    "ckptool convert whole.pth weights.pth --model-only",
    "ckptool convert ema.pth ema.safetensors --key model_ema",
)
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option(
    "--wrappers",
    type=click.Choice(["strip", "keep"]),
    help="Wrapper names such as module. [default: strip towards safetensors, else keep]",
)
@click.option("--to", metavar="DEVICE", help="Everything to this device: cpu, cuda:0.")
@click.option(
    "--device-map", multiple=True, metavar="A=B", help="What is on A to B; repeatable; cuda:*."
)
@click.option(
    "--visible-devices", metavar="LIST", help="Renumber as CUDA_VISIBLE_DEVICES=LIST does."
)
@click.option("--key", metavar="NAME", help="The state dict to take, where there are several.")
@click.option(
    "--model-only", is_flag=True, help="The one model state dict alone; a pickled module as one."
)
@click.option(
    "--ties",
    type=click.Choice(["keep", "copy"]),
    default="keep",
    show_default=True,
    help="Tied tensors written once, or each with bytes of its own.",
)
@click.option("--strict", is_flag=True, help="Refuse to leave anything out.")
@target_options(place=False)
def command(
    source: str,
    destination: str,
    to: str | None,
    device_map: tuple[str, ...],
    visible_devices: str | None,
    ties: str,
    strict: bool,
    target: Target,
    **selection: Any,
) -> None:
    """Write another format, with any of the changes on the way.

    The ending of DESTINATION decides the format (.safetensors), or --format; otherwise it is that
    of SOURCE. Safetensors holds one flat state dict: what is left out is named.
    """
    rules = device_rules(to, parsed_rules(device_map))
    visible = None if visible_devices is None else parsed_visible(visible_devices)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        return converted(
            checkpoint,
            target_format(checkpoint, destination, target.format),
            rules=rules,
            visible_devices=visible,
            ties=ties,
            **selection,
        )

    write_changed(
        source,
        change,
        replace(target, output=destination),
        word="converted",
        strict=strict,
    )
