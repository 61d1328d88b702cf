"""What of two checkpoints is compared: all, or what stands at one address in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound
from ckptool.inspection.diff_regions import Entry, Pair
from ckptool.model import Opaque, Path
from ckptool.modules import is_module
from ckptool.statedict import is_flat, sections
from ckptool.tree import held_items, name_of, resolve
from ckptool.words import printable

if TYPE_CHECKING:
    from ckptool.inspection.aligning import Alignment

__all__ = ["Scope", "Scopes", "in_scope", "scopes"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The node of a checkpoint that is compared, and its path."""

    root: Any
    base: Path = ()


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of both; where one entry alone is asked for, also that."""

    a: Scope
    b: Scope
    key: str | None = None
    """The address, where it names an entry and not a container (or nothing yet)."""
    entry_a: Entry | None = None
    """The entry that answers to it."""
    entry_b: Entry | None = None
    error: NotFound | None = None
    """To raise where nothing turns out to answer to it."""


def scopes(a: Checkpoint, b: Checkpoint, key: Any = None) -> Scopes:
    """Return what an address stands for in each; all of both without one.

    Raises:
        NotFound: nothing answers to it in a file that is not one flat state dict.
        AmbiguousName: several things do.
    """
    if key is None:
        return Scopes(Scope(a.root), Scope(b.root))
    found = [_found(checkpoint, key) for checkpoint in (a, b)]
    nodes = [scope for scope in found if isinstance(scope, Scope)]
    errors = [error for error in found if isinstance(error, NotFound)]
    if not nodes or any(not _is_container(scope.root) for scope in nodes):
        return _of_entry(a, b, key, found, None if nodes else errors[0])
    for error, checkpoint in zip(found, (a, b), strict=True):
        if isinstance(error, NotFound) and not is_flat(checkpoint.root):
            raise error
    one, other = (
        scope if isinstance(scope, Scope) else Scope(checkpoint.root)
        for scope, checkpoint in zip(found, (a, b), strict=True)
    )
    return Scopes(one, other)


def _found(checkpoint: Checkpoint, key: Any) -> Scope | NotFound:
    try:
        path, node = resolve(checkpoint, key)
    except AmbiguousName:
        raise
    except NotFound as error:
        return error
    return Scope(node, path)


def _is_container(node: Any) -> bool:
    if isinstance(node, Opaque):
        return is_module(node) or bool(held_items(node))
    return isinstance(node, (dict, list, tuple))


def _of_entry(
    a: Checkpoint, b: Checkpoint, key: Any, found: list[Scope | NotFound], error: NotFound | None
) -> Scopes:
    """Return an entry is held against its like within the section that it is in."""
    around: list[Scope] = []
    entries: list[Entry | None] = []
    for checkpoint, scope in zip((a, b), found, strict=True):
        if isinstance(scope, Scope):
            around.append(_section_around(checkpoint, scope))
            entries.append(Entry(name_of(scope.base), scope.base, scope.root))
        else:
            around.append(Scope(checkpoint.root))
            entries.append(None)
    wanted = name_of(tuple(key)) if isinstance(key, (tuple, list)) else str(key)
    return Scopes(around[0], around[1], wanted, entries[0], entries[1], error)


def _section_around(checkpoint: Checkpoint, scope: Scope) -> Scope:
    for part in sections(checkpoint.root):
        if part.kind != "values" and part.path == scope.base[: len(part.path)]:
            return Scope(part.holder, part.path)
    return Scope(checkpoint.root)


def in_scope(found: Scopes, aligned: Alignment) -> Alignment:
    """Return what of an alignment answers to the address; all of it where that names a container.

    Raises:
        NotFound: nothing does.
    """
    if found.key is None:
        return aligned
    wanted = _wanted(found)
    pairs = [
        pair
        for pair in aligned.pairs
        if wanted(pair.a, found.entry_a) or wanted(pair.b, found.entry_b)
    ]
    only_a = [entry for entry in aligned.only_a if wanted(entry, found.entry_a)]
    only_b = [entry for entry in aligned.only_b if wanted(entry, found.entry_b)]
    if found.entry_a and found.entry_b and (only_a or only_b or not pairs):
        name = found.entry_a.name
        pairs, only_a, only_b = [Pair(name, found.entry_a, found.entry_b)], [], []
    if not (pairs or only_a or only_b):
        raise found.error or NotFound(f"there is nothing named {printable(found.key)!r}")
    return replace(aligned, pairs=tuple(pairs), only_a=tuple(only_a), only_b=tuple(only_b))


def _wanted(found: Scopes) -> Callable[[Entry, Entry | None], bool]:
    """Whether an entry is the one that was found; where none was, has the name that was given."""
    if found.error is None:
        return lambda entry, known: known is not None and entry.path == known.path
    ending = f"/{found.key}"
    return lambda entry, _: entry.name == found.key or entry.name.endswith(ending)
