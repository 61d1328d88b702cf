"""The state dict that a model is to be filled from, wherever it is: a file, or memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, UsageError, warn
from ckptool.formats import open_checkpoint, opened
from ckptool.loading.fitting.boxes import Boxes
from ckptool.loading.live.slots import live_slots
from ckptool.loading.live.spreading import without_hidden
from ckptool.loading.objects.tree import TreeMaker
from ckptool.matching import Slots, slots_of
from ckptool.model import OrderedMap, TensorRef
from ckptool.names import N_AVERAGED
from ckptool.remedies import Remedy
from ckptool.statedict import Section, is_flat, model_state_dict, wrapped_names
from ckptool.tensors import is_one_part, only_a_part, require_torch
from ckptool.tensors.materialise import MapLocation
from ckptool.transforms.extraction import plain_state_dict
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "State", "stated"]

_PLAIN = (bool, int, float, str, type(None))

Source = str | os.PathLike[str] | Checkpoint | Mapping[Any, Any]
"""A file, an open checkpoint, a state dict, or a dict that holds one."""


class State:
    """One state dict: what it has by name, and how to get at it. Made by `stated`."""

    def __init__(
        self,
        tree: Checkpoint,
        section: Section,
        boxes: Boxes | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Look at the names; `options` as `TreeMaker`'s. Nothing is read yet."""
        self.tree = tree
        """All of the file. Of memory what stands for it: tensors without bytes."""
        self.section = section
        """Which part of `tree` it is."""
        self.root: OrderedMap = plain_state_dict(tree, section)
        """The entries as they are loaded: of a pickled module, detached."""
        self._originals = {} if boxes is None else boxes.originals
        self._containers = {} if boxes is None else boxes.containers
        self.slots: Slots = _slots(section, self._originals)
        """The model's own entries; not plain values that a script put beside them."""
        self.folder: str | None = None
        """The folder that was given, where it is one: what else is in it belongs to the model."""
        self._options = options
        self._maker: TreeMaker | None = None
        self._held = ExitStack()

    @property
    def file(self) -> str:
        """The path, for messages; empty for memory."""
        return self.tree.path

    @cached_property
    def metadata(self) -> Mapping[str, Any] | None:
        """Its `_metadata`: module path to version; None where it has none.

        Wrappers that keep their component out of the names do not keep it out of this: a module
        inside one is also here under the path that its names have.
        """
        held = self.root.metadata
        if not isinstance(held, Mapping):
            return None
        given = held if self.tree.format == "memory" or _is_plain(held) else self.made(held)
        made = {path: entry for path, entry in given.items() if isinstance(path, str)}
        holders = {name.rpartition(".")[0] for name in self.slots}
        inside = {
            clean: entry
            for path, entry in made.items()
            if path not in holders and (clean := without_hidden(path)) in holders and clean != path
        }
        return {**made, **inside}

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of plain values among the entries, which no model takes."""
        return tuple(str(name) for name in self.root if name not in self.slots)

    def ref(self, name: str) -> TensorRef | None:
        """One of `slots` as it lies in the file; None for what is in memory, or no tensor."""
        node = self.root[name]
        return node if _is_stored(node, self._originals) else None

    def value(self, name: str) -> Any:
        """What stands under one of `slots`: a tensor, or an extra state.

        Of a file it is made where `map_location` says, each tensor once, and what shares memory in
        the file shares it; what is made is kept until `forget`. Of memory it is the object itself.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `ckptool.load_state_dict`.
        """
        node = self.root[name]
        if id(node) in self._originals:
            return self._originals[id(node)]
        if _is_stored(node, self._originals) and is_one_part(node):
            raise only_a_part(node, name)
        if id(node) in self._containers:
            return self._containers[id(node)]
        if self._maker is None:
            self._maker = TreeMaker(self.root, originals=self._originals, **self._options)
        return self._maker.made(node, (name,))

    def made(self, node: Any, **options: Any) -> Any:
        """What stands for any node of `tree`, tensors made; read anew whenever it is asked for.

        Of memory it is new containers around the objects themselves. `options` in place of those
        of `stated`.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `ckptool.load`.
        """
        maker = TreeMaker(node, originals=self._originals, **{**self._options, **options})
        try:
            return maker.made(node)
        finally:
            maker.forget()

    def opened(self, path: str) -> Checkpoint:
        """Another file of the same save, open as long as this one.

        Raises:
            UnreadableFile: it cannot be opened as a checkpoint; see `ckptool.open`.
        """
        return self._held.enter_context(open_checkpoint(path))

    def close(self) -> None:
        """Let go of what was made, and of what was opened beside."""
        self.forget()
        self._held.close()

    def forget(self) -> None:
        """Let go of the values that were made."""
        if self._maker is not None:
            self._maker.forget()
            self._maker = None


@contextmanager
def stated(
    source: Source | torch.nn.Module,
    *,
    key: Any = None,
    wanted: Slots | None = None,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
) -> Iterator[State]:
    """The one state dict in `source`, or the one under `key`; a file is open meanwhile.

    `wanted`, by which that of several which fits best is told where none is chosen, is not asked
    otherwise.

    `map_location` and `mmap` are for what a file holds; tensors in memory stay where they are.
    A file needs no torch, but where its elements are made.

    Raises:
        TorchMissing: it is no file, and torch is not installed.
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        AmbiguousName, NotFound: several state dicts and no `key`, or none; the message lists them.
        UsageError: it is nothing that has a state dict.
    """
    options = {"map_location": map_location, "mmap": mmap}
    if isinstance(source, (str, os.PathLike, Checkpoint)):
        with opened(source) as checkpoint:
            state = _chosen(checkpoint, key, None, options, wanted)
            if state.section.unread:
                warn(f"{state.file}: the state dict is read without {listed(state.section.unread)}")
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
            f"a file, an open checkpoint or a state dict is wanted, not a {type(source).__name__}"
        )
    boxes = Boxes()
    with closing(_chosen(boxes.checkpoint(source), key, boxes, options, wanted)) as state:
        yield state


def _chosen(
    tree: Checkpoint,
    key: Any,
    boxes: Boxes | None,
    options: Mapping[str, Any],
    wanted: Slots | None,
) -> State:
    try:
        section = model_state_dict(tree, key)
    except AmbiguousName as error:
        if wanted is not None and error.remedy is not None:
            error.advise(_best_first(error.remedy, tree, wanted))
        raise
    except NotFound:
        if key is not None or not _is_one(tree.root, in_memory=tree.format == "memory"):
            raise
        section = Section((), "state_dict", tree.root, tree.root)
    _check_names(section, tree)
    return State(tree, _with_counter(section, tree.root), boxes, options)


def _best_first(remedy: Remedy, tree: Checkpoint, wanted: Slots) -> Remedy:
    """The keys that may be given, as they stand in the file, after the one that fits best."""
    from ckptool.matching import matched  # where none is chosen

    def fitting(way: Remedy) -> tuple[bool, int]:
        slots = slots_of(model_state_dict(tree, dict(way.arguments)["key"]))
        report = matched(slots, wanted).report
        return report.fits, report.fitting

    ways = [remedy._replace(lead="", instead=()), *remedy.instead]
    scores = [*map(fitting, ways)]
    best = max(scores)
    if best[1] == 0 or scores.count(best) > 1:
        return remedy
    first = ways.pop(scores.index(best))
    note = " fits best" if not best[0] else " fits"
    return Remedy(first.arguments, note, instead=tuple(ways))


def _check_names(section: Section, tree: Checkpoint) -> None:
    """Refuse a tensor under what is no text: no model has such a name, and torch raises as well."""
    for name, value in section.node.items():
        if isinstance(value, TensorRef) and not isinstance(name, str):
            raise NotFound(
                f"it is no state dict of a model: a tensor stands under {printable(repr(name))}, "
                "and names are text",
                file=tree.path or None,
            )


def _with_counter(section: Section, root: Any) -> Section:
    """The section with the counter of an `AveragedModel` that `save` puts beside it."""
    counter = root.get(N_AVERAGED) if section.path == ("state_dict",) else None
    if not isinstance(counter, TensorRef) or counter.shape or N_AVERAGED in section.node:
        return section
    node = OrderedMap({N_AVERAGED: counter, **section.node})
    node.attributes = getattr(section.node, "attributes", {})
    return replace(section, node=node)


def _is_one(root: Any, *, in_memory: bool) -> bool:
    """Whether it is a state dict all the same: of a model without tensors, or of odd ones."""
    if isinstance(root, OrderedMap) and root.metadata is not None:
        return not any(isinstance(value, (dict, list, tuple)) for value in root.values())
    return in_memory and isinstance(root, dict) and (not root or is_flat(root))


def _slots(section: Section, originals: Mapping[int, Any]) -> Slots:
    """As `slots_of`; what is in memory tells for itself what it is."""
    if not originals:
        return slots_of(section)
    nodes = {name: section.node[name] for name in wrapped_names(section.node)}
    values = {name: originals.get(id(node)) for name, node in nodes.items()}
    slots = live_slots(values)
    stored = [
        name for name, v in values.items() if v is None and isinstance(nodes[name], TensorRef)
    ]
    if stored:  # of an open checkpoint, in a dict with tensors in memory
        of_file = slots_of(section)
        slots.update((name, of_file[name]) for name in stored)
    return slots


def _is_plain(metadata: Mapping[Any, Any]) -> bool:
    """Whether it is what torch itself writes: versions, of which nothing has to be made."""
    return all(
        type(path) is str
        and type(entry) is dict
        and all(type(held) in _PLAIN for held in entry.values())
        for path, entry in metadata.items()
    )


def _is_stored(node: Any, originals: Mapping[int, Any]) -> bool:
    return isinstance(node, TensorRef) and id(node) not in originals
