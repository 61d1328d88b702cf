"""Layouts of several files: the tensors of each file are under the number in its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap
from ckptool.errors import FileMissing, NameCollision, NotFound, UsageError
from ckptool.files.place import place_of
from ckptool.formats.distributed.megatron import RANK_FILE, is_rank_folder
from ckptool.formats.several import open_by_key
from ckptool.recipes.names import Pattern, find_first_missing
from ckptool.recipes.recipe import Recipe
from ckptool.words import counted, printable


def _parse_file_patterns(recipe: Recipe) -> tuple[Pattern, Pattern]:
    """Return the pattern of the file names, and that of the prefix for the keys of each file.

    For `consolidated.{rank:02}.pth`, the prefix is `{rank:02}`; several numbers are joined by `/`.

    Raises:
        UsageError: if the recipe reads one file.
    """
    if recipe.files is None:
        text = f"recipe {printable(recipe.name)} does not read several files"
        raise UsageError(text, hint='add files = "consolidated.{rank:02}.pth" to the recipe')
    name = Pattern.parse(recipe.files)
    prefix_text = "/".join(f"{{{variable.name}}}" for variable in name.variables)
    literals = ("", *["/"] * (len(name.variables) - 1), "")  # before, between, after the variables
    return name, Pattern(prefix_text, literals, name.variables)


def first_prefix(recipe: Recipe) -> str:
    """Return the prefix for the keys of the first file: `0/`; or "" if there is one file."""
    if recipe.files is None or recipe.is_reversed:
        return ""
    name, prefix = _parse_file_patterns(recipe)
    return prefix.fill(dict.fromkeys(name.names, "0")) + "/"


def output_files(recipe: Recipe) -> str | None:
    """Return the pattern of the files that a recipe writes into a folder, or None for one file.

    Only a reversed recipe writes several files: those that it reads when it is not reversed, or a
    file in its own folder for each Megatron rank.
    """
    if not recipe.is_reversed:
        return None
    target_keys = [pattern.text for rule in recipe.passes[-1] for pattern in rule.right]
    is_of_ranks = any(key.startswith("mp_rank_") and "/" in key for key in target_keys)
    return recipe.files or (f"mp_rank_{{rank:02}}/{RANK_FILE}" if is_of_ranks else None)


def has_files(path: str | os.PathLike[str], recipe: Recipe) -> bool:
    """Return True if a path is a file that a recipe names, or a folder with one."""
    pattern, _ = _parse_file_patterns(recipe)
    name = os.fspath(path)
    place = place_of(name)
    file_names = place.list_names(name) if place.is_folder(name) else [os.path.basename(name)]
    return any(pattern.match(file) is not None for file in file_names)


def open_files(
    folder: str | os.PathLike[str], recipe: Recipe, open_one: Callable[[str], Checkpoint]
) -> Checkpoint:
    """Return the checkpoint of all files of a folder that a recipe names.

    The tree of `consolidated.01.pth` is below `01`. `folder` may be one of the files.

    Raises:
        FileMissing: if no file, or not every file, exists.
        UsageError: if the recipe has no `files`.
    """
    pattern, prefix = _parse_file_patterns(recipe)
    path = os.fspath(folder)
    place = place_of(path)
    if not place.is_folder(path):
        path = os.path.dirname(path)
    files = {}  # by the numbers in the name
    for name in place.list_names(path):
        if (values := pattern.match(name)) is not None:
            files[tuple(int(values[variable.name]) for variable in pattern.variables)] = name
    if not files:
        raise FileMissing(f"the folder has no file {recipe.files}", file=path or None)

    def fill_numbers(to_fill: Pattern, numbers: Iterable[int]) -> str:
        """Return the text of a pattern for the numbers in the name of a file."""
        names = (variable.name for variable in pattern.variables)
        return to_fill.fill(
            {name: str(number) for name, number in zip(names, numbers, strict=True)}
        )

    counts = [1 + max(axis) for axis in zip(*files, strict=True)]
    if (missing := find_first_missing(files, counts)) is not None:
        text = f"the folder has no {fill_numbers(pattern, missing)}"
        raise FileMissing(text, file=path or None, hint="copy it too")
    path_by_key = (
        (fill_numbers(prefix, numbers), os.path.join(path, files[numbers]))
        for numbers in sorted(files)
    )
    checkpoint = open_by_key(path_by_key, open_one)
    note = f"{counted(len(files), 'file')}: {recipe.files}"
    details = replace(checkpoint.details, notes=(note, *checkpoint.details.notes))
    root = nest_entries(checkpoint.root)
    return replace(checkpoint, root=root, original=root, path=path, details=details)


def nest_entries(entries: Mapping[str, Any]) -> OrderedMap:
    """Return the entries in nested dicts, by the `/` of their keys.

    Raises:
        NameCollision: if a key is that of an entry and of a dict.
    """
    root = OrderedMap()
    for key, entry in entries.items():
        *path, name = key.split("/")
        holder: Any = root
        for part in path:
            holder = holder.setdefault(part, OrderedMap())
            if not isinstance(holder, dict):
                break
        if not isinstance(holder, dict) or name in holder:
            raise NameCollision(f"{printable(key)!r} is also a dict, or is inside a tensor")
        holder[name] = entry
    return root


def split_files(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Checkpoint]:
    """Return the checkpoint of each file of a layout of several files, by file name.

    Each Megatron rank gets the rank file in its folder, without a pattern in the recipe.

    Raises:
        NotFound: if an entry belongs to no file.
        UsageError: if the recipe has no `files`, and the checkpoint is not of Megatron ranks.
    """
    root = checkpoint.root
    if recipe.files is None and isinstance(root, dict) and all(map(is_rank_folder, root)):
        return {f"{key}/{RANK_FILE}": replace(checkpoint, root=node) for key, node in root.items()}
    pattern, prefix = _parse_file_patterns(recipe)
    # One level of the tree for each number in the file names.
    nodes: dict[str, Any] = {"": checkpoint.root}
    for _ in pattern.variables:
        nodes = {
            f"{name}/{key}" if name else str(key): inside
            for name, node in nodes.items()
            for key, inside in (node.items() if isinstance(node, dict) else ())
        }
    checkpoints = {}
    for name, node in nodes.items():
        values = prefix.match(name)
        if values is None or not isinstance(node, dict):
            text = f"{printable(name)!r} does not belong to a file {recipe.files}"
            raise NotFound(text, file=checkpoint.path or None)
        checkpoints[pattern.fill(values)] = replace(checkpoint, root=node)
    return checkpoints
