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
from ckptool.core.tree import drop_ties as once
from ckptool.errors import NotFound
from ckptool.formats import load_format
from ckptool.tensors.whole import Wholes, interpolate_linearly
from ckptool.transforms.names import distinct
from ckptool.words import printable


def keeps_order(checkpoint: Checkpoint, names: list[str], metadata: object) -> bool:
    """Return True if the keys of a state dict are in the order of the model.

    A sorted order proves nothing without torch's `_metadata`, because safetensors, npz and DCP, and
    files made from these, are always sorted.
    """
    is_sorted = len(names) > 1 and metadata is None and names == sorted(names)
    return (checkpoint.in_memory or load_format(checkpoint.format).keeps_order) and not is_sorted


def weights_for_evaluation(
    checkpoint: Checkpoint,
) -> Iterator[tuple[Section, Section, dict[str, TensorRef]]]:
    """Yield each schedule-free optimizer in train mode, its model, and the weights by key.

    Raises:
        NotFound: if it is not certain which state belongs to which weight.
    """
    optimizers = distinct(one for one in checkpoint.sections if one.kind == "optimizer")
    models = distinct(one for one in checkpoint.sections if one.kind in MODEL_KINDS)
    for section in filter(has_training_weights, optimizers):
        are_alone = len(models) == len(optimizers) == 1
        model = models[0] if are_alone else find_model(section, models, optimizers)
        found = {} if model is None else keys_of_parameters(checkpoint, section, model)
        tensors = {} if model is None else get_named_tensors(model.node)
        wholes, made = Wholes(), {}
        for keys, group in zip(list_groups(section), section.node["param_groups"], strict=True):
            for key in keys if group.get("train_mode") is True else ():
                held, name = section.node["state"].get(key), found.get(key)
                end = held.get("z") if isinstance(held, dict) else None
                if end is None:
                    continue
                start, beta = tensors.get(name or ""), _beta(group)
                if name is None or start is None or end.shape != start.shape or not beta:
                    raise NotFound(
                        f"the schedule-free optimizer {printable(section.name)} is in train mode, "
                        "and names, shapes and order do not prove which state belongs to which "
                        "weight",
                        file=checkpoint.path or None,
                        hint="call optimizer.eval() before saving the checkpoint",
                    )
                made[name] = interpolate_linearly(wholes, start, end, 1 - 1 / beta)
        if model is not None and made:
            yield section, model, made


def _beta(group: Mapping[Any, Any]) -> float:
    betas = group.get("betas", (group.get("momentum"),))
    beta = betas[0] if isinstance(betas, (list, tuple)) and betas else None
    return float(beta) if isinstance(beta, (int, float)) else 0.0


def keys_of_parameters(checkpoint: Checkpoint, section: Section, model: Section) -> dict[Any, str]:
    """Return the key in the model for each parameter of an optimizer, by its key in `state`.

    Matches by name or, with one group, by position; empty if neither is certain. A name that the
    model does not have gets the key "".
    """
    groups, tensors = list_groups(section), get_named_tensors(model.node)
    keys = [key for group in groups for key in group]
    names = list_names(section)
    if names:
        bare = map_to_bare_names(names)
        own = {new: name for name, new in map_to_bare_names(tensors).items()}
        return {key: own.get(bare[name], "") for key, name in zip(keys, names, strict=True)}
    listed = once(((name,), one) for name, one in tensors.items())
    held = [str(path[0]) for path, _ in listed if _last(path) not in STATISTICS]
    metadata = getattr(model.node, "metadata", None)
    is_proved = (
        len(groups) == 1 and len(held) == len(keys) and not list_optimizer_names(section.node)
    )
    if is_proved and keeps_order(checkpoint, list(tensors), metadata):
        return dict(zip(keys, held, strict=True))
    return {}


def _last(path: tuple[Any, ...]) -> str:
    return str(path[0]).rpartition(".")[2]
