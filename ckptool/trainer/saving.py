"""What a checkpoint is: `full`, which a run goes on from, and the kinds that scripts write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckptool.errors import TrainingError, WriteError
from ckptool.files.atomic import atomic_output
from ckptool.loading.ranks import Ranks, default_group
from ckptool.trainer.strategies.base import Strategy

__all__ = ["expected_size", "require_picklable", "save"]


def save(kind: str, path: str, strategy: Strategy, values: Mapping[str, Any]) -> None:
    """Write a checkpoint of `kind`, one of `config.SAVES`; all processes call it, rank 0 writes.

    It appears whole or not at all, whatever its kind.

    Raises:
        WriteError: nothing is written; what was there is there.
        TrainingError: the module cannot be pickled.
    """
    if kind == "full":
        strategy.save(path, values)
        return
    contents = _CONTENTS[kind](strategy, values)
    _ranks().first(lambda: _pickle(contents, path))


def require_picklable(strategy: Strategy) -> None:
    """Try what a checkpoint of the kind `module` does; all processes call it.

    Raises:
        TrainingError: the module cannot be pickled.
    """
    module = strategy.whole_module()
    _ranks().first(lambda: _size(module))


def _ranks() -> Ranks:
    return Ranks(default_group(), error=WriteError, undone="nothing is written", call="Trainer.fit")


def expected_size(strategy: Strategy) -> int:
    """About how many bytes a checkpoint takes, the optimizer's state that is to come included."""
    config = strategy.config
    moments = int(config.momentum > 0) if config.optimizer == "sgd" else 2
    copies = 1 + int(config.ema is not None)
    parameters = sum(one.numel() * one.element_size() for one in strategy.module.parameters())
    buffers = sum(one.numel() * one.element_size() for one in strategy.module.buffers())
    return parameters * (copies + moments) + buffers * copies


def _wrapped(strategy: Strategy, values: Mapping[str, Any]) -> dict[str, Any]:
    """As most scripts with DistributedDataParallel save: the names are the wrapper's."""
    model, optimizer = strategy.wrapped_state()
    return {"epoch": values["epoch"], "state_dict": model, "optim_dict": optimizer}


def _unwrapped(strategy: Strategy, _: Mapping[str, Any]) -> dict[str, Any]:
    """As scripts with DataParallel do: `model.module.state_dict()`."""
    state, _ = strategy.wrapped_state()
    inside = _place_of(strategy.module, strategy.model)
    if inside:
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, f"{inside}.")
    return {"state_dict_model": state}


def _place_of(module: nn.Module, model: nn.Module) -> str:
    """The name of the bare module within its wrapper; empty: there is no wrapper."""
    return next(str(name) for name, one in model.named_modules() if one is module)


_CONTENTS: dict[str, Callable[[Strategy, Mapping[str, Any]], Any]] = {
    "wrapped": _wrapped,
    "unwrapped": _unwrapped,
    "module": lambda strategy, _: strategy.whole_module(),
}


class _Counted:
    """A file that keeps nothing but its length."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


class _Written(_Counted):
    """The same over an output of ours, which takes bytes of a size that is known before."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def write(self, data: bytes | memoryview) -> int:
        self._write(bytes(data))
        return super().write(data)


def _pickle(contents: Any, path: str) -> None:
    """`torch.save`, and the device tags that torch gives, into a file that is replaced at once.

    It is done twice, once for the size alone: nothing of it is held in memory.
    """
    with atomic_output(path, _size(contents), overwrite=True) as output:
        torch.save(contents, _Written(output.write))  # type: ignore[arg-type]


def _size(contents: Any) -> int:
    counted = _Counted()
    try:
        torch.save(contents, counted)  # type: ignore[arg-type]
    except Exception as error:  # whatever the classes in it have to say
        raise TrainingError(
            f"the module cannot be pickled: {error}", hint="--save full needs no class"
        ) from error
    return counted.size
