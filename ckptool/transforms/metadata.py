"""Move the entries of a state dict's `_metadata`, one per module, along with its renamed keys."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from operator import itemgetter
from typing import Any

from ckptool.core.names import Renamer

NewPaths = dict[Any, int]
"""The rank of the evidence by new path, for one module. If two modules get the same path, the entry
with the lower rank wins."""

# The evidence for a new path, the strongest first: a key directly below the module keeps it; keys
# below move to it (`module.fc` to `fc`); only keys further below keep it; no key is below, and the
# rule for modules moves it, or does not.
_OWN_KEY_STAYS, _KEYS_MOVE, _DEEPER_KEY_STAYS, _RULE_MOVES, _RULE_STAYS = range(5)


def move_metadata(
    metadata: dict[Any, Any], names: Mapping[str, str], rename_module: Renamer | None = None
) -> dict[Any, Any]:
    """Return `_metadata` with the entries under the new paths of their modules.

    A module moves with the keys below it. `names` maps all keys, old to new, also those that stay.
    If the keys move to several paths, each gets a copy of the entry. A module without keys moves by
    `rename_module`. If that is None, it moves with the nearest module above, and modules that merge
    into another one (a parametrization, a plain weight) are removed. An entry that moves replaces
    the entry at its new path. If a module, such as the root, moves into a new one, the new one gets
    an entry with version 1.
    """
    new_paths_by_keys = _find_new_paths_by_keys(metadata, names)
    if rename_module is None:
        metadata = _drop_merged_modules(metadata, names, new_paths_by_keys)
        rename_module = _make_nearest_renamer(names)
    new_paths = {
        path: new_paths_by_keys.get(path) or _find_new_path_by_rule(path, rename_module)
        for path in metadata
    }
    # If several modules move to one path, the entry of the lowest rank is used.
    ranked = [(rank, new, old) for old, ranks in new_paths.items() for new, rank in ranks.items()]
    old_by_new: dict[Any, Any] = {}
    for _, new, old in sorted(ranked, key=itemgetter(0)):
        old_by_new.setdefault(new, old)
    moved = type(metadata)()
    for path, entry in metadata.items():
        if path not in old_by_new and any(_is_below(new, path) for new in new_paths[path]):
            moved[path] = {"version": 1}  # The module itself moved into a new one at this path.
        moved.update((new, entry) for new in new_paths[path] if old_by_new[new] == path)
    return moved


def _find_new_paths_by_keys(
    metadata: Container[Any], names: Mapping[str, str]
) -> dict[str, NewPaths]:
    """Return the new paths of each module with keys below it, judging by these keys.

    A key also moves the modules further above, up to the first one with a new last part: the key
    `a.b.w -> x.b.w` moves `a.b` to `x.b` and `a` to `x`, but not the root.
    """
    new_paths: dict[str, NewPaths] = {}
    modules = dict.fromkeys((_get_parent(name), _get_parent(new)) for name, new in names.items())
    for path, new in modules:
        has_own_key = True
        while path in metadata:
            ranks = new_paths.setdefault(path, {})
            rank = _OWN_KEY_STAYS if has_own_key else _DEEPER_KEY_STAYS
            if path != new:
                rank = _KEYS_MOVE
            # True if another key has moved this module, and those above it, in the same way.
            is_known = new in ranks and not has_own_key
            ranks[new] = min(rank, ranks.get(new, rank))
            is_renamed = path.rpartition(".")[2] != new.rpartition(".")[2]
            if is_renamed or is_known or not path or not new:
                break
            path, new, has_own_key = _get_parent(path), _get_parent(new), False
    return new_paths


def _make_nearest_renamer(names: Mapping[str, str]) -> Renamer:
    """Return a function that moves a module without keys like the nearest module above."""
    modules = {""}  # `_metadata` may not have all of them.
    for name in names:
        path = _get_parent(name)
        while path not in modules:
            modules.add(path)
            path = _get_parent(path)
    new_paths = _find_new_paths_by_keys(modules, names)

    def rename(path: str) -> str:
        """Return the new path of a module, moved like the nearest one above with keys."""
        above = path
        while above and above not in new_paths:
            above = _get_parent(above)
        # Keys of one module may move to several places; the lowest rank is the best evidence.
        rank_by_new_path = new_paths.get(above, {above: 0})
        new_above = min(rank_by_new_path, key=rank_by_new_path.__getitem__)
        path_inside = path.removeprefix(above).removeprefix(".")
        return ".".join(filter(None, (new_above, path_inside)))

    return rename


def _drop_merged_modules(
    metadata: dict[Any, Any], names: Mapping[str, str], new_paths: Mapping[str, NewPaths]
) -> dict[Any, Any]:
    """Return `_metadata` without the modules that get the same new path as a module above them.

    `names` are the keys, `new_paths` the new paths of each module. A module stays if a key is
    directly in it and it is the topmost with one of its new paths, or if such a module is inside.
    """
    topmost_by_new_path: dict[Any, str] = {}
    for path in sorted(new_paths, key=len):
        for new in new_paths[path]:
            topmost_by_new_path.setdefault(new, path)
    kept_paths = set(topmost_by_new_path.values())
    return drop_empty_modules(
        metadata, names, (name for name in names if _get_parent(name) in kept_paths)
    )


def _find_new_path_by_rule(path: Any, rename_module: Renamer) -> NewPaths:
    """Return the new path of a module without keys, by the rule for modules, with its rank."""
    new = rename_module(path) if isinstance(path, str) else path
    return {new: _RULE_STAYS if new == path else _RULE_MOVES}


def _get_parent(name: str) -> str:
    """Return the path of the module that contains a key or module; "" for the root."""
    return name.rpartition(".")[0]


def _is_below(path: Any, above: Any) -> bool:
    """Return True if the module `path` is inside the module `above`."""
    return isinstance(path, str) and (not above or path.startswith(f"{above}."))


def drop_empty_modules(
    metadata: dict[Any, Any], names: Iterable[str], kept: Iterable[str]
) -> dict[Any, Any]:
    """Return `_metadata` without the modules that lost all keys below them, and those inside.

    `names` are the keys before, `kept` the remaining ones. The root stays.
    """
    removed = _list_modules_above(metadata, names) - _list_modules_above(metadata, kept) - {""}
    return type(metadata)(
        (path, entry)
        for path, entry in metadata.items()
        if not (isinstance(path, str) and _is_inside_removed(path, removed, metadata))
    )


def _list_modules_above(metadata: Mapping[Any, Any], names: Iterable[str]) -> set[str]:
    """Return the modules above the keys, upward until `metadata` lacks an entry."""
    modules: set[str] = set()
    for name in names:
        path = _get_parent(name)
        while path in metadata and path not in modules:
            modules.add(path)
            path = _get_parent(path)
    return modules


def _is_inside_removed(path: str, removed: set[str], metadata: Mapping[Any, Any]) -> bool:
    """Return True if a module, or one above it, was removed.

    `metadata` has the paths of all modules: above a path that it lacks there is no other.
    """
    while path and path in metadata:
        if path in removed:
            return True
        path = _get_parent(path)
    return False
