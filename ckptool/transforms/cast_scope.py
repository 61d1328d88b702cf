"""Which tensors a cast is about: what belongs to optimizers, what no state dict has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.model import Opaque, Path, TensorRef
from ckptool.modules import child_modules, own_tensors
from ckptool.statedict import sections
from ckptool.transforms.elements import tensors_placed
from ckptool.tree import walk

__all__ = ["optimizer_tensors", "unsaved_buffers", "with_own"]

_OPTIMIZERS = re.compile(r"(.*_)?optim(izer)?(_?states?|s)?(_.*)?", re.IGNORECASE)
"""Keys under which an optimizer's state stands, whatever its form."""


def optimizer_tensors(checkpoint: Checkpoint) -> set[Path]:
    """The paths of tensors that an optimizer or scheduler holds, in whatever form."""
    found = {
        path
        for part in sections(checkpoint.root)
        if part.kind in ("optimizer", "scheduler")
        for path, _ in part.tensors()
    }
    pickled: list[Path] = []

    def enter(path: Path, node: Any) -> bool:
        if isinstance(node, Opaque) and node.class_name.startswith("torch.optim."):
            pickled.append(path)
        return True

    for path, leaf in walk(checkpoint.root, enter=enter):
        if isinstance(leaf, TensorRef) and (
            any(isinstance(key, str) and _OPTIMIZERS.fullmatch(key) for key in path[:-1])
            or any(path[: len(holder)] == holder for holder in pickled)
        ):
            found.add(path)
    return found


def unsaved_buffers(checkpoint: Checkpoint) -> Iterator[tuple[Path, TensorRef]]:
    """The buffers of pickled modules that no state dict has, which `Module.to` casts too."""
    for part in sections(checkpoint.root):
        todo, seen = [("", part.holder)] if part.kind == "module" else [], set()
        while todo:
            prefix, module = todo.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            saved = own_tensors(module)
            for name, buffer in module.attributes.get("_buffers", {}).items():
                if isinstance(buffer, TensorRef) and name not in saved:
                    yield (*part.path, f"{prefix}{name}"), buffer
            inside = child_modules(module).items()
            todo.extend((f"{prefix}{name}.", child) for name, child in inside)


def with_own(checkpoint: Checkpoint, spared: set[Path]) -> Checkpoint:
    """The checkpoint with tensors of their own at the paths `spared`, over the same memory."""
    others = {id(tensor) for path, tensor in checkpoint.tensors() if path not in spared}
    own: dict[int, TensorRef] = {}
    placed = {
        path: own.setdefault(id(tensor), replace(tensor))
        for path, tensor in checkpoint.tensors()
        if path in spared and id(tensor) in others
    }
    return replace(checkpoint, root=tensors_placed(checkpoint.root, placed))
