"""A training run as lines: an epoch each, what replicas saw, where it was saved; and devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ckptool.render.table import table
from ckptool.render.text import Look, duration, runnable, size
from ckptool.trainer.events import EpochEnded, Resumed, Saved, Started, Stepped, Traced, Validating
from ckptool.words import clean, counted

if TYPE_CHECKING:
    from ckptool.trainer.devices import Devices

__all__ = [
    "device_lines",
    "end_lines",
    "epoch_line",
    "gpus_line",
    "heading",
    "progress_text",
    "resumed_line",
    "started_line",
    "stopped_line",
    "trace_line",
    "trained_line",
    "validating_text",
]

_COLUMNS = {"epoch": 5, "step": 7, "train_loss": 11, "val_loss": 11, "lr": 10, "samples/s": 10}
"""The widths, known before the rows are: those come minutes apart."""


_WITHOUT = {
    "optimizer": "its state begins anew",
    "scheduler": "the learning rate follows from the step",
    "scaler": "its scale begins anew",
    "ema": "the average begins with these weights",
    "rng": "dropout draws other numbers than a run that was not stopped",
    "progress": "the next epoch begins with its first step",
}
"""What the lack of each part of a checkpoint costs."""


def heading(look: Look) -> str:
    """Return what the columns of `epoch_line` are."""
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


def started_line(started: Started) -> str:
    """Return what is trained on what."""
    where = ", ".join(dict.fromkeys(started.devices))
    if started.processes > 1:
        where = f"{started.processes} processes, {where}"
    return (
        f"{started.strategy} on {where}: {counted(started.parameters, 'parameter')}, "
        f"{counted(started.samples, 'sample')}, {counted(started.steps, 'step')} an epoch"
    )


def resumed_line(resumed: Resumed) -> str:
    """Return where the run goes on from, and what that lacks."""
    costs = [f"{name} ({_WITHOUT[name]})" for name in resumed.without]
    lacks = f", without {', '.join(costs)}" if costs else ""
    return f"goes on from {clean(resumed.path)}, step {resumed.step:,}{lacks}"


def progress_text(step: Stepped, total: int, epochs: int, left: float | None) -> str:
    """Return the text behind the bar: the epoch, the step, and the seconds `left` if known."""
    place = f"epoch {step.epoch} of {epochs}, step {step.step:,} of {total:,}"
    return f"{place}, loss {step.loss:.4g}" + ("" if left is None else f", {duration(left)} left")


def validating_text(event: Validating) -> str:
    """Return the text behind the bar while an epoch is validated."""
    return f"validation, sample {event.done:,} of {event.samples:,}"


def trace_line(traced: Traced, rank: int | None) -> str:
    """Return what a replica, or the loop, got and gave, as DataParallel's tutorial has it."""
    given, got = _sizes(traced.inputs), _sizes(traced.outputs)
    told = (
        f"Outside: input size {given} output_size {got}"
        if traced.outside
        else f"\tIn Model: input size {given} output size {got}"
    )
    told += f" device {traced.device}"
    return told if rank is None else f"[rank {rank}] {told}"


def _sizes(shape: Sequence[int]) -> str:
    return f"torch.Size([{', '.join(map(str, shape))}])"


def end_lines(saved: Sequence[Saved]) -> Iterator[str]:
    """Yield the checkpoints that exist, and the command that describes the last one."""
    width = max((len(clean(one.path)) for one in saved), default=0)
    for one in saved:
        yield f"{clean(one.path):<{width}}  step {one.step:,}"
    if saved:
        yield runnable(f"ckptool info {shlex.quote(saved[-1].path)}")


def trained_line(step: int, epoch: int, best: float) -> str:
    """Return how a run ended that came to its end."""
    reached = f" The lowest loss of an epoch is {best:.6g}." if isfinite(best) else ""
    return f"Trained to step {step:,}, {counted(epoch, 'epoch')}.{reached}"


def stopped_line(step: int, path: str) -> str:
    """Return what is left of a run that a signal has ended."""
    return f"saved at step {step:,} in {clean(path)}: --resume auto goes on"


def gpus_line(physical: Mapping[str, str]) -> str:
    """Return the line that maps the devices of the program to the GPUs of the machine."""
    return ", ".join(f"{name} is GPU {number}" for name, number in physical.items())


def device_lines(devices: Devices, look: Look) -> Iterator[str]:
    """How many GPUs there are, and a row for each device; `*` is the one that `auto` takes."""
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
    used = [n for n in range(len(headers)) if any(row[n] for row in rows)]
    yield from table(
        [headers[n] for n in used],
        [[row[n] for n in used] for row in rows],
        look,
        flexible=1,
    )
