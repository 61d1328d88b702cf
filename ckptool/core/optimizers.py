"""What the state dict of an optimizer shows about its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from ckptool.core.model import Shape, TensorRef
from ckptool.core.sections import (
    MOMENTS,
    Section,
    is_flat_optimizer,
    is_optimizer,
    loose_optimizers,
    noted_owners,
)
from ckptool.core.tree import everything, walk

_FACTORS = (("row_var", "col_var", -1), ("exp_avg_sq_row", "exp_avg_sq_col", None))
"""Keys of Adafactor's rows and columns, which have the shape together; of the rows' sizes those
that count. Torch keeps a 1 for the dimension that is gone, transformers nothing."""

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


def groups_of(section: Section) -> list[list[Any]]:
    """Return the numbers or names of the parameters in each group."""
    held = [group.get("params") for group in section.node["param_groups"]]
    return [list(map(_key, one)) if isinstance(one, (list, tuple)) else [] for one in held]


def _key(held: Any) -> Any:
    """Return a group's entry for a parameter as a key of `state`; invalid ones match no key."""
    return held if isinstance(held, (int, str)) else ("?", id(held))


def has_training_weights(section: Section) -> bool:
    """Return True if it is schedule-free and in train mode, so its model has training weights."""
    states = section.node["state"].values()
    return any(group.get("train_mode") is True for group in section.node["param_groups"]) and any(
        isinstance(state, dict) and isinstance(state.get("z"), TensorRef) for state in states
    )


def names_in(section: Section) -> list[str]:
    """Return the parameter names in order; empty if the groups have no names."""
    names = [name for group in section.node["param_groups"] for name in _texts(group)]
    keys = [key for group in groups_of(section) for key in group]
    if len(names) != len(keys):
        names = [key for key in keys if isinstance(key, str)]
    return names if len(names) == len(keys) else []


def _texts(group: dict[Any, Any]) -> list[str]:
    held = group.get("param_names")
    return [one for one in held if isinstance(one, str)] if isinstance(held, (list, tuple)) else []


def moments_in(root: Any, sections: Iterable[Section]) -> Iterator[tuple[Any, str, TensorRef]]:
    """Yield the parameter, the key and the tensor for each tensor in optimizer states.

    The parameter is a name, or a number if no group has names.
    """
    for section in sections:
        loose = loose_optimizers(section.holder) if section.kind == "values" else [section]
        for one in loose:
            if one.kind == "optimizer" and is_optimizer(one.node):
                yield from _moments_of(one)
    for flat in everything(root):
        if isinstance(flat, dict) and is_flat_optimizer(flat):
            for key, value in flat.items():
                found = FLAT_KEY.fullmatch(key) if isinstance(key, str) else None
                if found and isinstance(value, TensorRef):
                    yield found[2], found[3], value


def _moments_of(section: Section) -> Iterator[tuple[Any, str, TensorRef]]:
    keys = [key for group in groups_of(section) for key in group]
    names = dict(zip(keys, names_in(section), strict=False))  # empty if there are no names
    for key, state in section.node["state"].items():
        for moment, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, TensorRef):
                yield names.get(key, key), str(moment), value


def shapes_in(section: Section) -> dict[Any, Shape]:
    """Return the shape of each parameter by number or name, if the state shows it."""
    found = {key: shape_of(state) for key, state in section.node["state"].items()}
    return {key: shape for key, shape in found.items() if shape is not None}


def shape_of(state: Any) -> Shape | None:
    """Return the shape of the parameter with this state, or None if it is not certain."""
    if not isinstance(state, dict):
        return None
    for name in MOMENTS:
        if isinstance(state.get(name), TensorRef):
            shape: Shape = state[name].shape
            return shape
    for rows, columns, stop in _FACTORS:
        row, column = state.get(rows), state.get(columns)
        if isinstance(row, TensorRef) and isinstance(column, TensorRef) and column.shape:
            return (*row.shape[:stop], column.shape[-1])
    return None


def fits_shape(state: Any, shape: Shape | None) -> bool:
    """Return True if the tensors of a parameter's state are scalars, or have its shape.

    For Adafactor, rows and columns must match those of the parameter.
    """
    factors = {key for rows, columns, _ in _FACTORS for key in (rows, columns)}
    return shape_of(state) in (None, shape) and all(
        leaf.shape == shape
        or factors.intersection(path)
        or prod(size or 0 for size in leaf.shape) == 1
        for path, leaf in walk(state)
        if isinstance(leaf, TensorRef)
    )


def options_of(section: Section) -> set[str]:
    """Return the options of its groups that distinguish optimizers."""
    return {name for name in OPTIONS if any(name in g for g in section.node["param_groups"])}


def model_of(
    section: Section, models: Sequence[Section], optimizers: Sequence[Section]
) -> Section | None:
    """Return the model of an optimizer, or None if it is not certain.

    This is the one noted by `ckptool.save`, else the only one, or the only one with a matching name
    (`G` and `optG`).
    """
    noted = _model_noted_by_save(section, models)
    if noted is not None:
        return noted
    whose = owner(section)
    named = [one for one in models if whose and owner(one) == whose]
    alike = [one for one in optimizers if owner(one) == whose]
    if len(named) == len(alike) == 1:
        return named[0]
    return models[0] if not whose and len(models) == len(optimizers) == 1 else None


def _model_noted_by_save(section: Section, models: Sequence[Section]) -> Section | None:
    front, depth = section.path[:-1], len(section.path)
    beside = [one for one in models if one.path[:-1] == front and len(one.path) == depth]
    noted = [held for one in beside if (held := noted_owners(one))]
    if len(noted) != 1 or section.path[-1] not in noted[0]:
        return None
    key = noted[0][section.path[-1]]
    return next((one for one in beside if one.path[-1] == key), None)


def owner(section: Section) -> str:
    """Return the rest of a name without the words for model or optimizer: `d` of `optimizer_D`."""
    return _COMMON_WORDS.sub("", "_".join(p for p in section.path if isinstance(p, str)).lower())
