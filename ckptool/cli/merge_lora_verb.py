"""`ckptool merge-lora`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.checkpoint import Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import (
    PATH,
    Listed,
    Target,
    output_option,
    shard_option,
    target_options,
    verb,
)
from ckptool.transforms import merge_lora

__all__ = ["command"]


@verb(
    "merge-lora",
    "ckptool merge-lora base.safetensors adapter/ -o merged.safetensors",
    "ckptool merge-lora base.pth one.safetensors two.safetensors -o out.pth --scale 0.8,0.5",
    "ckptool merge-lora peft_model.pth -o merged.pth --alpha 16",
)
@click.argument("base", type=PATH)
@click.argument("adapters", type=PATH, nargs=-1)
@output_option
@click.option(
    "--scale",
    type=Listed(float),
    default=(),
    help="A factor for each adapter, as 0.8,0.5, or one for all [default: 1].",
)
@click.option("--alpha", type=float, help="lora_alpha, where no adapter_config.json says it.")
@click.option("--key", metavar="NAME", help="Change only this state dict.")
@shard_option
@target_options(place=False)
def command(
    base: str, adapters: tuple[str, ...], target: Target, max_shard_size: str | None, **how: Any
) -> None:
    """Merge LoRA adapters into the weights of their base model.

    Adapters are those of PEFT (adapter_config.json beside them says the scale), kohya and
    diffusers. Without an adapter BASE is the state dict of a PeftModel, which holds its own. Sums
    are calculated in float32 and have the type of the base. What fits nothing in BASE is an error.
    """

    def change(checkpoint: Checkpoint, *others: Checkpoint) -> Checkpoint:
        return merge_lora(checkpoint, others, **how)

    write_changed(
        base, change, target, word="merged", max_shard_size=max_shard_size, others=adapters
    )
