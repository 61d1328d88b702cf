"""Models distributed over processes, and steps that succeed in all processes or in none.

FSDP 1 keeps the parameters of many modules in one flat parameter, and each rank has a part of it.
Its `state_dict` gathers them, so every rank must call it. The flat parameter records its contents
(torch/distributed/fsdp/_flat_param.py, `FlatParameter`), so names and shapes are known without
gathering. Parameters of `fully_shard` are DTensors.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool import errors
from ckptool.errors import CheckpointError, MatchError, warn
from ckptool.matching import EXTRA, Slot
from ckptool.tensors.live import dtype_name

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

_Result = TypeVar("_Result")
_Failures = dict[int, CheckpointError | str]
"""By global rank."""

_UNNAMED_COMPONENTS = frozenset(
    {"_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module"}
)
"""Components of module paths that the hooks of these wrappers remove from keys."""
_FLAT_PARAMETER_NAMES = frozenset({"_flat_param", "flat_param"})
"""Attributes of FSDP 1 modules with the flat parameter, which is no entry of a full state dict."""
_FAILURE_KEY = "failed"
"""The store key set by a process that failed."""


class Ranks:
    """The processes of some groups, or only this one.

    Every process makes the same calls in the same order. Failures pass through the groups in turn:
    this process repeats the failures of one group in the next.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        *,
        error: type[CheckpointError],
        undone: str,
        call: str,
        store: Store | None = None,
    ) -> None:
        """Use `groups` of `torch.distributed` (None is the default group), or only this process.

        `error` is raised if another process failed with a foreign error. `undone` describes the
        consequence for this process, and `call` the common call. A failure is also set in `store`,
        for processes that are still working.
        """
        self._groups, self._store = tuple(groups), store
        self._error, self._undone, self._call = error, undone, call
        self._is_peer_lost = False
        """True after another process did not answer, or made another call."""

    @property
    def rank(self) -> int:
        """The number of this process, or 0 without groups."""
        return _current_rank() if self._groups else 0

    @property
    def has_failed(self) -> bool:
        """True if a process is known to have failed; does not wait."""
        return self._store is not None and bool(self._store.check([_FAILURE_KEY]))

    @contextmanager
    def raise_on_all_ranks(self, undone: str = "") -> Iterator[None]:
        """Raise an error in every process if the block raises in one of them.

        `undone` describes the consequence of a failure in another process, for its error message.
        A process that fails raises its own error. The others raise a ckptool error of the same
        class; any other error becomes the class given to the constructor.

        Raises:
            CheckpointError: if another process failed or did not answer; with its rank.
        """
        if not self._groups:
            yield
            return
        try:
            yield
        except BaseException as error:
            with suppress(CheckpointError, RuntimeError):  # the others may have ended
                if self._store is not None:  # read by `has_failed`, without waiting
                    self._store.set(_FAILURE_KEY, "")
                self._exchange_failures({_current_rank(): to_sendable(error)}, self._undone)
            raise
        undone = undone or self._undone
        for rank, failure in sorted(self._exchange_failures({}, undone).items()):
            message = f"{undone}, because rank {rank} failed: {failure}"
            if isinstance(failure, str):
                raise self._error(message)
            failure.message, failure.args = message, (message,)
            raise failure

    def run_on_first(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in rank 0, and return its result in all ranks.

        If another process ends after the work is done, rank 0 only warns, and returns its result.
        """
        result: _Result | None = None
        try:
            with self.raise_on_all_ranks():
                if self.rank == 0:
                    result = work()
            return self.collect(result)[0]  # type: ignore[return-value]
        except CheckpointError as error:
            if result is None or not self._is_peer_lost:
                raise
            _, _, reason = error.message.partition(", because ")  # "nothing was written, because"
            warn(f"{self._call} succeeded, but {reason}")
            return result

    def collect(self, own: _Result) -> list[_Result]:
        """Return the value of each process of the first group, in order of rank.

        Raises:
            CheckpointError: if another process did not answer.
        """
        if not self._groups:
            return [own]
        return self._gather(own, self._groups[0], self._undone)

    def _exchange_failures(self, failures: _Failures, undone: str) -> _Failures:
        """Return `failures` of this process and the failures of all others, by global rank.

        A failure passes from group to group, because each process repeats what it has received.
        If one does not answer, the error says `undone`, the consequence.
        """
        for group in self._groups:
            for others in self._gather(failures, group, undone):
                failures = {**failures, **others}
        return failures

    def _gather(self, own: _Result, group: Any, undone: str) -> list[_Result]:
        """Return the value of each process of a group, in order of rank.

        Raises:
            CheckpointError: if a process did not answer, or makes another call.
        """
        import torch.distributed as dist

        answers: list[Any] = [None] * dist.get_world_size(group)
        hint = f"call {self._call} on every rank"
        try:
            dist.all_gather_object(answers, (self._call, own), group=group)
        except RuntimeError as error:  # any connection error of the backend
            self._is_peer_lost = True
            reason = str(error).strip().partition("\n")[0]
            text = f"{undone}, because another rank did not answer rank {_current_rank()}: {reason}"
            raise self._error(text, hint=hint) from error
        for position, answer in enumerate(answers):
            is_valid = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str)
            call = answer[0] if is_valid else "something else"
            if call != self._call:
                self._is_peer_lost = True
                rank = position if group is None else dist.get_global_rank(group, position)
                text = (
                    f"{undone}, because rank {rank} is in {call}, but rank {_current_rank()} in "
                    f"{self._call}"
                )
                raise self._error(text, hint=hint)
        return [value for _, value in answers]


def list_default_group() -> list[Any]:
    """Return a list of the group of all processes (None), which is empty if there is only one."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    return [None] if running and dist.get_world_size() > 1 else []


def _current_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def to_sendable(error: BaseException) -> CheckpointError | str:
    """Return an error that can be sent; foreign errors become text."""
    if isinstance(error, CheckpointError) and type(error).__module__ == errors.__name__:
        return error
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def find_ranks(model: torch.nn.Module) -> Ranks:
    """Return the processes that a DDP, FSDP or DTensor model is distributed over.

    Each of them calls `load_into`. Messages use the process groups of the model's wrappers, and of
    the mesh of each DTensor. Only this process is returned for any other model.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    groups: dict[Any, None] = {}  # an ordered set
    if dist.is_available() and dist.is_initialized():
        sharded_modules = {*list_fsdp_modules(model)}
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) or module in sharded_modules:
                module_groups = (  # the second one: between the nodes of FSDP's hybrid sharding
                    getattr(module, name, None) for name in ("process_group", "_inter_node_pg")
                )
                groups.update(dict.fromkeys(group for group in module_groups if group is not None))
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor)):
            if mesh.get_coordinate() is not None:  # this process is in the mesh
                groups.update((mesh.get_group(number), None) for number in range(mesh.ndim))
    real_groups = [  # the fake backend simulates a group without processes
        group
        for group in groups
        if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"
    ]
    return Ranks(
        real_groups,
        error=MatchError,
        undone="nothing was loaded",
        call="load_into with this model",
    )


def is_dtensor(tensor: Any) -> bool:
    """Return True for a DTensor, of which this rank has a part."""
    import torch

    return isinstance(tensor, torch.Tensor) and callable(getattr(type(tensor), "full_tensor", None))


def distribute_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `value`, distributed like `tensor`; unchanged for other tensors.

    Each rank has the whole `value`. torch 2.6 and later can therefore be asked to send nothing
    (`src_data_rank=None`); older versions send the value of rank 0.
    """
    if not is_dtensor(tensor) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    can_skip_source = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    options: dict[str, Any] = {"src_data_rank": None} if can_skip_source else {}
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach(), mesh, placements, **options)


def remove_hidden_parts(path: str) -> str:
    """Return the path of a module as in the keys of the state dict, without FSDP's wrappers."""
    if "_module" not in path:
        return path
    return ".".join(part for part in path.split(".") if part not in _UNNAMED_COMPONENTS)


def list_fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of `model` that are `FullyShardedDataParallel`."""
    # Not imported here: a model with such a module has imported it.
    home = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(home, "FullyShardedDataParallel", None)
    return (
        [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    )


def describe_fsdp_state(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of the full state dict of an FSDP model, and its `_metadata`.

    Nothing is gathered. Keys are in the order of the modules, each with the live tensor, or with a
    `Slot` for a parameter inside a flat parameter, and for extra states.
    """
    import torch

    slots_by_module = _describe_flat_parameters(model)
    state: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        metadata[path] = {"version": getattr(module, "_version", 1)}
        bare_path = remove_hidden_parts(path)
        prefix = f"{bare_path}." if bare_path else ""
        flattened = slots_by_module.get(id(module), {})
        state.update((prefix + name, slot) for name, slot in flattened.items())
        state.update(
            (prefix + name, tensor)
            for name, tensor in list_own_tensors(module).items()
            if name not in flattened and name not in _FLAT_PARAMETER_NAMES
        )
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            state[f"{prefix}_extra_state"] = EXTRA
    return state, metadata


def _describe_flat_parameters(model: torch.nn.Module) -> dict[int, dict[str, Slot]]:
    """Return the slots of parameters inside flat parameters: by `id` of their module, by name.

    A flat parameter records its parameters, and separately the further places of tied ones, each
    with the first place (`prim_module`, `prim_param_name`).
    """
    slots_by_module: dict[int, dict[str, Slot]] = defaultdict(dict)
    for fsdp_module in list_fsdp_modules(model):
        flat = getattr(getattr(fsdp_module, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        dtype = dtype_name(flat)
        tied_places = {
            (id(info.prim_module), info.prim_param_name) for info in flat._shared_param_infos
        }
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            place = id(info.module), info.param_name
            tie = place if place in tied_places else None
            slot = Slot(tuple(shape), dtype, "parameter", tie)
            slots_by_module[id(info.module)][info.param_name] = slot
        for info in flat._shared_param_infos:
            first = slots_by_module[id(info.prim_module)][info.prim_param_name]
            slots_by_module[id(info.module)][info.param_name] = first
    return slots_by_module


def list_own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the persistent buffers of one module."""
    not_saved = module._non_persistent_buffers_set
    buffers = {name: buffer for name, buffer in module._buffers.items() if name not in not_saved}
    tensors = {**module._parameters, **buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
