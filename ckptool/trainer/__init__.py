"""A small training loop, the same for every strategy that distributes it over devices.

    from ckptool.trainer import TrainConfig, Trainer

    Trainer(TrainConfig(out="run", strategy="ddp"), model=net, data=data, loss=loss).fit()

It writes checkpoints that the rest of `ckptool` reads, and resumes from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import make_importer

if TYPE_CHECKING:
    from ckptool.trainer.config import TrainConfig
    from ckptool.trainer.data import TrainData
    from ckptool.trainer.events import Observer
    from ckptool.trainer.trainer import Trainer, TrainResult

_HOMES = {
    "config": ("TrainConfig",),
    "data": ("TrainData",),
    "events": ("Observer",),
    "trainer": ("TrainResult", "Trainer"),
}

__all__ = ["Observer", "TrainConfig", "TrainData", "TrainResult", "Trainer"]

__getattr__ = make_importer(__name__, globals(), _HOMES)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
