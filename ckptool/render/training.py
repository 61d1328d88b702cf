"""A training run as lines: an epoch each, what replicas saw, where it was saved; and devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ckptool.render.table import table
from ckptool.render.text import Look, duration, runnable, size
from ckptool.trainer.events import (
    EpochEnded,
    Note,
    Resumed,
    Saved,
    Started,
    Stepped,
    Traced,
    Validating,
)
from ckptool.words import clean, counted

if TYPE_CHECKING:
    from ckptool.trainer import TrainResult
    from ckptool.trainer.devices import Devices

_COLUMNS = {"epoch": 5, "step": 7, "train_loss": 11, "val_loss": 11, "lr": 10, "samples/s": 10}
"""The widths, fixed before the first row: rows are minutes apart."""


_WITHOUT = {
    "optimizer": "its state starts from scratch",
    "scheduler": "the learning rate follows from the step",
    "scaler": "its scale starts from scratch",
    "ema": "the average starts with these weights",
    "rng": "dropout draws other numbers than an uninterrupted run",
    "progress": "the next epoch starts at its first step",
}
"""The consequence of each part that a checkpoint lacks."""


def heading(look: Look) -> str:
    """Return the headings of the columns of `epoch_line`."""
    return look.bold(_aligned(list(_COLUMNS)))


def epoch_line(epoch: EpochEnded) -> str:
    """Return the line of one epoch, below `heading`."""
    validated = "" if epoch.val_loss is None else f"{epoch.val_loss:.6g}"
    return _aligned(
        [
            str(epoch.epoch),
            str(epoch.step),
            f"{epoch.train_loss:.6g}",
            validated,
            f"{epoch.lr:.3g}",
            f"{epoch.samples_per_s:.0f}",
        ]
    )


def _aligned(cells: Sequence[str]) -> str:
    widths = _COLUMNS.values()
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def event_line(event: Started | Resumed | Note) -> str:
    """Return the line of an event: the start of a run, what it resumes from, or a note."""
    if isinstance(event, Note):
        return f"note: {clean(event.text)}"
    if isinstance(event, Resumed):
        costs = [f"{name} ({_WITHOUT[name]})" for name in event.without]
        lacks = f", without {', '.join(costs)}" if costs else ""
        return f"resuming from {clean(event.path)} at step {event.step:,}{lacks}"
    where = ", ".join(dict.fromkeys(event.devices))
    if event.processes > 1:
        where = f"{event.processes} processes, {where}"
    return (
        f"{event.strategy} on {where}: {counted(event.parameters, 'parameter')}, "
        f"{counted(event.samples, 'sample')}, {counted(event.steps, 'step')} an epoch"
    )


def progress_text(step: Stepped, total: int, epochs: int, left: float | None) -> str:
    """Return the text after the bar: the epoch, the step, and the seconds `left` if known."""
    place = f"epoch {step.epoch} of {epochs}, step {step.step:,} of {total:,}"
    return f"{place}, loss {step.loss:.4g}" + ("" if left is None else f", {duration(left)} left")


def validating_text(event: Validating) -> str:
    """Return the text after the bar while an epoch is validated."""
    return f"validation, sample {event.done:,} of {event.samples:,}"


def trace_line(traced: Traced, rank: int | None) -> str:
    """Return the sizes that a replica or the loop got and returned, as DataParallel prints."""
    given, got = _sizes(traced.inputs), _sizes(traced.outputs)
    text = (
        f"Outside: input size {given} output_size {got}"
        if traced.outside
        else f"\tIn Model: input size {given} output size {got}"
    )
    text += f" device {traced.device}"
    return text if rank is None else f"[rank {rank}] {text}"


def _sizes(shape: Sequence[int]) -> str:
    return f"torch.Size([{', '.join(map(str, shape))}])"


def end_lines(saved: Sequence[Saved], result: TrainResult) -> Iterator[str]:
    """Yield the checkpoints that exist, the command that describes the last one, and the end."""
    width = max((len(clean(one.path)) for one in saved), default=0)
    for one in saved:
        yield f"{clean(one.path):<{width}}  step {one.step:,}"
    if saved:
        yield runnable(f"ckptool info {shlex.quote(saved[-1].path)}")
    best = f" The lowest loss of an epoch is {result.best:.6g}." if isfinite(result.best) else ""
    yield f"Trained to step {result.step:,}, {counted(result.epoch, 'epoch')}.{best}"


def stopped_line(saved: Saved) -> str:
    """Return the line about the checkpoint of a run that a signal ended."""
    return f"saved at step {saved.step:,} in {clean(saved.path)}; continue with --resume auto"


def gpus_line(physical: Mapping[str, str]) -> str:
    """Return the line that maps the devices of the program to the GPUs of the machine."""
    return ", ".join(f"{name} is GPU {number}" for name, number in physical.items())


def device_lines(devices: Devices, look: Look) -> Iterator[str]:
    """Yield the number of GPUs, and a row for each device; `*` marks the one that `auto` uses."""
    yield counted(devices.cuda, "GPU") if devices.cuda else "no GPU: this machine, or this torch"
    rows = [
        [
            one.name,
            clean(one.model),
            "" if one.memory is None else size(one.memory),
            f"{devices.threads} threads" if one.name == "cpu" else "",
            one.physical or "",
            "*" if one.is_current else "",
        ]
        for one in devices.devices
    ]
    headers = ["device", "is", "memory", "threads", "GPU", "current"]
    yield from table(headers, rows, look, flexible=1, optional=range(len(headers)))
