"""The evaluation weights of a model trained with a schedule-free optimizer.

Source: facebookresearch/schedule_free. Its `eval()` turns the training weights y into their
average x: `p.lerp_(end=z, weight=1 - 1 / beta1)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import TensorRef
from ckptool.core.names import STATISTICS, map_to_bare_names
from ckptool.core.optimizers import (
    find_model,
    has_training_weights,
    list_groups,
    list_names,
)
from ckptool.core.sections import MODEL_KINDS, Section, get_named_tensors, list_optimizer_names
from ckptool.core.tree import drop_ties
from ckptool.errors import NotFound
from ckptool.formats import load_format
from ckptool.tensors.whole import ComputedTensors, interpolate_linearly
from ckptool.transforms.names import list_distinct_sections
from ckptool.words import printable


def is_in_model_order(checkpoint: Checkpoint, names: list[str], metadata: object) -> bool:
    """Return True if the keys `names` of a state dict are in the order of the model.

    A sorted order proves nothing without torch's `_metadata`, because safetensors, npz and DCP, and
    files made from these, are always sorted.
    """
    is_sorted = len(names) > 1 and metadata is None and names == sorted(names)
    return (checkpoint.in_memory or load_format(checkpoint.format).keeps_order) and not is_sorted


def compute_eval_weights(
    checkpoint: Checkpoint,
) -> Iterator[tuple[Section, Section, dict[str, TensorRef]]]:
    """Yield each schedule-free optimizer in train mode, its model, and the average x by key.

    In train mode, the weights are y = beta x + (1 - beta) z, and the state has z. So x is
    interpolated from y to z by 1 - 1 / beta.

    Raises:
        NotFound: if it is not certain which state belongs to which weight.
    """
    optimizers = list_distinct_sections(
        part for part in checkpoint.sections if part.kind == "optimizer"
    )
    models = list_distinct_sections(
        part for part in checkpoint.sections if part.kind in MODEL_KINDS
    )
    for section in filter(has_training_weights, optimizers):
        is_only_pair = len(models) == len(optimizers) == 1
        model = models[0] if is_only_pair else find_model(section, models, optimizers)
        model_keys = {} if model is None else match_parameters(checkpoint, section, model)
        tensors = {} if model is None else get_named_tensors(model.node)
        computed_tensors, weights = ComputedTensors(), {}
        for keys, group in zip(list_groups(section), section.node["param_groups"], strict=True):
            for key in keys if group.get("train_mode") is True else ():
                state, name = section.node["state"].get(key), model_keys.get(key)
                z = state.get("z") if isinstance(state, dict) else None
                if z is None:
                    continue
                training_weight, beta = tensors.get(name or ""), _read_beta(group)
                if (
                    name is None
                    or training_weight is None
                    or z.shape != training_weight.shape
                    or not beta
                ):
                    raise NotFound(
                        f"the schedule-free optimizer {printable(section.name)} is in train mode, "
                        "and names, shapes and order do not prove which state belongs to which "
                        "weight",
                        file=checkpoint.path or None,
                        hint="call optimizer.eval() before saving the checkpoint",
                    )
                weights[name] = interpolate_linearly(
                    computed_tensors, training_weight, z, 1 - 1 / beta
                )
        if model is not None and weights:
            yield section, model, weights


def _read_beta(group: Mapping[Any, Any]) -> float:
    """Return beta1 (Adam) or the momentum (SGD) of a parameter group, or 0 if it has neither."""
    betas = group.get("betas", (group.get("momentum"),))
    beta = betas[0] if isinstance(betas, (list, tuple)) and betas else None
    return float(beta) if isinstance(beta, (int, float)) else 0.0


def match_parameters(checkpoint: Checkpoint, section: Section, model: Section) -> dict[Any, str]:
    """Return the key in `model` by the key in `state`, for each parameter of the optimizer.

    Matches by name or, with one group, by position; empty if neither is certain. A name that the
    model does not have gets the key "".
    """
    groups, tensors = list_groups(section), get_named_tensors(model.node)
    keys = [key for group in groups for key in group]
    names = list_names(section)
    if names:
        bare_names = map_to_bare_names(names)
        model_keys = {bare: name for name, bare in map_to_bare_names(tensors).items()}
        return {
            key: model_keys.get(bare_names[name], "") for key, name in zip(keys, names, strict=True)
        }
    unique = drop_ties(((name,), tensor) for name, tensor in tensors.items())
    model_names = (str(name) for (name,), _ in unique)
    parameter_keys = [name for name in model_names if name.rpartition(".")[2] not in STATISTICS]
    metadata = getattr(model.node, "metadata", None)
    # Only a single group is certain to have all parameters in the order of the model. If only some
    # of them have names, these may contradict the positions.
    can_match_by_position = (
        len(groups) == 1
        and len(parameter_keys) == len(keys)
        and not list_optimizer_names(section.node)
    )
    if can_match_by_position and is_in_model_order(checkpoint, list(tensors), metadata):
        return dict(zip(keys, parameter_keys, strict=True))
    return {}
