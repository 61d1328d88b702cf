"""Tensors without values: lazy parameters, tensors on the meta device, placeholders of ZeRO-3."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Opaque
from ckptool.core.sections import MODEL_KINDS, Section
from ckptool.core.tree import name_of, walk
from ckptool.errors import NotRepresentable
from ckptool.words import counted

PLACEHOLDERS = (
    "the folder of the DeepSpeed run has the weights: ckptool convert FOLDER OUT --model-only"
)
"""The hint for placeholders."""


_LAZY = "torch.nn.parameter.Uninitialized"
"""The start of the class names of lazy parameters and buffers."""


def find_placeholders(checkpoint: Checkpoint, section: Section | None = None) -> Finding | None:
    """Return a finding for tensors without values in a checkpoint or section, or None.

    A state dict has placeholders if more than half of its tensors named `weight` have the shape
    (0,), or if `param_shapes` of the file has another shape for a tensor of shape (0,). Vectors,
    biases and buffers do not count, because ZeRO-3 keeps small tensors complete.
    """
    tensors = list(checkpoint.tensors() if section is None else section.tensors())
    leaves = checkpoint.leaves if section is None else walk(section.node)
    lazy = [name_of(path) for path, node in leaves if _is_lazy(node)]
    if lazy:
        count = counted(len(lazy), "lazy parameter")
        text = f"{count} without values: the model never ran"
        return Finding("lazy", text, tuple(lazy), hint="run the model once and save it again")
    meta = [path for path, tensor in tensors if "meta" in (tensor.kind, tensor.device)]
    if meta:
        text = f"{len(meta):,} of {counted(len(tensors), 'tensor')} without values: "
        text += "meta tensors have only a shape"
        remedy = "save it again from a model with values"
        return Finding("meta", text, tuple(map(name_of, meta)), hint=remedy)
    if not any(tensor.shape == (0,) for _, tensor in tensors):
        return None
    stated_shapes = dict(_read_param_shapes(checkpoint.original or checkpoint.root))
    for candidate in checkpoint.sections if section is None else (section,):
        if candidate.kind in MODEL_KINDS:
            finding = _find_empty_weights(candidate, stated_shapes)
            if finding is not None:
                return finding
    return None


def _find_empty_weights(section: Section, stated_shapes: Mapping[Any, Any]) -> Finding | None:
    """Return a finding for a state dict whose weights ZeRO-3 replaced by tensors of shape (0,).

    `stated_shapes` has the shapes of complete parameters by key, if the file states them.
    """
    tensors = section.tensors()
    empty = [path for path, tensor in tensors if tensor.shape == (0,)]
    weights = [tensor for path, tensor in tensors if str(path[-1]).endswith("weight")]
    # ZeRO-3 keeps parameters below its threshold complete, mostly vectors
    # (deepspeed/runtime/zero/config.py: param_persistence_threshold), so matrices decide.
    empty_count = sum(tensor.shape == (0,) for tensor in weights)
    complete_count = sum(len(tensor.shape) != 1 for tensor in weights)
    has_other_shape = any(stated_shapes.get(path[-1], (0,)) != (0,) for path in empty)
    if empty_count <= complete_count and not has_other_shape:
        return None
    text = f"the file has placeholders instead of weights: {len(empty):,} of "
    text += f"{counted(len(tensors), 'tensor')} have the shape (0,), as ZeRO-3 saves them"
    return Finding("part", text, tuple(map(name_of, empty)), hint=PLACEHOLDERS)


def refuse_placeholders(
    checkpoint: Checkpoint,
    section: Section | None = None,
    *,
    kinds: Collection[str] = ("lazy", "meta", "part"),
) -> None:
    """Refuse to use tensors without values of these kinds as weights.

    Raises:
        NotRepresentable: if there are any; for the first kind found.
    """
    finding = find_placeholders(checkpoint, section)
    if finding is not None and finding.kind in kinds:
        raise NotRepresentable(finding.text, file=checkpoint.path or None, hint=finding.hint)


def _is_lazy(node: Any) -> bool:
    """Return True for a lazy parameter that was saved before it got a shape."""
    return isinstance(node, Opaque) and node.class_name.startswith(_LAZY)


def _read_param_shapes(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the names and shapes in DeepSpeed's `param_shapes`, which has a dict per group."""
    groups = root.get("param_shapes") if isinstance(root, dict) else None
    for group in groups if isinstance(groups, list) else [groups]:
        yield from group.items() if isinstance(group, dict) else ()
