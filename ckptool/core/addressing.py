"""The one rule by which a name or a glob selects nodes of a checkpoint.

A name is an exact path, else an exact key, else the unique end of a path after a `.` or `/`. A glob
is compared with whole keys, or with whole paths if it contains a `/`. Both are compared with keys
as they are, and without wrapper prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.model import Path, TensorRef
from ckptool.core.names import (
    Renamer,
    find_similar,
    make_wrapper_remover,
    may_be_wrapped,
    strip_wrappers,
)
from ckptool.core.tree import MISSING, descend, format_key, name_of, walk_nodes
from ckptool.errors import AmbiguousName, NotFound
from ckptool.words import counted, listed, printable, shell

if TYPE_CHECKING:
    from ckptool.core.checkpoint import Checkpoint

_GLOB = re.compile(r"[*?\[]")
_EXACT_PATH, _EXACT_KEY, _PATH_END, _NO_MATCH = range(4)
"""The stages of a search by name: how a node may match, the best first."""

Node = tuple[Path, Any]


def is_glob(pattern: str) -> bool:
    """Return True if a pattern has the characters of a glob."""
    return _GLOB.search(pattern) is not None


class Unmatched(NamedTuple):
    """A pattern that matches nothing, with the nearest names."""

    pattern: str
    near: tuple[str, ...]

    def __str__(self) -> str:
        """Return the fact as a sentence."""
        near = f"; did you mean {listed(self.near)}?" if self.near else ""
        return f"{printable(self.pattern)!r} matches no key{near}"


class NameIndex:
    """An index of nodes, searched by name or glob."""

    def __init__(self, nodes: Iterable[Node], file: str = "") -> None:
        """Index the nodes with their paths; `file` is for messages."""
        self.nodes = list(nodes)
        self._file = file
        self._renamers: dict[Path, Renamer | None] = {}
        """By path of a container, the function that strips wrapper prefixes from its keys."""
        self._bare_paths: dict[Path, Path] = {}
        """The paths without wrapper prefixes that were needed so far."""

    def find(
        self, name: str, *, endings: bool = True, accept: Callable[[Any], bool] | None = None
    ) -> list[int]:
        """Return the positions of the nodes that match a name at the first stage with a match.

        The stages are the exact path, the exact key and, with `endings`, the end of a path. A name
        with wrapper prefixes that no node has is also searched without them. Only nodes for which
        `accept` is true are considered.
        """
        matches = self._find_stage(name, endings, accept)
        bare = strip_wrappers(name)
        return self._find_stage(bare, endings, accept) if not matches and bare != name else matches

    def _find_stage(
        self, name: str, endings: bool, accept: Callable[[Any], bool] | None
    ) -> list[int]:
        """Return the positions of the nodes that match a name as it is, at the first stage.

        A path matches with or without its wrapper prefixes. The stages are those of `find`.
        """
        matches_by_stage: tuple[list[int], ...] = ([], [], [])
        endings_of_path = (f"/{name}", f".{name}")
        # The bare name is the end of every match: wrapper prefixes may be inside of a key.
        bare_name = re.split("[./]" if may_be_wrapped(self._text, inside=True) else "/", name)[-1]
        for index, key in enumerate(self._keys):
            if not key.endswith(bare_name):
                continue
            path, node = self.nodes[index]
            if accept is not None and not accept(node):
                continue
            stage = _NO_MATCH
            for variant in dict.fromkeys((path, self._strip_path(path))):
                full_name = name_of(variant)
                if full_name == name:
                    stage = _EXACT_PATH
                elif variant and name_of(variant[-1:]) == name:
                    stage = min(stage, _EXACT_KEY)
                elif endings and full_name.endswith(endings_of_path):
                    stage = min(stage, _PATH_END)
            if stage != _NO_MATCH:
                matches_by_stage[stage].append(index)
        return next(filter(None, matches_by_stage), [])

    def find_only(self, name: str, *, endings: bool = True) -> Node | None:
        """Return the node that matches a name, or None.

        Raises:
            AmbiguousName: if several nodes match at one stage.
        """
        matches = self.find(name, endings=endings)
        if len(matches) > 1:
            raise _ambiguous_error(name, [self.nodes[index][0] for index in matches], self._file)
        return self.nodes[matches[0]] if matches else None

    def select(self, pattern: str, *, endings: bool = True) -> list[int]:
        """Return the positions of the nodes that match a name (as in `find`) or a glob.

        A glob with a slash is compared with paths, any other with keys; both also without wrapper
        prefixes. With `endings`, a name may also be the end of a path.

        Raises:
            AmbiguousName: if a name matches several nodes.
        """
        if not is_glob(pattern):
            matches = self.find(pattern, endings=endings)
            if len(matches) > 1:
                raise _ambiguous_error(
                    pattern, [self.nodes[index][0] for index in matches], self._file
                )
            return matches
        match = re.compile(translate(pattern)).match
        has_slash = "/" in pattern
        names = list(map(name_of, self._paths)) if has_slash else self._keys
        if not self._is_wrapped:
            return [index for index, name in enumerate(names) if match(name)]
        bare = map(name_of, map(self._strip_path, self._paths)) if has_slash else self._strip_keys()
        pairs = enumerate(zip(names, bare, strict=True))
        return [index for index, (name, other) in pairs if match(name) or match(other)]

    def _strip_keys(self) -> Iterator[str]:
        """Yield the last key of each path without wrapper prefixes."""
        for path, key in zip(self._paths, self._keys, strict=True):
            rename = self._renamer_for(path[:-1])
            yield rename(key) if rename else key

    def describe_unmatched(self, pattern: str) -> Unmatched:
        """Return a pattern that matches nothing, with the nearest names."""
        keys = (path if "/" in pattern else path[-1:] for path, _ in self.nodes)
        return Unmatched(pattern, tuple(find_nearest(pattern, map(name_of, keys))))

    @cached_property
    def _paths(self) -> list[Path]:
        """The path of each node."""
        return [path for path, _ in self.nodes]

    @cached_property
    def _keys(self) -> list[str]:
        """The last key of each path as text; empty for the root."""
        keys = (path[-1] if path else "" for path in self._paths)
        return [key if type(key) is str else format_key(key) for key in keys]

    @cached_property
    def _text(self) -> str:
        """All keys of all paths in one text."""
        above = {key for path in {path[:-1] for path in self._paths} for key in path}
        return "\n".join(chain(self._keys, (key for key in above if type(key) is str)))

    @cached_property
    def _is_wrapped(self) -> bool:
        """True if a wrapper prefix may be in one of the keys."""
        return may_be_wrapped(self._text)

    def _strip_path(self, path: Path) -> Path:
        """Return a path without wrapper prefixes."""
        if not self._is_wrapped or not path:
            return path
        parent, key = path[:-1], path[-1]
        rename = self._renamer_for(parent) if type(key) is str else None
        return (*self._strip_parent(parent), rename(key) if rename else key)

    def _strip_parent(self, path: Path) -> Path:
        """Return the path of a container without wrapper prefixes, cached."""
        if path not in self._bare_paths:
            self._bare_paths[path] = self._strip_path(path)
        return self._bare_paths[path]

    def _renamer_for(self, parent: Path) -> Renamer | None:
        """Return the function that strips wrapper prefixes in a container, or None if it has none.

        The keys of its tensors decide, if it has tensors.
        """
        if parent not in self._renamers:
            tensors, others = self._keys_by_container.get(parent, ([], []))
            self._renamers[parent] = make_wrapper_remover(tensors or others)
        return self._renamers[parent]

    @cached_property
    def _keys_by_container(self) -> Mapping[Path, tuple[list[str], list[str]]]:
        """By path of a container, the text keys of tensors in it, and those of other nodes."""
        keys_by_path: dict[Path, tuple[list[str], list[str]]] = {}
        for path, node in self.nodes:
            if path and type(path[-1]) is str:
                tensor_keys, other_keys = keys_by_path.setdefault(path[:-1], ([], []))
                (tensor_keys if type(node) is TensorRef else other_keys).append(path[-1])
        # In an index of leaves, containers are only in the paths: they are added as other nodes.
        pending, indexed = list(keys_by_path), set(self._paths)
        while pending:
            path = pending.pop()
            if not path or path in indexed:
                continue
            indexed.add(path)
            parent, key = path[:-1], path[-1]
            if parent not in keys_by_path:
                pending.append(parent)
            _, other_keys = keys_by_path.setdefault(parent, ([], []))
            if type(key) is str:
                other_keys.append(key)
        return keys_by_path


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes that patterns choose."""

    positions: frozenset[int]
    """The positions of the chosen nodes."""
    unmatched: tuple[Unmatched, ...] = ()
    """The patterns that match nothing."""

    def pick_from(self, index: NameIndex) -> Iterator[Node]:
        """Yield the chosen nodes."""
        return (node for position, node in enumerate(index.nodes) if position in self.positions)


def select(
    index: NameIndex, include: Sequence[str], exclude: Sequence[str], *, endings: bool
) -> Selection:
    """Return the nodes that match `include` (default: all) and not `exclude`.

    Raises:
        AmbiguousName: if a name matches several nodes.
    """
    matches = {
        pattern: index.select(pattern, endings=endings)
        for pattern in dict.fromkeys((*include, *exclude))
    }
    chosen = {position for pattern in include for position in matches[pattern]}
    if not include:
        chosen = set(range(len(index.nodes)))
    chosen.difference_update(*(matches[pattern] for pattern in exclude))
    unmatched = (
        index.describe_unmatched(pattern) for pattern, positions in matches.items() if not positions
    )
    return Selection(frozenset(chosen), tuple(unmatched))


def unmatched_error(unmatched: Unmatched, file: str) -> NotFound:
    """Return the error for a pattern that matches nothing."""
    near = f"; did you mean {listed(unmatched.near)}?" if unmatched.near else ""
    return NotFound(
        f"no tensor matches {printable(unmatched.pattern)!r}{near}",
        file=file or None,
        hint=f"ckptool list {shell(file)}" if file else None,
    )


def find_nearest(wanted: str, names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Return the names that contain `wanted`, else the most similar, else `others`, else all."""
    candidates = list(dict.fromkeys(names))
    word = wanted.strip("*./").lower()
    matches = [name for name in candidates if word and word in name.lower()]
    return matches or find_similar(wanted, candidates) or list(dict.fromkeys(others)) or candidates


def resolve(
    checkpoint: Checkpoint, address: Any, accept: Callable[[Any], bool] | None = None
) -> Node:
    """Return the path and node for a path, a key, or a unique end of a path.

    Finds containers and leaves for which `accept` is true. A tuple or list is tried as a path
    first.

    Raises:
        NotFound: if nothing matches; the message lists the nearest names.
        AmbiguousName: if several nodes match; the message lists them.
    """
    name = str(address)
    if isinstance(address, (tuple, list)):
        name = name_of(tuple(address))
        node = descend(checkpoint.root, tuple(address))
        if node is not MISSING and (accept is None or accept(node)):
            return tuple(address), node
    nodes = list(walk_nodes(checkpoint.root))
    index = NameIndex(nodes, checkpoint.path)
    matches = [index.nodes[position] for position in index.find(name, accept=accept)]
    if not matches:
        raise _missing_error(checkpoint, name, index)
    if len(matches) > 1:
        raise _ambiguous_error(name, [path for path, _ in matches], checkpoint.path)
    return matches[0]


def _ambiguous_error(name: str, paths: Sequence[Path], file: str) -> AmbiguousName:
    """Return the error for a name that matches several paths."""
    names = dict.fromkeys(map(name_of, paths))
    is_same_text = len(names) == 1
    choices = listed(repr(list(path)) for path in paths) if is_same_text else listed(names)
    return AmbiguousName(
        f"{printable(name)!r} is ambiguous: it could be {choices}",
        file=file or None,
        hint="in Python, give the path as a tuple" if is_same_text else "give more of the path",
    )


def _missing_error(checkpoint: Checkpoint, name: str, index: NameIndex) -> NotFound:
    """Return the error for a name that matches no node that was asked for."""
    file = checkpoint.path or None
    if index.find(name):  # it exists, but not as the state dict of a model or optimizer
        return NotFound(
            f"{printable(name)!r} is not a state dict and contains none",
            file=file,
            hint=f"ckptool info {shell(file)}" if file else None,
        )
    paths = [path for path, _ in index.nodes if path]
    top_names = (name_of(path) for path in paths if len(path) == 1)
    nearest = find_nearest(name, map(name_of, paths), top_names)
    globs = f" --include {shell(name)}" if is_glob(name) else ""
    return NotFound(
        f"no entry is named {printable(name)!r}; the file has {listed(nearest)}",
        file=file,
        hint=f"ckptool list {shell(file)}{globs}" if file else None,
    )


class TensorMap(Mapping[str, TensorRef]):
    """The tensors of a checkpoint by path; a key or the end of a path also works.

    Calling it yields each tensor with its path as a tuple.
    """

    def __init__(self, leaves: Sequence[Node], file: str) -> None:
        """Index the leaves of a checkpoint; `file` is for messages."""
        self._nodes = tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, TensorRef))
        self._file = file

    def __call__(self) -> Iterator[tuple[Path, TensorRef]]:
        """Yield the path of each tensor, and the tensor."""
        return iter(self._nodes)

    @cached_property
    def _index(self) -> NameIndex:
        """The index of all names of the tensors."""
        return NameIndex(self._nodes, self._file)

    @cached_property
    def _by_path(self) -> Mapping[str, TensorRef]:
        """The tensors by path as text.

        Raises:
            AmbiguousName: if two paths have the same text.
        """
        tensors: dict[str, TensorRef] = {}
        for path, tensor in self._nodes:
            name = name_of(path)
            if tensors.setdefault(name, tensor) is not tensor:
                paths = [path for path, _ in self._nodes if name_of(path) == name]
                raise _ambiguous_error(name, paths, self._file)
        return tensors

    def __repr__(self) -> str:
        """Return a summary in one line."""
        return f"<TensorMap of {counted(len(self), 'tensor')}>"

    def __getitem__(self, name: str | Path) -> TensorRef:
        """Return the tensor that matches a name; a tuple is a path.

        Raises:
            NotFound: if no tensor matches (`AmbiguousName`: if several do).
        """
        if isinstance(name, tuple):
            match = next((tensor for path, tensor in self._nodes if path == name), None)
            if match is not None:
                return match
            name = name_of(name)
        name = str(name)
        if name in self._by_path:
            return self._by_path[name]
        node = self._index.find_only(name)
        if node is None:
            raise unmatched_error(self._index.describe_unmatched(name), self._file)
        _path, tensor = node
        return tensor  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        """Yield the paths, in the order of the file."""
        return iter(self._by_path)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._nodes)
