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
    MODEL_MARK,
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
from ckptool.transforms.metadata import drop_empty_modules
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable, shell

_MOST_LISTED = 20
"""The number of paths that get their own sentence."""


@dataclass(eq=False)
class _Entry:
    """A container, tensor or entry of a state dict, and the decision about it."""

    path: Path
    node: Any
    is_container: bool = False
    model_keys: frozenset[Any] = frozenset()
    """The keys of a state dict that belong to the model."""
    inside: list[_Entry] = field(default_factory=list)
    """The entries directly in a container."""
    tensors: int = 0
    """The number of tensors in it."""
    is_removed: bool = False
    has_chosen: bool = False
    """True if a tensor in it is chosen."""
    is_reduced: bool = False
    """True if an entry in it is removed, at any depth."""
    is_partly_kept: bool = False
    """True if it needs a tensor that is not chosen, which is an error."""

    @property
    def removed_inside(self) -> list[_Entry]:
        """The entries directly in it that are removed."""
        return [child for child in self.inside if child.is_removed]


Choose = Callable[[list[Path]], Collection[Path]]
"""Chooses the paths to keep among the paths of all tensors."""


class _Pruning:
    """Removes the entries of a tree that `choose` leaves out, and containers that need these.

    `choose` also gets the other entries of a state dict that belong to the model
    (`sections.list_wrappable_keys`), with an `_extra_state` as one entry.
    """

    def __init__(self, root: Any, choose: Choose, base: Path) -> None:
        """Decide for every entry of the tree `root`, whose path in the file is `base`."""
        self._root = root
        self._base = base
        self._sections = {
            id(section.holder): section
            for section in find_sections(root)
            if section.kind != "values"  # which has no dict of its own
        }
        self._entries: dict[Path, _Entry] = {}
        """The entries by path below `root`, each after the container that it is in."""
        paths = self._collect_entries()
        chosen = choose([base + path for path in paths])
        for path in paths:
            self._entries[path].has_chosen = base + path in chosen
            self._entries[path].is_removed = not self._entries[path].has_chosen
        for entry in reversed(self._entries.values()):
            if entry.is_container:
                self._decide_container(entry)

    def _collect_entries(self) -> list[Path]:
        """Collect the containers and the entries to choose from; return these entries' paths."""
        paths: list[Path] = []

        def add_entry(entry: _Entry) -> None:
            """Add an entry to the tree of entries."""
            self._entries[entry.path] = entry
            if entry.path:
                self._entries[entry.path[:-1]].inside.append(entry)

        def belongs_to_model(path: Path) -> bool:
            """Return True for an entry of a state dict that belongs to the model."""
            return bool(path) and path[-1] in self._entries[path[:-1]].model_keys

        def add_choice(path: Path, node: Any) -> None:
            """Add an entry that can be chosen, unless `enter_container` has added it."""
            if path not in self._entries:
                add_entry(_Entry(path, node, tensors=sum(1 for _ in find_tensors(node))))
                paths.append(path)

        def enter_container(path: Path, node: Any) -> bool:
            """Add a container, and return True to enter it.

            An entry of the model, such as an `_extra_state`, is one choice and is not entered.
            """
            if belongs_to_model(path):
                add_choice(path, node)
                return False
            entry = _Entry(path, node, is_container=True)
            section = self._sections.get(id(node))
            if section and section.kind == "state_dict":
                entry.model_keys = frozenset(list_wrappable_keys(section.node))
            add_entry(entry)
            return True

        for path, leaf in walk(self._root, enter=enter_container):
            if isinstance(leaf, TensorRef) or belongs_to_model(path):
                add_choice(path, leaf)
        return paths

    def _decide_container(self, entry: _Entry) -> None:
        """Decide whether a container is removed; those inside it were decided before.

        An optimizer is removed with any entry, a dict with its last one. A list or an object cannot
        lose only some tensors: it is removed if none of them is chosen, else `is_partly_kept`.
        """
        node, section = entry.node, self._sections.get(id(entry.node))
        removed = entry.removed_inside
        entry.is_reduced = bool(removed) or any(child.is_reduced for child in entry.inside)
        entry.has_chosen = any(child.has_chosen for child in entry.inside if not child.is_removed)
        entry.tensors = sum(child.tensors for child in entry.inside)
        if entry.is_reduced and section is not None and section.kind == "optimizer":
            entry.is_removed = True
        elif isinstance(node, dict):
            entry.is_removed = bool(removed) and len(removed) == len(node)
        # A list may keep a dict that loses entries; an object may not.
        elif removed or (entry.is_reduced and isinstance(node, Opaque)):
            entry.is_partly_kept, entry.is_removed = entry.has_chosen, not entry.has_chosen

    def prune(self, file: str | None) -> tuple[Any, list[Change]]:
        """Return the tree without the entries to remove (None if nothing is left), and the changes.

        Raises:
            UsageError: if a list or an object would lose some of its tensors, or a dict with two
                paths in the file would become two dicts.
        """
        kept_containers: list[_Entry] = []
        dropped_texts: list[tuple[str, int]] = []  # each with its number of tensors or entries
        root = self._entries.get(())
        pending = [root] if root and root.is_container else []
        while pending:
            entry = pending.pop()
            if entry.is_removed:
                dropped_texts.append((self._describe_removed(entry), entry.tensors))
                continue
            if entry.is_partly_kept:
                raise self._partial_selection_error(entry, file)
            kept_containers.append(entry)
            pending.extend(child for child in reversed(entry.inside) if child.is_container)
            # Removed containers get a text of their own, when it is their turn.
            removed = [child for child in entry.removed_inside if not child.is_container]
            names = [str(child.path[-1]) for child in removed]
            if names:
                owner = self._describe_entry(entry.path)
                text = f"{counted(len(names), 'entry')} of {owner}: {listed(names)}"
                dropped_texts.append((text, len(names)))
        if root is not None and root.is_removed:
            return None, list(_report_left_out(dropped_texts))
        if not dropped_texts:
            return self._root, []
        removed_keys_by_id = self._find_removed_keys(kept_containers, file)

        def remove_keys(node: dict[Any, Any]) -> dict[Any, Any]:
            """Return a dict without its removed entries."""
            keys = removed_keys_by_id.get(id(node))
            return drop_keys(node, keys) if keys else node

        return rebuild(self._root, mapping=remove_keys), [
            *_report_left_out(dropped_texts),
            *self._warn_of_stale_optimizers(kept_containers),
        ]

    def _find_removed_keys(
        self, kept_containers: list[_Entry], file: str | None
    ) -> dict[int, frozenset[Any]]:
        """Return the keys to remove from each container, by the id of its node.

        Raises:
            UsageError: if a node has two paths in the file and would lose different keys there.
        """
        first_entry_by_id: dict[int, _Entry] = {}
        removed_keys_by_id: dict[int, frozenset[Any]] = {}
        for entry in kept_containers:
            identity = id(entry.node)
            keys = frozenset(child.path[-1] for child in entry.removed_inside)
            first = first_entry_by_id.setdefault(identity, entry)
            if removed_keys_by_id.setdefault(identity, keys) != keys:
                subjects = (self._describe_entry(path) for path in (first.path, entry.path))
                raise UsageError(
                    f"{' and '.join(subjects)} are the same object in this file, and would "
                    "differ afterwards",
                    file=file,
                    hint="choose the same entries of both, or one of them with --key",
                )
        return removed_keys_by_id

    def _describe_removed(self, entry: _Entry) -> str:
        """Return a text about a removed container; a note if the user chose some of its tensors."""
        note = ", only partly selected" if entry.has_chosen else ""
        facts = [*self._describe_kind(entry), counted(entry.tensors, "tensor")]
        return f"{self._describe_entry(entry.path)} ({', '.join(facts)}){note}"

    def _describe_entry(self, path: Path) -> str:
        """Return the path of an entry in the file, for messages."""
        return describe_path(self._base + path)

    def _describe_kind(self, entry: _Entry) -> Iterator[str]:
        """Yield the kind of a container that is a section or an object."""
        if section := self._sections.get(id(entry.node)):
            yield section.kind.replace("_", " ")
        elif isinstance(entry.node, Opaque):
            yield "object"

    def _partial_selection_error(self, entry: _Entry, file: str | None) -> UsageError:
        """Return the error about a list or an object that would lose some of its tensors."""
        node, name = entry.node, self._describe_entry(entry.path)
        hint = "select all of its tensors or none"
        if not isinstance(node, Opaque):
            reason = "a list, and dropping some entries would renumber the rest"
            return UsageError(
                f"{name} is {reason}", file=file, hint=f"{hint}, or one entry with --key"
            )
        return UsageError(
            f"{name} is an object of class {printable(node.class_name)}, which needs "
            "all of its tensors",
            file=file,
            hint="add --model-only to convert it to a state dict" if is_module(node) else hint,
        )

    def _warn_of_stale_optimizers(self, kept_containers: list[_Entry]) -> Iterator[Change]:
        """Warn of optimizers that keep a state although weights of a model are removed."""
        kept_sections = [
            (entry, section)
            for entry in kept_containers
            if (section := self._sections.get(id(entry.node)))
        ]
        lost_weights = any(
            entry.is_reduced and section.kind in MODEL_KINDS for entry, section in kept_sections
        )
        for entry, section in kept_sections if lost_weights else ():
            has_state = section.kind == "optimizer" and section.node["state"]
            if has_state:
                name = self._describe_entry(entry.path)
                yield Change("warning", f"{name} still has the state of removed parameters")


def drop_keys(node: dict[Any, Any], dropped: Collection[Any]) -> dict[Any, Any]:
    """Return a state dict, or another dict, without the keys `dropped`, also in `_metadata`."""
    smaller = copy_with_items(
        node, ((key, value) for key, value in node.items() if key not in dropped)
    )
    if isinstance(smaller, OrderedMap) and isinstance(smaller.metadata, dict):
        names = list_wrappable_keys(node)
        kept = [name for name in names if name not in dropped]
        versions = drop_empty_modules(smaller.metadata, names, kept)
        smaller.attributes = {**smaller.attributes, "_metadata": versions}
    return smaller


def drop_tensors(checkpoint: Checkpoint, dropped: Collection[Path]) -> tuple[Any, list[Change]]:
    """Return the tree without the tensors at some paths, and changes that list them.

    The tree is None if nothing is left.

    Raises:
        UsageError: if a list or an object would lose some of its tensors.
    """

    def choose_others(paths: list[Path]) -> set[Path]:
        """Return the paths that are not dropped."""
        return set(paths).difference(dropped)

    return _Pruning(checkpoint.root, choose_others, base=()).prune(checkpoint.path or None)


def _report_left_out(dropped_texts: list[tuple[str, int]]) -> Iterator[Change]:
    """Yield a change for each description and count of dropped entries; the last ones share one."""
    for text, count in dropped_texts[:_MOST_LISTED]:
        yield Change("left-out", text, count)
    if len(dropped_texts) > _MOST_LISTED:
        count = sum(count for _, count in dropped_texts[_MOST_LISTED:])
        places = counted(len(dropped_texts) - _MOST_LISTED, "more place")
        yield Change("left-out", f"{counted(count, 'entry')} in {places}", count)


_VALUES = (bool, int, float, complex, str, type(None))


def extract_state_dict(
    checkpoint: Checkpoint, key: Any = None, *, values: bool = True
) -> Checkpoint:
    """Return a checkpoint whose root is the one flat state dict (`sections.find_model_state_dict`).

    A pickled module becomes its `state_dict()` (`copy_state_dict`). Changes of kind `left-out`
    list everything else; without `values`, also the values among the tensors.

    Raises:
        AmbiguousName: if there are several state dicts and no `key`.
        NotFound: if there is no state dict, or none at `key`.
    """
    section = find_model_state_dict(checkpoint, key)
    return (_isolate_state_dict if values else _isolate_weights)(checkpoint, section)


def _isolate_state_dict(checkpoint: Checkpoint, section: Section) -> Checkpoint:
    """Return a checkpoint with the state dict of a section as root; report what is left out.

    DTensors that are complete in this file become plain tensors, which is reported too.
    """
    root = copy_state_dict(checkpoint, section)
    n_spread_before, n_spread_after = (
        sum(value.is_spread for value in state.values() if isinstance(value, TensorRef))
        for state in (section.node, root)
    )
    if n_gathered := n_spread_before - n_spread_after:
        text = f"converted {counted(n_gathered, 'DTensor')} to plain tensors"
        checkpoint = checkpoint.with_root(checkpoint.root, Change("gather", text, n_gathered))
    if section.holder is checkpoint.root and isinstance(section.holder, OrderedMap):
        # The file is this state dict, so that nothing is left out.
        is_unchanged = all(map(operator.is_, root.values(), section.holder.values()))
        return checkpoint if is_unchanged else checkpoint.with_root(root)
    return checkpoint.with_root(root, *report_left_out(checkpoint.root, section))


def _isolate_weights(checkpoint: Checkpoint, section: Section) -> Checkpoint:
    """Return a checkpoint with only the weights of a section as root.

    Like `_isolate_state_dict`, but without the values among the tensors, which no model loads.
    """
    alone = _isolate_state_dict(checkpoint, section)
    names = [name for name in list_value_keys(alone.root) if not has_tensors(alone.root[name])]
    if not names:
        return alone
    dropped = frozenset(names)
    items = ((key, node) for key, node in alone.root.items() if key not in dropped)
    root = copy_with_items(alone.root, items)
    text = f"{listed(map(str, names), most=20)} (values in the state dict)"
    return alone.with_root(root, Change("left-out", text, len(names)))


def copy_state_dict(checkpoint: Checkpoint, section: Section) -> OrderedMap:
    """Return a copy of the state dict of a section.

    The tensors of a module or an exported program are detached, as in `state_dict()`. A state dict
    keeps its tensors as they were saved. A DTensor that is complete in the file becomes a plain
    tensor.
    """
    is_detached = section.kind == "module" or load_format(checkpoint.format).is_program
    root = OrderedMap(section.node)
    for name, value in section.node.items():
        if isinstance(value, TensorRef):
            plain = value.whole or value
            root[name] = _detach(plain) if is_detached else plain
    if isinstance(section.node, OrderedMap):
        attributes = dict(section.node.attributes)
        attributes.pop(MODEL_MARK, None)  # The mark tells the model from other state dicts.
        root.attributes = attributes
    return root


def _detach(tensor: TensorRef) -> TensorRef:
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


def report_left_out(root: Any, section: Section) -> Iterator[Change]:
    """Yield changes for everything outside a state dict, and for its unreadable parts."""
    if isinstance(section.holder, Opaque):
        text = f"the {printable(section.holder.class_name)} object around the state dict"
        own_places = {tensor.place for _, tensor in section.tensors()}
        hidden = {tensor.place for tensor in find_tensors(section.holder)} - own_places
        note = f" (with {counted(len(hidden), 'tensor')} outside the state dict)" if hidden else ""
        yield Change("left-out", f"{text}{note}", 1)
    for text, n_tensors in section.apart.items():  # without its tensors the model is incomplete
        yield Change("left-out", text, 1, needed=n_tensors > 0)
    if section.path or section.holder is root or section.kind == "module":
        yield from report_outside(root, section.path, section.holder)
        return
    # The root has the keys of the state dict and other keys. Everything at the others is outside,
    # because no path begins with None.
    others = {key: value for key, value in root.items() if key not in section.node}
    yield from report_outside(others, (None,), section.holder)


def report_outside(root: Any, chosen: Path, holder: Any) -> Iterator[Change]:
    """Yield changes for everything outside the node `holder` at the path `chosen`.

    One change for each section, and one each for all loose tensors, values and objects.
    """
    for section in find_sections(root):
        if section.kind == "values":
            yield from _report_loose_leaves(section, chosen)
        elif section.holder is not holder and not is_within(section.path, chosen):
            count = sum(1 for path, _ in section.tensors() if not is_within(path, chosen))
            prefix = "the rest of " if is_within(chosen, section.path) else ""
            text = f"{prefix}{printable(section.name) or 'the root'}"
            facts = f"{section.kind.replace('_', ' ')}, {counted(count, 'tensor')}"
            yield Change("left-out", f"{text} ({facts})", count)


def _report_loose_leaves(values: Section, chosen: Path) -> Iterator[Change]:
    """Yield changes for the tensors, values and objects outside all sections and `chosen`.

    `values` has these leaves by path. Each change names the highest nodes that contain such leaves,
    but not `chosen`: for the leaf `a/b/c/d` and `chosen` `a/x` that is `a/b`.
    """
    counts_by_kind = {kind: Counter[str]() for kind in ("tensor", "value", "object")}
    for path, leaf in values.node.items():
        if is_within(path, chosen):
            continue
        pairs = zip(path, chosen, strict=False)
        n_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        counts_by_kind[_classify_leaf(leaf)][name_of(path[: n_shared + 1])] += 1
    for kind, count_by_name in counts_by_kind.items():
        if count_by_name:
            noun = kind if len(count_by_name) == 1 else f"{kind}s"
            text = f"{listed(count_by_name, most=20)} ({noun})"
            yield Change("left-out", text, count_by_name.total())


def _classify_leaf(leaf: Any) -> str:
    """Return `tensor`, `value` or `object` for a leaf; a numpy number is a value."""
    if isinstance(leaf, TensorRef):
        return "tensor"
    is_plain = isinstance(leaf, _VALUES) or (isinstance(leaf, Opaque) and leaf.plain is not None)
    return "value" if is_plain else "object"


def select_part(checkpoint: Checkpoint, key: Any, model_only: bool) -> tuple[Checkpoint, Path]:
    """Return the part at `key`, with `model_only` its state dict, and the path of its root.

    Without both, the part is the whole checkpoint. A tensor becomes a dict with one entry, and a
    pickled module its state dict.
    """
    if key == "":
        raise UsageError(
            "an entry with an empty key cannot be selected",
            file=checkpoint.path or None,
            hint="leave out --key to take the whole file",
        )
    if model_only:
        model = find_model_state_dict(checkpoint, key)
        return _isolate_weights(checkpoint, model), model.path
    if key is None:
        return checkpoint, ()
    path, node = _resolve_key(checkpoint, key)
    if node is checkpoint.root:
        return checkpoint, ()
    shown = printable(name_of(path))
    made_root = Change("extract", f"made {shown} the root")
    for section in checkpoint.sections:
        # A module becomes its state dict, and tensors of distributed classes plain tensors.
        is_converted = section.kind == "module" or any(
            tensor.is_spread for _, tensor in section.tensors()
        )
        if section.path == path and section.kind in MODEL_KINDS and is_converted:
            alone = _isolate_state_dict(checkpoint, section)
            return alone.with_root(alone.root, made_root), path
    left_out = list(report_outside(checkpoint.root, path, node))
    if isinstance(node, TensorRef):
        change = Change("extract", f"extracted the tensor {shown} into a dict", 1)
        parent_path, key_of_tensor = path[:-1], name_of(path[-1:])
        return checkpoint.with_root({key_of_tensor: node}, change, *left_out), parent_path
    return checkpoint.with_root(node, made_root, *left_out), path


def _resolve_key(checkpoint: Checkpoint, key: Any) -> tuple[Path, Any]:
    """Return the path and the node of a key that can be the root of a file.

    Raises:
        UsageError: if it is a value without tensors.
    """
    try:
        return resolve(checkpoint, key, accept=_can_be_root)
    except AmbiguousName:  # a kind of NotFound
        raise
    except NotFound:
        path, _ = resolve(checkpoint, key)  # raises NotFound again if there is no entry at all
        name, file = printable(name_of(path)), checkpoint.path
        raise UsageError(
            f"{name!r} is a value without tensors",
            file=file or None,
            hint=f"ckptool show {shell(file)} {shell(name)}" if file else None,
        ) from None


def _can_be_root(node: Any) -> bool:
    """Return True for a container, a tensor, or an object that is not a plain value."""
    if isinstance(node, Opaque):
        return node.plain is None
    return isinstance(node, (dict, list, tuple, TensorRef))


def select_tensors(
    checkpoint: Checkpoint,
    part: Checkpoint,
    base: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Checkpoint:
    """Return the part without the tensors that the patterns leave out; its root was at `base`.

    Raises:
        NotFound: if a pattern matches nothing, or no tensor is left.
        AmbiguousName: if a name matches several tensors.
    """
    file = checkpoint.path or None

    def choose(paths: list[Path]) -> set[Path]:
        """Return the paths that the patterns select."""
        index = NameIndex(((path, None) for path in paths), checkpoint.path)
        chosen = select(index, include, exclude, endings=False)
        if chosen.unmatched:
            raise unmatched_error(chosen.unmatched[0], checkpoint.path)
        return {path for path, _ in chosen.pick_from(index)}

    root, changes = _Pruning(part.root, choose, base).prune(file)
    if root is None or not any(part.with_root(root).tensors()):
        raise NotFound(
            "no tensor would remain",
            file=file,
            hint=f"left out would be: {'; '.join(change.text for change in changes)}"
            if changes
            else "exclude fewer tensors",
        )
    if root is part.root:
        return part
    return part.with_root(root, *changes)


def count_kept(before: Checkpoint, after: Checkpoint) -> Change:
    """Return a change that counts the tensors and bytes kept."""
    all_tensors, kept_tensors = (
        [tensor for _, tensor in checkpoint.tensors()] for checkpoint in (before, after)
    )
    text = f"kept {len(kept_tensors):,} of {counted(len(all_tensors), 'tensor')}"
    return Change(
        "extract",
        f"{text} ({_count_bytes(kept_tensors):,} of {_count_bytes(all_tensors):,} bytes)",
        len(kept_tensors),
    )


def _count_bytes(tensors: Iterable[TensorRef]) -> int:
    """Return the size of the tensors; tied ones count once."""
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
        tensors = list(checkpoint.tensors())
        lost = [path for path, tensor in tensors if any(map(_is_lost, walk_everything(tensor)))]
        # `walk_everything` also yields the components of a tensor, such as sparse indices.
        parts = (part for _, tensor in tensors for part in walk_everything(tensor))
        storages = (part.storage for part in parts if isinstance(part, TensorRef))
        unchecked_sources = (
            storage.data.source
            for storage in storages
            if storage and storage.data and storage.nbytes and storage.crc32 is None
        )
        # Bytes in memory are from the pickle, which was read.
        has_unchecked = not all(isinstance(source, MemorySource) for source in unchecked_sources)
        note = "; the file has no checksums, so only lengths were checked" if has_unchecked else ""
        if not lost and tensors:
            text = f"all {counted(len(tensors), 'tensor')} are intact{note}"
            return checkpoint.with_root(checkpoint.root, Change("salvage", text))
        # The paths above are dropped too: an `_extra_state` is one entry, which has lost a tensor
        # inside it. A container is not an entry, so its path here drops nothing.
        dropped_paths = {path[:length] for path in lost for length in range(1, len(path) + 1)}
        root, changes = drop_tensors(checkpoint, dropped_paths)
        if root is None or not tensors:  # damage may leave no tensors, but intact values
            raise NotFound("no tensor is intact", file=checkpoint.path)
        salvaged = checkpoint.with_root(root, *changes)
        count = sum(1 for _ in salvaged.tensors())
        text = (
            f"salvaged {count:,} of {counted(len(tensors), 'tensor')}; {len(lost):,} damaged{note}"
        )
        return salvaged.with_root(root, Change("salvage", text, len(lost)))


def _is_lost(tensor: object) -> bool:
    """Return True for a tensor with bytes that are missing from the file."""
    storage = getattr(tensor, "storage", None)
    if storage is None or storage.device == "meta":
        return False
    return storage.data is None
