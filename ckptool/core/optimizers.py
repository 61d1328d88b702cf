"""Read the parameters of an optimizer from its state dict: names, groups, shapes, options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptool.core.model import Shape, TensorRef
from ckptool.core.sections import (
    MOMENTS,
    Section,
    find_loose_optimizers,
    is_flat_optimizer,
    is_optimizer,
    read_noted_owners,
)
from ckptool.core.tree import walk, walk_everything

_ADAFACTOR_KEYS = (("row_var", "col_var", -1), ("exp_avg_sq_row", "exp_avg_sq_col", None))
"""The keys of Adafactor's rows and columns, and the end of the rows' sizes. Together they have the
shape of the parameter: the rows lack the last dimension, for which torch keeps a 1 at the end and
transformers nothing."""

OPTIONS = (
    "betas", "momentum", "dampening", "nesterov", "alpha", "rho", "lr_decay", "lambd", "etas",
    "step_sizes", "max_iter", "momentum_decay",
)  # fmt: skip
"""Group options that `step()` of some of torch's optimizers needs, and others lack."""

FLAT_KEY = re.compile(r"(state\.|param_groups\.)(.+)(\.[^.]+)", re.DOTALL)
"""Matches a key of `get_optimizer_state_dict` with `flatten_optimizer_state_dict`."""

_COMMON_WORDS = re.compile(
    r"optimi[sz]ers?|optim|opt|(?:state_?)?dicts?|states?|models?|modules?|networks?|nets?|weights|"
    r"params|[\W_]"
)


def list_groups(section: Section) -> list[list[Any]]:
    """Return the numbers or names of the parameters in each group."""
    params_of_groups = (group.get("params") for group in section.node["param_groups"])
    return [
        list(map(_to_state_key, params)) if isinstance(params, (list, tuple)) else []
        for params in params_of_groups
    ]


def _to_state_key(entry: Any) -> Any:
    """Return a group's entry for a parameter as a key of `state`; invalid ones match no key."""
    return entry if isinstance(entry, (int, str)) else ("?", id(entry))


def has_training_weights(section: Section) -> bool:
    """Return True if it is schedule-free and in train mode, so its model has training weights.

    A schedule-free optimizer has a tensor `z` in the state of a parameter.
    """
    states = section.node["state"].values()
    return any(group.get("train_mode") is True for group in section.node["param_groups"]) and any(
        isinstance(state, dict) and isinstance(state.get("z"), TensorRef) for state in states
    )


def list_names(section: Section) -> list[str]:
    """Return the parameter names in order; empty if the groups have no names."""
    names = [name for group in section.node["param_groups"] for name in _list_group_names(group)]
    keys = [key for group in list_groups(section) for key in group]
    if len(names) != len(keys):  # without `param_names`, the keys may be names
        names = [key for key in keys if isinstance(key, str)]
    return names if len(names) == len(keys) else []


def _list_group_names(group: dict[Any, Any]) -> list[str]:
    """Return the strings in the `param_names` of a group; empty without such a list."""
    names = group.get("param_names")
    if not isinstance(names, (list, tuple)):
        return []
    return [name for name in names if isinstance(name, str)]


def find_moments(root: Any, sections: Iterable[Section]) -> Iterator[tuple[Any, str, TensorRef]]:
    """Yield the parameter, the key and the tensor for each tensor in optimizer states.

    The parameter is a name, or a number if no group has names. Flat states, with keys such as
    `state.NAME.exp_avg`, follow wherever they are below `root`; their keys begin with a dot.
    """
    for section in sections:
        optimizers = (
            find_loose_optimizers(section.holder) if section.kind == "values" else [section]
        )
        for optimizer in optimizers:
            if optimizer.kind == "optimizer" and is_optimizer(optimizer.node):
                yield from _find_section_moments(optimizer)
    for node in walk_everything(root):
        if isinstance(node, dict) and is_flat_optimizer(node):
            for key, value in node.items():
                match = FLAT_KEY.fullmatch(key) if isinstance(key, str) else None
                if match and isinstance(value, TensorRef):
                    _, parameter, moment = match.groups()
                    yield parameter, moment, value


def _find_section_moments(section: Section) -> Iterator[tuple[Any, str, TensorRef]]:
    """Yield the parameter, the key and the tensor for each tensor in one optimizer state."""
    keys = [key for group in list_groups(section) for key in group]
    names = dict(zip(keys, list_names(section), strict=False))  # empty if there are no names
    for key, state in section.node["state"].items():
        for moment, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, TensorRef):
                yield names.get(key, key), str(moment), value


def find_shapes(section: Section) -> dict[Any, Shape]:
    """Return the shape of each parameter by number or name, if the state shows it."""
    shapes = {key: infer_shape(state) for key, state in section.node["state"].items()}
    return {key: shape for key, shape in shapes.items() if shape is not None}


def infer_shape(state: Any) -> Shape | None:
    """Return the shape of the parameter with this state, or None if it is not certain.

    A moment has that shape; the rows and columns of Adafactor have it together.
    """
    if not isinstance(state, dict):
        return None
    for name in MOMENTS:
        if isinstance(state.get(name), TensorRef):
            shape: Shape = state[name].shape
            return shape
    for row_key, column_key, rows_end in _ADAFACTOR_KEYS:
        rows, columns = state.get(row_key), state.get(column_key)
        if isinstance(rows, TensorRef) and isinstance(columns, TensorRef) and columns.shape:
            return (*rows.shape[:rows_end], columns.shape[-1])
    return None


def fits_shape(state: Any, shape: Shape | None) -> bool:
    """Return True if the tensors of a parameter's state are scalars, or have its shape.

    For Adafactor, rows and columns must match those of the parameter.
    """
    if infer_shape(state) not in (None, shape):
        return False
    factor_keys = {key for rows, columns, _ in _ADAFACTOR_KEYS for key in (rows, columns)}
    return all(
        leaf.shape == shape
        or leaf.numel == 1
        or not factor_keys.isdisjoint(path)  # checked by `infer_shape`
        for path, leaf in walk(state)
        if isinstance(leaf, TensorRef)
    )


def find_options(section: Section) -> set[str]:
    """Return the options of its groups that distinguish optimizers."""
    return {
        name for name in OPTIONS if any(name in group for group in section.node["param_groups"])
    }


def find_model(
    section: Section, models: Sequence[Section], optimizers: Sequence[Section]
) -> Section | None:
    """Return the model of an optimizer, or None if it is not certain.

    This is the one noted by `ckptool.save`, else the only one, or the only one with a matching name
    (`G` and `optG`).
    """
    noted_model = _find_noted_model(section, models)
    if noted_model is not None:
        return noted_model
    owner = extract_owner(section)
    if not owner:
        return models[0] if len(models) == len(optimizers) == 1 else None
    own_models = [candidate for candidate in models if extract_owner(candidate) == owner]
    own_optimizers = [candidate for candidate in optimizers if extract_owner(candidate) == owner]
    return own_models[0] if len(own_models) == len(own_optimizers) == 1 else None


def _find_noted_model(section: Section, models: Sequence[Section]) -> Section | None:
    """Return the model next to an optimizer that `ckptool.save` noted as its model, or None.

    One of the models in the same dict has the notes for all of its optimizers: the key of an
    optimizer, with that of its model.
    """
    parent, depth = section.path[:-1], len(section.path)
    siblings = [
        sibling for sibling in models if sibling.path[:-1] == parent and len(sibling.path) == depth
    ]
    all_notes = [notes for sibling in siblings if (notes := read_noted_owners(sibling))]
    if len(all_notes) != 1:
        return None
    [model_key_by_optimizer_key] = all_notes
    model_key = model_key_by_optimizer_key.get(section.path[-1])
    return next((sibling for sibling in siblings if sibling.path[-1] == model_key), None)


def extract_owner(section: Section) -> str:
    """Return the part of a name that is not a word for model or optimizer: `d` of `optimizer_D`."""
    return _COMMON_WORDS.sub(
        "", "_".join(part for part in section.path if isinstance(part, str)).lower()
    )
