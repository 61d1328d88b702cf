"""Find the saved state of an optimizer: in the model's file, or in a separate file next to it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.optimizers import find_model, list_groups
from ckptool.core.sections import MODEL_KINDS, Section, is_optimizer, restore_integer_keys
from ckptool.core.tree import name_of
from ckptool.errors import MatchError
from ckptool.loading.source import StateDict
from ckptool.remedies import Remedy
from ckptool.transforms.names import list_distinct_sections
from ckptool.words import listed, printable

_OPTIMIZER_FILE_NAME = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
"""The files of an optimizer's own: transformers writes `.pt`, accelerate `.bin`."""
HINT_MODEL_ONLY = "leave out optimizer= to load only the model"
"""The hint if no optimizer can be loaded."""
_HINT_SEPARATE_FILE = (
    "if it is in a separate file, use load_into(model, {'model': ..., 'optimizer': "
    "ckptool.load(FILE)}, optimizer=...)"
)


class SavedOptimizer(NamedTuple):
    """An `Optimizer.state_dict()` in a file."""

    tree: Checkpoint
    """The file, or a separate file next to the model."""
    section: Section
    """The state dict of the optimizer in `tree`."""
    notes: tuple[str, ...] = ()
    """Notes for the report about where it was found."""

    @property
    def groups(self) -> Any:
        """The groups: learning rates and other options."""
        return self.section.node["param_groups"]

    @property
    def parameter_keys(self) -> list[tuple[int, Any]]:
        """The group and the number or name of each parameter, in the order of the groups."""
        return [
            (group, key) for group, keys in enumerate(list_groups(self.section)) for key in keys
        ]

    @property
    def group_sizes(self) -> list[int]:
        """The number of parameters in each group."""
        return [len(keys) for keys in list_groups(self.section)]

    def state_of(self, key: Any) -> Any:
        """Return the state of a parameter, or None if it is empty, like `momentum_buffer: None`."""
        state = self.section.node["state"].get(key)
        is_empty = isinstance(state, dict) and all(value is None for value in state.values())
        return None if is_empty else state

    def path_of(self, key: Any, *inside: Any) -> str:
        """Return the path of the state of a parameter."""
        return name_of((*self.section.path, "state", key, *inside))


def find_optimizer(state: StateDict, key: Any) -> SavedOptimizer:
    """Return the optimizer in the model's file, or in a separate file in the model's folder.

    `key` may be the name of a separate file, or a path: in the model's file if that has an
    optimizer, else in the only separate file.
    """
    files = [] if state.folder is None else _list_optimizer_files(state.folder)
    is_in_model_file = bool(_list_optimizers(state.tree))
    if key not in files and (is_in_model_file or not files):
        section = _select_optimizer(state.tree, state.section, key, state.file)
        return SavedOptimizer(state.tree, _restore_keys(section))
    if key is None and len(files) > 1:
        raise MatchError(
            f"the folder has {len(files)} optimizer files: {listed(files)}",
            hint=Remedy(instead=tuple(Remedy((("optimizer_key", name),)) for name in files)),
        )
    name, path_in_file = (key, None) if key in files else (files[0], key)
    tree = state.open_sibling(os.path.join(state.folder or "", name))
    try:
        section = _select_optimizer(tree, model=None, key=path_in_file, file="")
    except MatchError as refused:
        refused.message = f"{name!r}, next to the model: {refused.message}"
        raise
    note = f"loaded the optimizer from {name!r}, next to the model"
    return SavedOptimizer(tree, _restore_keys(section), (note,))


def _restore_keys(section: Section) -> Section:
    """Return the section of an optimizer with integer keys in `state`; DCP makes them text."""
    return replace(section, node=restore_integer_keys(section.node))


def _list_optimizers(tree: Checkpoint) -> list[Section]:
    """Return the states of torch's optimizers."""
    sections = (section for section in tree.sections if section.kind == "optimizer")
    return list_distinct_sections(section for section in sections if not section.is_foreign)


def _list_optimizer_files(folder: str) -> list[str]:
    """Return the names of the optimizer files in a folder."""
    with suppress(OSError):
        return sorted(filter(_OPTIMIZER_FILE_NAME.fullmatch, os.listdir(folder)))
    return []


def _select_optimizer(tree: Checkpoint, model: Section | None, key: Any, file: str) -> Section:
    """Return the optimizer at `key`, or that of `model`, or the only one of the file.

    The only one is returned if its model is unknown, or without a `model`. `file` is the path of
    the model's file, for messages.

    Raises:
        MatchError: if there is none, or several, or the only one belongs to another model.
    """
    if key is not None:
        path, node = resolve(
            tree, key, accept=lambda node: isinstance(node, dict) and is_optimizer(node)
        )
        return Section(path, "optimizer", node, holder=node)
    optimizers = _list_optimizers(tree)
    models = list_distinct_sections(
        section for section in tree.sections if section.kind in MODEL_KINDS
    )
    owners = [find_model(optimizer, models, optimizers) for optimizer in optimizers]
    holder = None if model is None else model.holder
    of_model = [
        optimizer
        for optimizer, owner in zip(optimizers, owners, strict=True)
        if owner is not None and owner.holder is holder
    ]
    if len(of_model) == 1:
        return of_model[0]
    if len(optimizers) == 1 and (model is None or owners[0] is None):
        return optimizers[0]
    raise _selection_error(optimizers, owners, file)


def _selection_error(
    optimizers: Sequence[Section], owners: Sequence[Section | None], file: str
) -> MatchError:
    """Return the error that a file has no optimizer of the chosen model, or several optimizers.

    `owners` has the model of each optimizer, or None if it is unknown.
    """
    remedies = tuple(Remedy((("optimizer_key", optimizer.name),)) for optimizer in optimizers)
    if len(optimizers) > 1:
        names = listed(optimizer.name for optimizer in optimizers)
        return MatchError(
            f"the file has {len(optimizers)} optimizers: {names}", hint=Remedy(instead=remedies)
        )
    if optimizers and owners[0] is not None:
        return MatchError(
            f"the only optimizer, {printable(optimizers[0].name)}, belongs to "
            f"{printable(owners[0].name)}, which is not the chosen model",
            hint=Remedy(note=HINT_MODEL_ONLY, instead=remedies),
        )
    text = "the file has no optimizer state"
    folder = os.path.dirname(file) or "."
    separate_files = _list_optimizer_files(folder) if file else []
    if separate_files:
        return MatchError(
            f"{text}, but its folder has {listed(separate_files)}",
            hint=f"use load_into(model, {folder!r}, optimizer=...) to load it from there",
        )
    return MatchError(text, hint=_HINT_SEPARATE_FILE)
