"""State dicts of live models, optimizers and their like, whole and under the model's own names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptool.errors import UsageError, WriteError, warn
from ckptool.loading.live.ranks import Ranks
from ckptool.loading.live.spreading import is_spread, sharded
from ckptool.loading.saving.bare_names import bare_names, counters, renamed_state
from ckptool.loading.saving.gathering import Job, Label, check_alike
from ckptool.loading.saving.optimizer_names import (
    Names,
    entry_names,
    named,
    names_in,
    own_names,
    parameters_of,
)
from ckptool.names import Rename, strip_names
from ckptool.words import counted

if TYPE_CHECKING:
    import torch

__all__ = ["LiveStates", "is_optimizer"]

_CONTAINERS = (list, tuple, set, frozenset)


class LiveStates:
    """Takes state dicts, and remembers what is to be saved in the place of what.

    Where a model or its optimizer is spread over several processes, each makes the same calls: the
    parts are gathered, and kept in the first one. What only this process has to do with, the user's
    own code above all, is done before, and has ended well in all of them before they gather: none
    waits in vain. Code of the user's inside an FSDP (the first), which gathers by itself, is run on
    the way.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Nothing is taken yet."""
        self.instead: dict[int, Any] = {}
        """By `id`, what stands for an object: its state dict, or the whole of a spread tensor."""
        self.counter: Any = None
        """How many models the one of `of_model` is the average of, where it is one."""
        self.owners: dict[int, torch.nn.Module] = {}
        """By the `id` of an optimizer the module that has all of its parameters, if one has."""
        self._ranks = ranks
        self._writes = ranks.own == 0
        self._modules: list[torch.nn.Module] = []
        self._orders: dict[int, list[str]] = {}
        self._called: dict[int, dict[int, str]] = {}
        """By the `id` of a module what its state dict calls parameters that it calls otherwise."""
        self._optimizers: list[Any] = []
        self._spread: list[Any] = []
        self._jobs: list[Job] = []
        self._tied: dict[int, int] = {}
        """By the `id` of a spread tensor of a state dict that of the model's parameter."""
        self._wholes: dict[int, Any] = {}
        self._alive: list[Any] = []

    def of_model(self, model: Any) -> Any:
        """What the state dict of a module, or one that was taken already, is to stand for.

        That of a module is known after `gather`. Wrapper names are off. The counter of an
        `AveragedModel` is none of the inner names: see `counter`.

        Raises:
            UsageError: it is neither.
            NameCollision: two names would become one.
        """
        import torch

        if isinstance(model, torch.nn.Module):
            place = _Place()
            self._take_module(place, model, bare_names(model), counters(model))
            return place
        if isinstance(model, Mapping):
            return _stripped(model)
        raise UsageError(
            f"model= takes a module or its state dict, not a {type(model).__name__}",
            hint="several models: save(path, model=one, other=another)",
        )

    def gather(self, root: Any) -> None:
        """Look through a tree for what has a state dict, and for tensors that are spread.

        An `AveragedModel` among it keeps its own names: those go with its counter. Optimizers come
        last, when all modules are known that may have their parameters.

        Raises:
            WriteError: another process failed, or has something else to gather.
        """
        seen = {id(root)}
        todo: list[Any] | None = [root, *self.instead.values()]
        while todo is not None:
            with self._ranks.reached():
                self._look_through(todo, seen)
            todo = self._next()

    def _next(self) -> list[Any] | None:
        """What there is to look through next, in this process; None: all of them are done."""
        jobs, spread, optimizers = self._jobs, self._spread, self._optimizers
        labels = [*map(_label_of, spread), *(job.label for job in jobs)]
        told = self._ranks.all((labels, bool(optimizers)))
        if any(theirs for theirs, _ in told):
            with self._ranks.reached():
                check_alike([theirs for theirs, _ in told], self._ranks.own)
            self._jobs, self._spread = [], []
            return self._gathered(spread, jobs)
        if any(more for _, more in told):
            self._optimizers = []
            with self._ranks.reached():
                return [held for one in optimizers for held in self._take_optimizer(one)]
        return None

    def _gathered(self, spread: list[Any], jobs: list[Job]) -> list[Any]:
        with self._ranks.reached():
            for tensor in spread:
                self._put(tensor, self._whole(tensor))
        found = []
        for job in jobs:
            with self._ranks.reached():
                found.append(job.do())
        return found

    def _look_through(self, todo: list[Any], seen: set[int]) -> None:
        todo.reverse()
        while todo:
            for inner in reversed([*self._held(todo.pop())]):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    todo.append(inner)

    def _held(self, node: Any) -> Iterable[Any]:
        """What a node holds; of one that something stands for, that."""
        import torch

        if isinstance(node, dict):
            return node.values()
        if isinstance(node, _CONTAINERS):
            return node
        if id(node) in self.instead:
            return ()
        if is_spread(node):
            self._spread.append(node)
        elif isinstance(node, torch.nn.Module):
            return self._take_module(node, node, bare_names(node, averages=False))
        elif is_optimizer(node):
            self._optimizers.append(node)
        elif _has_state(node):
            return (self._put(node, node.state_dict()),)
        return ()

    def _take_module(
        self, node: Any, model: torch.nn.Module, bare: Rename, counted_by: Sequence[str] = ()
    ) -> Iterable[Any]:
        """The state dict of a module, which stands for `node`; none where it is to be gathered."""
        self._modules.append(model)

        def take() -> Any:
            return self._put(node, self._of_module(model, bare, counted_by))

        if not sharded(model):
            return (take(),)
        self._jobs.append(Job(_label_of_shards(model), take))
        return ()

    def _take_optimizer(self, optimizer: Any) -> Iterable[Any]:
        """The state dict of an optimizer; none where it is to be gathered."""
        owner = self._owner(optimizer)
        if owner is not None:
            self.owners[id(optimizer)] = owner

        def take() -> Any:
            return self._put(optimizer, self._of_optimizer(optimizer, owner))

        if owner is not None and sharded(owner):
            label = _label_of_shards(owner)
        elif callable(getattr(optimizer, "consolidate_state_dict", None)):
            label = Label("", None)
        else:
            return (take(),)
        kind = type(optimizer).__name__
        self._jobs.append(Job(label._replace(text=f"the state of {kind}"), take))
        return ()

    def _put(self, node: Any, instead: Any) -> Any:
        self.instead[id(node)] = instead
        self._alive.append((node, instead))
        return instead

    def _of_optimizer(self, optimizer: Any, owner: torch.nn.Module | None) -> Any:
        """What its `state_dict()` gives, with `param_names` in its groups.

        The names are those of `owner`, the first module that has all of its parameters; else those
        that the optimizer itself was given, wrappers off; else, group by group, what there is of
        either.
        """
        if owner is not None and sharded(owner):
            return _of_sharded(optimizer, owner, self._orders[id(owner)])
        if callable(getattr(optimizer, "consolidate_state_dict", None)):  # ZeroRedundancyOptimizer
            optimizer.consolidate_state_dict(to=0)
            if not self._writes:
                return {}
        state = optimizer.state_dict()
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return state
        if owner is not None:
            names = self._names_in(optimizer, groups, owner)
        else:
            names = own_names(groups)
            if None in names:
                names = self._some_names(optimizer, groups, names)
        return {**state, "param_groups": named(groups, names)}

    def _owner(self, optimizer: Any) -> torch.nn.Module | None:
        """The module whose parameters it trains."""
        wanted = {id(parameter) for parameter in parameters_of(optimizer)}
        return next(
            (one for one in self._modules if wanted.issubset(map(id, one.parameters()))), None
        )

    def _some_names(self, optimizer: Any, groups: list[dict[str, Any]], own: Names) -> Names:
        """For groups that are of one module those of that, else their `own`; a warning of the rest.

        The module is the one that has most of the parameters.
        """
        wanted = {id(parameter) for parameter in parameters_of(optimizer)}
        strange = [len(wanted - set(map(id, module.parameters()))) for module in self._modules]
        if not strange or not wanted:
            return own
        fewest = min(strange)
        names = self._names_in(optimizer, groups, self._modules[strange.index(fewest)])
        taken = {name for group in names for name in group or ()}
        for number, (found, mine) in enumerate(zip(names, own, strict=True)):
            if found is None and mine is not None and taken.isdisjoint(mine):
                names[number] = mine
                taken.update(mine)
        if None in names:
            how = (
                "the names of some of its parameters only"
                if taken
                else "no names of its parameters"
            )
            warn(
                f"an optimizer is saved with {how}: {fewest:,} of "
                f"{counted(len(wanted), 'parameter')} are none of the model's; load_into has only "
                "shapes, or optimizer_order='position', to go by"
            )
        return names

    def _names_in(
        self, optimizer: Any, groups: list[dict[str, Any]], model: torch.nn.Module
    ) -> Names:
        return names_in(optimizer, groups, model, self._called.get(id(model), {}))

    def _of_module(
        self, model: torch.nn.Module, bare: Rename, counted_by: Sequence[str] = ()
    ) -> OrderedDict[Any, Any]:
        """Of tied parameters that are spread, the whole will be made once."""
        with _unsharded(model):
            state = model.state_dict()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, value in state.items():
            if is_spread(value) and name in parameters:
                self._tied[id(value)] = id(parameters[name])
        if not sharded(model):
            self._called[id(model)] = entry_names(model, state, bare)
        if counted_by:
            self.counter = state.get(counted_by[0])
        renamed = renamed_state(state, bare, without=counted_by)
        self._orders[id(model)] = list(renamed)
        return renamed

    def _whole(self, tensor: Any) -> Any:
        """All of a DTensor, on the CPU; gathered in every process, kept in one.

        Raises:
            WriteError: another process did not come.
        """
        key = self._tied.get(id(tensor), id(tensor))
        if key not in self._wholes:
            try:
                whole = tensor.full_tensor().detach()
            except RuntimeError as error:
                text = f"nothing is written, as a tensor could not be gathered: {error}"
                raise WriteError(text) from error
            self._wholes[key] = whole.cpu() if self._writes else whole.new_empty(0)
        return self._wholes[key]


class _Place:
    """Where the state dict of a module will be."""


def _label_of(tensor: Any) -> Label:
    """A tensor that is spread, as it is told to others."""
    mesh = getattr(tensor, "device_mesh", None)
    ranks = None if mesh is None else tuple(mesh.mesh.flatten().tolist())
    return Label(f"a tensor of {list(tensor.shape)}", ranks)


def is_optimizer(node: Any) -> bool:
    """Whether it is one, of torch's or of the same form."""
    return _has_state(node) and isinstance(getattr(node, "param_groups", None), list)


def _has_state(node: Any) -> bool:
    return not isinstance(node, type) and callable(getattr(type(node), "state_dict", None))


# FullyShardedDataParallel (the first: of `fully_shard` the parameters are DTensors)


def _label_of_shards(model: torch.nn.Module) -> Label:
    """Such a model, as it is told to others."""
    import torch.distributed as dist

    groups = (dist.get_process_group_ranks(one.process_group) for one in sharded(model))
    return Label(f"a {type(model).__name__}", tuple({rank for group in groups for rank in group}))


@contextmanager
def _unsharded(model: torch.nn.Module) -> Iterator[None]:
    """Have FSDP give whole tensors, on the CPU of the first rank where that is another device.

    On the CPU itself torch 2.13 reads freed memory if it is told to move what is there already.
    """
    inside = sharded(model)
    if not inside:
        yield
        return
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    moves = all(module.compute_device.type != "cpu" for module in inside)
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=moves, rank0_only=moves),
        FullOptimStateDictConfig(offload_to_cpu=moves, rank0_only=moves),
    ):
        yield


def _of_sharded(optimizer: Any, model: torch.nn.Module, order: Sequence[str]) -> dict[str, Any]:
    """The state of an optimizer over shards, per parameter and by position.

    Parameters that are parts of a flat one come in the `order` of the model's names, as a plain
    optimizer has them.
    """
    from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

    with _unsharded(model):
        by_name = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    bare = bare_names(model)
    flat = any(isinstance(parameter, FlatParameter) for parameter in parameters_of(optimizer))
    rank = {name: at for at, name in enumerate(order)} if flat else {}
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


def _stripped(state: Mapping[Any, Any]) -> OrderedDict[Any, Any]:
    """A state dict without wrapper names, as far as the names themselves tell them."""
    import torch

    names = [
        name
        for name, value in state.items()
        if isinstance(name, str)
        and (isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state")
    ]
    found = strip_names(names)
    return renamed_state(state, lambda name: found.renamed.get(name, name), found.rename_module)
