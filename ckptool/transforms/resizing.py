"""Resize tensors to other numbers of rows, and position embeddings to other grids."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isqrt, prod
from typing import Any, NamedTuple, TypeAlias

from ckptool.core.addressing import NameIndex
from ckptool.core.checkpoint import Change
from ckptool.core.model import Storage, TensorRef, replace_elements, row_major_strides
from ckptool.core.sections import Section, get_named_tensors
from ckptool.dtypes import PACKED
from ckptool.errors import NotRepresentable, UsageError
from ckptool.files import ByteRange
from ckptool.files.computed import join_ranges
from ckptool.formats.distributed.placements import row_major_data
from ckptool.tensors.averaging import make_rows, resample_positions
from ckptool.transforms.casting import FLOATING
from ckptool.words import counted, printable, shell

_MAX_PREFIX = 5
"""The maximum number of tokens before the grid, for example a class token and four registers."""


class SectionWork(NamedTuple):
    """The result of a rule for one state dict."""

    items: list[tuple[Any, Any]]
    """The new entries of the state dict."""
    used: set[int]
    """The identities of the tensors that change."""
    changes: list[Change]


SectionRule: TypeAlias = "Callable[[Section, str], SectionWork]"
"""A function of a state dict, and the file for messages."""
_Resize: TypeAlias = "Callable[[str, TensorRef, str], tuple[TensorRef, str]]"
"""A function of a key, its tensor and the file for messages. It returns the tensor with another
shape, and a description of the change."""


def _make_glob_rule(kind: str, glob: str, resize: _Resize) -> SectionRule:
    """Return the rule that resizes each tensor that matches the glob, and all keys tied to it."""

    def apply(section: Section, file: str) -> SectionWork:
        """Return the result for one state dict; `file` is for messages.

        The tensors tied to a selected one (with the same `place`) are resized with it.
        """
        tensors = get_named_tensors(section.node)
        index = NameIndex([((*section.path, name), node) for name, node in tensors.items()], file)
        matches = [index.nodes[position] for position in index.select(glob, endings=False)]
        chosen_places = {tensor.place for _, tensor in matches}
        work = SectionWork(list(section.node.items()), used=set(), changes=[])
        resized_by_place: dict[Any, TensorRef] = {}
        for position, (name, node) in enumerate(work.items):
            if name not in tensors or node.place not in chosen_places:
                continue
            if node.place not in resized_by_place:
                _check_resizable(name, node, file)
                resized, text = resize(name, node, file)
                resized_by_place[node.place] = resized
                sentence = f"{printable(name)}: {text}"
                if node.kind == "numpy" and resized is not node:
                    sentence += "; a tensor takes the place of the numpy array"
                old_rows, new_rows = node.sizes[0], resized.sizes[0]
                work.changes.append(Change(kind, sentence, 1, was=old_rows, now=new_rows))
            else:
                sentence = f"{printable(name)}: changed in the same way, because it is tied to "
                work.changes.append(Change(kind, f"{sentence}another tensor", 1))
            work.items[position] = name, resized_by_place[node.place]
            work.used.add(id(node))
        return work

    return apply


def parse_resize(rule: str) -> SectionRule:
    """Return the rule for `GLOB=ROWS`: give the tensors that match GLOB this number of rows.

    Raises:
        UsageError: if the text has another form.
    """
    match = re.fullmatch(r"(?s)(.+)=([0-9]{1,15})(:zero|:mean)?", rule)
    if match is None:
        hint = "--resize '*.embed_tokens.weight=32001', or =32001:zero"
        raise UsageError(f"{printable(rule)!r} is not a glob with a number of rows", hint=hint)
    n_rows, zero = int(match[2]), match[3] == ":zero"

    def resize(name: str, tensor: TensorRef, file: str) -> tuple[TensorRef, str]:
        """Return a tensor with `n_rows` rows, and a description of the change.

        New rows are the mean of the old ones, or zeros.
        """
        shape = tensor.sizes
        if not shape:
            raise UsageError(f"{printable(name)!r} is one number, without rows", file=file)
        n_old_rows, *other_sizes = shape
        data, n_new = row_major_data(tensor, printable(name), file), n_rows - n_old_rows
        if not n_new:
            return tensor, f"already has {counted(n_rows, 'row')}"
        if n_new > 0:
            if not zero and (tensor.dtype not in FLOATING or not n_old_rows):
                text = f"{printable(name)!r} has no mean: it is {tensor.dtype} {list(shape)}"
                raise UsageError(text, file=file, hint=f"--resize {shell(f'{rule}:zero')}")
            data = join_ranges([data, make_rows(tensor, n_new, zero=zero)])
            mean = "the mean of the existing rows"
            values = "all zeros" if zero else mean if n_new == 1 else f"each {mean}"
            text = f"added {counted(n_new, 'row')}, {values}"
        else:
            data = data.slice(0, n_rows * prod(other_sizes) * tensor.itemsize)
            text = f"cut {counted(-n_new, 'row')} off the end"
        new_shape = (n_rows, *other_sizes)
        text = f"{list(shape)} -> {list(new_shape)}, {text}"
        return _replace_data(tensor, name, new_shape, data), text

    return _make_glob_rule("resize", match[1], resize)


def parse_interpolation(rule: str) -> SectionRule:
    """Return the rule for `GLOB=HxW`: resample position embeddings to a grid of H x W patches.

    Raises:
        UsageError: if the text has another form.
    """
    match = re.fullmatch(r"(?s)(.+)=([0-9]{1,6})x([0-9]{1,6})", rule)
    if match is None or not (int(match[2]) and int(match[3])):
        hint = "--interpolate-pos 'pos_embed=24x24', in patches"
        raise UsageError(f"{printable(rule)!r} is not a glob with a grid", hint=hint)
    grid = int(match[2]), int(match[3])

    def interpolate(name: str, tensor: TensorRef, file: str) -> tuple[TensorRef, str]:
        """Return a position embedding for another grid, and a description of the change."""
        shape = tensor.sizes  # (..., tokens, channels)
        n_tokens = shape[-2] if len(shape) > 1 and prod(shape[:-2]) == 1 else 0
        # The possible sides of the old, square grid, with up to _MAX_PREFIX tokens before it.
        sides = [n for n in range(1, isqrt(n_tokens) + 1) if n_tokens - n * n <= _MAX_PREFIX]
        if len(sides) != 1 or tensor.dtype not in FLOATING:
            text = (
                f"{printable(name)!r}, {tensor.dtype} {list(shape)}, cannot be a position embedding"
            )
            expected = f"of one square grid with at most {_MAX_PREFIX} tokens before it"
            raise UsageError(f"{text} {expected}", file=file)
        side, n_prefix = sides[0], n_tokens - sides[0] ** 2
        data = row_major_data(tensor, printable(name), file)
        if grid != (side, side):
            data = resample_positions(tensor, n_prefix, (side, side), grid)
        new_shape = (*shape[:-2], n_prefix + prod(grid), shape[-1])
        text = f"a grid of {side}x{side} -> {grid[0]}x{grid[1]}, bicubic"
        kept = f", {counted(n_prefix, 'token')} before it kept" if n_prefix else ""
        return _replace_data(tensor, name, new_shape, data), text + kept

    return _make_glob_rule("interpolate", match[1], interpolate)


def _check_resizable(name: str, tensor: TensorRef, file: str) -> None:
    """Refuse a tensor without plain elements, because its shape cannot change."""
    if not tensor.has_content or tensor.dtype in PACKED:
        text = (
            f"{printable(name)!r} is a {tensor.dtype} {tensor.kind} tensor, so its shape "
            "cannot change"
        )
        raise NotRepresentable(text, file=file)


def _replace_data(
    tensor: TensorRef, name: str, shape: tuple[int, ...], data: ByteRange
) -> TensorRef:
    """Return the tensor with another shape and elements, in row-major order."""
    return replace_elements(
        tensor, shape=shape, stride=row_major_strides(shape), offset=0, flags=(),
        storage=Storage(name, data, data.length, tensor.device),
    )  # fmt: skip
