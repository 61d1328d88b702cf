"""A training run as lines: epochs, shapes of replicas, checkpoints; and devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ckptool.render.table import table_lines
from ckptool.render.text import Look, format_duration, format_size, make_pasteable
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
    return look.bold(_align_cells(list(_COLUMNS)))


def epoch_line(epoch: EpochEnded) -> str:
    """Return the line of one epoch, below `heading`."""
    validated = "" if epoch.val_loss is None else f"{epoch.val_loss:.6g}"
    return _align_cells(
        [
            str(epoch.epoch),
            str(epoch.step),
            f"{epoch.train_loss:.6g}",
            validated,
            f"{epoch.lr:.3g}",
            f"{epoch.samples_per_s:.0f}",
        ]
    )


def _align_cells(cells: Sequence[str]) -> str:
    """Return the cells of a row, aligned to the columns."""
    widths = _COLUMNS.values()
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def event_line(event: Started | Resumed | Note) -> str:
    """Return the line of an event: the start of a run, its resumption, or a note."""
    if isinstance(event, Note):
        return f"note: {clean(event.text)}"
    if isinstance(event, Resumed):
        lost_parts = [f"{name} ({_WITHOUT[name]})" for name in event.without]
        lacks = f", without {', '.join(lost_parts)}" if lost_parts else ""
        return f"resuming from {clean(event.path)} at step {event.step:,}{lacks}"
    where = ", ".join(dict.fromkeys(event.devices))
    if event.processes > 1:
        where = f"{event.processes} processes, {where}"
    return (
        f"{event.strategy} on {where}: {counted(event.parameters, 'parameter')}, "
        f"{counted(event.samples, 'sample')}, {counted(event.steps, 'step')} an epoch"
    )


def progress_text(step: Stepped, total: int, epochs: int, seconds_left: float | None) -> str:
    """Return the text after the bar: the epoch, the step, and the time left if known."""
    position = f"epoch {step.epoch} of {epochs}, step {step.step:,} of {total:,}"
    return f"{position}, loss {step.loss:.4g}" + (
        "" if seconds_left is None else f", {format_duration(seconds_left)} left"
    )


def validating_text(event: Validating) -> str:
    """Return the text after the bar while an epoch is validated."""
    return f"validation, sample {event.done:,} of {event.samples:,}"


def trace_line(traced: Traced, rank: int | None) -> str:
    """Return the sizes that a replica or the loop got and returned, as DataParallel prints."""
    input_size, output_size = _format_sizes(traced.inputs), _format_sizes(traced.outputs)
    text = (
        f"Outside: input size {input_size} output_size {output_size}"
        if traced.outside
        else f"\tIn Model: input size {input_size} output size {output_size}"
    )
    text += f" device {traced.device}"
    return text if rank is None else f"[rank {rank}] {text}"


def _format_sizes(shape: Sequence[int]) -> str:
    """Return a shape as torch prints it."""
    return f"torch.Size([{', '.join(map(str, shape))}])"


def end_lines(saved: Sequence[Saved], result: TrainResult) -> Iterator[str]:
    """Yield the checkpoints that exist, the command that describes the last one, and the end."""
    width = max((len(clean(checkpoint.path)) for checkpoint in saved), default=0)
    for checkpoint in saved:
        yield f"{clean(checkpoint.path):<{width}}  step {checkpoint.step:,}"
    if saved:
        yield make_pasteable(f"ckptool info {shlex.quote(saved[-1].path)}")
    best = f" The lowest loss of an epoch is {result.best:.6g}." if isfinite(result.best) else ""
    yield f"Trained to step {result.step:,}, {counted(result.epoch, 'epoch')}.{best}"


def stopped_line(saved: Saved) -> str:
    """Return the line about the checkpoint of a run that a signal ended."""
    return f"saved at step {saved.step:,} in {clean(saved.path)}; continue with --resume auto"


def gpus_line(physical: Mapping[str, str]) -> str:
    """Return the line that maps the devices of the program to the GPUs of the machine."""
    return ", ".join(f"{name} is GPU {number}" for name, number in physical.items())


def device_lines(devices: Devices, look: Look) -> Iterator[str]:
    """Yield the number of GPUs, and a row for each device; `*` marks the one that `auto` uses.

    Columns that are empty for all devices are left out.
    """
    yield counted(devices.cuda, "GPU") if devices.cuda else "no GPU: this machine, or this torch"
    rows = [
        [
            device.name,
            clean(device.model),
            "" if device.memory is None else format_size(device.memory),
            f"{devices.threads} threads" if device.name == "cpu" else "",
            device.physical or "",
            "*" if device.is_current else "",
        ]
        for device in devices.devices
    ]
    headers = ["device", "is", "memory", "threads", "GPU", "current"]
    yield from table_lines(headers, rows, look, flexible=1, optional=range(len(headers)))
