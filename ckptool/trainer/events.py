"""The events of a run, for observers; the library itself prints nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class _Event:
    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Started(_Event):
    """A run starts; `samples` and `steps` are per epoch."""

    strategy: str
    devices: tuple[str, ...]
    processes: int
    parameters: int
    samples: int
    steps: int
    epochs: int


@dataclass(frozen=True)
class Resumed(_Event):
    """A run resumes from a checkpoint; `without` lists the parts it does not have."""

    path: str
    epoch: int
    step: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced(_Event):
    """The input and output shapes of a replica, or with `outside`, of the whole model."""

    outside: bool
    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Stepped(_Event):
    """A step of the optimizer is finished; `step` counts from 1 over all epochs.

    `staleness` is the age, in updates, of the weights that the gradients were computed with.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    staleness: int = 0


@dataclass(frozen=True)
class Validating(_Event):
    """The validation has reached sample `done` of `samples`."""

    done: int
    samples: int


@dataclass(frozen=True)
class EpochEnded(_Event):
    """An epoch is finished: one line of `metrics.jsonl`.

    Losses are means over samples, `epoch` counts from 1, `lr` is the rate of the last step.
    `val_loss` is None without validation data. In plain data a loss that is not finite is None.
    """

    epoch: int
    step: int
    train_loss: float
    val_loss: float | None
    lr: float
    samples_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data for JSON, which has no NaN and infinity."""
        fields = super().to_dict()
        return {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in fields.items()
        }


@dataclass(frozen=True)
class Saved(_Event):
    """A checkpoint is written."""

    path: str
    epoch: int
    step: int


@dataclass(frozen=True)
class Note(_Event):
    """A message for the user."""

    text: str


class Observer:
    """Receives every event in every process; all but `Traced` are the same in every process."""

    def tell(self, event: _Event) -> None:
        """Ignore an event; a subclass may print it."""
