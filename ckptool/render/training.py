"""A training run as lines: an epoch each, what replicas saw, where it was saved; and devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptool.render.table import table
from ckptool.render.terminal import Look
from ckptool.render.text import count, runnable, size
from ckptool.trainer.events import EpochEnded, Resumed, Saved, Started, Stepped, Traced
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
]

_COLUMNS = {"epoch": 5, "step": 7, "train_loss": 11, "val_loss": 11, "lr": 10, "samples/s": 10}
"""The widths, known before the rows are: those come minutes apart."""


def heading(look: Look) -> str:
    """What the columns of `epoch_line` are."""
    return look.bold(_aligned(list(_COLUMNS)))


def epoch_line(epoch: EpochEnded) -> str:
    """One epoch, below `heading`."""
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
    """What is trained on what."""
    where = ", ".join(dict.fromkeys(started.devices))
    if started.processes > 1:
        where = f"{started.processes} processes, {where}"
    return (
        f"{started.strategy} on {where}: {counted(started.parameters, 'parameter')}, "
        f"{counted(started.samples, 'sample')}, {counted(started.steps, 'step')} an epoch"
    )


def resumed_line(resumed: Resumed) -> str:
    """Where the run goes on from, and what that lacks."""
    lacks = f", which is without {', '.join(resumed.without)}" if resumed.without else ""
    return f"goes on from {clean(resumed.path)}, step {count(resumed.step)}{lacks}"


def progress_text(step: Stepped, total: int) -> str:
    """Behind the bar."""
    return f"step {count(step.step)} of {count(total)}, loss {step.loss:.4g}"


def trace_line(traced: Traced, rank: int | None) -> str:
    """What a replica, or the loop, was given and got, as the tutorial of DataParallel has it."""
    given, got = _sizes(traced.inputs), _sizes(traced.outputs)
    told = (
        f"Outside: input size {given} output_size {got}"
        if traced.outside
        else f"\tIn Model: input size {given} output size {got}"
    )
    return told if rank is None else f"[rank {rank}] {told}"


def _sizes(shape: Sequence[int]) -> str:
    return f"torch.Size([{', '.join(map(str, shape))}])"


def end_lines(saved: Sequence[Saved], *, is_read: bool) -> Iterator[str]:
    """The checkpoints that are there, and with `is_read` the command that reads the last one."""
    width = max((len(clean(one.path)) for one in saved), default=0)
    for one in saved:
        yield f"{clean(one.path):<{width}}  step {count(one.step)}"
    if saved and is_read:
        yield runnable(f"ckptool info {shlex.quote(saved[-1].path)}")


def stopped_line(step: int, path: str) -> str:
    """What is left of a run that a signal has ended."""
    return f"saved at step {count(step)} in {clean(path)}: --resume auto goes on"


def gpus_line(physical: Mapping[str, str]) -> str:
    """Which device of the program is which GPU of the machine."""
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
