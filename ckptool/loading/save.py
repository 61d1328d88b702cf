"""`save`: a model, its optimizer and what else belongs to a run, as one file of plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import (
    AmbiguousName,
    NotFound,
    NotRepresentable,
    TargetExists,
    UsageError,
    WriteError,
)
from ckptool.files.system import worded
from ckptool.loading.live.ranks import Ranks, default_group
from ckptool.loading.saving.freezing import frozen
from ckptool.loading.saving.live_states import LiveStates, is_optimizer
from ckptool.model import OrderedMap
from ckptool.names import N_AVERAGED
from ckptool.statedict import OF_THE_MODEL, model_state_dict
from ckptool.tensors.runtime import require_torch
from ckptool.writing import FLAT, Receipt, target_format
from ckptool.writing import save as written

if TYPE_CHECKING:
    import torch

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    overwrite: bool = True,
    **values: Any,
) -> Receipt:
    """Write a checkpoint that a bare `torch.load` takes, `weights_only=True` and on any machine.

    It is a dict: `state_dict` of the model, `optimizer`, and the values by their names (`epoch`,
    `step`, `scheduler`, `scaler`, `ema`, `rng`, `config`, ...). The file appears whole or not at
    all; what it replaces stays until then. Missing folders are made; what a link leads to is
    replaced, and the link stays.

    The state dict has the names of the model inside all wrappers, with its `_metadata`; tensors are
    detached and tagged `cpu`, what shared memory shares it, and of a large storage only what
    tensors see is written. Nothing is copied as a whole on the way. The optimizer's is torch's own
    form, with the names of the parameters as `param_names` of each group. Any other module,
    optimizer, scheduler or scaler among the values, at whatever depth, becomes its state dict; an
    `AveragedModel` there keeps its own names, which go with its counter. Of one that is the model
    itself the counter, `n_averaged`, stands beside the state dict.

    Where there are other state dicts beside that of the model, `load_into` and `load_state_dict`
    take that of the model without being told, as the file says which it is. So it does of the
    `optimizer`, and of others that are values themselves, as the modules are whose parameters they
    have.

    In a script SIGTERM ends Python at once: an old file stays, and a hidden temporary file, which
    the next save to the same name removes. A handler that raises has it removed.

    Under `torch.distributed` **every rank calls it**, whatever the model is: sharded parameters are
    gathered, rank 0 writes what it was given, the others wait, and what goes wrong is raised in all
    of them. Under an `if rank == 0:` rank 0 waits for the others as long as the timeout of the
    process group lets it (torch's own is 30 minutes with gloo), and then nothing is written.

    Args:
        path: Where to. A name that ends in `.safetensors` makes such a file, of a model alone.
        model: A module, wrapped or not; or its state dict, whose wrapper names go.
        optimizer: Its parameters are to be found in `model`, or else in any one module among the
            values. Where they are of several (`[*G.parameters(), *D.parameters()]`), or some of
            none, the names are those of the module that has most: a group that has others too is
            written without names, with a warning, unless it was given named parameters.
        overwrite: Replace a file that is there; False: refuse.
        values: None, bool, int, float, complex, str, bytes, tensors, `torch.Size`, `device`,
            `dtype`, and list, tuple, dict, OrderedDict, set and Counter of those; numpy scalars
            become numbers. Of a tensor its elements, shape, layout and type are saved: an attribute
            that was set on it is not, a class of its own becomes torch's, mkldnn's layout a strided
            one.

    Returns:
        What was written; the same on every rank.

    Raises:
        TorchMissing: torch is not installed.
        NotRepresentable: a value is of another kind, a tensor has no elements here; the message
            names the place. Nothing was written.
        NameCollision: two names of the model would become one without its wrappers.
        UsageError: there is nothing to save, or two things of one name; `overwrite` is no bool.
        TargetExists: the file is there, and `overwrite` is False; or it is a folder.
        NoSpace: the disk cannot hold it.
        WriteDenied: the system does not let us write there.
        FileBusy: another process, or thread, is writing the file.
        WriteError: another rank failed, did not come, or has something else to gather; or the
            system takes no such name.
    """
    require_torch()
    ranks = Ranks(
        default_group(), error=WriteError, undone="nothing is written", call="ckptool.save"
    )
    states = LiveStates(ranks)
    with ranks.reached():
        _check_overwrite(overwrite)
        tree = _taken(states, model, optimizer, values)
    states.gather(tree)
    if states.counter is not None:
        tree.setdefault(N_AVERAGED, states.counter)
    noted = _noted(states, tree, model)
    return ranks.first(
        lambda: _write(_named(path), tree, states.instead, noted, overwrite=overwrite)
    )


def _check_overwrite(overwrite: Any) -> None:
    if not isinstance(overwrite, bool):
        raise UsageError(
            f"overwrite={overwrite!r} is not True or False",
            hint="overwrite=False keeps a file that is there",
        )


def _taken(
    states: LiveStates, model: Any, optimizer: Any, values: dict[str, Any]
) -> dict[str, Any]:
    """Everything by name."""
    tree: dict[str, Any] = {}
    if model is not None:
        if "state_dict" in values:
            text = "a value is called 'state_dict', as is what is saved of the model"
            raise UsageError(text, hint="give it another name")
        tree["state_dict"] = states.of_model(model)
    if optimizer is not None:
        if not is_optimizer(optimizer):
            raise UsageError(f"optimizer= takes an optimizer, not a {type(optimizer).__name__}")
        tree["optimizer"] = optimizer
    tree.update(values)
    if not tree:
        raise UsageError("there is nothing to save", hint="ckptool.save(path, model=model)")
    return tree


def _named(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"a path is wanted, not a {type(path).__name__}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise UsageError(f"{name!r} is no path: no name has a null byte")
    return name


def _noted(states: LiveStates, tree: dict[str, Any], model: Any) -> dict[str, str]:
    """By the keys of optimizers those of the modules whose parameters they have."""
    keys = {id(node): key for key, node in reversed(tree.items())}
    if model is not None:
        keys[id(model)] = "state_dict"
    owners = ((key, states.owners.get(id(node))) for key, node in tree.items())
    return {key: keys[id(owner)] for key, owner in owners if id(owner) in keys}


def _write(
    path: str,
    tree: dict[str, Any],
    instead: dict[int, Any],
    noted: dict[str, str],
    *,
    overwrite: bool,
) -> Receipt:
    checkpoint = frozen(tree, instead=instead, file=path)
    _mark(checkpoint, noted)
    is_flat = target_format(checkpoint, path) in FLAT
    left_out: tuple[str, ...] = ()
    if is_flat and tree.keys() == {"state_dict", N_AVERAGED}:
        checkpoint = checkpoint.with_root({"state_dict": checkpoint.root["state_dict"]})
        left_out = (f"{N_AVERAGED}, the counter of an AveragedModel",)
    try:
        with worded(path):
            receipt = written(checkpoint, path, overwrite=overwrite, strict=is_flat, verify=False)
    except TargetExists as error:
        hint = "overwrite=True replaces it" if os.path.isfile(path) else error.hint
        raise TargetExists(error.message, file=path, hint=hint) from error
    except NotRepresentable as error:
        hint = "save the model alone, or a .pth file" if is_flat else error.hint
        raise NotRepresentable(error.message, file=path, hint=hint) from error
    return replace(receipt, source="", left_out=(*receipt.left_out, *left_out))


def _mark(checkpoint: Checkpoint, noted: dict[str, str]) -> None:
    """Have the file say which state dict is the model's, where it holds others; and what is noted.

    And where it holds an optimizer: the names of its parameters are the model's in full then.
    """
    state = checkpoint.root.get("state_dict")
    if isinstance(state, OrderedMap):
        try:
            model_state_dict(checkpoint)
            is_asked = "optimizer" in checkpoint.root
        except AmbiguousName:
            is_asked = True
        except NotFound:
            return
        if is_asked:
            state.attributes[OF_THE_MODEL] = noted
