"""`ckptool cast`."""

from __future__ import annotations

from ckptool.checkpoint import Change, Checkpoint
from ckptool.cli.changing import divided, workers_option, write_changed
from ckptool.cli.options import (
    Target,
    dtype_option,
    file_argument,
    flag,
    master_option,
    quantised_options,
    repeatable,
    target_options,
    verb,
)
from ckptool.errors import UsageError
from ckptool.transforms import cast, floating_type, with_masters

__all__ = ["command", "parsed_keep"]


@verb(
    "cast",
    "ckptool cast model.pth --dtype bfloat16",
    "ckptool cast model.pth --dtype fp16 --keep '*.norm.*=float32'",
    "ckptool cast model.pth --dtype float8_e4m3fn --keep '*.bias' -o small.pth",
    "ckptool cast fp8.safetensors --dequantize bfloat16",
)
@file_argument
@dtype_option("--dtype", "The type to cast to: bfloat16, fp16, float32.")
@quantised_options
@repeatable(
    "--keep",
    "GLOB[=DTYPE]",
    "Cast matching tensors to this type instead, or not at all; repeatable, the first match "
    "decides.",
)
@flag("--all", "Cast optimizer state, too.", "everything")
@flag(
    "--allow-overflow",
    "Write values that are too large for the type as torch does: inf, NaN or the largest.",
)
@master_option
@workers_option
@target_options()
def command(
    file: str,
    master: bool,
    dtype: str | None,
    dequantize: str | None,
    raw: bool,
    keep: tuple[str, ...],
    everything: bool,
    allow_overflow: bool,
    workers: int | None,
    target: Target,
) -> None:
    """Cast floating-point tensors to another type.

    Integers, booleans and optimizer state stay as they are. The result says how many values
    overflow, underflow or lose precision; an overflow is an error. Values are rounded first:
    65519.99 fits float16 (as 65504), 65520 does not. A GLOB is compared with the name of a tensor,
    a GLOB with a / with its whole path. Quantised weights are refused without
    --dequantize or --raw. --dequantize takes fp8 weights with scales, nf4, fp4 and int8 of
    bitsandbytes, quantised tensors and linear layers of torch, and Int8Tensor, Float8Tensor and
    IntxUnpackedToInt8Tensor of torchao: the result is that of the library, and what only
    quantised weights need is left out. With --dtype bfloat16 the result of model.pth goes to
    model.bfloat16.pth.
    """
    word = dtype or dequantize
    if word is None:
        raise UsageError("cast needs a type", hint="--dtype bfloat16")
    name = floating_type(word)
    rules = parsed_keep(keep)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        made = cast(
            with_masters(checkpoint) if master else checkpoint,
            dtype,
            keep=rules,
            everything=everything,
            allow_overflow=allow_overflow,
            dequantize=dequantize,
            raw=raw,
        )
        if target.dry_run and made.root is not checkpoint.root:
            text = "a dry run computes no values, so it cannot tell whether any overflows"
            made = made.with_root(made.root, Change("note", text))
        return made

    divided(lambda: write_changed(file, change, target, word=name), workers)


def parsed_keep(texts: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Return `GLOB=DTYPE` and `GLOB` as pairs of a glob and a type or None."""
    rules: list[tuple[str, str | None]] = []
    for text in texts:
        glob, equals, dtype = text.rpartition("=")
        rules.append((glob, floating_type(dtype)) if equals else (text, None))
    return rules
