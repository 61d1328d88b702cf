"""Extract from a checkpoint: a section, some tensors, the model, or the intact tensors."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, ClassVar

from ckptool.core.addressing import NameIndex, resolve, select, unmatched_error
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, OrderedMap, Path, TensorRef, copy_with_items, find_tensors
from ckptool.core.modules import has_tensors, is_module
from ckptool.core.sections import (
    MODEL_KINDS,
    OF_THE_MODEL,
    Section,
    find_model_state_dict,
    find_sections,
    list_value_keys,
    list_wrappable_keys,
)
from ckptool.core.tree import describe_path, is_within, name_of, rebuild, walk, walk_everything
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.files.source import MemorySource
from ckptool.formats import load_format
from ckptool.transforms.names import remaining_metadata
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable, shell

_MOST_LISTED = 20
"""The number of paths that get their own sentence."""


@dataclass(eq=False)
class _Entry:
    """A container, tensor or entry of a state dict, and whether it is kept."""

    path: Path
    node: Any
    is_container: bool = False
    names: frozenset[Any] = frozenset()
    """The keys of a state dict that belong to the model."""
    inside: list[_Entry] = field(default_factory=list)
    tensors: int = 0
    gone: bool = False
    kept: bool = False
    """True if a tensor in it is chosen."""
    reduced: bool = False
    is_partly_kept: bool = False
    """True if it needs a tensor that is not chosen."""


Choose = Callable[[list[Path]], Collection[Path]]
"""Chooses the paths to keep among the paths of all tensors."""


class _Pruning:
    """The containers of a tree, and the entries to remove because `choose` leaves out their paths.

    `choose` also gets the other entries of a state dict that belong to the model
    (`sections.list_wrappable_keys`), with an `_extra_state` as one entry.
    """

    def __init__(self, root: Any, choose: Choose, base: Path) -> None:
        self._root = root
        self._base = base
        self._parts = {id(one.holder): one for one in find_sections(root) if one.kind != "values"}
        self._entries: dict[Path, _Entry] = {}
        noted = self._find()
        kept = choose([base + path for path in noted])
        for path in noted:
            self._entries[path].kept = base + path in kept
            self._entries[path].gone = not self._entries[path].kept
        for entry in reversed(self._entries.values()):
            if entry.is_container:
                self._decide(entry)

    def _find(self) -> list[Path]:
        """Collect the containers and the entries to choose from; return the entries' paths."""
        noted: list[Path] = []

        def add(entry: _Entry) -> None:
            self._entries[entry.path] = entry
            if entry.path:
                self._entries[entry.path[:-1]].inside.append(entry)

        def is_own(path: Path) -> bool:
            return bool(path) and path[-1] in self._entries[path[:-1]].names

        def note(path: Path, node: Any) -> None:
            if path not in self._entries:
                add(_Entry(path, node, tensors=sum(1 for _ in find_tensors(node))))
                noted.append(path)

        def enter(path: Path, node: Any) -> bool:
            if is_own(path):
                note(path, node)
                return False
            part = self._parts.get(id(node))
            names = list_wrappable_keys(part.node) if part and part.kind == "state_dict" else ()
            add(_Entry(path, node, is_container=True, names=frozenset(names)))
            return True

        for path, leaf in walk(self._root, enter=enter):
            if isinstance(leaf, TensorRef) or is_own(path):
                note(path, leaf)
        return noted

    def _decide(self, entry: _Entry) -> None:
        """Decide whether to remove a container, after the containers in it."""
        node, part = entry.node, self._parts.get(id(entry.node))
        leaving = [one for one in entry.inside if one.gone]
        entry.reduced = bool(leaving) or any(one.reduced for one in entry.inside)
        entry.kept = any(one.kept for one in entry.inside if not one.gone)
        entry.tensors = sum(one.tensors for one in entry.inside)
        if entry.reduced and part is not None and part.kind == "optimizer":
            entry.gone = True
        elif isinstance(node, dict):
            entry.gone = bool(leaving) and len(leaving) == len(node)
        elif leaving or (entry.reduced and isinstance(node, Opaque)):
            entry.is_partly_kept, entry.gone = entry.kept, not entry.kept

    def result(self, file: str | None) -> tuple[Any, list[Change]]:
        """Return the tree without these entries (None if nothing is left), and the changes.

        Raises:
            UsageError: if a list or an object would lose some of its tensors, or a dict with two
                paths in the file would become two dicts.
        """
        staying: list[_Entry] = []
        dropped_texts: list[tuple[str, int]] = []
        dropped: dict[int, tuple[Path, frozenset[Any]]] = {}
        todo = [one for one in (self._entries.get(()),) if one and one.is_container]
        while todo:
            entry = todo.pop()
            if entry.gone:
                partly = ", only partly selected" if entry.kept else ""
                facts = [*self._kind(entry), counted(entry.tensors, "tensor")]
                text = f"{self._name(entry.path)} ({', '.join(facts)}){partly}"
                dropped_texts.append((text, entry.tensors))
                continue
            if entry.is_partly_kept:
                raise self._refusal(entry, file)
            staying.append(entry)
            todo.extend(one for one in reversed(entry.inside) if one.is_container)
            leaving = [one for one in entry.inside if one.gone]
            names = [str(one.path[-1]) for one in leaving if not one.is_container]
            if names:
                text = (
                    f"{counted(len(names), 'entry')} of {self._name(entry.path)}: {listed(names)}"
                )
                dropped_texts.append((text, len(names)))
            keys = frozenset(one.path[-1] for one in leaving)
            before, others = dropped.setdefault(id(entry.node), (entry.path, keys))
            if others != keys:
                raise UsageError(
                    f"{self._name(before)} and {self._name(entry.path)} are the same object "
                    "in this "
                    "file, and would differ afterwards",
                    file=file,
                    hint="choose the same entries of both, or one of them with --key",
                )
        if () in self._entries and self._entries[()].gone:
            return None, list(_left_out_changes(dropped_texts))
        if not dropped_texts:
            return self._root, []

        def smaller(node: dict[Any, Any]) -> dict[Any, Any]:
            keys = dropped.get(id(node), ((), ()))[1]
            return without_keys(node, keys) if keys else node

        root = rebuild(self._root, mapping=smaller)
        return root, [*_left_out_changes(dropped_texts), *self._warn_of_stale_optimizers(staying)]

    def _name(self, path: Path) -> str:
        return describe_path(self._base + path)

    def _kind(self, entry: _Entry) -> Iterator[str]:
        """Yield the kind of a container that is a section or an object."""
        if part := self._parts.get(id(entry.node)):
            yield part.kind.replace("_", " ")
        elif isinstance(entry.node, Opaque):
            yield "object"

    def _refusal(self, entry: _Entry, file: str | None) -> UsageError:
        node, name = entry.node, self._name(entry.path)
        hint = "select all of its tensors or none"
        if not isinstance(node, Opaque):
            what = "a list, and dropping some entries would renumber the rest"
            return UsageError(
                f"{name} is {what}", file=file, hint=f"{hint}, or one entry with --key"
            )
        return UsageError(
            f"{name} is an object of class {printable(node.class_name)}, which needs "
            "all of its tensors",
            file=file,
            hint="add --model-only to convert it to a state dict" if is_module(node) else hint,
        )

    def _warn_of_stale_optimizers(self, staying: list[_Entry]) -> Iterator[Change]:
        """Warn of optimizers that keep a state although weights of a model are removed."""
        parts = [(one, part) for one in staying if (part := self._parts.get(id(one.node)))]
        if any(one.reduced and part.kind in MODEL_KINDS for one, part in parts):
            for one, part in parts:
                if part.kind == "optimizer" and part.node["state"]:
                    text = f"{self._name(one.path)} still has the state of removed parameters"
                    yield Change("warning", text)


def without_keys(node: dict[Any, Any], dropped: Collection[Any]) -> dict[Any, Any]:
    """Return a state dict, or another mapping, without some entries, also in its `_metadata`."""
    made = copy_with_items(
        node, ((key, value) for key, value in node.items() if key not in dropped)
    )
    if isinstance(made, OrderedMap) and isinstance(made.metadata, dict):
        names = list_wrappable_keys(node)
        kept = [name for name in names if name not in dropped]
        versions = remaining_metadata(made.metadata, names, kept)
        made.attributes = {**made.attributes, "_metadata": versions}
    return made


def without(checkpoint: Checkpoint, gone: Collection[Path]) -> tuple[Any, list[Change]]:
    """Return the tree without the tensors at some paths (or None), and what was left out.

    Raises:
        UsageError: if a list or an object would lose some of its tensors.
    """

    def choose(paths: list[Path]) -> set[Path]:
        return set(paths).difference(gone)

    return _Pruning(checkpoint.root, choose, ()).result(checkpoint.path or None)


def _left_out_changes(dropped_texts: list[tuple[str, int]]) -> Iterator[Change]:
    for text, count in dropped_texts[:_MOST_LISTED]:
        yield Change("left-out", text, count)
    if len(dropped_texts) > _MOST_LISTED:
        count = sum(count for _, count in dropped_texts[_MOST_LISTED:])
        places = counted(len(dropped_texts) - _MOST_LISTED, "more place")
        yield Change("left-out", f"{counted(count, 'entry')} in {places}", count)


_VALUES = (bool, int, float, complex, str, type(None))


def single_state_dict(
    checkpoint: Checkpoint, key: Any = None, *, values: bool = True
) -> Checkpoint:
    """Return a checkpoint whose root is the one flat state dict (`sections.find_model_state_dict`).

    A pickled module becomes its `state_dict()` (`plain_state_dict`). Changes of kind `left-out`
    list everything else; without `values`, also the values among the tensors.

    Raises:
        AmbiguousName: if there are several state dicts and no `key`.
        NotFound: if there is no state dict, or none at `key`.
    """
    chosen = find_model_state_dict(checkpoint, key)
    return (_state_dict_alone if values else _weights_alone)(checkpoint, chosen)


def _state_dict_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """Return a checkpoint with the state dict of a section as root; the rest is `left-out`."""
    root = plain_state_dict(checkpoint, chosen)
    spread = sum(value.is_spread for value in chosen.node.values() if isinstance(value, TensorRef))
    spread -= sum(value.is_spread for value in root.values() if isinstance(value, TensorRef))
    if spread:
        text = f"converted {counted(spread, 'DTensor')} to plain tensors"
        checkpoint = checkpoint.with_root(checkpoint.root, Change("gather", text, spread))
    if chosen.holder is checkpoint.root and isinstance(chosen.holder, OrderedMap):
        same = all(map(operator.is_, root.values(), chosen.holder.values()))
        return checkpoint if same else checkpoint.with_root(root)
    return checkpoint.with_root(root, *left_out(checkpoint.root, chosen))


def _weights_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """Return `_state_dict_alone` without the values among the tensors, which no model loads."""
    alone = _state_dict_alone(checkpoint, chosen)
    names = [name for name in list_value_keys(alone.root) if not has_tensors(alone.root[name])]
    if not names:
        return alone
    gone = frozenset(names)
    root = copy_with_items(
        alone.root, ((key, one) for key, one in alone.root.items() if key not in gone)
    )
    text = f"{listed(map(str, names), most=20)} (values in the state dict)"
    return alone.with_root(root, Change("left-out", text, len(names)))


def plain_state_dict(checkpoint: Checkpoint, chosen: Section) -> OrderedMap:
    """Return a copy of the state dict of a section.

    The tensors of a module or an exported program are detached, as in `state_dict()`. A state dict
    keeps its tensors as they were saved. A DTensor that is complete in the file becomes a plain
    tensor.
    """
    of_module = chosen.kind == "module" or load_format(checkpoint.format).is_program
    root = OrderedMap(chosen.node)
    for name, value in chosen.node.items():
        if isinstance(value, TensorRef):
            plain = value.whole or value
            root[name] = _detached(plain) if of_module else plain
    if isinstance(chosen.node, OrderedMap):
        held = chosen.node.attributes  # a single state dict needs no mark
        root.attributes = {key: value for key, value in held.items() if key != OF_THE_MODEL}
    return root


def _detached(tensor: TensorRef) -> TensorRef:
    """Return the tensor as `Tensor.detach()` does.

    No Parameter, no gradient, no hooks, no attributes; a subclass stays a subclass.
    """
    if not tensor.wrapping and not tensor.requires_grad and tensor.hooks is None:
        return tensor
    classes = tuple(
        replace(layer, requires_grad=False)
        for layer in tensor.wrapping
        if layer.kind == "type" and tensor.kind == "subclass"
    )
    return replace(tensor, requires_grad=False, hooks=None, wrapping=classes)


def left_out(root: Any, chosen: Section) -> Iterator[Change]:
    """Yield changes for everything outside a state dict, and for what could not be read of it."""
    if isinstance(chosen.holder, Opaque):
        text = f"the {printable(chosen.holder.class_name)} object around the state dict"
        known = {tensor.place for _, tensor in chosen.tensors()}
        hidden = {tensor.place for tensor in find_tensors(chosen.holder)} - known
        more = f" (with {counted(len(hidden), 'tensor')} outside the state dict)" if hidden else ""
        yield Change("left-out", f"{text}{more}", 1)
    for text, tensors in chosen.apart.items():
        yield Change("left-out", text, 1, needed=tensors > 0)
    if chosen.path or chosen.holder is root or chosen.kind == "module":
        yield from beside(root, chosen.path, chosen.holder)
        return
    rest = {key: value for key, value in root.items() if key not in chosen.node}
    yield from beside(rest, (None,), chosen.holder)  # no other path begins with it


def beside(root: Any, chosen: Path, holder: Any) -> Iterator[Change]:
    """Yield a change for everything outside the node `holder` at the path `chosen`.

    One for each section, and for loose tensors, values and objects.
    """
    for part in find_sections(root):
        if part.kind == "values":
            yield from _loose(part, chosen)
        elif part.holder is not holder and not is_within(part.path, chosen):
            count = sum(1 for path, _ in part.tensors() if not is_within(path, chosen))
            rest = "the rest of " if is_within(chosen, part.path) else ""
            text = f"{rest}{printable(part.name) or 'the root'}"
            facts = f"{part.kind.replace('_', ' ')}, {counted(count, 'tensor')}"
            yield Change("left-out", f"{text} ({facts})", count)


def _loose(values: Section, chosen: Path) -> Iterator[Change]:
    """Yield changes for leaves in no section, grouped by the highest node outside `chosen`."""
    groups = {group: Counter[str]() for group in ("tensors", "values", "objects")}
    for path, leaf in values.node.items():
        if is_within(path, chosen):
            continue
        both = zip(path, chosen, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        groups[_group(leaf)][name_of(path[: shared + 1])] += 1
    for group, names in groups.items():
        if names:
            kind = group[:-1] if len(names) == 1 else group
            yield Change("left-out", f"{listed(names, most=20)} ({kind})", names.total())


def _group(leaf: Any) -> str:
    if isinstance(leaf, TensorRef):
        return "tensors"
    plain = isinstance(leaf, _VALUES) or (isinstance(leaf, Opaque) and leaf.plain is not None)
    return "values" if plain else "objects"


def part_of(checkpoint: Checkpoint, key: Any, model_only: bool) -> tuple[Checkpoint, Path]:
    """Return the part chosen by `key` and `model_only`, and the path of its root."""
    if key == "":
        raise UsageError(
            "an entry with an empty key cannot be selected",
            file=checkpoint.path or None,
            hint="leave out --key to take the whole file",
        )
    if model_only:
        model = find_model_state_dict(checkpoint, key)
        return _weights_alone(checkpoint, model), model.path
    if key is None:
        return checkpoint, ()
    path, node = _resolved(checkpoint, key)
    if node is checkpoint.root:
        return checkpoint, ()
    name = printable(name_of(path))
    for section in checkpoint.sections:
        is_made = section.kind == "module" or any(one.is_spread for _, one in section.tensors())
        if section.path == path and section.kind in MODEL_KINDS and is_made:
            alone = _state_dict_alone(checkpoint, section)
            return alone.with_root(alone.root, Change("extract", f"made {name} the root")), path
    left_out = list(beside(checkpoint.root, path, node))
    if isinstance(node, TensorRef):
        change = Change("extract", f"extracted the tensor {name} into a dict", 1)
        return checkpoint.with_root({name_of(path[-1:]): node}, change, *left_out), path[:-1]
    made = checkpoint.with_root(node, Change("extract", f"made {name} the root"), *left_out)
    return made, path


def _resolved(checkpoint: Checkpoint, key: Any) -> tuple[Path, Any]:
    try:
        return resolve(checkpoint, key, accept=_may_be_root)
    except AmbiguousName:
        raise
    except NotFound:
        path, _ = resolve(checkpoint, key)
        name, file = printable(name_of(path)), checkpoint.path
        raise UsageError(
            f"{name!r} is a value without tensors",
            file=file or None,
            hint=f"ckptool show {shell(file)} {shell(name)}" if file else None,
        ) from None


def _may_be_root(node: Any) -> bool:
    if isinstance(node, Opaque):
        return node.plain is None
    return isinstance(node, (dict, list, tuple, TensorRef))


def chosen_of(
    checkpoint: Checkpoint,
    part: Checkpoint,
    base: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Checkpoint:
    """Return the part, whose root had the path `base`, without what the patterns leave out.

    Raises:
        NotFound: if a pattern matches nothing, or nothing is left.
        AmbiguousName: if a name matches several tensors.
    """
    file = checkpoint.path or None

    def choose(paths: list[Path]) -> set[Path]:
        index = NameIndex(((path, None) for path in paths), checkpoint.path)
        chosen = select(index, include, exclude, endings=False)
        if chosen.unmatched:
            raise unmatched_error(chosen.unmatched[0], checkpoint.path)
        return {path for path, _ in chosen.pick_from(index)}

    root, changes = _Pruning(part.root, choose, base).result(file)
    if root is None or not any(part.with_root(root).tensors()):
        raise NotFound(
            "no tensor would remain",
            file=file,
            hint=f"left out would be: {'; '.join(one.text for one in changes)}"
            if changes
            else "exclude fewer tensors",
        )
    if root is part.root:
        return part
    return part.with_root(root, *changes)


def count_kept(before: Checkpoint, after: Checkpoint) -> Change:
    """Return a change that counts the tensors and bytes kept."""
    every, kept = ([tensor for _, tensor in one.tensors()] for one in (before, after))
    text = f"kept {len(kept):,} of {counted(len(every), 'tensor')}"
    return Change("extract", f"{text} ({_bytes(kept):,} of {_bytes(every):,} bytes)", len(kept))


def _bytes(tensors: Iterable[TensorRef]) -> int:
    return sum({tensor.place or id(tensor): tensor.nbytes for tensor in tensors}.values())


@dataclass(frozen=True)
class Salvage(Step):
    """Take the intact tensors of a damaged or truncated file, and leave out the others.

    An optimizer with damaged tensors is left out completely, because a partial state is useless.
    """

    opens_damaged: ClassVar[bool] = True
    flag: ClassVar[str] = "salvage"
    on_files: ClassVar[str] = "a dict in memory cannot be damaged"

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint, opened for salvage, without tensors that have missing bytes.

        Raises:
            NotFound: if no tensor is intact.
            UsageError: if a list or an object would lose some of its tensors.
        """
        every = list(checkpoint.tensors())
        lost = [path for path, tensor in every if any(map(_is_lost, walk_everything(tensor)))]
        parts = (part for _, tensor in every for part in walk_everything(tensor))
        storages = (part.storage for part in parts if isinstance(part, TensorRef))
        unsummed = (one.data.source for one in storages
                    if one and one.data and one.nbytes and one.crc32 is None)  # fmt: skip
        is_unsummed = not all(isinstance(source, MemorySource) for source in unsummed)
        how = "; the file has no checksums, so only lengths were checked" if is_unsummed else ""
        if not lost and every:
            text = f"all {counted(len(every), 'tensor')} are intact{how}"
            return checkpoint.with_root(checkpoint.root, Change("salvage", text))
        gone = {path[:length] for path in lost for length in range(1, len(path) + 1)}
        root, changes = without(checkpoint, gone)
        if root is None or not every:  # damage may leave no tensors, but intact values
            raise NotFound("no tensor is intact", file=checkpoint.path)
        left = checkpoint.with_root(root, *changes)
        count = sum(1 for _ in left.tensors())
        text = f"salvaged {count:,} of {counted(len(every), 'tensor')}; {len(lost):,} damaged{how}"
        return left.with_root(root, Change("salvage", text, len(lost)))


def _is_lost(tensor: object) -> bool:
    storage = getattr(tensor, "storage", None)
    return storage is not None and storage.data is None and storage.device != "meta"
