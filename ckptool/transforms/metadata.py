"""`_metadata` of a state dict whose names change, or of which some leave.

It has an entry for every module, by path, also for those without tensors. A name's module is the
name without its last component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.names import Rename

__all__ = ["moved_metadata", "remaining_metadata"]

Targets = dict[Any, int]
"""The new paths of one module, each with its rank: where two modules come to one path, the entry
of the lower rank stands there."""

_OWN_STAYS, _MOVES, _STAYS, _LOOSE_MOVES, _LOOSE_STAYS = range(5)


def moved_metadata(
    metadata: dict[Any, Any], names: Mapping[str, str], rename_module: Rename
) -> dict[Any, Any]:
    """`_metadata` under the new paths.

    A module goes where the names below it go, `names` being old to new, those that stay as well;
    its entry is kept for each path where they go apart. One without names goes where
    `rename_module` says. An entry that moves replaces that of a container it moves to. The root,
    and any other module that comes to stand inside a new one, gives that an entry of version 1.
    """
    found = _followed(metadata, names)
    targets = {
        path: found[path] if path in found else _loose(path, rename_module) for path in metadata
    }
    claims: dict[Any, tuple[int, Any]] = {}
    for path, ranks in targets.items():
        for new, rank in ranks.items():
            if new not in claims or rank < claims[new][0]:
                claims[new] = rank, path
    moved = type(metadata)()
    for path, entry in metadata.items():
        if path not in claims and any(_is_below(new, path) for new in targets[path]):
            moved[path] = {"version": 1}
        moved.update((new, entry) for new in targets[path] if claims[new][1] == path)
    return moved


def _followed(metadata: Mapping[Any, Any], names: Mapping[str, str]) -> dict[str, Targets]:
    """Where modules go as the names below them do, as far up as only what is above changes."""
    found: dict[str, Targets] = {}
    modules = dict.fromkeys((_parent(name), _parent(new)) for name, new in names.items())
    for path, new in modules:
        own = True
        while path in metadata:
            ranks = found.setdefault(path, {})
            rank = _MOVES if path != new else _OWN_STAYS if own else _STAYS
            known = ranks.get(new)
            ranks[new] = rank if known is None else min(rank, known)
            apart = path.rpartition(".")[2] != new.rpartition(".")[2]
            if apart or not path or not new or (known is not None and not own):
                break
            path, new, own = _parent(path), _parent(new), False
    return found


def _loose(path: Any, rename_module: Rename) -> Targets:
    new = rename_module(path) if isinstance(path, str) else path
    return {new: _LOOSE_STAYS if new == path else _LOOSE_MOVES}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_below(path: Any, above: Any) -> bool:
    return isinstance(path, str) and (not above or path.startswith(f"{above}."))


def remaining_metadata(
    metadata: dict[Any, Any], names: Iterable[str], kept: Iterable[str]
) -> dict[Any, Any]:
    """`_metadata` without the modules that have lost all the names below them, and those inside.

    The root stays.
    """
    gone = _modules(metadata, names) - _modules(metadata, kept) - {""}
    return type(metadata)(
        (path, entry)
        for path, entry in metadata.items()
        if not (isinstance(path, str) and _inside_any(path, gone, metadata))
    )


def _modules(metadata: Mapping[Any, Any], names: Iterable[str]) -> set[str]:
    """The modules above the names, as far up as there are entries without a gap."""
    found: set[str] = set()
    for name in names:
        path = _parent(name)
        while path in metadata and path not in found:
            found.add(path)
            path = _parent(path)
    return found


def _inside_any(path: str, gone: set[str], metadata: Mapping[Any, Any]) -> bool:
    while path and path in metadata:
        if path in gone:
            return True
        path = _parent(path)
    return False
