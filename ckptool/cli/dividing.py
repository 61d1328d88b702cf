"""A command that several processes execute together, started by torchrun or --workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ckptool.cli.console import WORDS, in_words, settle
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.writing.divided import Team

__all__ = ["divided", "team_of", "workers_option"]

_TEAM = "ckptool.team"

workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Write the shards with this many processes; torchrun spreads them over machines.",
)


def divided(work: Callable[[], object], workers: int | None) -> None:
    """Do the work in this process, as a worker of torchrun, or in new processes.

    Raises:
        WorkerFailed: a worker's error.
    """
    if workers in (None, 1) and not _is_launched():
        work()
        return
    from ckptool.tensors.runtime import require_torch  # which brings threads

    require_torch()
    if _is_launched():
        from ckptool.trainer.launching import recorded
        from ckptool.trainer.processes import team

        with recorded(in_words), team("ckptool", undone="nothing has got its name") as found:
            click.get_current_context().meta[_TEAM] = found
            work()
    else:
        from ckptool.trainer.launching import launch

        settle(launch(click.get_current_context().meta[WORDS], nproc=workers or 1))


def team_of() -> Team | None:
    """Return the processes that execute this command; None if it is one process.

    Raises:
        UsageError: torchrun has started a verb that runs in one process.
    """
    context = click.get_current_context()
    team: Team | None = context.meta.get(_TEAM)
    if team is None and _is_launched():
        raise UsageError(
            f"{context.info_name} runs in one process, and torchrun has started "
            f"{os.environ['WORLD_SIZE']}",
            hint="run it without torchrun; convert and cast can use several processes",
        )
    return team


def _is_launched() -> bool:
    """Return whether torchrun has started this command itself, not a script that calls it."""
    is_module = os.path.basename(sys.argv[0]) == "__main__.py"
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_module and many and "TORCHELASTIC_RUN_ID" in os.environ
