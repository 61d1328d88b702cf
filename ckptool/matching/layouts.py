"""The axes of tensors in files whose layout is not torch's: TensorFlow's, Keras', Flax's.

A kernel is [..., in, out] there, and [out, in, ...] in torch. The last part of the name in the file
says what the tensor is, the type of the model's module what is wanted. Where the two do not decide
the axes, the user's `transpose` and `no_transpose` do. A shape only checks the result.
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
"""For each axis of the model's tensor, that of the file's tensor."""
Kinds = Mapping[str, str]
"""By name in the model: `kernel`, `same` (the axes of the file), or in words what its module is."""

_KERNEL, _SAME = "kernel", "same"
_TYPES = {
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear"), _KERNEL),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), _KERNEL),
    **dict.fromkeys(("Embedding", "EmbeddingBag", "LayerNorm", "RMSNorm"), _SAME),
}
"""What the weight of a module of `torch.nn` is. Other types decide nothing."""
_ROLES = {
    "kernel": _KERNEL,
    **dict.fromkeys(("embedding", "embeddings", "gamma", "scale", "beta", "bias"), _SAME),
}
"""The same by the last part of a name in the file; a number is either."""
_WIDTHS = (
    "out_channels",
    "out_features",
    "num_features",
    "num_channels",
    "normalized_shape",
    "embedding_dim",
)
"""Attributes that say how many channels a module gives."""
_LAST = re.compile(r"[./]")
_HINT = (
    "--transpose 'layer.weight' or, with the axes of the file, --transpose 'layer.weight=2,3,0,1'"
)


class TransposeRules(NamedTuple):
    """What the user says of axes that nothing else decides."""

    transpose: tuple[tuple[str, Axes], ...] = ()
    """Globs of names in the model, each with the axes; none: as a kernel's."""
    no_transpose: tuple[str, ...] = ()
    """Globs; they come before those of `transpose`."""

    @classmethod
    def of(cls, transpose: Iterable[str], no_transpose: Iterable[str]) -> TransposeRules:
        """Read `GLOB` and `GLOB=AXES`.

        Raises:
            UsageError: the axes are not each number from 0 once.
        """
        read = []
        for text in transpose:
            glob, _, numbers = text.partition("=")
            axes = tuple(int(one) if one.isdecimal() else -1 for one in numbers.split(",") if one)
            if sorted(axes) != list(range(len(axes))):
                raise UsageError(f"'{printable(text)}' has no order of axes", hint=_HINT)
            read.append((glob, axes))
        return cls(tuple(read), tuple(no_transpose))

    def axes(self, name: str, dimensions: int) -> Axes | None:
        """Return the axes that the user chooses for a tensor of the model; None: nothing is said.

        Raises:
            UsageError: it has another number of them.
        """
        if any(fnmatchcase(name, glob) for glob in self.no_transpose):
            return tuple(range(dimensions))
        for glob, axes in self.transpose:
            if fnmatchcase(name, glob):
                if len(axes) not in (0, dimensions):
                    what = f"{printable(name)!r} has {dimensions} axes, and not {len(axes)}"
                    raise UsageError(what, hint=_HINT)
                return axes or _as_kernel(dimensions)
        return None


def _as_kernel(dimensions: int) -> Axes:
    """Return the axes of [..., in, out] in the order [out, in, ...]."""
    return (dimensions - 1, dimensions - 2, *range(dimensions - 2))


def kinds_of(modules: Iterable[tuple[str, Any]]) -> Kinds:
    """Return what each parameter is, by the live modules, each with its path, in their order.

    A Linear may be behind a Flatten, where its inputs have another order than in torch, if a
    convolution of the model has a divisor of them for channels, and neither the layer nor the
    convolution before has as many.
    """
    every = list(modules)
    channels = {_size(module, "out_channels") for _, module in every} - {0}
    kinds: dict[str, str] = {}
    width = last = 0
    for path, module in every:
        word, inputs = _class_of(module), _size(module, "in_features")
        kind = _TYPES.get(word, word)
        if word.startswith("ConvTranspose"):
            kind = f"{word}, and Flax mirrors its kernels unless transpose_kernel=True"
        elif _size(module, "groups") > 1:
            kind = f"{word} of {module.groups} groups"
        elif inputs not in (0, width, last) and not all(inputs % one for one in channels):
            kind = f"{word} that may be behind a Flatten, which has another order in torch"
        width = next(filter(None, (_size(module, one) for one in _WIDTHS)), width)
        last = _size(module, "out_channels") or last
        for own in module._parameters:
            kinds[f"{path}.{own}".lstrip(".")] = kind if own == "weight" else word
    return kinds


def _size(module: Any, name: str) -> int:
    """Return an attribute of a module, or the last of several sizes; 0: it is no size."""
    size = vars(module).get(name)
    if isinstance(size, (tuple, list)) and size:
        size = size[-1]
    return size if isinstance(size, int) and size > 0 else 0


def _class_of(module: Any) -> str:
    """Return the name of the nearest class that decides axes, else of the nearest, not torch's."""
    names = [f"{one.__module__}.{one.__name__}" for one in type(module).__mro__]
    own = [name.rpartition(".")[2] if name.startswith("torch.") else name for name in names]
    return next((name for name in own if name in _TYPES), own[0])


def wanted_by(want: Mapping[str, Slot], kinds: Kinds | None, choices: TransposeRules) -> Slots:
    """Return what a model wants with the shapes that its tensors have in the file.

    None stands for a shape that only the name in the file decides, or nothing. Without `kinds` the
    file has torch's layout, but for what the user chooses.
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
    """Return a match with the slots of `wanted_by`, with `layouts` in its report.

    Tensors whose axes nothing decides are not paired; neither are those of another shape, nor
    numbered variables of a layer that has more or fewer of them than the module.
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
    """Return the axes of a tensor, or why nothing decides them."""
    kind = "" if kinds is None else kinds.get(name, "")
    last = _LAST.split(own.removesuffix(":0"))[-1].removeprefix("_")
    if kind in (_KERNEL, _SAME) and (last.isdecimal() or _ROLES.get(last) == kind):
        is_kernel = kind == _KERNEL
        return Layout(name, own, _as_kernel(dimensions) if is_kernel else (*range(dimensions),))
    axes = choices.axes(name, dimensions)
    if axes is not None or kinds is None:
        return Layout(name, own, axes or (*range(dimensions),))
    if kind in (_KERNEL, _SAME):
        return Layout(name, own, reason=f"{printable(last)!r} is not called a {kind}")
    text = f"in a {printable(kind)}" if kind else "in modules whose types are not known"
    return Layout(name, own, reason=text)


def _misnumbered(
    found: Match, have: Mapping[str, Slot], want: Mapping[str, Slot]
) -> dict[str, str]:
    """Return names that a number stands for, if it may be another's, each with a note on that."""
    known = [one for one in found.report.renamed if one.text.partition(" ")[0] in NUMBERED]
    pairs = [(own, _layer(own), _layer(name)) for one in known for own, name in one.names]
    own_sizes = Counter(map(_layer, have)) if pairs else {}
    sizes = Counter(_layer(name) for name in want if not name.endswith(BATCHES)) if pairs else {}
    return {
        own: f"{printable(layer)} has {own_sizes[layer]} tensors, and {printable(module)} "
        f"{sizes[module]}: give each a name by a rule"
        for own, layer, module in pairs
        if own_sizes[layer] != sizes[module]
    }


def _layer(name: str) -> str:
    return name[: -len(_LAST.split(name)[-1]) - 1]
