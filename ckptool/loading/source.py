"""The state dict to load, from a file or from memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptool.core.checkpoint import MEMORY, Checkpoint
from ckptool.core.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
    copy_with_items,
)
from ckptool.core.names import N_AVERAGED
from ckptool.core.sections import Section, find_model_state_dict, is_extra_state, is_flat
from ckptool.errors import AmbiguousName, NotFound, UsageError, warn
from ckptool.formats import open_checkpoint
from ckptool.loading.load import TreeMaker, make_tree, open_with_warnings
from ckptool.loading.ranks import remove_hidden_parts
from ckptool.loading.target import make_live_slots
from ckptool.matching import Slots, match_keys, slots_of
from ckptool.matching.report import Layout
from ckptool.remedies import Remedy
from ckptool.tensors import is_one_part, only_part_error, require_torch
from ckptool.tensors.live import LiveObject, LiveTree, describe_tensor, is_array
from ckptool.tensors.storages import MapLocation
from ckptool.transforms.extraction import copy_state_dict
from ckptool.words import a_class, listed, printable

if TYPE_CHECKING:
    import torch

_NODE_TYPES = (TensorRef, StorageRef, DeviceValue, Global, Opaque)
"""Nodes from the tree of an open checkpoint."""

Source = str | os.PathLike[str] | Checkpoint | Mapping[Any, Any]
"""A file, an open checkpoint, a state dict, or a dict that contains one."""


class StateDict:
    """One state dict with its keys, read on demand. Created by `open_state_dict`."""

    def __init__(
        self,
        tree: Checkpoint,
        section: Section,
        live: LiveTree | None = None,
        *,
        map_location: MapLocation = "cpu",
        mmap: bool = False,
    ) -> None:
        """Store the keys; nothing is read yet."""
        self.tree = tree
        """The whole file; in memory, a tree of tensors without bytes."""
        self.section = section
        """The section of `tree` with the state dict."""
        self.root: OrderedMap = copy_state_dict(tree, section)
        """The entries to load; those of a pickled module are detached."""
        live = live or LiveTree()
        self._originals = live.originals
        """By `id` of a node, the live tensor or object in memory; empty for a file."""
        self._containers = live.containers
        """By `id` of a node, the live dict, list or tuple in memory; empty for a file."""
        self.slots: Slots = _make_slots(section, self._originals)
        """The model's own entries, without plain values added by a script."""
        self.folder: str | None = None
        """The given folder, if any; other files in it also belong to the model."""
        self.map_location, self.mmap = map_location, mmap
        self._tree_maker: TreeMaker | None = None
        """Creates values, and keeps them; made for the first value that is read."""
        self._siblings = ExitStack()
        """The opened files of `open_sibling`."""

    @property
    def file(self) -> str:
        """The path, for messages; empty in memory."""
        return self.tree.path

    @cached_property
    def metadata(self) -> dict[str, Any] | None:
        """Its `_metadata`: module path to entry, such as `{"version": 1}`; None if it has none.

        Some wrappers remove their component from the keys but not from `_metadata`: a module
        inside one is also listed with the path in its keys.
        """
        stored = self.root.metadata
        if not isinstance(stored, Mapping):
            return None
        entry_by_path: dict[str, Any] = {
            path: dict(entry)
            for path, entry in stored.items()
            if isinstance(path, str) and isinstance(entry, Mapping)
        }
        values = (value for entry in entry_by_path.values() for value in entry.values())
        # Versions need no torch. Other values are created together, because they may be shared.
        if not all(isinstance(value, int | str | None) for value in values):
            entry_by_path = self.make_node(entry_by_path)
        paths_with_keys = {name.rpartition(".")[0] for name in self.slots}
        for path, entry in [*entry_by_path.items()]:
            bare_path = remove_hidden_parts(path)
            if path not in paths_with_keys and bare_path in paths_with_keys:
                entry_by_path[bare_path] = entry
        return entry_by_path

    def permute_axes(self, layouts: Iterable[Layout]) -> None:
        """Put the axes of tensors in torch's order in `root`, without reading or moving data.

        Tensors with unknown axes stay unchanged.
        """
        nodes = {**self.root}
        for layout in layouts:
            if not layout.axes:  # unknown
                continue
            file_key = layout.own
            live = self._originals.get(id(nodes[file_key]))
            if live is None:
                nodes[file_key] = nodes[file_key].permuted(layout.axes)
            else:
                permuted = live.detach().permute(layout.axes)
                nodes[file_key] = describe_tensor(permuted)
                self._originals[id(nodes[file_key])] = permuted
        self.root = copy_with_items(self.root, nodes)

    @property
    def plain_values(self) -> tuple[str, ...]:
        """The keys of plain values, which no model loads."""
        return tuple(str(name) for name in self.root if name not in self.slots)

    def ref(self, name: str) -> TensorRef | None:
        """Return a tensor in the file, or None if the entry is in memory, or not a tensor."""
        node = self.root[name]
        return node if isinstance(node, TensorRef) and id(node) not in self._originals else None

    def value(self, name: str) -> Any:
        """Return an entry: a tensor, or an extra state.

        A tensor in a file is created once, on `map_location`, and kept until `close`. Tensors that
        share memory in the file still share it. Entries in memory are returned unchanged. Errors
        are those of `ckptool.load_state_dict`.
        """
        node = self.root[name]
        if id(node) in self._originals:  # in memory: a tensor or an object
            return self._originals[id(node)]
        if isinstance(node, TensorRef) and is_one_part(node):
            raise only_part_error(node, name)
        if id(node) in self._containers:  # in memory: a dict, list or tuple
            return self._containers[id(node)]
        if self._tree_maker is None:
            self._tree_maker = TreeMaker(
                self.root,
                originals=self._originals,
                map_location=self.map_location,
                mmap=self.mmap,
            )
        return self._tree_maker.make(node, (name,))

    def make_node(self, node: Any) -> Any:
        """Return the object of a node of the tree; tensors are read again at each call, on the CPU.

        In memory, the result has new containers around the same objects.
        """
        return make_tree(node, originals=self._originals)

    def open_sibling(self, path: str) -> Checkpoint:
        """Open another file of the same save, until this one is closed."""
        return self._siblings.enter_context(open_checkpoint(path))

    def close(self) -> None:
        """Release all created values and opened files."""
        if self._tree_maker is not None:
            self._tree_maker.forget()
            self._tree_maker = None
        self._siblings.close()


@contextmanager
def open_state_dict(
    source: Source | torch.nn.Module,
    *,
    key: Any = None,
    wanted: Slots | None = None,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    with_values: bool = False,
) -> Iterator[StateDict]:
    """Open the state dict in `source`, or the one under `key`.

    If there are several and no key, the error proposes the one that fits `wanted` best first.
    `map_location` and `mmap` apply to files; tensors in memory are not moved. A file needs no torch
    until its values are read. `with_values` reads values stored in separate files.

    Raises:
        TorchMissing: if `source` is not a file, and torch is not installed.
        UnreadableFile: if the file cannot be opened as a checkpoint; see `ckptool.open`.
        AmbiguousName, NotFound: if there are several state dicts and no `key`, or none.
        UsageError: if `source` has no state dict.
    """
    if isinstance(source, (str, os.PathLike, Checkpoint)):
        with open_with_warnings(source) as checkpoint:
            if with_values:
                checkpoint = checkpoint.with_late_values()
            section = _choose_section(checkpoint, key, wanted)
            if section.unread:
                warn(f"{checkpoint.path}: left out of the state dict: {listed(section.unread)}")
            state = StateDict(checkpoint, section, map_location=map_location, mmap=mmap)
            if not isinstance(source, Checkpoint) and os.path.isdir(source):
                state.folder = os.fsdecode(source)
            with closing(state):
                yield state
        return
    require_torch()
    import torch

    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise UsageError(
            f"source is {a_class(source)}, expected a file, an open checkpoint or a state dict"
        )
    live = _Live()
    tree = Checkpoint(live.fill_mapping(source, OrderedMap()), MEMORY, "")
    section = _choose_section(tree, key, wanted)
    with closing(StateDict(tree, section, live, map_location=map_location, mmap=mmap)) as state:
        yield state


def _choose_section(tree: Checkpoint, key: Any, wanted: Slots | None) -> Section:
    """Return the section of the state dict, with the counter of an `AveragedModel`.

    A tree that is itself a state dict needs no `key`. For a choice between several, the error's
    hint begins with the one that fits the slots of a model, `wanted`.

    Raises:
        AmbiguousName, NotFound: if there are several state dicts and no `key`, or none.
    """
    try:
        section = find_model_state_dict(tree, key)
    except AmbiguousName as error:
        if wanted is not None and error.remedy is not None:
            error.advise(_sort_by_fit(error.remedy, tree, wanted))
        raise
    except NotFound:
        if key is not None or not _is_state_dict(tree.root, in_memory=tree.in_memory):
            raise
        section = Section((), "state_dict", tree.root, tree.root)
    for name, value in section.node.items():
        if isinstance(value, TensorRef) and not isinstance(name, str):
            raise NotFound(
                f"not a model's state dict: a tensor has the key {printable(repr(name))}, "
                "which is not a "
                "string",
                file=tree.path or None,
            )
    if section.path != ("state_dict",) or N_AVERAGED in section.node:
        return section
    counter = tree.root.get(N_AVERAGED)  # `save` writes it next to the state dict
    if isinstance(counter, TensorRef) and not counter.shape:
        node = copy_with_items(section.node, {N_AVERAGED: counter, **section.node})
        section = replace(section, node=node)
    return section


def _sort_by_fit(remedy: Remedy, tree: Checkpoint, wanted: Slots) -> Remedy:
    """Return a hint that lists the state dicts of the file by `key`, the best fit first.

    Without a single best fit, the hint is returned unchanged.
    """

    def rate(candidate: Remedy) -> tuple[bool, int]:
        """Return if the state dict at the hint's `key` fits, and how many of its keys match."""
        slots = slots_of(find_model_state_dict(tree, dict(candidate.arguments)["key"]))
        report = match_keys(slots, wanted).report
        return report.fits, report.fitting

    candidates = [remedy._replace(lead="", instead=()), *remedy.instead]
    ratings = [*map(rate, candidates)]
    best_rating = max(ratings)
    fits, matching_keys = best_rating
    if matching_keys == 0 or ratings.count(best_rating) > 1:
        return remedy
    best = candidates.pop(ratings.index(best_rating))
    return Remedy(best.arguments, " fits" if fits else " fits best", instead=tuple(candidates))


def _is_state_dict(root: Any, *, in_memory: bool) -> bool:
    """Return True if a tree without a recognized state dict is one itself.

    In a file, it needs `_metadata`, which only `state_dict()` writes, and no containers. A dict in
    memory was passed as a state dict: it may have no `_metadata`, and may be empty.
    """
    if isinstance(root, OrderedMap) and root.metadata is not None:
        return not any(isinstance(value, (dict, list, tuple)) for value in root.values())
    return in_memory and isinstance(root, dict) and (not root or is_flat(root))


def _make_slots(section: Section, originals: Mapping[int, Any]) -> Slots:
    """Return the slots of a section.

    Entries in memory get those of their live object, which `originals` has by the `id` of the node.
    """
    slots = slots_of(section)
    live = {
        name: originals[id(section.node[name])]
        for name in slots
        if id(section.node[name]) in originals
    }
    return {**slots, **make_live_slots(live)} if live else slots


class _Live(LiveTree):
    """The tree of a dict in memory: modules become state dicts, arrays become tensors."""

    def make_child(self, key: Any, node: Any) -> Any:
        """Keep an array that is an extra state of a module unchanged."""
        if is_extra_state(key) and is_array(node):
            return self.register_leaf(node, LiveObject(node))
        return super().make_child(key, node)

    def make_leaf(self, node: Any) -> Any:
        """Return the node of a tensor, module, array, or object.

        Nodes of an open checkpoint stay. An array that torch cannot use stays an object.
        """
        import torch

        if isinstance(node, _NODE_TYPES):
            return node
        if isinstance(node, torch.Tensor):
            return self.register_leaf(node, describe_tensor(node))
        if isinstance(node, Mapping):
            return self.fill_mapping(node, OrderedMap())
        if isinstance(node, torch.nn.Module):
            return self.make_node(node.state_dict())
        if isinstance(node, torch.Size):
            return Size(node)
        if isinstance(node, tuple):
            return tuple(map(self.make_node, node))
        if is_array(node) and node.dtype.kind in "biufc":  # bool, int, uint, float, complex
            # torch has neither negative strides nor other byte orders: they need a copy.
            if any(step < 0 for step in node.strides) or not node.dtype.isnative:
                node = node.astype(node.dtype.newbyteorder("="), order="C")
            with suppress(TypeError), warnings.catch_warnings():  # a dtype that torch does not have
                warnings.simplefilter("ignore")  # about read-only arrays
                array = torch.from_numpy(node)
                return self.register_leaf(array, describe_tensor(array))
        return super().make_leaf(node)
