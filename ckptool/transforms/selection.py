"""One state dict out of a checkpoint, as safetensors holds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.model import Opaque, OrderedMap, Path, TensorRef
from ckptool.paths import listed, name_of, printable
from ckptool.statedict import Section, model_state_dict, sections

__all__ = ["single_state_dict"]

_VALUES = (bool, int, float, complex, str, type(None))


def single_state_dict(checkpoint: Checkpoint, key: Any = None) -> Checkpoint:
    """The checkpoint whose root is the one flat state dict (`statedict.model_state_dict`).

    A pickled module becomes what its `state_dict()` would be. All else is named among the
    changes, kind `left-out`.

    Raises:
        AmbiguousName: there are several state dicts and no `key`.
        NotFound: there is none, or nothing under that `key`.
    """
    chosen = model_state_dict(checkpoint, key)
    if chosen.holder is checkpoint.root and isinstance(chosen.holder, OrderedMap):
        return checkpoint
    root = OrderedMap(chosen.node)
    if isinstance(chosen.node, OrderedMap):
        root.attributes = chosen.node.attributes
    return checkpoint.with_root(root, *_left_out(checkpoint.root, chosen))


def _left_out(root: Any, chosen: Section) -> Iterator[Change]:
    """What else there is: a change for each section, and for loose tensors, values and objects."""
    if isinstance(chosen.holder, Opaque):
        text = f"the object of class {printable(chosen.holder.class_name)} around the state dict"
        yield Change("left-out", text, 1)
    for part in sections(root):
        if part.kind == "values":
            yield from _loose(part, chosen.path)
        elif part.holder is not chosen.holder:
            count = sum(1 for path, _ in part.tensors() if not _inside(path, chosen.path))
            beside = "the rest of " if _inside(chosen.path, part.path) else ""
            text = f"{beside}the {part.kind} {printable(part.name) or 'at the root'}"
            yield Change("left-out", f"{text} ({count} tensors)", count)


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
