"""Quantized weights: convert them to plain tensors, and refuse to change a part of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NoReturn

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import SPARSE_KINDS, TensorRef, copy_with_items, find_tensors
from ckptool.core.modules import find_opaque_content
from ckptool.core.quantization_config import plain_header, quantization_config
from ckptool.core.quantizers import (
    MARKERS,
    Quantized,
    find_incomplete,
    find_quantized,
    to_plain_key,
)
from ckptool.core.sections import MODEL_KINDS, describe_opaque_content
from ckptool.core.tree import rebuild, walk_everything as every_node
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotFound, NotRepresentable
from ckptool.tensors.casting import FLOATS
from ckptool.tensors.dequantizing import PACKED, can_dequantize, dequantize
from ckptool.tensors.unpacking import UnknownLayout
from ckptool.words import listed, printable, shell


@dataclass(frozen=True)
class Dequantized:
    """A checkpoint without quantized weights, and the facts for the receipt."""

    checkpoint: Checkpoint
    storages: set[int] = field(default_factory=set)
    """The identities of the storages with dequantized weights."""
    schemes: dict[str, None] = field(default_factory=dict)
    """The schemes of the quantized weights."""
    dropped_keys: dict[str, None] = field(default_factory=dict)
    """The keys of companions and markers, which plain weights do not need."""


def get_elements(tensor: TensorRef) -> TensorRef:
    """Return the tensor itself, or the values of a sparse tensor, or the buffer of a nested one."""
    parts = tensor.parts or {}
    part = None
    if tensor.kind == "nested":
        part = parts.get("buffer")
    elif tensor.kind in SPARSE_KINDS:
        part = parts.get("values")
    return tensor if part is None else part


def refuse_dependent_tensors(
    checkpoint: Checkpoint, chosen: Collection[int], remedy: str = ""
) -> None:
    """Refuse to change tensors that only have a meaning together with others.

    `chosen` has the identities of the tensors to change, or of their elements (`get_elements`).

    Raises:
        NotRepresentable: if one is quantized, is the companion of a quantized one, or has a meaning
            known only to the class of its module. `remedy` is the hint for all of these.
    """

    def raise_error(fact: str, *remedies: str) -> None:
        """Raise the error; its hint is these remedies, then the `remedy` of the caller."""
        hint = "; ".join(filter(None, (*remedies, remedy)))
        raise NotRepresentable(fact, file=checkpoint.path, hint=hint or None)

    def contains_chosen(node: Any) -> bool:
        """Return True if a node is or contains one of the tensors to change."""
        return any(id(get_elements(tensor)) in chosen for tensor in find_tensors(node))

    for section in checkpoint.sections:
        if section.kind == "module":
            for path, node in find_opaque_content(section.holder).items():
                if contains_chosen(node):
                    raise_error(f"cannot be cast: {describe_opaque_content(path, node)}")
    for state, name, quantized in _find_quantized_weights(checkpoint):
        if any(contains_chosen(state[key]) for key in (name, *quantized.companions)):
            file = f" {shell(checkpoint.path)}" if checkpoint.path else ""
            dequantize_hint = f"dequantize them: ckptool cast --dequantize bfloat16{file}"
            config = quantization_config(checkpoint)
            if quantized.companions:
                needed = listed(quantized.companions)
            else:
                needed = f"its class, {printable(getattr(state[name], 'class_name', ''))}"
            raise_error(
                f"{printable(name)!r} {quantized}: its values need {needed}",
                dequantize_hint if can_dequantize(state, name, quantized, config) else "",
            )


def _find_quantized_weights(
    checkpoint: Checkpoint, *, with_torch_quantized: bool = False
) -> Iterator[tuple[dict[Any, Any], str, Quantized]]:
    """Yield the state dict, the key and the quantization of each quantized weight.

    Only models are judged by shapes, and a pickled module by its `state_dict()`. With
    `with_torch_quantized`, also yield torch's quantized tensors, which contain their scales. In a
    layer, their companions are the scale and zero point of the activations, which only a quantized
    layer needs.
    """
    models = {
        id(section.node): section for section in checkpoint.sections if section.kind in MODEL_KINDS
    }
    modules = (section.node for section in models.values() if section.kind == "module")
    for node in chain(every_node(checkpoint.root), modules):
        if isinstance(node, dict):
            for name, quantized in find_quantized(node, by_shape=id(node) in models).items():
                has_tensor = next(find_tensors(node[name]), None) is not None
                if has_tensor:  # else there is nothing to convert
                    yield node, name, quantized
            for name, value in node.items() if with_torch_quantized else ():
                if isinstance(value, TensorRef) and value.kind == "quantized":
                    layer = str(name).removesuffix("weight")
                    companions: tuple[str, ...] = (f"{layer}scale", f"{layer}zero_point")
                    is_of_layer = layer != name and all(key in node for key in companions)
                    if not is_of_layer:
                        companions = ()
                    yield node, name, Quantized(f"torch.{value.dtype}", companions)


def dequantize_weights(checkpoint: Checkpoint, dtype: str) -> Dequantized:
    """Return a checkpoint with plain tensors in place of quantized weights and their companions.

    They are float32 until they are cast; `dtype` is only for a hint.

    Raises:
        NotRepresentable: if a weight has an unsupported quantization.
        NotFound: if no weight is quantized.
    """
    result = Dequantized(checkpoint)
    replacements_by_state = _dequantize_each(result)
    for node in every_node(checkpoint.root):
        if isinstance(node, dict):
            _refuse_incomplete(node, replacements_by_state.get(id(node), {}), checkpoint.path)
    if not replacements_by_state:
        has_float8 = any(tensor.dtype.startswith("float8_") for _, tensor in checkpoint.tensors())
        raise NotFound(
            "the file has no quantized weights",
            file=checkpoint.path,
            # After other steps, the command to cast the file itself would not fit.
            hint=f"cast float8 weights without scales with --dtype {dtype}"
            if has_float8 and not checkpoint.changes
            else None,
        )

    def replace_entries(old: dict[Any, Any]) -> dict[Any, Any]:
        """Return a state dict with the plain tensors in place of the quantized ones."""
        replacements = replacements_by_state.get(id(old), {})  # by old key, the new entries
        if not replacements:
            return old
        # A quantized tensor has one new entry, or several; its companions have none.
        entries = [replacements.get(key, {key: value}).items() for key, value in old.items()]
        counts = Counter(key for items in entries for key, _ in items)
        if duplicates := [key for key, count in counts.items() if count > 1]:
            raise NotRepresentable(
                f"several entries would become {listed(duplicates)} when dequantized",
                file=checkpoint.path,
            )
        return copy_with_items(old, chain.from_iterable(entries))

    root = rebuild(checkpoint.root, None, replace_entries)
    details = checkpoint.details
    details = replace(details, header=plain_header(details.header))
    return replace(result, checkpoint=replace(checkpoint, root=root, details=details))


def _dequantize_each(result: Dequantized) -> dict[int, dict[str, dict[str, TensorRef]]]:
    """Return, by `id` of the state dict and old key, the entries that replace quantized weights.

    A companion of a weight has no new entries. The facts for the receipt are added to `result`.
    Weights that share all their tensors share the result.

    Raises:
        NotRepresentable: if a weight has an unsupported quantization.
    """
    checkpoint = result.checkpoint
    plain_tensors_by_parts: dict[tuple[int, ...], dict[str, TensorRef]] = {}
    replacements_by_state: dict[int, dict[str, dict[str, TensorRef]]] = {}
    ids_in_tree = {id(node) for node in every_node(checkpoint.root)}
    seen_weights, config = set[int](), quantization_config(checkpoint)
    for state, name, quantized in _find_quantized_weights(checkpoint, with_torch_quantized=True):
        # The state dict of a pickled module is not in the tree, so that it cannot be replaced: the
        # weights in it must be those of a state dict in the tree.
        is_in_tree, weight_id = id(state) in ids_in_tree, id(state[name])
        if not is_in_tree and weight_id in seen_weights:
            continue
        seen_weights.add(weight_id)
        parts = (weight_id, *(id(state[key]) for key in quantized.companions))
        replacements = replacements_by_state.setdefault(id(state), {})
        try:
            if parts not in plain_tensors_by_parts and not is_in_tree:
                raise UnknownLayout
            plain_tensors = plain_tensors_by_parts.get(parts) or dequantize(
                state, name, quantized, config, checkpoint.path
            )
            key = to_plain_key(quantized.scheme, name)
            stem = key.removesuffix(PACKED) if isinstance(key, str) else key
            new_entries = {  # `end` is "", or for packed parameters "weight" and "bias"
                f"{stem}{end}" if end else stem: tensor for end, tensor in plain_tensors.items()
            }
        except UnknownLayout as error:
            raise NotRepresentable(
                f"{printable(str(name))!r} cannot be dequantized: it {quantized}, "
                f"and {error.message}",
                file=checkpoint.path,
                hint=error.hint
                if is_in_tree
                else "add --model-only to convert the module to a state dict first",
            ) from None
        plain_tensors_by_parts[parts] = plain_tensors
        weight = next(iter(plain_tensors.values()))  # the second one, if any, is the bias
        result.storages.add(id(weight.storage))
        result.schemes[quantized.scheme] = None
        markers = (key for key in state if str(key).rpartition(".")[2] in MARKERS)
        left_out = (*quantized.companions, *markers)
        result.dropped_keys.update(dict.fromkeys(left_out))
        replacements.update({name: new_entries} | {key: {} for key in left_out})
    return replacements_by_state


def _refuse_incomplete(
    state: Mapping[Any, Any], replacements: Mapping[str, Mapping[str, TensorRef]], file: str
) -> None:
    """Refuse a state dict with quantized weights that lack their companions.

    Such a weight has a key that only quantized weights have, or it looks like a dequantized
    one: the same float8 dtype, or the same last part of the key, dtype and kind. `replacements`
    has the new entries by key of a dequantized weight; none for its companions.

    Raises:
        NotRepresentable: if the result would still have quantized weights.
    """

    def refuse(name: object, fact: str) -> NoReturn:
        """Raise the error for a weight without its companions."""
        raise NotRepresentable(
            f"{printable(str(name))!r} is {fact}, but the tensors that it needs are missing",
            file=file,
            hint="get all shards of the model, or leave it out with --exclude",
        )

    def get_looks(name: Any, tensor: TensorRef) -> tuple[str, str, str]:
        """Return the last part of a key, and the dtype and kind of its tensor."""
        return str(name).rpartition(".")[2], tensor.dtype, tensor.kind

    for name in find_incomplete(state, replacements.keys()):
        refuse(name, "quantized, judging by its key")
    if not replacements:
        return
    # Without wider floats: codes may be bfloat16, but so are the weights of ordinary layers.
    candidates = {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, TensorRef)
        and (tensor.dtype not in FLOATS or BY_NAME[tensor.dtype].itemsize == 1)
    }
    weight_by_looks = {
        get_looks(name, candidates[name]): name
        for name, plain_tensors in replacements.items()
        if plain_tensors and name in candidates  # a weight, not a companion
    }
    weight_by_float8_dtype = {
        dtype: name for (_, dtype, _), name in weight_by_looks.items() if dtype in FLOATS
    }
    for name, tensor in candidates.items():
        if name not in replacements:
            similar = weight_by_looks.get(
                get_looks(name, tensor), weight_by_float8_dtype.get(tensor.dtype)
            )
            if similar is not None:
                refuse(name, f"{tensor.dtype}, like the quantized {printable(similar)!r}")
