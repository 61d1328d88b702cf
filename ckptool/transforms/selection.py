"""One state dict out of a checkpoint, as safetensors holds it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.model import Opaque, OrderedMap, Path, TensorRef, find_tensors
from ckptool.modules import holds_tensors
from ckptool.paths import name_of
from ckptool.statedict import OF_THE_MODEL, Section, model_state_dict, sections, values_inside
from ckptool.transforms.places import tie_key
from ckptool.words import counted, listed, printable

__all__ = [
    "beside",
    "plain_state_dict",
    "single_state_dict",
    "state_dict_alone",
    "weights_alone",
]

_PROGRAMS = ("torchscript", "pt2")
"""Formats whose tensors are those of a module, as a pickled module's are."""
_VALUES = (bool, int, float, complex, str, type(None))


def single_state_dict(
    checkpoint: Checkpoint, key: Any = None, *, values: bool = True
) -> Checkpoint:
    """The checkpoint whose root is the one flat state dict (`statedict.model_state_dict`).

    A pickled module becomes what its `state_dict()` would be (`plain_state_dict`). All else is
    named among the changes, kind `left-out`; without `values` also those among the tensors.

    Raises:
        AmbiguousName: there are several state dicts and no `key`.
        NotFound: there is none, or nothing under that `key`.
    """
    alone = state_dict_alone if values else weights_alone
    return alone(checkpoint, model_state_dict(checkpoint, key))


def state_dict_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """The checkpoint whose root is one section's state dict; what else there is, `left-out`."""
    root = plain_state_dict(checkpoint, chosen)
    spread = sum(value.is_spread for value in chosen.node.values() if isinstance(value, TensorRef))
    spread -= sum(value.is_spread for value in root.values() if isinstance(value, TensorRef))
    if spread:
        text = f"{counted(spread, 'DTensor')}, all in this file, made plain"
        checkpoint = checkpoint.with_root(checkpoint.root, Change("gather", text, spread))
    if chosen.holder is checkpoint.root and isinstance(chosen.holder, OrderedMap):
        same = all(map(operator.is_, root.values(), chosen.holder.values()))
        return checkpoint if same else checkpoint.with_root(root)
    return checkpoint.with_root(root, *_left_out(checkpoint.root, chosen))


def weights_alone(checkpoint: Checkpoint, chosen: Section) -> Checkpoint:
    """As `state_dict_alone`, without the values among the tensors, which no model takes."""
    alone = state_dict_alone(checkpoint, chosen)
    names = [name for name in values_inside(alone.root) if not holds_tensors(alone.root[name])]
    if not names:
        return alone
    gone = frozenset(names)
    root = OrderedMap((name, value) for name, value in alone.root.items() if name not in gone)
    root.attributes = alone.root.attributes
    text = f"the values among the tensors: {listed(map(str, names), most=20)}"
    return alone.with_root(root, Change("left-out", text, len(names)))


def plain_state_dict(checkpoint: Checkpoint, chosen: Section) -> OrderedMap:
    """A section's state dict as a mapping of its own.

    Of a module or an exported program the tensors are detached, as `state_dict()` detaches them;
    what was saved as a state dict has what it was saved with. A DTensor of which the file has all
    is the plain tensor.
    """
    of_module = chosen.kind == "module" or checkpoint.format in _PROGRAMS
    root = OrderedMap(chosen.node)
    for name, value in chosen.node.items():
        if isinstance(value, TensorRef):
            plain = value.whole or value
            root[name] = _detached(plain) if of_module else plain
    if isinstance(chosen.node, OrderedMap):
        held = chosen.node.attributes  # alone it is the model's without saying so
        root.attributes = {key: value for key, value in held.items() if key != OF_THE_MODEL}
    return root


def _detached(tensor: TensorRef) -> TensorRef:
    """The tensor as `Tensor.detach()` gives it.

    No Parameter, no gradient, no hooks, no attributes; of a subclass it stays.
    """
    if not tensor.wrapping and not tensor.requires_grad and tensor.hooks is None:
        return tensor
    classes = tuple(
        replace(layer, requires_grad=False)
        for layer in tensor.wrapping
        if layer.kind == "type" and tensor.kind == "subclass"
    )
    return replace(tensor, requires_grad=False, hooks=None, wrapping=classes)


def _left_out(root: Any, chosen: Section) -> Iterator[Change]:
    """What is around and beside a state dict, and what could not be read of it."""
    if isinstance(chosen.holder, Opaque):
        text = f"the object of class {printable(chosen.holder.class_name)} around the state dict"
        known = {tie_key(tensor) for _, tensor in chosen.tensors()}
        hidden = {tie_key(tensor) for tensor in find_tensors(chosen.holder)} - known
        more = f" ({counted(len(hidden), 'tensor')} beside it)" if hidden else ""
        yield Change("left-out", f"{text}{more}", 1)
    for text, tensors in chosen.apart.items():
        yield Change("left-out", text, 1, needed=tensors > 0)
    yield from beside(root, chosen.path, chosen.holder)


def beside(root: Any, chosen: Path, holder: Any) -> Iterator[Change]:
    """What there is beside the node `holder` under the path `chosen`.

    A change for each section, and for loose tensors, values and objects.
    """
    for part in sections(root):
        if part.kind == "values":
            yield from _loose(part, chosen)
        elif part.holder is not holder and not _inside(part.path, chosen):
            count = sum(1 for path, _ in part.tensors() if not _inside(path, chosen))
            rest = "the rest of " if _inside(chosen, part.path) else ""
            text = f"{rest}the {part.kind} {printable(part.name) or 'at the root'}"
            yield Change("left-out", f"{text} ({counted(count, 'tensor')})", count)


def _inside(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer


def _loose(values: Section, chosen: Path) -> Iterator[Change]:
    """Leaves of no section, each under the name of the highest node that holds no chosen tensor."""
    groups: dict[str, dict[str, int]] = {"tensors": {}, "values": {}, "objects": {}}
    for path, leaf in values.node.items():
        if _inside(path, chosen):
            continue
        names = groups[_group(leaf)]
        shared = next(
            (at for at, (own, other) in enumerate(zip(path, chosen, strict=False)) if own != other),
            min(len(path), len(chosen)),
        )
        name = name_of(path[: shared + 1])
        names[name] = names.get(name, 0) + 1
    for group, names in groups.items():
        if names:
            yield Change("left-out", f"the {group} {listed(names, most=20)}", sum(names.values()))


def _group(leaf: Any) -> str:
    if isinstance(leaf, TensorRef):
        return "tensors"
    plain = isinstance(leaf, _VALUES) or (isinstance(leaf, Opaque) and leaf.plain is not None)
    return "values" if plain else "objects"
