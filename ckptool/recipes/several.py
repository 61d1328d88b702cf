"""Layouts of several files: the tensors of each file stand below what its name tells of it."""

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
from ckptool.recipes.names import Pattern, first_missing
from ckptool.recipes.recipe import Recipe
from ckptool.words import counted, printable


def _patterns(recipe: Recipe) -> tuple[Pattern, Pattern]:
    """Return the pattern of the files' names, and that of what stands before the keys of each."""
    if recipe.files is None:
        text = f"recipe {printable(recipe.name)} does not read several files"
        raise UsageError(text, hint='add files = "consolidated.{rank:02}.pth" to the recipe')
    name = Pattern.parse(recipe.files)
    count = len(name.variables)
    return name, Pattern("/".join("{}" * count), ("", *["/"] * (count - 1), ""), name.variables)


def prefix_of(recipe: Recipe) -> str:
    """Return what stands before the keys of the first file; nothing, if there is one file."""
    if recipe.files is None or recipe.is_reversed:
        return ""
    name, before = _patterns(recipe)
    return before.fill(dict.fromkeys(name.names, "0")) + "/"


def written_files(recipe: Recipe) -> str | None:
    """Return how the files are called that a recipe writes into a folder, if it writes several.

    Those of Megatron's ranks are each in a folder of its own.
    """
    if not recipe.is_reversed:
        return None
    rights = [one.text for rule in recipe.passes[-1] for one in rule.right]
    is_of_ranks = any(one.startswith("mp_rank_") and "/" in one for one in rights)
    return recipe.files or (f"mp_rank_{{rank:02}}/{RANK_FILE}" if is_of_ranks else None)


def has_files(path: str | os.PathLike[str], recipe: Recipe) -> bool:
    """Return whether a path is a file that a recipe names, or a folder with one."""
    pattern, _ = _patterns(recipe)
    name = os.fspath(path)
    place = place_of(name)
    names = place.list_names(name) if place.is_folder(name) else [os.path.basename(name)]
    return any(pattern.match(one) is not None for one in names)


def open_files(
    folder: str | os.PathLike[str], recipe: Recipe, open_one: Callable[[str], Checkpoint]
) -> Checkpoint:
    """Return the checkpoint of all files of a folder that a recipe names.

    The tree of `consolidated.01.pth` is below `01`. `folder` may be one of the files.

    Raises:
        FileMissing: no such file, or one of them is missing.
        UsageError: the recipe has no `files`.
    """
    pattern, before = _patterns(recipe)
    path = os.fspath(folder)
    place = place_of(path)
    if not place.is_folder(path):
        path = os.path.dirname(path)
    found = {}
    for name in place.list_names(path):
        if (values := pattern.match(name)) is not None:
            found[tuple(int(values[one.name]) for one in pattern.variables)] = name
    if not found:
        raise FileMissing(f"the folder has no file {recipe.files}", file=path or None)

    def filled(one: Pattern, number: Iterable[int]) -> str:
        words = (variable.name for variable in pattern.variables)
        return one.fill({word: str(n) for word, n in zip(words, number, strict=True)})

    counts = [1 + max(axis) for axis in zip(*found, strict=True)]
    if (missing := first_missing(found, counts)) is not None:
        text = f"the folder has no {filled(pattern, missing)}"
        raise FileMissing(text, file=path or None, hint="copy it too")
    names = ((filled(before, one), os.path.join(path, found[one])) for one in sorted(found))
    made = open_by_key(names, open_one)
    what = f"{counted(len(found), 'file')}: {recipe.files}"
    details = replace(made.details, notes=(what, *made.details.notes))
    root = nested(made.root)
    return replace(made, root=root, original=root, path=path, details=details)


def nested(entries: Mapping[str, Any]) -> OrderedMap:
    """Return entries in the dicts that the `/` of their keys lead through.

    Raises:
        NameCollision: a key is that of an entry and of a dict.
    """
    root = OrderedMap()
    for key, entry in entries.items():
        *path, name = key.split("/")
        holder: Any = root
        for one in path:
            holder = holder.setdefault(one, OrderedMap())
            if not isinstance(holder, dict):
                break
        if not isinstance(holder, dict) or name in holder:
            raise NameCollision(f"{printable(key)!r} is also a dict, or is inside a tensor")
        holder[name] = entry
    return root


def split_files(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Checkpoint]:
    """Return the checkpoint of each file, by its name, of a layout of several files.

    Raises:
        NotFound: something is below no number of a file.
        UsageError: the recipe has no `files`, and the checkpoint is not of Megatron's ranks.
    """
    root = checkpoint.root
    if recipe.files is None and isinstance(root, dict) and all(map(is_rank_folder, root)):
        return {f"{key}/{RANK_FILE}": replace(checkpoint, root=node) for key, node in root.items()}
    pattern, before = _patterns(recipe)
    nodes: dict[str, Any] = {"": checkpoint.root}
    for _ in pattern.variables:
        nodes = {
            f"{name}/{key}" if name else str(key): inside
            for name, node in nodes.items()
            for key, inside in (node.items() if isinstance(node, dict) else ())
        }
    made = {}
    for name, node in nodes.items():
        values = before.match(name)
        if values is None or not isinstance(node, dict):
            text = f"{printable(name)!r} does not belong to a file {recipe.files}"
            raise NotFound(text, file=checkpoint.path or None)
        made[pattern.fill(values)] = replace(checkpoint, root=node)
    return made
