"""Ways of spreading a run over devices, one file each, behind one small interface."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Observer
from ckptool.trainer.strategies.base import Strategy

_HOMES = {
    "single": ("base", "Strategy"),
    "dp": ("data_parallel", "DataParallel"),
    "ddp": ("data_parallel", "DistributedDataParallel"),
    "model-parallel": ("model_parallel", "ModelParallel"),
    "fsdp": ("fsdp", "FullyShardedDataParallel"),
    "parameter-server": ("parameter_server", "ParameterServer"),
    "xla": ("xla", "Xla"),
}


def make_strategy(config: TrainConfig, observer: Observer) -> Strategy:
    """Return the strategy of `config.strategy`, not connected yet."""
    home, name = _HOMES[config.strategy]
    module = import_module(f"{__name__}.{home}")
    return cast(Strategy, getattr(module, name)(config, observer))
