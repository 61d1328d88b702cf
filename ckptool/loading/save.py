"""`save`: write a model, its optimizer and other values of a run to one file of plain data."""

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
    check_collisions,
    map_to_bare_names,
    strip_names,
)
from ckptool.core.sections import MODEL_MARK, find_model_state_dict, is_extra_state
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, UsageError, WriteError, warn
from ckptool.files.system import convert_os_errors
from ckptool.formats import load_format
from ckptool.loading.ranks import (
    Ranks,
    describe_fsdp_state,
    is_dtensor,
    list_default_group,
    list_fsdp_modules,
)
from ckptool.tensors.live import freeze
from ckptool.tensors.storages import require_torch
from ckptool.transforms import Compact
from ckptool.transforms.metadata import move_metadata
from ckptool.words import a_class
from ckptool.writing import Receipt, choose_format, save as write_checkpoint

if TYPE_CHECKING:
    import torch

_Arguments = ParamSpec("_Arguments")
_WRAPPED_CHILD = "module"
"""The child of `DataParallel` and similar classes that is the wrapped model."""
_WRAPPER_ONLY_NAMES = frozenset(WRAPPERS) - {_WRAPPED_CHILD}
"""Wrappers at any position: no author gives a layer such a name."""
_AVERAGED_CLASS = "AveragedModel"
"""A class that keeps a model as its `module`, next to a counter."""
_WRAPPER_CLASSES = frozenset((
    "DataParallel", "DeepSpeedEngine", "DistributedDataParallel", "FullyShardedDataParallel",
    "ModelEma", "ModelEmaV2", "ModelEmaV3", "ShardedDataParallel",
))  # fmt: skip
"""Classes of torch and other libraries that only keep a model as their `module`."""


def _require_keywords(function: Callable[_Arguments, Receipt]) -> Callable[_Arguments, Receipt]:
    """Decorate `save`: the error for a positional argument proposes a keyword."""

    @wraps(function)
    def call_with_keywords(*args: _Arguments.args, **given: _Arguments.kwargs) -> Receipt:
        """Call the function, or raise an error that proposes keywords."""
        if len(args) > 1:
            paths = [value for value in args if isinstance(value, (str, os.PathLike))]
            others = [value for value in args if not isinstance(value, (str, os.PathLike))]
            path = paths[0] if paths else "model.pth"
            words = ", ".join(dict.fromkeys(map(_guess_keyword, others))) or "value=..."
            raise UsageError(
                f"save accepts one path, and values by keyword: {words}",
                hint=f"call ckptool.save({os.fsdecode(path)!r}, {words})",
            )
        return function(*args, **given)

    return call_with_keywords


def _guess_keyword(value: object) -> str:
    """Return the likely keyword argument for a value, as written in a call."""
    import torch

    if _is_optimizer(value):
        return "optimizer=..."
    if isinstance(value, Mapping):
        is_state = all(isinstance(entry, torch.Tensor) for entry in value.values())
        return "model=..." if is_state else "**..."
    return "model=..." if isinstance(value, torch.nn.Module) else "value=..."


@_require_keywords
def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    overwrite: bool = True,
    **values: object,
) -> Receipt:
    """Write a checkpoint that `torch.load` reads on any machine with `weights_only=True`.

    The file is a dict: `state_dict` of the model without wrappers, `optimizer`, and the values by
    name. It is written completely or not at all; an existing file is kept until then. Tensors are
    saved for `cpu`. Modules, optimizers, schedulers and scalers among the values become their state
    dicts. See docs/loading.md for details. The returned receipt is the same on every rank.

    Under `torch.distributed`, **call `save` on every rank**, for every kind of model: rank 0
    writes, and an error is raised on all ranks.

    Args:
        path: The file to write. A `.safetensors` file contains only a model.
        model: A module with or without wrappers, or its state dict.
        optimizer: An optimizer over the parameters of `model`, or of one module among the values.
        overwrite: True replaces an existing file; False raises an error.
        values: Plain values, tensors, `torch.Size`, `device`, `dtype`; list, tuple, dict,
            OrderedDict, set and Counter of these; numpy scalars, which become numbers.

    Raises:
        NotRepresentable: if a value has another type, or a tensor has no data.
        NameCollision: if two keys of the model would become the same without wrapper prefixes.
        UsageError: if there is nothing to save, or an argument has a wrong type or name.
        TargetExists: if the file exists and `overwrite` is False, or `path` is a folder.
        NoSpace, WriteDenied: if the disk is full, or writing there is not allowed.
        FileBusy, WriteError: if another process writes the file, or a rank failed or did not call.
    """
    require_torch()
    ranks = Ranks(
        list_default_group(), error=WriteError, undone="nothing was written", call="ckptool.save"
    )
    states = _States(ranks)
    with ranks.raise_on_all_ranks():
        if not isinstance(overwrite, bool):
            raise UsageError(
                f"overwrite={overwrite!r} is not True or False",
                hint="use overwrite=False to keep an existing file",
            )
        tree = _collect(states, model, optimizer, values)
    states.gather(tree)
    if states.counter is not None:
        tree.setdefault(N_AVERAGED, states.counter)
    owner_keys = _find_owner_keys(states, tree, model)
    return ranks.run_on_first(
        lambda: _write_tree(
            _check_path(path), tree, states.replacements, owner_keys, overwrite=overwrite
        )
    )


def _collect(states: _States, model: Any, optimizer: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values to save by key: live objects, or their placeholders until `gather`."""
    tree: dict[str, Any] = {}
    if model is not None:
        if "state_dict" in values:
            text = "'state_dict' is the key of the model, so no value can have this name"
            raise UsageError(text, hint="give it another name")
        tree["state_dict"] = states.take_model(model)
    if optimizer is not None:
        if not _is_optimizer(optimizer):
            raise UsageError(f"optimizer is {a_class(optimizer)}, expected an optimizer")
        tree["optimizer"] = optimizer
    tree.update(values)
    if not tree:
        raise UsageError("nothing to save", hint="call ckptool.save(path, model=model)")
    return tree


def _check_path(path: Any) -> str:
    """Return the path as text; refuse other types, and null bytes."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"path is {a_class(path)}, expected a path")
    name = os.fsdecode(path)
    if "\0" in name:
        raise UsageError(f"{name!r} is not a path: it contains a null byte")
    return name


def _find_owner_keys(states: _States, tree: dict[str, Any], model: Any) -> dict[str, str]:
    """Return, for the key of each optimizer, the key of the module with its parameters.

    An optimizer without such a module, or with one that is not a value of `tree`, is left out.
    """
    # Reversed, so that the first key of an object counts.
    key_by_id = {id(node): key for key, node in reversed(tree.items())}
    if model is not None:
        key_by_id[id(model)] = "state_dict"
    owners = {
        key: states.owners[id(node)] for key, node in tree.items() if id(node) in states.owners
    }
    return {key: key_by_id[id(owner)] for key, owner in owners.items() if id(owner) in key_by_id}


def _write_tree(
    path: str,
    tree: dict[str, Any],
    replacements: dict[int, Any],
    owner_keys: dict[str, str],
    *,
    overwrite: bool,
) -> Receipt:
    """Write the tree, and return the receipt; `replacements` has objects to write by old `id`.

    Only the used bytes of each storage are written. A format for tensors alone (`flat`, such as
    safetensors) gets no counter of an `AveragedModel`, and refuses other values.
    """
    checkpoint = Compact()(freeze(tree, replacements=replacements, file=path))
    _mark_model(checkpoint, owner_keys)
    is_flat = load_format(choose_format(checkpoint, path)).flat  # only tensors, by key
    left_out: tuple[str, ...] = ()
    if is_flat and tree.keys() == {"state_dict", N_AVERAGED}:
        checkpoint = checkpoint.with_root({"state_dict": checkpoint.root["state_dict"]})
        left_out = (f"{N_AVERAGED} (counter of an AveragedModel)",)
    try:
        with convert_os_errors(path):
            # Not verified: the tensors are copied from memory, without a computation.
            receipt = write_checkpoint(
                checkpoint, path, overwrite=overwrite, strict=is_flat, verify=False
            )
    except NotRepresentable as error:
        hint = "save only the model, or write a .pth file" if is_flat else error.hint
        raise NotRepresentable(error.message, file=path, hint=hint) from error
    return replace(receipt, source="", left_out=(*receipt.left_out, *left_out))


def _mark_model(checkpoint: Checkpoint, owner_keys: dict[str, str]) -> None:
    """Record in the file which state dict is the model's, and the owner of each optimizer.

    This is done if the file has several state dicts or an optimizer.
    """
    state = checkpoint.root.get("state_dict")
    if isinstance(state, OrderedMap):
        try:
            find_model_state_dict(checkpoint)  # only to learn whether it is the only one
            needs_mark = "optimizer" in checkpoint.root
        except AmbiguousName:
            needs_mark = True
        except NotFound:  # no state dict of a model, for example without any tensor
            return
        if needs_mark:
            state.attributes[MODEL_MARK] = owner_keys


class _States:
    """The state dicts of live objects, by object.

    If a model or its optimizer is distributed over processes, each process makes the same calls:
    the parts are gathered, and kept in the first process. Work of a single process, in particular
    user code, runs first and must succeed in all processes before they gather, so that no process
    waits forever. Only user code inside FSDP 1, which gathers by itself, runs later.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Start without objects; `ranks` are the processes that gather together."""
        self.replacements: dict[int, Any] = {}
        """By `id` of an object, its replacement: a state dict, or a gathered tensor."""
        self.counter: Any = None
        """The counter of the model passed to `take_model`, if that is an `AveragedModel`."""
        self.owners: dict[int, torch.nn.Module] = {}
        """By the `id` of an optimizer, the module that has all of its parameters, if any."""
        self._ranks = ranks
        self._taken_modules: list[torch.nn.Module] = []
        """The modules found so far, which may have the parameters of an optimizer."""
        self._pending_optimizers: list[Any] = []
        """Optimizers found in the tree, whose state is taken after all modules are known."""
        self._pending_dtensors: list[Any] = []
        """DTensors found in the tree, to be gathered."""
        self._gather_jobs: list[tuple[Label, Callable[[], Any]]] = []
        """The work that all processes do together, with a label that must be the same in all."""
        self._first_by_parameter: dict[int, Any] = {}
        """By the `id` of a parameter, its DTensor in the first state dict that has it."""
        self._keep_alive: list[Any] = []
        """Replaced objects and replacements: no new object may get the `id` of one of them."""

    def take_model(self, model: Any) -> Any:
        """Return a placeholder for a module's state dict until `gather`, or the given state dict.

        Wrapper prefixes are removed. If the module is an `AveragedModel`, `self.counter` is set.
        """
        import torch

        if isinstance(model, torch.nn.Module):
            placeholder = object()
            remove_wrappers = make_wrapper_remover(model)
            self._take_module(
                placeholder, model, remove_wrappers, _find_counters(model, remove_wrappers)
            )
            return placeholder
        # Without a module, the keys show the wrappers; those of plain values have none.
        if isinstance(model, Mapping):
            stripped = strip_names(
                [
                    key
                    for key, value in model.items()
                    if isinstance(key, str)
                    and (isinstance(value, torch.Tensor) or is_extra_state(key))
                ]
            )
            new_key_by_key = stripped.renamed
            return _rename_state(
                model, lambda key: new_key_by_key.get(key, key), stripped.rename_module
            )
        raise UsageError(
            f"model is {a_class(model)}, expected a module or its state dict",
            hint="save several models with save(path, model=one, other=another)",
        )

    def gather(self, root: Any) -> None:
        """Fill `replacements` for the objects with a state dict, and the DTensors, in a tree.

        An `AveragedModel` in the tree keeps its own keys and its counter. Optimizers come last,
        because all modules that may have their parameters must be known.
        """
        seen: set[int] = set()
        pending: list[Any] | None = [root, *self.replacements.values()]
        while pending is not None:  # gathered state dicts may contain further objects
            with self._ranks.raise_on_all_ranks():
                self._visit_nodes(pending, seen)
            pending = self._gather_found()

    def _visit_nodes(self, pending: list[Any], seen: set[int]) -> None:
        """Visit the pending nodes and everything below them, in order; empties `pending`."""
        pending.reverse()  # the next node is popped from the end
        while pending:
            node = pending.pop()
            if id(node) not in seen:
                seen.add(id(node))
                pending.extend(reversed([*self._list_children(node)]))

    def _list_children(self, node: Any) -> Iterable[Any]:
        """Return the children of a node, or the state dict that replaces it.

        DTensors, FSDP modules and optimizers have to be gathered, and are only registered here. An
        `AveragedModel` is not treated as a wrapper, so it keeps its keys.
        """
        import torch

        if isinstance(node, dict):
            return node.values()
        if isinstance(node, (list, tuple, set, frozenset)):
            return node
        if id(node) in self.replacements:
            return ()
        if is_dtensor(node):
            self._pending_dtensors.append(node)
        elif isinstance(node, torch.nn.Module):
            remove_wrappers = make_wrapper_remover(node, averages=False)
            return self._take_module(node, model=node, remove_wrappers=remove_wrappers)
        elif _is_optimizer(node):
            self._pending_optimizers.append(node)
        elif _has_state(node):
            return (self._replace(node, node.state_dict()),)
        return ()

    def _gather_found(self) -> list[Any] | None:
        """Gather the found objects, and return the nodes to visit next; None at the end.

        The optimizers follow once no process has anything else to gather. All processes decide
        from the same answers, so that they take the same branch.
        """
        dtensors, jobs = self._pending_dtensors, self._gather_jobs
        optimizers = self._pending_optimizers
        own_labels = [*map(_label_tensor, dtensors), *(label for label, _ in jobs)]
        answers = self._ranks.collect((own_labels, bool(optimizers)))
        labels_by_rank = [labels for labels, _ in answers]
        if any(labels_by_rank):
            with self._ranks.raise_on_all_ranks():
                _refuse_different(labels_by_rank, self._ranks.rank)
            self._pending_dtensors, self._gather_jobs = [], []
            with self._ranks.raise_on_all_ranks():
                for tensor in dtensors:
                    self._gather_whole(tensor)
            gathered_states = []
            for _, gather in jobs:
                with self._ranks.raise_on_all_ranks():
                    gathered_states.append(gather())
            return gathered_states
        if any(has_optimizers for _, has_optimizers in answers):
            self._pending_optimizers = []
            with self._ranks.raise_on_all_ranks():
                return [
                    node for optimizer in optimizers for node in self._take_optimizer(optimizer)
                ]
        return None

    def _replace(self, node: Any, replacement: Any) -> Any:
        """Register the replacement of an object, and return it."""
        self.replacements[id(node)] = replacement
        self._keep_alive.append((node, replacement))
        return replacement

    def _take_module(
        self,
        node: Any,
        model: torch.nn.Module,
        remove_wrappers: Renamer,
        counters: Sequence[str] = (),
    ) -> Iterable[Any]:
        """Register a module, whose state dict replaces `node`, and return that as a child to visit.

        Nothing is returned for FSDP 1, which gathers it later. The keys in `counters` are left out;
        the value of the first is stored in `counter`.
        """
        self._taken_modules.append(model)
        take_state = partial(self._take_state, node, model, remove_wrappers, counters)
        if not list_fsdp_modules(model):
            return (take_state(),)
        self._gather_jobs.append((_label_module(model), take_state))
        return ()

    def _take_state(
        self,
        node: Any,
        model: torch.nn.Module,
        remove_wrappers: Renamer,
        counters: Sequence[str],
    ) -> Any:
        """Replace `node` by the state dict of a module, with its keys without wrappers.

        `counters` are the keys of the counters of an `AveragedModel`, which are left out; the
        first, that of the outermost one, is stored in `counter`.
        """
        with _gather_fsdp(model):
            state = model.state_dict()
        if counters:
            self.counter = state.get(counters[0])
        renamed = _rename_state(state, remove_wrappers, without=counters)
        parameter_by_key = {
            remove_wrappers(name): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        # A state dict has a new DTensor for each key: tied keys share one, which is gathered once.
        for key, value in renamed.items():
            if is_dtensor(value):
                parameter = parameter_by_key.get(key, value)
                renamed[key] = self._first_by_parameter.setdefault(id(parameter), value)
        return self._replace(node, renamed)

    def _take_optimizer(self, optimizer: Any) -> Iterable[Any]:
        """Return the state dict of an optimizer, as a child to visit.

        For an optimizer of an FSDP 1 model, or a `ZeroRedundancyOptimizer`, add the job that
        gathers it later, and return nothing.
        """
        parameter_ids = set(map(id, _list_parameters(optimizer)))
        owners = (
            module
            for module in self._taken_modules
            if parameter_ids.issubset(map(id, module.parameters()))
        )
        owner = next(owners, None)
        description = f"the state of {type(optimizer).__name__}"
        if owner is not None:
            self.owners[id(optimizer)] = owner
            if list_fsdp_modules(owner):
                _, ranks = _label_module(owner)
                take_sharded = partial(self._take_sharded_optimizer, optimizer, owner)
                self._gather_jobs.append(((description, ranks), take_sharded))
                return ()
        if callable(getattr(optimizer, "consolidate_state_dict", None)):  # ZeroRedundancyOptimizer
            consolidate = partial(self._consolidate_optimizer, optimizer, owner)
            all_ranks = None
            self._gather_jobs.append(((description, all_ranks), consolidate))
            return ()
        return (self._replace(optimizer, self._make_optimizer_state(optimizer, owner)),)

    def _take_sharded_optimizer(self, optimizer: Any, owner: torch.nn.Module) -> Any:
        """Gather the state of an optimizer of an FSDP 1 model."""
        return self._replace(optimizer, _gather_optimizer_state(optimizer, owner))

    def _consolidate_optimizer(self, optimizer: Any, owner: torch.nn.Module | None) -> Any:
        """Gather the state of a `ZeroRedundancyOptimizer` in the first process."""
        optimizer.consolidate_state_dict(to=0)
        state = self._make_optimizer_state(optimizer, owner) if self._ranks.rank == 0 else {}
        return self._replace(optimizer, state)

    def _make_optimizer_state(self, optimizer: Any, owner: torch.nn.Module | None) -> Any:
        """Return `state_dict()` with parameter names in the groups, without wrapper prefixes.

        The names come from `owner`, which has all parameters, or from the optimizer itself. Without
        either, the groups get no names, with a warning if a module is saved too. A state without
        groups is returned unchanged.
        """
        state = optimizer.state_dict()
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return state
        names_by_group = _name_parameters(optimizer, groups, owner)
        if names_by_group is not None:
            groups = [
                {**group, "param_names": names}
                for group, names in zip(groups, names_by_group, strict=True)
            ]
        elif self._taken_modules and any(group.get("params") for group in groups):
            warn(
                "saved an optimizer without parameter names, because no model has all of its "
                "parameters; load it with load_into and optimizer_order='position'"
            )
        # A plain dict and a plain list, also if the optimizer returns subclasses of them.
        return {**state, "param_groups": list(groups)}

    def _gather_whole(self, tensor: Any) -> None:
        """Gather a DTensor in every process, and keep it on the CPU of the first."""
        try:
            whole = tensor.full_tensor().detach()
        except RuntimeError as error:
            text = f"nothing was written, because a tensor could not be gathered: {error}"
            raise WriteError(text) from error
        # The other processes only took part in the gathering.
        self._replace(tensor, whole.cpu() if self._ranks.rank == 0 else whole.new_empty(0))


Label = tuple[str, tuple[int, ...] | None]
"""The gathered object, for messages, and the ranks that gather it; None means all."""


def _label_tensor(tensor: Any) -> Label:
    """Return the label of a DTensor: its shape, and the ranks that gather it (None: all)."""
    mesh = getattr(tensor, "device_mesh", None)
    ranks = None if mesh is None else tuple(mesh.mesh.flatten().tolist())
    return f"a tensor of {list(tensor.shape)}", ranks


def _label_module(model: torch.nn.Module) -> Label:
    """Return the label of an FSDP model: its class, and the ranks that gather it."""
    import torch.distributed as dist

    groups = (
        dist.get_process_group_ranks(module.process_group) for module in list_fsdp_modules(model)
    )
    return f"a {type(model).__name__}", tuple({rank for group in groups for rank in group})


def _refuse_different(labels: Sequence[Sequence[Label]], own_rank: int) -> None:
    """Raise an error if this process and another would gather different objects together.

    `labels` has the objects that each rank gathers, with the ranks that take part (None: all).
    Only those with both ranks are compared.
    """
    for rank, other_labels in enumerate(labels):
        ours = [text for text, ranks in labels[own_rank] if ranks is None or rank in ranks]
        others = [text for text, ranks in other_labels if ranks is None or own_rank in ranks]
        for own_text, other_text in zip_longest(ours, others, fillvalue="nothing"):
            if own_text != other_text:
                raise WriteError(
                    f"nothing was written, because rank {own_rank} gathers {own_text}, but rank "
                    f"{rank} gathers {other_text}",
                    hint="call ckptool.save on every rank with the same sharded modules, "
                    "optimizers "
                    "and tensors",
                )


def _has_state(node: Any) -> bool:
    """Return True if the class of an object has a method `state_dict`."""
    return not isinstance(node, type) and callable(getattr(type(node), "state_dict", None))


def _is_optimizer(node: Any) -> bool:
    """Return True for a torch optimizer, or an object of the same form."""
    return _has_state(node) and isinstance(getattr(node, "param_groups", None), list)


def _list_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# names without wrapper prefixes


def make_wrapper_remover(model: torch.nn.Module, *, averages: bool = True) -> Renamer:
    """Return a function that removes wrapper prefixes of `model` from keys and module paths.

    A child `module` is a wrapped model only inside a known wrapper class: a layer with this name
    keeps it. Other wrapper names, such as `_orig_mod`, are removed everywhere. Without `averages`,
    an `AveragedModel` is not a wrapper.
    """
    kinds = _WRAPPER_CLASSES | {_AVERAGED_CLASS} if averages else _WRAPPER_CLASSES
    # The paths of modules with a wrapped `module`, without the other wrapper names.
    wrapper_paths = frozenset(
        ".".join(part for part in path.split(".") if part and part not in _WRAPPER_ONLY_NAMES)
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_one_of(kinds, module) and _WRAPPED_CHILD in dict(module.named_children())
    )

    def remove_wrappers(name: str) -> str:
        """Return a key or module path without wrapper prefixes."""
        path_so_far: list[str] = []  # the path of the parent, as in `wrapper_paths`
        kept: list[str] = []
        for part in name.split("."):
            if part in _WRAPPER_ONLY_NAMES:
                continue
            if part != _WRAPPED_CHILD or ".".join(path_so_far) not in wrapper_paths:
                kept.append(part)
            path_so_far.append(part)
        return ".".join(kept)

    return remove_wrappers


def _find_counters(model: torch.nn.Module, remove_wrappers: Renamer) -> list[str]:
    """Return the keys of the counters of each `AveragedModel` among the wrappers of `model`.

    Wrappers have an empty path without wrapper prefixes; an average inside the model keeps its own.
    """
    return [
        f"{path}.{N_AVERAGED}".lstrip(".")
        for path, module in model.named_modules()
        if _is_one_of({_AVERAGED_CLASS}, module)
        and N_AVERAGED in module._buffers
        and not remove_wrappers(path)
    ]


def _is_one_of(names: Collection[str], module: torch.nn.Module) -> bool:
    """Return True if the class of a module, or a base class, has one of these names.

    Names decide, because the libraries of these classes may not be installed.
    """
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _rename_state(
    state: Mapping[Any, Any],
    rename: Renamer,
    rename_module: Renamer | None = None,
    *,
    without: Collection[str] = (),
) -> OrderedDict[Any, Any]:
    """Return a state dict with new keys, and its `_metadata` with new paths.

    Keys that are not strings stay. The keys in `without` are left out. `rename_module` renames the
    paths of modules without keys, as `rename` does if it is None.
    """
    kept_keys = [key for key in state if key not in without]
    new_by_key = {key: rename(key) for key in kept_keys if isinstance(key, str)}
    check_collisions(kept_keys, new_by_key, hint="save the model without the wrapper")
    renamed = OrderedDict((new_by_key.get(key, key), state[key]) for key in kept_keys)
    metadata = getattr(state, "_metadata", None)
    if isinstance(metadata, dict):
        vars(renamed)["_metadata"] = move_metadata(metadata, new_by_key, rename_module or rename)
    return renamed


def _name_parameters(
    optimizer: Any, groups: list[dict[str, Any]], owner: torch.nn.Module | None
) -> list[list[str]] | None:
    """Return the parameter names of each group without wrapper prefixes.

    They come from the model `owner`, or without one from `param_names` in `groups`, the groups of
    the optimizer's state dict. Returns None if a group would get more or fewer names than it has
    parameters.
    """
    if owner is None:
        names_by_group = [group.get("param_names") or [] for group in groups]
    else:
        name_by_id = {id(parameter): name for name, parameter in owner.named_parameters()}
        names_by_group = [
            [name_by_id[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
    if list(map(len, names_by_group)) != [len(group["params"]) for group in groups]:
        return None
    all_names = [name for group_names in names_by_group for name in group_names]
    remove_wrappers = (
        map_to_bare_names(all_names).__getitem__ if owner is None else make_wrapper_remover(owner)
    )
    return [[remove_wrappers(name) for name in group_names] for group_names in names_by_group]


# FullyShardedDataParallel (FSDP 1: the parameters of `fully_shard` are DTensors)


def _gather_fsdp(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Let FSDP return whole tensors, moved to the CPU of the first rank from other devices.

    On CPU models, torch 2.13 reads freed memory if it is asked to move them.
    """
    fsdp_modules = list_fsdp_modules(model)
    if not fsdp_modules:
        return nullcontext()
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    is_moved = all(module.compute_device.type != "cpu" for module in fsdp_modules)
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=is_moved, rank0_only=is_moved),
        FullOptimStateDictConfig(offload_to_cpu=is_moved, rank0_only=is_moved),
    )


def _gather_optimizer_state(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of an optimizer of an FSDP 1 model, numbered like a plain optimizer's.

    FSDP's own state dict has names in place of the numbers. The parts of a flat parameter are put
    in the order of the model's keys.
    """
    from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

    with _gather_fsdp(model):
        by_name = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    remove_wrappers = make_wrapper_remover(model)
    position_by_key: dict[str, int] = {}  # empty without flat parameters: the order stays
    if any(isinstance(parameter, FlatParameter) for parameter in _list_parameters(optimizer)):
        model_state, _ = describe_fsdp_state(model)
        position_by_key = {remove_wrappers(key): index for index, key in enumerate(model_state)}

    def find_position(name: str) -> int:
        """Return the position of a parameter in the model, or 0 if it is unknown."""
        return position_by_key.get(remove_wrappers(name), 0)

    number_by_name: dict[str, int] = {}
    groups = []
    for group in by_name.get("param_groups", ()):
        names = sorted(group["params"], key=find_position)
        numbers = [number_by_name.setdefault(name, len(number_by_name)) for name in names]
        groups.append(
            {**group, "params": numbers, "param_names": [remove_wrappers(name) for name in names]}
        )
    state = by_name.get("state", {})
    return {
        "state": {number: state[name] for name, number in number_by_name.items() if name in state},
        "param_groups": groups,
    }
