"""The processes of `torch.distributed`, as a launcher such as torchrun has started them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckptool.errors import CheckpointError, PeerLost, TrainingError, WriteError
from ckptool.loading.ranks import Ranks, default_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "TIMEOUT",
    "World",
    "connected",
    "end_if_connected",
    "local_rank",
    "of_this_attempt",
    "ranks",
    "require_launcher",
    "team",
]

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(minutes=10)
"""How long processes wait for each other."""
_HOURS = timedelta(days=30)
"""The same, where one writes for hours: a launcher ends who is left."""
_RUNS = count()
"""Numbers the runs of a script, the same in all of its processes."""
_ENDED: list[Any] = []
"""The group of the last run: to let go of it is to join its threads, with Python's lock held. One
that has just taken part in the last exchange may wait for that lock to free a tensor (gloo)."""


class World:
    """The processes of the default group, or this one alone; all make the same calls in order."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Use the default group, with sums on `device`, this process's own; None: be alone."""
        self._device = device
        self.rank, self.size = 0, 1
        if device is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and tells."""
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over the processes, as float64, the same in all of them."""
        if self._device is None:
            return [float(value) for value in values]
        total = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]


def ranks(undone: str, error: type[CheckpointError]) -> Ranks:
    """Return the processes that call `Trainer.fit`, to do steps together or not at all."""
    return Ranks(default_group(), error=error, undone=undone, call="Trainer.fit")


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def require_launcher() -> None:
    """Check that this is one of several processes.

    Raises:
        TrainingError: no launcher has started it.
    """
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise TrainingError(
            f"this strategy runs in several processes, and {missing[0]} does not say which this is",
            hint="torchrun --nproc-per-node 2 SCRIPT, or ckptool train --nproc 2",
        )
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise TrainingError(
            f"RANK={rank} is none of the {size} processes of WORLD_SIZE: they count from 0"
        )


@contextmanager
def connected(device: torch.device) -> Iterator[World]:
    """Connect the processes, over NCCL for GPUs and gloo for everything else, until the end.

    Where they are connected already, as in a script that trains several times, they stay so.

    Raises:
        TrainingError: no launcher has started this process, or the others cannot be reached.
        PeerLost: one of them has gone while this one waited for it.
    """
    if dist.is_initialized():
        yield World(device)
        return
    require_launcher()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    from torch.distributed.distributed_c10d import PrefixStore

    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, size = _meeting_point()
        met = PrefixStore(f"run {next(_RUNS)}", of_this_attempt(store))
        dist.init_process_group(backend, store=met, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise _not_reached(error) from error
    try:
        yield World(device)
    except (RuntimeError, CheckpointError) as error:
        if _tells_of_loss(error):
            raise PeerLost("another process of this run has gone, which ends this one") from error
        raise
    finally:
        _ENDED[:] = [dist.group.WORLD]
        dist.destroy_process_group()


def end_if_connected(code: int) -> None:
    """End this process with an exit code, if it was connected to others.

    Python's own end would take its lock away from a thread of gloo that has a tensor left to free,
    which ends the process by SIGABRT ("terminate called without an active exception").
    """
    if _ENDED:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@contextmanager
def team(call: str, *, undone: str) -> Iterator[Ranks]:
    """Connect the processes of a launcher, which wait for each other as long as it takes.

    Args:
        call: What all of them do, for messages.
        undone: What a failure of another one means, for messages.

    Raises:
        As `connected`.
    """
    with connected(torch.device("cpu")):
        group = dist.new_group(timeout=_HOURS)
        store = of_this_attempt(_meeting_point()[0])
        yield Ranks((group,), error=WriteError, undone=undone, call=call, store=store)


@cache
def _meeting_point() -> tuple[Store, int, int]:
    """Return the store of the launcher, this process's rank, and the number of processes.

    Once a process: what an earlier run has left there, addresses for one, is not another run's.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    return store, rank, size


def of_this_attempt(store: Store) -> Store:
    """Return the part of a store for this attempt of torchrun, which restarts with one store.

    What earlier attempts have left there, the addresses of processes for one, leads nowhere.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # not in every torch

    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _not_reached(error: BaseException) -> TrainingError:
    address = f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']}"
    if "EADDRINUSE" in str(error):
        return TrainingError(
            f"processes cannot meet at {address}: it is taken",
            hint="torchrun --master-port, or MASTER_PORT, with another one",
        )
    return TrainingError(
        f"the other processes cannot be reached at {address}: {str(error).splitlines()[0]}"
    )


def _tells_of_loss(error: BaseException | None) -> bool:
    """Return whether torch's error, or its cause behind a common step, is of a connection.

    Gloo names its file alone.
    """
    if isinstance(error, CheckpointError):
        return _tells_of_loss(error.__cause__)
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
