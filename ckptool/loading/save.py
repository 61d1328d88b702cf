"""`save`: a model, its optimizer and what else belongs to a run, as one file of plain data."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ParamSpec

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap
from ckptool.core.names import (
    N_AVERAGED,
    WRAPPERS,
    Renamer,
    bare_names as without_wrappers,
    check_collisions,
    strip_names,
)
from ckptool.core.sections import OF_THE_MODEL, is_extra_state, model_state_dict
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, UsageError, WriteError, warn
from ckptool.files.system import worded
from ckptool.formats import format_of
from ckptool.loading.ranks import Ranks, default_group, is_spread, sharded, ungathered
from ckptool.tensors.live import frozen
from ckptool.tensors.materialize import require_torch
from ckptool.transforms import Compact
from ckptool.transforms.names import moved_metadata
from ckptool.words import a_class
from ckptool.writing import Receipt, save as written, target_format

if TYPE_CHECKING:
    import torch

_Arguments = ParamSpec("_Arguments")
_OUTER = "module"
_PRIVATE = frozenset(WRAPPERS) - {_OUTER}
"""Wrappers wherever they stand: no author calls a layer so."""
_AVERAGE = "AveragedModel"
"""Keeps a model as its `module`, and a counter beside it."""
_WRAPPERS = frozenset((
    "DataParallel", "DeepSpeedEngine", "DistributedDataParallel", "FullyShardedDataParallel",
    "ModelEma", "ModelEmaV2", "ModelEmaV3", "ShardedDataParallel",
))  # fmt: skip
"""Classes, torch's and those of others, that keep a model as their `module`, and nothing else."""


def _refusing_values(function: Callable[_Arguments, Receipt]) -> Callable[_Arguments, Receipt]:
    """Return `save`, which names the keyword that is meant by an argument without one."""

    @wraps(function)
    def call(*args: _Arguments.args, **given: _Arguments.kwargs) -> Receipt:
        if len(args) > 1:
            paths = [one for one in args if isinstance(one, (str, os.PathLike))]
            others = [one for one in args if not isinstance(one, (str, os.PathLike))]
            path = paths[0] if paths else "model.pth"
            words = ", ".join(dict.fromkeys(map(_keyword_of, others))) or "value=..."
            raise UsageError(
                f"save takes one path, and what to save by keyword: {words}",
                hint=f"ckptool.save({os.fsdecode(path)!r}, {words})",
            )
        return function(*args, **given)

    return call


def _keyword_of(value: object) -> str:
    """Return the argument of `save` that is meant by a value, in the words of a call."""
    import torch

    if _is_optimizer(value):
        return "optimizer=..."
    if isinstance(value, Mapping):
        is_state = all(isinstance(one, torch.Tensor) for one in value.values())
        return "model=..." if is_state else "**..."
    return "model=..." if isinstance(value, torch.nn.Module) else "value=..."


@_refusing_values
def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    overwrite: bool = True,
    **values: object,
) -> Receipt:
    """Write a checkpoint that a plain `torch.load` reads, with `weights_only=True`, on any machine.

    The file is a dict: `state_dict` of the model without wrappers, `optimizer`, and the values by
    their names. It appears as a whole or not at all; an old file stays until then. Tensors are
    tagged `cpu`. Modules, optimizers, schedulers and scalers among the values become their state
    dicts. docs/loading.md has more. The receipt is the same on every rank.

    Under `torch.distributed` **every rank calls `save`**, for every kind of model: rank 0 writes,
    and an error is raised on all ranks.

    Args:
        path: The file to write. If it ends in `.safetensors`, it holds only a model.
        model: A module with or without wrappers, or its state dict.
        optimizer: An optimizer over the parameters of `model`, or of one module among the values.
        overwrite: Replace an existing file; False: refuse.
        values: Plain values, tensors, `torch.Size`, `device`, `dtype`; list, tuple, dict,
            OrderedDict, set and Counter of these; numpy scalars, which become numbers.

    Raises:
        NotRepresentable: a value is of another kind, or a tensor has no elements here.
        NameCollision: two keys of the model would become the same without its wrappers.
        UsageError: there is nothing to save, or an argument has a wrong type or name.
        TargetExists: the file exists and `overwrite` is False; or `path` is a folder.
        NoSpace, WriteDenied: the disk is full, or the system refuses to write there.
        FileBusy, WriteError: another process writes the file; or a rank failed or did not call.
    """
    require_torch()
    ranks = Ranks(
        default_group(), error=WriteError, undone="nothing is written", call="ckptool.save"
    )
    states = _States(ranks)
    with ranks.reached():
        if not isinstance(overwrite, bool):
            raise UsageError(
                f"overwrite={overwrite!r} is not True or False",
                hint="overwrite=False keeps a file that is there",
            )
        tree = _taken(states, model, optimizer, values)
    states.gather(tree)
    if states.counter is not None:
        tree.setdefault(N_AVERAGED, states.counter)
    noted = _noted(states, tree, model)
    return ranks.first(
        lambda: _write(_named(path), tree, states.instead, noted, overwrite=overwrite)
    )


def _taken(states: _States, model: Any, optimizer: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Everything by name."""
    tree: dict[str, Any] = {}
    if model is not None:
        if "state_dict" in values:
            text = "a value is called 'state_dict', as is what is saved of the model"
            raise UsageError(text, hint="give it another name")
        tree["state_dict"] = states.of_model(model)
    if optimizer is not None:
        if not _is_optimizer(optimizer):
            raise UsageError(f"optimizer= takes an optimizer, not {a_class(optimizer)}")
        tree["optimizer"] = optimizer
    tree.update(values)
    if not tree:
        raise UsageError("there is nothing to save", hint="ckptool.save(path, model=model)")
    return tree


def _named(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"a path is wanted, not {a_class(path)}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise UsageError(f"{name!r} is not a path: it has a null byte")
    return name


def _noted(states: _States, tree: dict[str, Any], model: Any) -> dict[str, str]:
    """By the keys of optimizers those of the modules whose parameters they have."""
    keys = {id(node): key for key, node in reversed(tree.items())}
    if model is not None:
        keys[id(model)] = "state_dict"
    owners = {
        key: states.owners[id(node)] for key, node in tree.items() if id(node) in states.owners
    }
    return {key: keys[id(owner)] for key, owner in owners.items() if id(owner) in keys}


def _write(
    path: str,
    tree: dict[str, Any],
    instead: dict[int, Any],
    noted: dict[str, str],
    *,
    overwrite: bool,
) -> Receipt:
    checkpoint = Compact()(frozen(tree, instead=instead, file=path))
    _mark(checkpoint, noted)
    is_flat = format_of(target_format(checkpoint, path)).flat
    left_out: tuple[str, ...] = ()
    if is_flat and tree.keys() == {"state_dict", N_AVERAGED}:
        checkpoint = checkpoint.with_root({"state_dict": checkpoint.root["state_dict"]})
        left_out = (f"{N_AVERAGED}, the counter of an AveragedModel",)
    try:
        with worded(path):
            receipt = written(checkpoint, path, overwrite=overwrite, strict=is_flat, verify=False)
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


class _States:
    """The state dicts of live objects, and what is saved in the place of which object.

    Where a model or its optimizer is spread over processes, each makes the same calls: the parts
    are gathered, and kept in the first process. Work that concerns one process alone, above all the
    user's own code, is done first, and has ended well in all of them before they gather: no process
    waits in vain. Only the user's code inside an FSDP (the first), which gathers by itself, runs
    later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.instead: dict[int, Any] = {}
        """By `id` what stands for an object: its state dict, or the whole of a spread tensor."""
        self.counter: Any = None
        """How many models the one of `of_model` is the average of, where it is one."""
        self.owners: dict[int, torch.nn.Module] = {}
        """By the `id` of an optimizer the module that has all of its parameters, if one has."""
        self._ranks = ranks
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._spread: list[Any] = []
        self._jobs: list[tuple[Label, Callable[[], Any]]] = []
        """What the processes gather together, each its part."""
        self._first: dict[int, Any] = {}
        """By the `id` of a spread parameter the first tensor that a state dict has for it."""
        self._alive: list[Any] = []

    def of_model(self, model: Any) -> Any:
        """Return what stands for the state dict of a module until `gather`; or a state dict.

        Wrapper names are removed. The counter of an `AveragedModel` is in `counter`.
        """
        import torch

        if isinstance(model, torch.nn.Module):
            place = object()
            bare = bare_names(model)
            self._take_module(place, model, bare, _counters(model, bare))
            return place
        if isinstance(model, Mapping):
            texts = {name: value for name, value in model.items() if isinstance(name, str)}
            found = strip_names(
                [n for n, v in texts.items() if isinstance(v, torch.Tensor) or is_extra_state(n)]
            )
            rename = found.renamed
            return _renamed_state(model, lambda name: rename.get(name, name), found.rename_module)
        raise UsageError(
            f"model= takes a module or its state dict, not {a_class(model)}",
            hint="several models: save(path, model=one, other=another)",
        )

    def gather(self, root: Any) -> None:
        """Look through a tree for objects with a state dict, and for spread tensors.

        An `AveragedModel` in it keeps its own names, which go with its counter. Optimizers come
        last, when all modules are known that may have their parameters.
        """
        seen: set[int] = set()
        todo: list[Any] | None = [root, *self.instead.values()]
        while todo is not None:
            with self._ranks.reached():
                self._look_through(todo, seen)
            todo = self._next()

    def _look_through(self, todo: list[Any], seen: set[int]) -> None:
        todo.reverse()
        while todo:
            node = todo.pop()
            if id(node) not in seen:
                seen.add(id(node))
                todo.extend(reversed([*self._held(node)]))

    def _held(self, node: Any) -> Iterable[Any]:
        """Return what a node holds; or the state dict that stands for it."""
        import torch

        if isinstance(node, dict):
            return node.values()
        if isinstance(node, (list, tuple, set, frozenset)):
            return node
        if id(node) in self.instead:
            return ()
        if is_spread(node):
            self._spread.append(node)
        elif isinstance(node, torch.nn.Module):
            return self._take_module(node, node, bare_names(node, averages=False))
        elif _is_optimizer(node):
            self._optimizers.append(node)
        elif _has_state(node):
            return (self._put(node, node.state_dict()),)
        return ()

    def _next(self) -> list[Any] | None:
        """Gather what was found, and return what to look through next; None: it is all done."""
        jobs, spread, optimizers = self._jobs, self._spread, self._optimizers
        labels = [*map(_label, spread), *(label for label, _ in jobs)]
        told = self._ranks.all((labels, bool(optimizers)))
        if any(theirs for theirs, _ in told):
            with self._ranks.reached():
                _check_alike([theirs for theirs, _ in told], self._ranks.own)
            self._jobs, self._spread = [], []
            with self._ranks.reached():
                for tensor in spread:
                    self._gather_whole(tensor)
            found = []
            for _, gather in jobs:
                with self._ranks.reached():
                    found.append(gather())
            return found
        if any(more for _, more in told):
            self._optimizers = []
            with self._ranks.reached():
                return [held for one in optimizers for held in self._take_optimizer(one)]
        return None

    def _put(self, node: Any, instead: Any) -> Any:
        self.instead[id(node)] = instead
        self._alive.append((node, instead))
        return instead

    def _take_module(
        self, node: Any, model: torch.nn.Module, bare: Renamer, counted_by: Sequence[str] = ()
    ) -> Iterable[Any]:
        """Return the state dict of a module, which stands for `node`; or have it gathered later."""
        self._modules.append(model)

        def take() -> Any:
            with _unsharded(model):
                state = model.state_dict()
            if counted_by:
                self.counter = state.get(counted_by[0])
            renamed = _renamed_state(state, bare, without=counted_by)
            own = {bare(name): one for name, one in model.named_parameters(remove_duplicate=False)}
            for name, value in renamed.items():
                if is_spread(value):  # a tie is gathered once
                    renamed[name] = self._first.setdefault(id(own.get(name, value)), value)
            return self._put(node, renamed)

        if not sharded(model):
            return (take(),)
        self._jobs.append((_label_of_shards(model), take))
        return ()

    def _take_optimizer(self, optimizer: Any) -> Iterable[Any]:
        """Return the state dict of an optimizer; or have it gathered later."""
        wanted = set(map(id, _parameters_of(optimizer)))
        own = (one for one in self._modules if wanted.issubset(map(id, one.parameters())))
        owner = next(own, None)
        text = f"the state of {type(optimizer).__name__}"
        if owner is not None:
            self.owners[id(optimizer)] = owner
            if sharded(owner):
                label = text, _label_of_shards(owner)[1]
                take = partial(_of_sharded, optimizer, owner)
                self._jobs.append((label, lambda: self._put(optimizer, take())))
                return ()
        if callable(getattr(optimizer, "consolidate_state_dict", None)):  # ZeroRedundancyOptimizer

            def consolidated() -> Any:
                optimizer.consolidate_state_dict(to=0)
                state = self._of_optimizer(optimizer, owner) if self._ranks.own == 0 else {}
                return self._put(optimizer, state)

            self._jobs.append(((text, None), consolidated))
            return ()
        return (self._put(optimizer, self._of_optimizer(optimizer, owner)),)

    def _of_optimizer(self, optimizer: Any, owner: torch.nn.Module | None) -> Any:
        """Return its `state_dict()` with the names of its parameters in the groups, wrappers off.

        They are those of `owner`, which has all of them, else those that it was itself given.
        """
        state = optimizer.state_dict()
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return state
        names = _names_of(optimizer, groups, owner)
        if names is None and self._modules and any(group.get("params") for group in groups):
            warn(
                "an optimizer is saved without names of its parameters, as no one model has all of "
                "them; load_into takes it with optimizer_order='position'"
            )
        named = [
            group if names is None else {**group, "param_names": own}
            for group, own in zip(groups, names or groups, strict=True)
        ]
        return {**state, "param_groups": named}

    def _gather_whole(self, tensor: Any) -> None:
        """Gather a DTensor in every process, and keep it on the CPU of the first."""
        try:
            whole = tensor.full_tensor().detach()
        except RuntimeError as error:
            text = f"nothing is written, as a tensor could not be gathered: {error}"
            raise WriteError(text) from error
        self._put(tensor, whole.cpu() if self._ranks.own == 0 else whole.new_empty(0))


Label = tuple[str, tuple[int, ...] | None]
"""What is gathered, for messages, and between which ranks; None: all."""


def _label(tensor: Any) -> Label:
    mesh = getattr(tensor, "device_mesh", None)
    ranks = None if mesh is None else tuple(mesh.mesh.flatten().tolist())
    return f"a tensor of {list(tensor.shape)}", ranks


def _label_of_shards(model: torch.nn.Module) -> Label:
    import torch.distributed as dist

    groups = (dist.get_process_group_ranks(one.process_group) for one in sharded(model))
    return f"a {type(model).__name__}", tuple({rank for group in groups for rank in group})


def _check_alike(told: Sequence[Sequence[Label]], own: int) -> None:
    """Refuse to wait for a process that gathers something else than this one."""
    for rank, theirs in enumerate(told):
        ours = [text for text, ranks in told[own] if ranks is None or rank in ranks]
        others = [text for text, ranks in theirs if ranks is None or own in ranks]
        for here, there in zip_longest(ours, others, fillvalue="nothing"):
            if here != there:
                raise WriteError(
                    f"nothing is written, as rank {own} gathers {here} where rank {rank} gathers "
                    f"{there}",
                    hint="every rank calls ckptool.save with the same sharded modules, optimizers "
                    "and tensors",
                )


def _has_state(node: Any) -> bool:
    return not isinstance(node, type) and callable(getattr(type(node), "state_dict", None))


def _is_optimizer(node: Any) -> bool:
    """Return whether it is an optimizer, of torch's or of the same form."""
    return _has_state(node) and isinstance(getattr(node, "param_groups", None), list)


def _parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# names without wrappers


def bare_names(model: torch.nn.Module, *, averages: bool = True) -> Renamer:
    """Return the rename of tensor names and module paths that removes all wrappers of `model`.

    A child that is called `module` is a wrapped model only in a wrapper of a known class: a layer
    that its author called so keeps its name. Without `averages` an `AveragedModel` is no wrapper.
    """
    kinds = _WRAPPERS | {_AVERAGE} if averages else _WRAPPERS
    around = frozenset(
        ".".join(part for part in path.split(".") if part and part not in _PRIVATE)
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_one_of(kinds, module) and _OUTER in dict(module.named_children())
    )

    def bare(name: str) -> str:
        seen: list[str] = []
        kept: list[str] = []
        for part in name.split("."):
            if part in _PRIVATE:
                continue
            if part != _OUTER or ".".join(seen) not in around:
                kept.append(part)
            seen.append(part)
        return ".".join(kept)

    return bare


def _counters(model: torch.nn.Module, bare: Renamer) -> list[str]:
    """Return the names of the counters that an `AveragedModel` among the wrappers keeps."""
    return [
        f"{path}.{N_AVERAGED}".lstrip(".")
        for path, module in model.named_modules()
        if _is_one_of({_AVERAGE}, module) and N_AVERAGED in module._buffers and not bare(path)
    ]


def _is_one_of(names: Collection[str], module: torch.nn.Module) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _renamed_state(
    state: Mapping[Any, Any],
    rename: Renamer,
    rename_module: Renamer | None = None,
    *,
    without: Collection[str] = (),
) -> OrderedDict[Any, Any]:
    """Return a state dict under new names, its `_metadata` under the new paths."""
    kept = [name for name in state if name not in without]
    names = {name: rename(name) for name in kept if isinstance(name, str)}
    check_collisions(kept, names, hint="save the model inside the wrapper")
    renamed = OrderedDict((names.get(name, name), state[name]) for name in kept)
    metadata = getattr(state, "_metadata", None)
    if isinstance(metadata, dict):
        vars(renamed)["_metadata"] = moved_metadata(metadata, names, rename_module or rename)
    return renamed


def _names_of(
    optimizer: Any, groups: list[dict[str, Any]], owner: torch.nn.Module | None
) -> list[list[str]] | None:
    """Return the names of the parameters of each group; None where `groups` has more or fewer."""
    if owner is None:
        found = [group.get("param_names") or [] for group in groups]
    else:
        names = {id(parameter): name for name, parameter in owner.named_parameters()}
        found = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    if list(map(len, found)) != [len(group["params"]) for group in groups]:
        return None
    every = [name for own in found for name in own]
    bare = without_wrappers(every).__getitem__ if owner is None else bare_names(owner)
    return [[bare(name) for name in own] for own in found]


# FullyShardedDataParallel (the first: the parameters of `fully_shard` are DTensors)


def _unsharded(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Have FSDP return whole tensors, on the CPU of the first rank where that is another device.

    On the CPU itself torch 2.13 reads freed memory where it is asked to move them there.
    """
    inside = sharded(model)
    if not inside:
        return nullcontext()
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    moves = all(module.compute_device.type != "cpu" for module in inside)
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=moves, rank0_only=moves),
        FullOptimStateDictConfig(offload_to_cpu=moves, rank0_only=moves),
    )


def _of_sharded(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of an optimizer over shards, per parameter and by position.

    Parameters that are parts of a flat one come in the order of the model's names, as a plain
    optimizer has them.
    """
    from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

    with _unsharded(model):
        by_name = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    bare = bare_names(model)
    flat = any(isinstance(parameter, FlatParameter) for parameter in _parameters_of(optimizer))
    order = [*ungathered(model)[0]] if flat else []
    rank = {bare(name): at for at, name in enumerate(order)}
    positions: dict[str, int] = {}
    groups = []
    for group in by_name.get("param_groups", ()):
        names = sorted(group["params"], key=lambda name: rank.get(bare(name), 0))
        params = [positions.setdefault(name, len(positions)) for name in names]
        groups.append({**group, "params": params, "param_names": [bare(name) for name in names]})
    state = by_name.get("state", {})
    return {
        "state": {at: state[name] for name, at in positions.items() if name in state},
        "param_groups": groups,
    }
