"""How fast recipes move elements, and how long a plan takes: `python -m benchmarks.recipes`.

Each kind of equation reads its result from front to back, a megabyte count in processor seconds;
the plans are of 100,000 tensors, with the way back that the receipt is made of.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

import ckptool
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap, make_plain_tensor
from ckptool.files import ByteRange, MemorySource
from ckptool.recipes import Recipe, relayout

MIB = 1 << 20


class Kind(NamedTuple):
    """An equation over tensors of some shapes."""

    name: str
    left: str | Sequence[str]
    right: str | Sequence[str]
    axes: str
    shapes: Sequence[tuple[int, ...]]
    params: dict[str, int] = {}  # noqa: RUF012


def kinds(n: int) -> list[Kind]:
    """Return every kind, over rows of `n` elements."""
    qkv = ["q", "k", "v"]
    gqa = "(g (per + 1 + 1) d) ... -> (g per d) ..., (g d) ..., (g d) ..."
    ranks, experts = [(n, n)] * 4, [(512, n)] * 32
    half, two = [(n, 2 * n)] * 2, [(n, 4 * n), (n, 2 * n)]
    return [
        Kind("rope", "0", "v", "(h half 2) ... -> (h 2 half) ...", [(4 * n, n)], {"half": 64}),
        Kind("transpose", "0", "v", "i o -> o i", [(4 * n, n)]),
        Kind("kernel of a convolution", "0", "v", "h w i o -> o i h w", [(3, 3, 1024, n)]),
        Kind("split equal", "0", qkv, "(c + c + c) i -> c i, c i, c i", [(3 * n, n)]),
        Kind("split grouped", "0", qkv, gqa, [(6 * n, n)], {"per": 4, "d": 128}),
        Kind("split in turn", "0", ["g", "u"], "e i (f (1 + 1)) -> e f i, e f i", [(8, n, 1024)]),
        Kind(
            "fuse in turn, transposed", ["0", "1"], "w", "e f i, e f i -> e i (f (1 + 1))",
            [(8, 512, n)] * 2,
        ),
        Kind("fuse in turn", ["0", "1"], "w", "i f, i f -> i (f (1 + 1))", half),
        Kind(
            "fuse in turn, 2 and 1", ["0", "1"], "w", "i (f two), i f -> i (f (two + 1))", two,
            {"two": 2},
        ),
        Kind("exchange", "0", "v", "(c + c') ... -> (c' + c) ...", [(4 * n, n)]),
        Kind("ranks by rows", "{r}", "w", "o i -> (r o) i", ranks),
        Kind("ranks by columns", "{r}", "w", "o i -> o (r i)", ranks),
        Kind("stack first", "{r}", "w", "o i -> r o i", experts),
        Kind("stack last", "{r}", "w", "o i -> o i r", experts),
        Kind("unstack last", "0", "{r}", "o i r -> o i", [(512, n, 32)]),
        Kind("pad", "0", "v", "v i -> (v + _pad) i", [(4 * n - 7, n)], {"_pad": 7}),
    ]  # fmt: skip


def speed(kind: Kind, dtype: torch.dtype, folder: Path) -> float:
    """Return how many MiB of the result are read in a second."""
    path = folder / "in.safetensors"
    state = {str(at): torch.zeros(shape, dtype=dtype) for at, shape in enumerate(kind.shapes)}
    save_file(state, path)
    with ckptool.open(path) as source:
        made = relayout(source, Recipe.from_rule(*kind[1:4]), kind.params)
        began, size = time.process_time(), 0
        for _, tensor in made.tensors():
            size += sum(len(block) for block in tensor.data.iterate_reused())
        return size / MIB / (time.process_time() - began)


STACKS = (
    '[[tensors]]\nfrom=["{n}.{e}.w1", "{n}.{e}.w3"]\nto="{n}.w"\naxes="f i, f i -> e (f + f) i"'
)
LAYERS = """
[names]
"layers.{n}.{w:norm|norm2}.weight" = "model.layers.{n}.{w:input|post}_layernorm.weight"
[[tensors]]
from = "layers.{n}.wq.weight"
to = "model.layers.{n}.q.weight"
axes = "(h half 2) i -> (h 2 half) i"
[[tensors]]
from = "layers.{n}.wkv.weight"
to = ["model.layers.{n}.k.weight", "model.layers.{n}.v.weight"]
axes = "(c + c) i -> c i, c i"
"""


def plan_seconds(recipe: str, keys: Sequence[str]) -> float:
    """Return the processor seconds that a plan over tensors of 8 x 8 takes."""
    data = ByteRange(MemorySource(bytes(64), "memory"), 0, 64)
    tensors = OrderedMap((key, make_plain_tensor(key, "uint8", (8, 8), data)) for key in keys)
    checkpoint = Checkpoint(tensors, "safetensors", "many.safetensors")
    began = time.process_time()
    relayout(checkpoint, Recipe.parse(recipe, name="plan"), {"half": 2} if "half" in recipe else {})
    return time.process_time() - began


def main() -> None:
    """Print one line for each kind and plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="elements of a row, for bfloat16")
    width = parser.parse_args().width
    stacks = [f"{n}.{e}.{w}" for n in range(100) for e in range(500) for w in ("w1", "w3")]
    parts = ("norm", "norm2", "wq", "wkv")
    layers = [f"layers.{n}.{part}.weight" for n in range(25_000) for part in parts]
    with tempfile.TemporaryDirectory() as folder:
        for dtype, n in ((torch.bfloat16, width), (torch.float32, width * 11 // 16 // 256 * 256)):
            for kind in kinds(n):
                found = speed(kind, dtype, Path(folder))
                print(f"{str(dtype).removeprefix('torch.'):9} {kind.name:26} {found:8,.0f} MiB/s")
    print(f"a plan of 100,000 experts {plan_seconds(STACKS, stacks):11.2f} s")
    print(f"a plan of 25,000 layers of 4 tensors {plan_seconds(LAYERS, layers):.2f} s")


if __name__ == "__main__":
    main()
