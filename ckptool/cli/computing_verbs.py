"""The verbs that compute new values of tensors: `cast`, `average`, `merge-lora`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.changing import run_divided, workers_option, write_changed
from ckptool.cli.options import (
    PATH,
    Listed,
    OutputOptions,
    dtype_option,
    file_argument,
    flag,
    master_option,
    output_option,
    quantized_options,
    repeatable,
    shard_option,
    target_options,
    verb,
)
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.errors import UsageError
from ckptool.transforms import Cast, Masters, average, merge_lora, parse_floating_dtype


@verb(
    "cast",
    "ckptool cast model.pth --dtype bfloat16",
    "ckptool cast model.pth --dtype fp16 --keep '*.norm.*=float32'",
    "ckptool cast model.pth --dtype float8_e4m3fn --keep '*.bias' -o small.pth",
    "ckptool cast fp8.safetensors --dequantize bfloat16",
)
@file_argument
@dtype_option("--dtype", "Cast to DTYPE, for example bfloat16, fp16 or float32.")
@quantized_options
@repeatable(
    "--keep",
    "NAME[=DTYPE]",
    "Cast matching tensors to this DTYPE instead, or not at all. NAME is a path, a key or a glob. "
    "Repeatable; the first match applies.",
)
@flag("--cast-optimizer", "Also cast optimizer state.")
@flag(
    "--allow-overflow",
    "Write overflowing values as torch does: inf, NaN or the maximum.",
)
@master_option
@workers_option
@target_options()
def cast_command(
    file: str,
    master: bool,
    dtype: str | None,
    dequantize: str | None,
    raw: bool,
    keep: tuple[str, ...],
    cast_optimizer: bool,
    allow_overflow: bool,
    workers: int | None,
    target: OutputOptions,
) -> None:
    """Cast floating-point tensors to another dtype.

    Integers, booleans and optimizer state do not change. The receipt reports how many values
    overflow, underflow or lose precision; overflow is an error. Values are rounded first: 65519.99
    fits float16 (as 65504), 65520 does not. A glob matches whole keys, or whole paths if it
    contains a /. Quantized weights need --dequantize or --raw. --dequantize supports weights
    of bitsandbytes, torch, torchao, quanto, MLX, compressed-tensors, GPTQ, AWQ, HQQ, NVFP4 and
    MXFP4, and fp8 with scales, and uses the config.json next to the file. The result equals that of
    the library; entries that only quantized weights need are left out. --dtype bfloat16 writes
    model.bfloat16.pth.
    """
    new_dtype = dtype or dequantize
    if new_dtype is None:
        raise UsageError("cast needs --dtype or --dequantize", hint="add --dtype bfloat16")
    dtype_word = parse_floating_dtype(new_dtype)  # for the default name of the file to write
    step = Cast(
        dtype,
        keep=parse_keep_rules(keep),
        cast_optimizer=cast_optimizer,
        allow_overflow=allow_overflow,
        dequantize=dequantize,
        raw=raw,
    )

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Cast the checkpoint; note that a dry run does not check overflow."""
        cast = checkpoint.then(*([Masters()] if master else []), step)
        if target.dry_run and cast.root is not checkpoint.root:
            text = "a dry run computes no values, so overflow is not checked"
            cast = cast.with_root(cast.root, Change("note", text))
        return cast

    run_divided(lambda: write_changed(file, change, target, word=dtype_word), workers)


def parse_keep_rules(texts: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Return `GLOB=DTYPE` and `GLOB` as pairs of a glob and a dtype or None."""
    rules: list[tuple[str, str | None]] = []
    for text in texts:
        glob, equals, dtype = text.rpartition("=")
        rules.append((glob, parse_floating_dtype(dtype)) if equals else (text, None))
    return rules


@verb(
    "average",
    "ckptool average epoch_18.pth epoch_19.pth epoch_20.pth -o mean.pth",
    "ckptool average a.pth b.safetensors -o mean.safetensors --ints first",
    "ckptool average a.pth b.pth -o mixed.pth --weights 0.7,0.3",
    "ckptool average a.pth b.pth -o mixed.pth --mode slerp --t 0.3",
    "ckptool average model.pth tuned.pth base.pth -o added.pth --mode task",
)
@click.argument("files", type=PATH, nargs=-1, required=True)
@output_option
@click.option(
    "--mode",
    type=click.Choice(["mean", "slerp", "task"]),
    default="mean",
    show_default=True,
    help="Compute the mean, slerp along the arc between two files, or task: A + t (B - C).",
)
@click.option(
    "--weights",
    type=Listed(float),
    default=(),
    help="Weight each file, for example 0.7,0.3. The weights are normalized. Only with mode mean.",
)
@click.option(
    "--t",
    type=float,
    help="Set the position from the first file (0) to the second (1) for slerp [default: 0.5], or "
    "the factor of the difference for task [default: 1].",
)
@click.option(
    "--ints",
    type=click.Choice(["same", "first"]),
    default="same",
    show_default=True,
    help="Require integer tensors to be the same in all files, or take them from the first.",
)
@click.option("--key", metavar="NAME", help="Average only this state dict.")
@target_options(place=False)
def average_command(files: tuple[str, ...], target: OutputOptions, **options: Any) -> None:
    """Average several checkpoints.

    Tensors with the same key, without wrapper prefixes, are summed in float64 and rounded to their
    dtype in the first file. Keys, ties, _metadata and other values come from the first file;
    optimizer and scheduler state is left out.
    """
    if len(files) < 2:
        raise UsageError("average needs at least two files", hint="ckptool average A B -o mean.pth")

    def change(*checkpoints: Checkpoint) -> Checkpoint:
        """Average the checkpoints."""
        return average(checkpoints, **options)

    write_changed(files[0], change, target, word="average", others=files[1:])


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
    help="Scale each adapter, for example 0.8,0.5, or all by one factor. [default: 1]",
)
@click.option("--alpha", type=float, help="Set lora_alpha, if there is no adapter_config.json.")
@click.option("--key", metavar="NAME", help="Change only this state dict.")
@shard_option
@target_options(place=False)
def merge_lora_command(
    base: str,
    adapters: tuple[str, ...],
    target: OutputOptions,
    max_shard_size: str | None,
    **options: Any,
) -> None:
    """Merge LoRA adapters into their base model.

    Supports PEFT (with the scale in adapter_config.json), kohya and diffusers adapters. Without
    ADAPTERS, BASE is the state dict of a PeftModel, which contains its adapter. Sums are computed
    in float32 and rounded to the dtype of the base. Adapter keys that do not fit BASE are an error.
    """

    def change(checkpoint: Checkpoint, *others: Checkpoint) -> Checkpoint:
        """Merge the adapters into the base."""
        return merge_lora(checkpoint, others, **options)

    write_changed(
        base, change, target, word="merged", max_shard_size=max_shard_size, others=adapters
    )
