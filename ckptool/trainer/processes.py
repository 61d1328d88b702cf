"""The processes of `torch.distributed` that a launcher such as torchrun has started."""

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
from ckptool.loading.ranks import Ranks, list_default_group
from ckptool.trainer.launching import connection_error

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(minutes=10)
"""The time that processes wait for each other."""
_LONG_TIMEOUT = timedelta(days=30)
"""The same where a process writes for hours; the launcher ends processes that are left."""
_RUNS = count()
"""The numbers of the runs of a script, the same in all of its processes."""
_KEPT_GROUPS: list[Any] = []
"""The group of the last run, kept alive: its end joins its threads with Python's lock held, and a
thread of gloo may wait for that lock to free a tensor."""


class World:
    """The processes of the default group, or only this one; all make the same calls.

    Attributes:
        rank: The number of this process; 0 writes the files.
        size: The number of processes.
        ranks: The processes, which succeed or fail together.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Use the default group, with sums on this process's `device`; None: only this process."""
        self._device = device
        self.rank, self.size = 0, 1
        if device is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = Ranks(
            list_default_group(),
            error=TrainingError,
            undone="training cannot continue",  # this and the next are for error messages
            call="Trainer.fit",
        )

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the processes, as float64."""
        if self._device is None:  # only this process
            return [float(value) for value in values]
        total = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]


def read_local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def read_launcher_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, set by a launcher.

    Raises:
        TrainingError: an environment variable of the launcher is missing or wrong.
    """
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise TrainingError(
            f"this strategy needs several processes, but {missing[0]} is not set",
            hint="use torchrun --nproc-per-node 2 SCRIPT, or ckptool train --nproc 2",
        )
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise TrainingError(
            f"RANK={rank} is not a number from 0 to WORLD_SIZE - 1 (WORLD_SIZE={size})"
        )
    return int(rank), int(size)


@contextmanager
def connect_processes(device: torch.device) -> Iterator[World]:
    """Connect the processes until the end of the block, with NCCL for GPUs and gloo otherwise.

    Processes that the script has connected stay connected.

    Raises:
        TrainingError: no launcher started this process, or the others cannot be reached.
        PeerLost: another process ended while this one waited for it.
    """
    if dist.is_initialized():
        yield World(device)
        return
    read_launcher_rank()  # raises without a launcher
    if device.type == "cuda":
        torch.cuda.set_device(device)
    from torch.distributed.distributed_c10d import PrefixStore

    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, size = open_store()
        # Each run of a script has its own keys in the store: those of earlier runs stay there.
        run_store = PrefixStore(f"run {next(_RUNS)}", store)
        dist.init_process_group(
            backend, store=run_store, rank=rank, world_size=size, timeout=TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        raise connection_error(
            error, os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"]
        ) from error
    try:
        yield World(device)
    except (RuntimeError, CheckpointError) as error:
        if _is_lost_connection(error):
            raise PeerLost("stopped, because another process of this run has ended") from error
        raise
    finally:
        _KEPT_GROUPS[:] = [dist.group.WORLD]  # its destructor may wait for a thread of gloo forever
        dist.destroy_process_group()


def end_if_connected(code: int) -> None:
    """End this process with an exit code if it was connected to others.

    Python's own shutdown is skipped, except exit functions and the output. It may stop a thread of
    gloo that frees a tensor, which ends the process with SIGABRT ("terminate called without an
    active exception").
    """
    if _KEPT_GROUPS:  # filled at the end of `connect_processes`
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@contextmanager
def connect_group(call: str, *, undone: str) -> Iterator[Ranks]:
    """Connect the processes of a launcher, which wait for each other for up to 30 days.

    A failure is also set in the launcher's store, for processes that still work.

    Args:
        call: The name of the common work, for messages.
        undone: The consequence of a failure in another process, for messages.

    Raises:
        As `connect_processes`.
    """
    with connect_processes(torch.device("cpu")):
        group = dist.new_group(timeout=_LONG_TIMEOUT)
        store, *_ = open_store()
        yield Ranks((group,), error=WriteError, undone=undone, call=call, store=store)


@cache
def open_store() -> tuple[Store, int, int]:
    """Return the launcher's store, the rank of this process and the number of processes.

    Attempts of torchrun share a store, and addresses of processes from earlier attempts are wrong:
    each attempt has its part of the store.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # not in every torch
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store), rank, size


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return True if an error is a lost connection, or a ckptool error that has it as its cause.

    Errors of gloo have no class of their own: they are recognized by the path of its source.
    """
    if isinstance(error, CheckpointError):
        return _is_lost_connection(error.__cause__)
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
