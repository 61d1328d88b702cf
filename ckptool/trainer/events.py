"""What a run tells while it goes: the library prints nothing, an observer may."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "EpochEnded",
    "Note",
    "Observer",
    "Resumed",
    "Saved",
    "Started",
    "Stepped",
    "Traced",
    "Validating",
]


@dataclass(frozen=True)
class _Event:
    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Started(_Event):
    """The first step is next. `samples` and `steps` are those of a whole epoch."""

    strategy: str
    devices: tuple[str, ...]
    processes: int
    parameters: int
    samples: int
    steps: int
    epochs: int


@dataclass(frozen=True)
class Resumed(_Event):
    """The run goes on from a checkpoint; `without` names what that does not hold."""

    path: str
    epoch: int
    step: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced(_Event):
    """What one replica was given and gave; `outside` is the whole, as the loop sees it."""

    outside: bool
    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Stepped(_Event):
    """One step of the optimizer is done; `step` counts from 1 over all epochs.

    `staleness` is how many updates old the weights were that its gradients are of.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    staleness: int = 0


@dataclass(frozen=True)
class Validating(_Event):
    """So many of the validation samples are through."""

    done: int
    samples: int


@dataclass(frozen=True)
class EpochEnded(_Event):
    """One line of `metrics.jsonl`; losses are means over samples, `epoch` counts from 1.

    `lr` is the rate of the epoch's last step. Of data without a validation part `val_loss` is None.
    In plain data it is None as well where it is no finite number, which a note tells.
    """

    epoch: int
    step: int
    train_loss: float
    val_loss: float | None
    lr: float
    samples_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data, which JSON can hold."""
        told = super().to_dict()
        return {name: one if math.isfinite(one or 0) else None for name, one in told.items()}


@dataclass(frozen=True)
class Saved(_Event):
    """A checkpoint is on the disk."""

    path: str
    epoch: int
    step: int


@dataclass(frozen=True)
class Note(_Event):
    """Something that whoever runs this wants to know, as one sentence."""

    text: str


class Observer:
    """Told of everything, each in its own process: what several tell is the same, but `Traced`."""

    def tell(self, event: _Event) -> None:
        """Take an event; this one does nothing with it."""
