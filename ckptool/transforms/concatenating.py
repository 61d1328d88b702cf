"""Tensors of a model that ranks hold in parts, joined along the dimensions that the user names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import UsageError
from ckptool.files import ByteRange
from ckptool.files.tiled import Tile, tiled
from ckptool.formats.distributed.megatron import is_rank
from ckptool.formats.distributed.placements import row_major_data
from ckptool.model import (
    Path,
    Storage,
    TensorRef,
    find_tensors,
    over_elements,
    remade,
    row_major_strides,
)
from ckptool.names import families
from ckptool.tensors.sameness import same_elements
from ckptool.transforms.casting import tensors_placed
from ckptool.tree import name_of, selected
from ckptool.words import counted, few, listed, printable

__all__ = ["along", "concatenated", "over_data"]


def concatenated(checkpoint: Checkpoint, rules: Iterable[str]) -> Checkpoint:
    """Return the tree of the first rank, with the tensors of its model joined from all ranks.

    A rule is a glob with a dimension, `*.linear_qkv.weight=0`; the first that matches counts.
    Other tensors of the ranks (optimizer, random generators) are left out.

    Raises:
        UsageError: a rule is none, or matches nothing; there are no ranks; or these differ in
            their names, in a tensor that no rule names, or in another dimension.
    """
    file, places = checkpoint.path, [_place(rule) for rule in rules]
    ranks = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    if not ranks or not all(map(is_rank, ranks)):
        hint = "give the folder of one iteration, which has a folder mp_rank_00"
        raise UsageError("holds no ranks of Megatron's to concatenate", file=file, hint=hint)
    trees = [root if isinstance(root, dict) else {} for root in ranks.values()]
    models = [dict(checkpoint.with_root({"model": one.get("model")}).tensors()) for one in trees]
    apart = {name_of(path) for one in models for path in one.keys() ^ models[0].keys()}
    if apart:
        raise UsageError(f"has tensors that not all ranks have: {few(sorted(apart))}", file=file)
    joined, whole, differing = dict[tuple[int, ...], TensorRef](), dict[Path, TensorRef](), []
    for path, first in models[0].items():
        every = [one[path] for one in models]
        dim = next((dim for glob, dim in places if selected(path, (glob,))), None)
        if dim is not None:
            key = (dim, *map(id, every))  # ties stay
            if key not in joined:
                joined[key] = along(name_of(path), every, dim, file)
            whole[path] = joined[key]
        elif not all(_same(first, one) for one in every[1:]):
            differing.append(name_of(path))
    if differing:
        what = f"and no rule says how to join them: {_kinds(differing)}"
        hint = "--concat 'GLOB=DIM' for each kind: the dimension along which Megatron split it"
        text = f"its ranks differ in {counted(len(differing), 'tensor')}, {what}"
        raise UsageError(text, file=file, hint=hint)
    for glob, _ in places:
        if not any(selected(path, (glob,)) for path in whole):
            raise UsageError(f"no tensor of the model matches {printable(glob)!r}", file=file)
    lost = [key for key, one in trees[0].items() if key != "model" and any(find_tensors([one]))]
    root = remade(trees[0], ((key, one) for key, one in trees[0].items() if key not in lost))
    text = f"{counted(len(whole), 'tensor')} joined from {counted(len(ranks), 'rank')}"
    changes = [Change("concat", text, len(whole))]
    if once := [name_of(path) for path in models[0] if path not in whole]:
        text = f"taken once, as all ranks have the same: {_kinds(once)}"
        changes.append(Change("keep", text, len(once)))
    if lost:
        text = f"what each rank has of its own: {listed(map(printable, map(str, lost)))}"
        changes.append(Change("left-out", text, len(lost)))
    return checkpoint.with_root(tensors_placed(root, whole), *changes)


def _kinds(names: Iterable[str]) -> str:
    return listed((one.label for one in families((name, None) for name in names)), most=40)


def _place(rule: str) -> tuple[str, int]:
    glob, _, dim = rule.rpartition("=")
    if not glob or not (dim.isascii() and dim.isdigit() and len(dim) < 3):
        hint = "--concat '*.linear_qkv.weight=0'"
        raise UsageError(f"{printable(rule)!r} is not a glob with a dimension", hint=hint)
    return glob, int(dim)


def _same(one: TensorRef, other: TensorRef) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and same_elements(one, other)


def along(name: str, every: Sequence[TensorRef], dim: int, file: str) -> TensorRef:
    """Return tensors joined along a dimension, to stand under `name`.

    Raises:
        UsageError: they differ in their types or in another dimension.
    """
    shapes = [one.sizes for one in every]
    others = {(*size[:dim], None, *size[dim + 1 :]) for size in shapes}
    if len(others) > 1 or len({one.dtype for one in every}) > 1 or dim >= len(shapes[0]):
        has = listed(f"{one.dtype} {list(size)}" for one, size in zip(every, shapes, strict=True))
        what = f"{printable(name)!r} cannot be joined along dimension {dim}"
        raise UsageError(f"{what}: its parts have {has}", file=file)
    first, start, tiles = every[0], 0, list[Tile]()
    for one, size in zip(every, shapes, strict=True):
        at = tuple(start if axis == dim else 0 for axis in range(len(size)))
        tiles.append(Tile(at, size, row_major_data(one, printable(name), file)))
        start += size[dim]
    shape = (*shapes[0][:dim], start, *shapes[0][dim + 1 :])
    return over_data(first, name, shape, tiled(file, shape, first.itemsize, tiles))


def over_data(tensor: TensorRef, name: str, shape: tuple[int, ...], data: ByteRange) -> TensorRef:
    """Return the tensor with another shape and elements, in row-major order."""
    return over_elements(
        tensor, shape=shape, stride=row_major_strides(shape), offset=0, flags=(),
        storage=Storage(name, data, data.length, tensor.device),
    )  # fmt: skip
