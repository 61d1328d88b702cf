"""Open, change and save a checkpoint and print the receipt, for every verb that writes.

`convert` and `cast` can do so in several processes, started by torchrun or `--workers`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import click

from ckptool.cli.console import ARGUMENTS, Screen, describe_error, set_exit_code
from ckptool.cli.options import OutputOptions
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import TargetExists, UsageError
from ckptool.files.place import is_address
from ckptool.formats import open_checkpoint, shard_format_of
from ckptool.render.receipt import receipt_lines
from ckptool.writing import Receipt, save
from ckptool.writing.target import make_default_target

if TYPE_CHECKING:
    from ckptool.writing.divided import WriterGroup


def write_changed(
    source: str,
    change: Callable[..., Checkpoint],
    target: OutputOptions,
    *,
    word: str,
    opening: Callable[[], AbstractContextManager[Checkpoint]] | None = None,
    others: Sequence[str] = (),
    **options: Any,
) -> Receipt:
    """Open `source`, change it, write it to the target, and print the receipt.

    `opening` opens it instead of `open_checkpoint`, `others` are further checkpoints passed to
    `change`, and `options` are further arguments of `save`. The default target is named with
    `word`: `model.stripped.pth`.

    Raises:
        UsageError: if `--output` and `--in-place` are both given, or a remote source has neither.
        TargetExists: if `--in-place` would edit through a link, without `--force`.
        CheckpointError: if opening, changing or writing fails.
    """
    if target.output is not None and target.in_place:
        raise UsageError("--output and --in-place cannot be combined", hint="use one of them")
    if is_address(source) and target.output is None:
        raise UsageError(
            "the file is remote, so -o is required",
            file=source,
            hint="add -o FILE"
            + ("; remote files cannot be edited in place" if target.in_place else ""),
        )
    group = find_group()
    is_silent = group is not None and group.rank > 0  # the first process prints everything
    screen = Screen(as_json=False, quiet=True) if is_silent else target.screen
    options_of_result = {  # options that the written bytes may depend on
        name: value
        for name, value in click.get_current_context().params.items()
        if name not in ("workers", "quiet", "as_json")
    }
    with (
        opening() if opening else open_checkpoint(source) as checkpoint,
        ExitStack() as opened,
        screen.progress("writing", "reading back") as progress,
    ):
        if target.in_place and not target.force:
            for file in checkpoint.sources:
                _refuse_link(file.name)
        path = _choose_path(checkpoint, source, target, word)
        changed = change(
            checkpoint, *(opened.enter_context(open_checkpoint(other)) for other in others)
        )
        opened.callback(changed.close)  # closes files that a step opened
        receipt = save(
            changed,
            path,
            format=target.format,
            overwrite=target.force,
            in_place=target.in_place,
            dry_run=target.dry_run,
            verify=target.verify,
            progress=progress,
            group=group,
            options=repr(sorted(options_of_result.items())),
            **options,
        )
    screen.print_receipt(receipt, receipt_lines(receipt))
    return receipt


def _choose_path(checkpoint: Checkpoint, source: str, target: OutputOptions, word: str) -> str:
    """Return the file to write: the given one, the source itself, or one next to it.

    Of a folder of shards, the source itself is its index.
    """
    if target.in_place:
        return checkpoint.path
    if target.output is not None:
        return target.output
    sharded = bool(shard_format_of(checkpoint.format))
    # A default is named after the opened file, unless this is a shard, or one of a folder.
    is_real_path = os.path.isfile(checkpoint.path) or not os.path.exists(source)
    source_name = checkpoint.path if is_real_path and not sharded else source
    return make_default_target(source_name, word, target.format, sharded=sharded)


def _refuse_link(path: str) -> None:
    """Refuse an in-place edit of a link, or of a file with other hard links.

    Raises:
        TargetExists: if `path` is one.
    """
    if os.path.islink(path):
        raise TargetExists(
            f"is a link to {os.path.realpath(path)}",
            file=path,
            hint="add --force to edit the file that it links to",
        )
    if os.stat(path).st_nlink > 1:
        raise TargetExists(
            "has several hard links, and the others would keep the old content",
            file=path,
            hint="add --force to replace only this one",
        )


_GROUP_KEY = "ckptool.group"
"""The key of the group of processes in the command context's `meta`."""

workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Write the shards in this many processes; torchrun distributes them over machines.",
)


def run_divided(work: Callable[[], object], workers: int | None) -> None:
    """Do the work in this process, as a torchrun worker, or in new processes.

    With several processes, each finds their group with `find_group`. New ones run the same command
    line, and their exit code becomes that of this process.

    Raises:
        WorkerFailed: if a worker fails.
    """
    if workers in (None, 1) and not _is_launched():
        work()
        return
    from ckptool.tensors.storages import require_torch  # only several processes need torch

    require_torch()
    if _is_launched():
        from ckptool.trainer.launching import record_errors
        from ckptool.trainer.processes import connect_group

        end_with_parent()
        with (
            record_errors(describe_error),
            connect_group("ckptool", undone="no target was written") as ranks,
        ):
            click.get_current_context().meta[_GROUP_KEY] = ranks
            work()
    else:
        from ckptool.trainer.launching import launch

        set_exit_code(launch(click.get_current_context().meta[ARGUMENTS], nproc=workers or 1))


def end_with_parent(seconds: float = 0.5) -> None:
    """End this process soon after its launcher ended, even by `kill -9`.

    Unfinished files have a temporary name or a journal, so killing this process is safe.
    """
    launcher = os.getppid()

    def watch() -> None:
        """Wait until the launcher is gone, then end this process."""
        while os.getppid() == launcher:  # an orphan gets another parent
            time.sleep(seconds)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def find_group() -> WriterGroup | None:
    """Return the group of processes that execute this command, or None if it is one process.

    Raises:
        UsageError: if torchrun started a verb that runs in one process.
    """
    context = click.get_current_context()
    group: WriterGroup | None = context.meta.get(_GROUP_KEY)
    if group is None and _is_launched():
        raise UsageError(
            f"{context.info_name} runs in one process, but torchrun started "
            f"{os.environ['WORLD_SIZE']}",
            hint="run it without torchrun; only convert and cast can use several processes",
        )
    return group


def _is_launched() -> bool:
    """Return True if torchrun started this command, and not a script that calls it."""
    is_module = os.path.basename(sys.argv[0]) == "__main__.py"
    has_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_module and has_several and "TORCHELASTIC_RUN_ID" in os.environ
