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
_KIND_BY_MODULE_TYPE = {
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear"), _KERNEL),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), _KERNEL),
    **dict.fromkeys(("Embedding", "EmbeddingBag", "LayerNorm", "RMSNorm"), _SAME),
}
"""The kind of the weight by `torch.nn` module type. Other types decide nothing."""
_KIND_BY_KEY_PART = {
    "kernel": _KERNEL,
    **dict.fromkeys(("embedding", "embeddings", "gamma", "scale", "beta", "bias"), _SAME),
}
"""The kind by the last part of a file key; a number can be either."""
_OUTPUT_SIZE_ATTRIBUTES = (
    "out_channels",
    "out_features",
    "num_features",
    "num_channels",
    "normalized_shape",
    "embedding_dim",
)
"""Attributes with the number of output channels of a module."""
_SEPARATOR = re.compile(r"[./]")
_HINT_TRANSPOSE = "use --transpose 'layer.weight' or, with axes, --transpose 'layer.weight=2,3,0,1'"


class TransposeRules(NamedTuple):
    """The user's choices for axes that nothing else decides."""

    transpose: tuple[tuple[str, Axes], ...] = ()
    """Globs of model keys with axes; no axes means those of a kernel."""
    no_transpose: tuple[str, ...] = ()
    """Globs, which take precedence over `transpose`."""

    @classmethod
    def parse(cls, transpose: Iterable[str], no_transpose: Iterable[str]) -> TransposeRules:
        """Read `GLOB` and `GLOB=AXES`; a glob by itself gets no axes.

        Raises:
            UsageError: if the axes are not a permutation.
        """
        read = []
        for text in transpose:
            glob, _, numbers = text.partition("=")
            axes = tuple(  # -1 is in no permutation
                int(axis) if axis.isdecimal() else -1 for axis in numbers.split(",") if axis
            )
            if sorted(axes) != list(range(len(axes))):
                raise UsageError(
                    f"'{printable(text)}' is not a permutation of axes", hint=_HINT_TRANSPOSE
                )
            read.append((glob, axes))
        return cls(tuple(read), tuple(no_transpose))

    def axes_for(self, key: str, dimensions: int) -> Axes | None:
        """Return the user's axes for a model tensor, or None.

        A rule without axes is for [..., in, out], those of a kernel.

        Raises:
            UsageError: if the number of axes differs.
        """
        if any(fnmatchcase(key, glob) for glob in self.no_transpose):
            return tuple(range(dimensions))
        for glob, axes in self.transpose:
            if fnmatchcase(key, glob):
                if len(axes) not in (0, dimensions):
                    text = f"{printable(key)!r} has {dimensions} axes, but {len(axes)} are given"
                    raise UsageError(text, hint=_HINT_TRANSPOSE)
                return axes or _kernel_axes(dimensions)
        return None


def _kernel_axes(dimensions: int) -> Axes:
    """Return the axes of [..., in, out] in the order [out, in, ...]."""
    return (dimensions - 1, dimensions - 2, *range(dimensions - 2))


def find_kinds(modules: Iterable[tuple[str, Any]]) -> Kinds:
    """Return the kind of each parameter, from the modules with their paths in order.

    If the axes are uncertain, it is a description of the module, and the user decides. This is so
    for a Linear that may follow a Flatten, which orders its inputs differently in torch. Its number
    of inputs shows it: a multiple of the channels of some convolution, but not the number of
    outputs of the layer or convolution before.
    """
    named_modules = list(modules)
    channel_counts = {_read_size(module, "out_channels") for _, module in named_modules} - {0}
    kinds: dict[str, str] = {}
    previous_outputs = previous_channels = 0
    for path, module in named_modules:
        class_name, inputs = _name_class(module), _read_size(module, "in_features")
        kind = _KIND_BY_MODULE_TYPE.get(class_name, class_name)
        if class_name.startswith("ConvTranspose"):
            kind = f"{class_name}, which Flax mirrors unless transpose_kernel=True"
        elif _read_size(module, "groups") > 1:
            kind = f"{class_name} with {module.groups} groups"
        elif inputs not in (0, previous_outputs, previous_channels) and any(
            inputs % count == 0 for count in channel_counts
        ):
            kind = f"{class_name} that may follow a Flatten, which has another order in torch"
        previous_outputs = next(
            filter(None, (_read_size(module, name) for name in _OUTPUT_SIZE_ATTRIBUTES)),
            previous_outputs,
        )
        previous_channels = _read_size(module, "out_channels") or previous_channels
        for parameter in module._parameters:
            kinds[f"{path}.{parameter}".lstrip(".")] = kind if parameter == "weight" else class_name
    return kinds


def _read_size(module: Any, attribute: str) -> int:
    """Return a size attribute of a module; 0 if it is not a size.

    Of several sizes, such as the `normalized_shape` of a LayerNorm, it is the last one.
    """
    size = vars(module).get(attribute)
    if isinstance(size, (tuple, list)) and size:
        size = size[-1]
    return size if isinstance(size, int) and size > 0 else 0


def _name_class(module: Any) -> str:
    """Return the name of the nearest class that decides axes, or of the class itself."""
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__]
    short_names = [name.rpartition(".")[2] if name.startswith("torch.") else name for name in names]
    return next((name for name in short_names if name in _KIND_BY_MODULE_TYPE), short_names[0])


def expect_file_shapes(
    model_slots: Mapping[str, Slot], kinds: Kinds | None, rules: TransposeRules
) -> Slots:
    """Return the slots of a model with the shapes expected in the file.

    A shape is None if only the file key, or nothing, decides it. Without `kinds`, the file has
    torch's layout, except for the user's choices.
    """

    def expect_shape(key: str, shape: Shape) -> Shape | None:
        """Return the shape that a model tensor has in the file, or None if it is unknown."""
        if rules.axes_for(key, len(shape)) is not None:  # applied only if the file key is unusual
            return None
        kind = _SAME if kinds is None else kinds.get(key)
        if kind not in (_KERNEL, _SAME):  # a description of a module whose axes are uncertain
            return None
        # Kernels [out, in, ...] of torch are [..., in, out] there.
        return (*shape[2:], shape[1], shape[0]) if kind == _KERNEL else shape

    return {
        name: slot._replace(shape=expect_shape(name, slot.shape))
        if slot.shape is not None and len(slot.shape) > 1
        else slot
        for name, slot in model_slots.items()
    }


def resolve_layouts(
    match: Match,
    file_slots: Mapping[str, Slot],
    model_slots: Mapping[str, Slot],
    kinds: Kinds | None,
    rules: TransposeRules,
) -> Match:
    """Return the match with the transposed tensors, and those of unknown axes, as `layouts`.

    The match was made with the slots of `expect_file_shapes`. Tensors with unknown axes or another
    shape lose their pair. So do all numbered variables of a layer that has more or fewer of them
    than its module has tensors, because their numbers then prove nothing.
    """
    report, layouts, unpaired = match.report, list[Layout](), set[str]()
    mismatched = {row.name: row for row in report.mismatched}
    paired_keys = (*match.pairs.values(), *(row.own for row in report.mismatched))
    for file_key in dict.fromkeys(paired_keys):
        key, shape = match.renamed[file_key], file_slots[file_key].shape or ()
        if len(shape) < 2:
            continue
        layout = _decide_axes(key, file_key, kinds, len(shape), rules)
        transposed, model_shape = tuple(shape[axis] for axis in layout.axes), model_slots[key].shape
        if layout.reason:  # the axes are unknown
            mismatched.pop(key, None)
            unpaired.add(file_key)
            layouts.append(layout)
        elif model_shape not in (None, transposed):
            mismatched[key] = Mismatch(key, file_key, transposed, model_shape or ())
            unpaired.add(file_key)
        elif list(layout.axes) != sorted(layout.axes):  # axes in the same order need no entry
            layouts.append(layout)
    misnumbered = _find_misnumbered(match, file_slots, model_slots)
    missing = {
        *report.missing_keys,
        *(key for key, file_key in match.pairs.items() if file_key in misnumbered),
    }
    unexpected = {*report.unexpected_keys, *misnumbered}
    report = replace(
        report,
        missing_keys=[key for key in model_slots if key in missing],
        unexpected_keys=[file_key for file_key in file_slots if file_key in unexpected],
        mismatched=tuple(mismatched.values()),
        layouts=tuple(row for row in layouts if row.own not in misnumbered),
        notes=(*report.notes, *dict.fromkeys(misnumbered.values())),
    )
    unpaired |= misnumbered.keys()
    pairs = {key: file_key for key, file_key in match.pairs.items() if file_key not in unpaired}
    return match._replace(pairs=pairs, report=report)


def _decide_axes(
    key: str, file_key: str, kinds: Kinds | None, dimensions: int, rules: TransposeRules
) -> Layout:
    """Return the axes of a tensor, or the reason why they are unknown.

    The axes are certain if the module type (`kinds`) and the last part of the file key agree. Else
    the user's `rules` decide; without `kinds`, torch's order is the default.
    """
    kind = "" if kinds is None else kinds.get(key, "")
    # TensorFlow ends the keys of variables with ":0", and Keras begins attributes with "_".
    last_part = _SEPARATOR.split(file_key.removesuffix(":0"))[-1].removeprefix("_")
    if kind in (_KERNEL, _SAME) and (
        last_part.isdecimal()  # Keras numbers the variables of a layer
        or _KIND_BY_KEY_PART.get(last_part) == kind
    ):
        same_axes = tuple(range(dimensions))
        return Layout(key, file_key, _kernel_axes(dimensions) if kind == _KERNEL else same_axes)
    axes = rules.axes_for(key, dimensions)
    if axes is not None or kinds is None:
        return Layout(key, file_key, axes or (*range(dimensions),))
    if kind in (_KERNEL, _SAME):
        return Layout(
            key, file_key, reason=f"{printable(last_part)!r} is not the usual name of a {kind}"
        )
    text = f"in a {printable(kind)}" if kind else "in modules of unknown type"
    return Layout(key, file_key, reason=text)


def _find_misnumbered(
    match: Match, file_slots: Mapping[str, Slot], model_slots: Mapping[str, Slot]
) -> dict[str, str]:
    """Return the numbered variables of layers with another number of tensors than their module.

    `vars.1` is the bias only of a layer with as many variables as its module has tensors. Each file
    key has a note.
    """
    # The text of these rules begins with the variable: "vars.1 -> bias".
    renamings = [rule for rule in match.report.renamed if rule.text.partition(" ")[0] in NUMBERED]
    pairs = [
        (file_key, _layer_of(file_key), _layer_of(key))
        for renaming in renamings
        for file_key, key in renaming.names
    ]
    if not pairs:
        return {}
    count_by_file_layer = Counter(map(_layer_of, file_slots))
    count_by_module = Counter(_layer_of(key) for key in model_slots if not key.endswith(BATCHES))
    return {
        file_key: f"{printable(layer)} has {count_by_file_layer[layer]} tensors, but "
        f"{printable(module)} has {count_by_module[module]}: rename each with a rule"
        for file_key, layer, module in pairs
        if count_by_file_layer[layer] != count_by_module[module]
    }


def _layer_of(key: str) -> str:
    """Return the path of the layer that contains a key: `a/b` for `a/b/kernel`, `a` for `a.w`."""
    last_component = _SEPARATOR.split(key)[-1]
    return key.removesuffix(last_component)[:-1]
