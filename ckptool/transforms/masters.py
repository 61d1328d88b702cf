"""Weights replaced by the fp32 masters that an optimizer keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NotFound
from ckptool.formats.distributed.zero import MASTER, SLICED
from ckptool.model import TensorRef, remade
from ckptool.words import counted

__all__ = ["with_masters"]


def with_masters(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of DeepSpeed with its fp32 masters in the place of the weights.

    Frozen parameters and buffers, which have no masters, stay as they are, and so do weights of
    stage 3 that are masters already. What the reader cast is not cast.

    Raises:
        NotFound: the checkpoint has no masters, or one of a weight that the model does not have.
    """
    root = _mapping(checkpoint.root)
    module, optimizer = _mapping(root.get("module")), _mapping(root.get("optimizer"))
    states = _mapping(optimizer.get("state"))
    masters = {
        name: state[MASTER]
        for name, state in states.items()
        if isinstance(state, dict) and isinstance(state.get(MASTER), TensorRef)
    }
    if states and not masters and optimizer.get("zero_stage") == SLICED:
        return checkpoint
    if not masters or not masters.keys() <= module.keys():
        raise NotFound(
            "holds no fp32 masters of the weights, as the optimizer of DeepSpeed keeps them",
            file=checkpoint.path or None,
            hint="without --master (master=True) the weights are those of the model",
        )
    by_place = {_place(module[name]): master for name, master in masters.items()}
    weights = [(name, by_place.get(_place(one), one)) for name, one in module.items()]
    count = sum(one is not module[name] for name, one in weights)
    text = f"{counted(count, 'weight')} became the fp32 masters of the optimizer"
    if count < len(weights):
        text += f"; {counted(len(weights) - count, 'tensor')} without one stay as they are"
    kept = {
        name: remade(state, ((k, v) for k, v in state.items() if k != MASTER))
        for name, state in states.items()
    }
    changes = {
        "module": remade(module, weights),
        "optimizer": remade(optimizer, {**optimizer, "state": kept}),
    }
    made = checkpoint.with_root(remade(root, {**root, **changes}), Change("master", text, count))
    told = tuple(change for change in made.changes if change.kind != "cast")
    return replace(made, changes=told, reports=())


def _mapping(node: Any) -> dict[Any, Any]:
    return node if isinstance(node, dict) else {}


def _place(node: Any) -> Any:
    """Return where a weight lies, which tied names share."""
    return node.place if isinstance(node, TensorRef) else id(node)
