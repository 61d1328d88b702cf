"""The axes of tensors in TensorFlow, Keras and Flax files, which differ from torch.

A kernel is [..., in, out] there, and [out, in, ...] in torch. The last part of the file key shows
the kind of the tensor, the type of the model's module the expected one. If these do not decide the
axes, the user's `transpose` and `no_transpose` do. A shape only checks the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ckptool.core.model import Shape
from ckptool.errors import UsageError
from ckptool.matching.known_renames import BATCHES, NUMBERED
from ckptool.matching.match import Match
from ckptool.matching.report import Layout, Mismatch, Slot, Slots
from ckptool.words import printable

Axes = tuple[int, ...]
"""The axis of the file's tensor for each axis of the model's tensor."""
Kinds = Mapping[str, str]
"""By model key: `kernel`, `same` (the axes of the file), or a description of the module."""

_KERNEL, _SAME = "kernel", "same"
_TYPES = {
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear"), _KERNEL),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), _KERNEL),
    **dict.fromkeys(("Embedding", "EmbeddingBag", "LayerNorm", "RMSNorm"), _SAME),
}
"""The kind of the weight by `torch.nn` module type. Other types decide nothing."""
_ROLES = {
    "kernel": _KERNEL,
    **dict.fromkeys(("embedding", "embeddings", "gamma", "scale", "beta", "bias"), _SAME),
}
"""The kind by the last part of a file key; a number can be either."""
_WIDTHS = (
    "out_channels",
    "out_features",
    "num_features",
    "num_channels",
    "normalized_shape",
    "embedding_dim",
)
"""Attributes with the number of output channels of a module."""
_LAST = re.compile(r"[./]")
_HINT = "use --transpose 'layer.weight' or, with axes, --transpose 'layer.weight=2,3,0,1'"


class TransposeRules(NamedTuple):
    """The user's choices for axes that nothing else decides."""

    transpose: tuple[tuple[str, Axes], ...] = ()
    """Globs of model keys with axes; no axes means those of a kernel."""
    no_transpose: tuple[str, ...] = ()
    """Globs, which take precedence over `transpose`."""

    @classmethod
    def of(cls, transpose: Iterable[str], no_transpose: Iterable[str]) -> TransposeRules:
        """Read `GLOB` and `GLOB=AXES`.

        Raises:
            UsageError: if the axes are not a permutation.
        """
        read = []
        for text in transpose:
            glob, _, numbers = text.partition("=")
            axes = tuple(int(one) if one.isdecimal() else -1 for one in numbers.split(",") if one)
            if sorted(axes) != list(range(len(axes))):
                raise UsageError(f"'{printable(text)}' is not a permutation of axes", hint=_HINT)
            read.append((glob, axes))
        return cls(tuple(read), tuple(no_transpose))

    def axes(self, name: str, dimensions: int) -> Axes | None:
        """Return the user's axes for a model tensor, or None.

        Raises:
            UsageError: if the number of axes differs.
        """
        if any(fnmatchcase(name, glob) for glob in self.no_transpose):
            return tuple(range(dimensions))
        for glob, axes in self.transpose:
            if fnmatchcase(name, glob):
                if len(axes) not in (0, dimensions):
                    what = f"{printable(name)!r} has {dimensions} axes, but {len(axes)} are given"
                    raise UsageError(what, hint=_HINT)
                return axes or _as_kernel(dimensions)
        return None


def _as_kernel(dimensions: int) -> Axes:
    """Return the axes of [..., in, out] in the order [out, in, ...]."""
    return (dimensions - 1, dimensions - 2, *range(dimensions - 2))


def kinds_of(modules: Iterable[tuple[str, Any]]) -> Kinds:
    """Return the kind of each parameter, from the modules with their paths in order.

    A Linear may follow a Flatten, with inputs in another order than in torch, if the channels of a
    convolution divide its inputs, and neither the layer nor the convolution before has as many.
    """
    every = list(modules)
    channels = {_size(module, "out_channels") for _, module in every} - {0}
    kinds: dict[str, str] = {}
    width = last = 0
    for path, module in every:
        word, inputs = _class_of(module), _size(module, "in_features")
        kind = _TYPES.get(word, word)
        if word.startswith("ConvTranspose"):
            kind = f"{word}, which Flax mirrors unless transpose_kernel=True"
        elif _size(module, "groups") > 1:
            kind = f"{word} with {module.groups} groups"
        elif inputs not in (0, width, last) and not all(inputs % one for one in channels):
            kind = f"{word} that may follow a Flatten, which has another order in torch"
        width = next(filter(None, (_size(module, one) for one in _WIDTHS)), width)
        last = _size(module, "out_channels") or last
        for own in module._parameters:
            kinds[f"{path}.{own}".lstrip(".")] = kind if own == "weight" else word
    return kinds


def _size(module: Any, name: str) -> int:
    """Return a size attribute of a module, or the last of several sizes; 0 if it is not a size."""
    size = vars(module).get(name)
    if isinstance(size, (tuple, list)) and size:
        size = size[-1]
    return size if isinstance(size, int) and size > 0 else 0


def _class_of(module: Any) -> str:
    """Return the name of the nearest class that decides axes, or of the class itself."""
    names = [f"{one.__module__}.{one.__name__}" for one in type(module).__mro__]
    own = [name.rpartition(".")[2] if name.startswith("torch.") else name for name in names]
    return next((name for name in own if name in _TYPES), own[0])


def wanted_by(want: Mapping[str, Slot], kinds: Kinds | None, choices: TransposeRules) -> Slots:
    """Return the slots of a model with the shapes expected in the file.

    A shape is None if only the file key, or nothing, decides it. Without `kinds`, the file has
    torch's layout, except for the user's choices.
    """

    def shape_of(name: str, shape: Shape) -> Shape | None:
        if choices.axes(name, len(shape)) is not None:
            return None
        kind = _SAME if kinds is None else kinds.get(name)
        if kind not in (_KERNEL, _SAME):
            return None
        return (*shape[2:], shape[1], shape[0]) if kind == _KERNEL else shape

    return {
        name: slot._replace(shape=shape_of(name, slot.shape))
        if slot.shape is not None and len(slot.shape) > 1
        else slot
        for name, slot in want.items()
    }


def laid_out(
    found: Match,
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    kinds: Kinds | None,
    choices: TransposeRules,
) -> Match:
    """Return a match of the slots of `wanted_by` with `layouts` in its report.

    Tensors with unknown axes or another shape are not paired; neither are numbered variables of a
    layer if their number differs from the module's.
    """
    report, layouts, gone = found.report, list[Layout](), set[str]()
    wrong = {one.name: one for one in report.mismatched}
    for own in dict.fromkeys((*found.pairs.values(), *(one.own for one in report.mismatched))):
        name, shape = found.renamed[own], have[own].shape or ()
        if len(shape) < 2:
            continue
        row = _decided(name, own, kinds, len(shape), choices)
        new, wanted = tuple(shape[axis] for axis in row.axes), want[name].shape
        if row.reason:
            wrong.pop(name, None)
            gone.add(own)
            layouts.append(row)
        elif wanted not in (None, new):
            wrong[name] = Mismatch(name, own, new, wanted or ())
            gone.add(own)
        elif list(row.axes) != sorted(row.axes):
            layouts.append(row)
    odd = _misnumbered(found, have, want)
    missing = {*report.missing_keys, *(name for name, own in found.pairs.items() if own in odd)}
    unexpected = {*report.unexpected_keys, *odd}
    report = replace(
        report,
        missing_keys=[name for name in want if name in missing],
        unexpected_keys=[own for own in have if own in unexpected],
        mismatched=tuple(wrong.values()),
        layouts=tuple(one for one in layouts if one.own not in odd),
        notes=(*report.notes, *dict.fromkeys(odd.values())),
    )
    gone |= odd.keys()
    pairs = {name: own for name, own in found.pairs.items() if own not in gone}
    return found._replace(pairs=pairs, report=report)


def _decided(
    name: str, own: str, kinds: Kinds | None, dimensions: int, choices: TransposeRules
) -> Layout:
    """Return the axes of a tensor, or why they are unknown."""
    kind = "" if kinds is None else kinds.get(name, "")
    last = _LAST.split(own.removesuffix(":0"))[-1].removeprefix("_")
    if kind in (_KERNEL, _SAME) and (last.isdecimal() or _ROLES.get(last) == kind):
        is_kernel = kind == _KERNEL
        return Layout(name, own, _as_kernel(dimensions) if is_kernel else (*range(dimensions),))
    axes = choices.axes(name, dimensions)
    if axes is not None or kinds is None:
        return Layout(name, own, axes or (*range(dimensions),))
    if kind in (_KERNEL, _SAME):
        return Layout(name, own, reason=f"{printable(last)!r} is not the usual name of a {kind}")
    text = f"in a {printable(kind)}" if kind else "in modules of unknown type"
    return Layout(name, own, reason=text)


def _misnumbered(
    found: Match, have: Mapping[str, Slot], want: Mapping[str, Slot]
) -> dict[str, str]:
    """Return file keys with an ambiguous number, each with a note."""
    known = [one for one in found.report.renamed if one.text.partition(" ")[0] in NUMBERED]
    pairs = [(own, _layer(own), _layer(name)) for one in known for own, name in one.names]
    own_sizes = Counter(map(_layer, have)) if pairs else {}
    sizes = Counter(_layer(name) for name in want if not name.endswith(BATCHES)) if pairs else {}
    return {
        own: f"{printable(layer)} has {own_sizes[layer]} tensors, but {printable(module)} "
        f"has {sizes[module]}: rename each with a rule"
        for own, layer, module in pairs
        if own_sizes[layer] != sizes[module]
    }


def _layer(name: str) -> str:
    return name[: -len(_LAST.split(name)[-1]) - 1]
