"""Tensors with other shapes: rows, position embeddings, parts, tensors of parts or of ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ckptool.core.addressing import NameIndex
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import (
    Path,
    Storage,
    TensorRef,
    find_tensors,
    over_elements,
    remade,
    row_major_strides,
)
from ckptool.core.names import families
from ckptool.core.sections import MODEL_KINDS, Section, named_tensors
from ckptool.core.tree import name_of
from ckptool.dtypes import PACKED
from ckptool.errors import NameCollision, NotRepresentable, UsageError
from ckptool.files import ByteRange
from ckptool.files.computed import joined
from ckptool.files.tiled import Tile, tiled
from ckptool.formats.distributed.megatron import is_rank
from ckptool.formats.distributed.placements import row_major_data
from ckptool.tensors.averaging import interpolated, more_rows
from ckptool.tensors.bytewise import same_elements
from ckptool.transforms.casting import FLOATING, optimizer_tensors, refuse_apart, tensors_placed
from ckptool.transforms.names import distinct, with_items
from ckptool.transforms.step import Step, listed_option
from ckptool.words import counted, few, listed, printable, shell

_PREFIX = 5
"""The most tokens before the grid: one of the class, one of distillation, four registers."""


class _Work(NamedTuple):
    """What a rule makes of one state dict."""

    items: list[tuple[Any, Any]]
    used: list[TensorRef]
    changes: list[Change]


_Step: TypeAlias = "Callable[[Section, str], _Work]"
_One: TypeAlias = "Callable[[str, TensorRef, str], tuple[TensorRef, str]]"
"""A tensor of another shape, and what was done to it."""


@dataclass(frozen=True)
class Reshape(Step):
    """Give tensors of the model other shapes, rule by rule in the order of the fields.

    A tensor that is tied to one that is resized changes with it.
    """

    on_files: ClassVar[str] = "its results are computed when a file is written"

    resize: Iterable[str] = ()
    """`GLOB=ROWS` each: rows are cut, or added as the mean of the others, or, with
    `GLOB=ROWS:zero`, zero."""
    interpolate_pos: Iterable[str] = ()
    """`GLOB=HxW` each: position embeddings of a ViT for another grid of patches, as timm makes
    them."""
    split: Iterable[str] = ()
    """`*.qkv=>*.q,*.k,*.v@DIM` each: equal parts along a dimension."""
    fuse: Iterable[str] = ()
    """`*.q,*.k,*.v=>*.qkv@DIM` each: the parts joined."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: a rule is none, or a text is in place of a list of rules.
        """
        for name in ("resize", "interpolate_pos", "split", "fuse"):
            object.__setattr__(self, name, listed_option(name, getattr(self, name)))
        self._steps()

    def _steps(self) -> list[tuple[str, _Step]]:
        kinds: tuple[tuple[Iterable[str], Callable[[str], _Step]], ...] = (
            (self.resize, _resizing),
            (self.interpolate_pos, _interpolating),
            (self.split, _splitting),
            (self.fuse, _fusing),
        )
        return [(rule, kind(rule)) for rules, kind in kinds for rule in rules]

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with other shapes.

        Raises:
            UsageError: a rule matches nothing, or does not fit a tensor; the tensors are in a
                pickled module; there is the state of an optimizer, which would no longer fit.
            NameCollision: a key is there already.
            NotRepresentable: a tensor is quantized, or has no elements that can be computed with.
        """
        for rule, step in self._steps():
            checkpoint = _after(checkpoint, rule, step)
        return checkpoint


def _after(checkpoint: Checkpoint, rule: str, step: _Step) -> Checkpoint:
    file, works = checkpoint.path, dict[int, _Work]()
    for part in distinct(checkpoint.sections):
        if part.kind in MODEL_KINDS and (work := step(part, file)).used:
            works[id(part.holder)] = work
    if not works:
        raise UsageError(f"no tensor of the model matches {printable(rule)!r}", file=file or None)
    if optimizer_tensors(checkpoint) or any(one.kind == "optimizer" for one in checkpoint.sections):
        text = "has an optimizer, whose state would not fit parameters of another shape"
        hint = f"ckptool convert {shell(file)} OUT --model-only takes the weights alone"
        raise UsageError(text, file=file, hint=hint)
    refuse_apart(checkpoint, {id(one) for work in works.values() for one in work.used})
    changes = (one for work in works.values() for one in work.changes)
    return with_items(checkpoint, {at: work.items for at, work in works.items()}, *changes)


def _by_glob(kind: str, glob: str, one: _One) -> _Step:
    def step(part: Section, file: str) -> _Work:
        tensors = named_tensors(part.node)
        index = NameIndex([((*part.path, name), node) for name, node in tensors.items()], file)
        places = {index.nodes[at][1].place for at in index.select(glob, endings=False)}
        work, known = _Work(list(part.node.items()), [], []), dict[Any, TensorRef]()
        for at, (name, node) in enumerate(work.items):
            if name not in tensors or node.place not in places:
                continue
            if node.place not in known:
                _check(name, node, file)
                known[node.place], text = one(name, node, file)
                was, now = (made.sizes[0] for made in (node, known[node.place]))
                is_new = node.kind == "numpy" and known[node.place] is not node
                told = f"{printable(name)}: {text}"
                told += "; a tensor takes the place of the numpy array" if is_new else ""
                work.changes.append(Change(kind, told, 1, was=was, now=now))
            else:
                work.changes.append(Change(kind, f"{printable(name)}: tied to another, as it", 1))
            work.items[at] = name, known[node.place]
            work.used.append(node)
        return work

    return step


def _resizing(rule: str) -> _Step:
    found = re.fullmatch(r"(?s)(.+)=([0-9]{1,15})(:zero|:mean)?", rule)
    if found is None:
        hint = "--resize '*.embed_tokens.weight=32001', or =32001:zero"
        raise UsageError(f"{printable(rule)!r} is not a glob with a number of rows", hint=hint)
    rows, zero = int(found[2]), found[3] == ":zero"

    def one(name: str, tensor: TensorRef, file: str) -> tuple[TensorRef, str]:
        shape = tensor.sizes
        if not shape:
            raise UsageError(f"{printable(name)!r} is one number, without rows", file=file)
        data, count = row_major_data(tensor, printable(name), file), rows - shape[0]
        if not count:
            return tensor, f"has {counted(rows, 'row')} already"
        if count > 0:
            if not zero and (tensor.dtype not in FLOATING or not shape[0]):
                text = f"{printable(name)!r} has no mean: it is {tensor.dtype} {list(shape)}"
                raise UsageError(text, file=file, hint=f"--resize {shell(f'{rule}:zero')}")
            data = joined([data, more_rows(tensor, count, zero=zero)])
            text = f"{counted(count, 'row')} added, {'zero' if zero else 'the mean of the others'}"
        else:
            data = data.slice(0, rows * prod(shape[1:]) * tensor.itemsize)
            text = f"{counted(-count, 'row')} cut off the end"
        new = (rows, *shape[1:])
        return _over_data(tensor, name, new, data), f"{list(shape)} -> {list(new)}, {text}"

    return _by_glob("resize", found[1], one)


def _interpolating(rule: str) -> _Step:
    found = re.fullmatch(r"(?s)(.+)=([0-9]{1,6})x([0-9]{1,6})", rule)
    if found is None or not (int(found[2]) and int(found[3])):
        hint = "--interpolate-pos 'pos_embed=24x24', in patches"
        raise UsageError(f"{printable(rule)!r} is not a glob with a grid", hint=hint)
    grid = int(found[2]), int(found[3])

    def one(name: str, tensor: TensorRef, file: str) -> tuple[TensorRef, str]:
        shape = tensor.sizes
        tokens = shape[-2] if len(shape) > 1 and prod(shape[:-2]) == 1 else 0
        sides = [n for n in range(1, isqrt(tokens) + 1) if tokens - n * n <= _PREFIX]
        if len(sides) != 1 or tensor.dtype not in FLOATING:
            text = (
                f"{printable(name)!r}, {tensor.dtype} {list(shape)}, can be no position embedding"
            )
            why = f"of one square grid with at most {_PREFIX} tokens before it"
            raise UsageError(f"{text} {why}", file=file)
        old, prefix = (sides[0], sides[0]), tokens - sides[0] ** 2
        data = row_major_data(tensor, printable(name), file)
        if grid != old:
            data = interpolated(tensor, prefix, old, grid)
        new = (*shape[:-2], prefix + prod(grid), shape[-1])
        text = f"a grid of {old[0]}x{old[1]} -> {grid[0]}x{grid[1]}, bicubic"
        kept = f", {counted(prefix, 'token')} before it kept" if prefix else ""
        return _over_data(tensor, name, new, data), text + kept

    return _by_glob("interpolate", found[1], one)


def _splitting(rule: str) -> _Step:
    (whole,), parts, dim = _parsed(
        "split", "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0", rule
    )

    def step(part: Section, file: str) -> _Work:
        work, known = _Work([], [], []), dict[Any, list[TensorRef]]()
        tensors = named_tensors(part.node)
        for name, node in part.node.items():
            found = _found(whole, name) if name in tensors else None
            if found is None:
                work.items.append((name, node))
                continue
            new, shape = [_filled(one, found) for one in parts], node.sizes
            _check(name, node, file)
            if dim >= len(shape) or shape[dim] % len(new):
                text = f"{printable(name)!r} of shape {list(shape)} has no {len(new)} equal parts"
                raise UsageError(f"{text} along dimension {dim}", file=file)
            if node.place not in known:
                size = shape[dim] // len(new)
                step, less = size * node.stride[dim], (*shape[:dim], size, *shape[dim + 1 :])
                views = (
                    over_elements(node, shape=less, offset=node.offset + at * step)
                    for at in range(len(new))
                )
                known[node.place] = [
                    _over_data(node, one, less, row_major_data(view, printable(name), file))
                    for one, view in zip(new, views, strict=True)
                ]
            work.items.extend(zip(new, known[node.place], strict=True))
            work.used.append(node)
            text = f"{printable(name)} -> {listed(new)}, along dimension {dim}"
            work.changes.append(Change("split", text, 1))
        return _distinct(work, file)

    return step


def _fusing(rule: str) -> _Step:
    parts, (whole,), dim = _parsed("fuse", "*.q.weight,*.k.weight,*.v.weight=>*.qkv.weight@0", rule)

    def step(part: Section, file: str) -> _Work:
        tensors = named_tensors(part.node)
        groups = dict.fromkeys(
            found for one in parts for name in tensors if (found := _found(one, name)) is not None
        )
        taken, work = dict[str, tuple[str, TensorRef] | None](), _Work([], [], [])
        known = dict[Any, TensorRef]()
        for group in groups:
            names = [_filled(one, group) for one in parts]
            if lacking := [name for name in names if name not in tensors]:
                there = next(name for name in names if name in tensors)
                text = f"{printable(there)!r} cannot be fused: there is no {listed(lacking)}"
                raise UsageError(text, file=file)
            if again := [name for name in names if name in taken or names.count(name) > 1]:
                raise UsageError(f"{listed(again)} would be fused twice", file=file)
            for name in names:
                _check(name, tensors[name], file)
            every, new = [tensors[name] for name in names], _filled(whole, group)
            place = tuple(one.place for one in every)
            if place not in known:
                known[place] = _along(new, every, dim, file)
            taken.update({**dict.fromkeys(names), names[0]: (new, known[place])})
            work.used.extend(every)
            text = f"{listed(names)} -> {printable(new)}, along dimension {dim}"
            work.changes.append(Change("fuse", text, len(names)))
        for item in part.node.items():
            if (made := taken.get(item[0], item)) is not None:
                work.items.append(made)
        return _distinct(work, file)

    return step


def _parsed(option: str, example: str, rule: str) -> tuple[list[str], list[str], int]:
    """Return the patterns on both sides of a rule, one of them alone on its side."""
    names, _, dim = rule.rpartition("@")
    left, right = ([*map(str.strip, one.split(","))] for one in names.partition("=>")[::2])
    stars = {one.count("*") for one in (left if option == "fuse" else left[:1])}
    fits = all(one and one.count("*") in {0, *stars} for one in (*left, *right))
    sides = (left, right) if option == "split" else (right, left)
    is_dim = dim.isascii() and dim.isdigit() and len(dim) < 3
    if not is_dim or not fits or len(stars) > 1 or len(sides[0]) != 1 or len(sides[1]) < 2:
        text = f"{printable(rule)!r} does not say what is one and what are its parts"
        raise UsageError(text, hint=f"--{option} '{example}', as many * on both sides")
    return left, right, int(dim)


def _found(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return what the `*` of a pattern match in a name."""
    found = re.fullmatch("(?s)" + "(.*)".join(map(re.escape, pattern.split("*"))), name)
    return None if found is None else found.groups()


def _filled(pattern: str, found: tuple[str, ...]) -> str:
    every = iter(found)
    return re.sub(r"\*", lambda _: next(every), pattern)


def _check(name: str, tensor: TensorRef, file: str) -> None:
    if not tensor.has_content or tensor.dtype in PACKED:
        text = f"{printable(name)!r} is a {tensor.dtype} {tensor.kind} tensor, whose shape stays"
        raise NotRepresentable(text, file=file)


def _distinct(work: _Work, file: str) -> _Work:
    if len(dict(work.items)) < len(work.items):
        counts = Counter(name for name, _ in work.items)
        again = (str(name) for name, count in counts.items() if count > 1)
        raise NameCollision(f"would have several tensors of one name: {listed(again)}", file=file)
    return work


@dataclass(frozen=True)
class Concat(Step):
    """Take the tree of the first rank of Megatron, with the tensors joined from all ranks.

    Other tensors of the ranks (optimizer, random generators) are left out.
    """

    on_files: ClassVar[str] = "the ranks are in the folder of a Megatron iteration"

    options: ClassVar[Mapping[str, str]] = {"rules": "concat"}

    rules: Iterable[str]
    """`GLOB=DIM` each: the dimension along which the ranks split tensors; the first decides."""

    def __post_init__(self) -> None:
        """Check the rules.

        Raises:
            UsageError: one is not a glob with a dimension.
        """
        object.__setattr__(self, "rules", listed_option("concat", self.rules))
        for rule in self.rules:
            _place(rule)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the ranks joined.

        Raises:
            UsageError: a rule matches nothing; there are no ranks; or these differ in their keys,
                in a tensor that no rule names, or in another dimension.
        """
        file, places = checkpoint.path, [_place(rule) for rule in self.rules]
        ranks = checkpoint.root if isinstance(checkpoint.root, dict) else {}
        if not ranks or not all(map(is_rank, ranks)):
            hint = "give the folder of one iteration, which has a folder mp_rank_00"
            raise UsageError("holds no ranks of Megatron's to concatenate", file=file, hint=hint)
        trees = [root if isinstance(root, dict) else {} for root in ranks.values()]
        models = [
            dict(checkpoint.with_root({"model": one.get("model")}).tensors()) for one in trees
        ]
        apart = {name_of(path) for one in models for path in one.keys() ^ models[0].keys()}
        if apart:
            raise UsageError(
                f"has tensors that not all ranks have: {few(sorted(apart))}", file=file
            )
        index, dims = NameIndex(models[0].items(), file), dict[int, int]()
        for glob, dim in places:
            if not (found := index.select(glob, endings=False)):
                raise UsageError(f"no tensor of the model matches {printable(glob)!r}", file=file)
            for at in found:
                dims.setdefault(at, dim)
        fused, whole, differing = dict[tuple[int, ...], TensorRef](), dict[Path, TensorRef](), []
        for at, (path, first) in enumerate(models[0].items()):
            every = [one[path] for one in models]
            if at in dims:
                key = (dims[at], *map(id, every))  # ties stay
                if key not in fused:
                    fused[key] = _along(name_of(path), every, dims[at], file)
                whole[path] = fused[key]
            elif not all(_same(first, one) for one in every[1:]):
                differing.append(name_of(path))
        if differing:
            what = f"and no rule says how to join them: {_kinds(differing)}"
            hint = "--concat 'GLOB=DIM' for each kind: the dimension along which Megatron split it"
            text = f"its ranks differ in {counted(len(differing), 'tensor')}, {what}"
            raise UsageError(text, file=file, hint=hint)
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


def refuse_mixed(checkpoint: Checkpoint, concat: Concat, reshape: Reshape) -> None:
    """Refuse to split what was joined from ranks along the same dimension.

    Each rank has a share of every part: of gate and up, of q, k and v. Joined, and cut into equal
    parts, these would be mixed.

    Raises:
        UsageError: naming one such tensor.
    """
    index, dims = NameIndex(checkpoint.tensors(), checkpoint.path), dict[int, int]()
    for rule in concat.rules:
        glob, dim = _place(rule)
        for at in index.select(glob, endings=False):
            dims.setdefault(at, dim)  # the first rule that matches decides
    example = "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0"
    splits = [_parsed("split", example, rule) for rule in reshape.split]
    for at, dim in dims.items():
        name = str(index.nodes[at][0][-1])
        for (whole,), _, along in splits:
            if dim == along and _found(whole, name) is not None:
                raise UsageError(
                    f"each rank has a share of every part of {printable(name)!r}: split after it "
                    "was joined, the parts would be mixed",
                    file=checkpoint.path or None,
                    hint="--recipe llama-megatron-to-hf takes them apart rank by rank; "
                    "ckptool recipes lists more",
                )


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


def _along(name: str, every: Sequence[TensorRef], dim: int, file: str) -> TensorRef:
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
    return _over_data(first, name, shape, tiled(file, shape, first.itemsize, tiles))


def _over_data(tensor: TensorRef, name: str, shape: tuple[int, ...], data: ByteRange) -> TensorRef:
    """Return the tensor with another shape and elements, in row-major order."""
    return over_elements(
        tensor, shape=shape, stride=row_major_strides(shape), offset=0, flags=(),
        storage=Storage(name, data, data.length, tensor.device),
    )  # fmt: skip
