"""What every verb that writes does: open, change, save, say."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptool.checkpoint import Checkpoint
from ckptool.cli.console import print_document, say
from ckptool.cli.options import Target
from ckptool.cli.progress import Progress
from ckptool.cli.targets import default_target
from ckptool.errors import TargetExists, UsageError
from ckptool.formats import open_checkpoint
from ckptool.render.receipt import receipt_document, receipt_lines
from ckptool.writing import Receipt, save
from ckptool.writing.sharding import SHARD_FORMATS

__all__ = ["write_changed"]


def write_changed(
    source: str,
    change: Callable[[Checkpoint], Checkpoint],
    target: Target,
    *,
    word: str,
    strict: bool = False,
    rewrite: bool = False,
    max_shard_size: str | None = None,
) -> Receipt:
    """Open `source`, `change` it, write it where `target` says, and tell what happened.

    `word` names the target where the user does not: `model.stripped.pth`.

    Raises:
        UsageError: both `--output` and `--in-place`; or neither, and the source is in shards.
        TargetExists: `--in-place` through a link, without `--force`.
        CheckpointError: whatever opening, changing or writing meets.
    """
    chosen = _chosen(source, target)
    with open_checkpoint(source) as checkpoint, Progress(quiet=target.quiet) as progress:
        sharded = checkpoint.format in SHARD_FORMATS
        if target.in_place and sharded:
            chosen = checkpoint.path  # of a folder, the index in it
        path = chosen or default_target(source, word, target.format, sharded=sharded)
        changed = change(checkpoint)
        receipt = save(
            changed,
            path,
            format=target.format,
            overwrite=target.force,
            in_place=target.in_place,
            rewrite=rewrite,
            strict=strict,
            max_shard_size=max_shard_size,
            dry_run=target.dry_run,
            verify=target.verify,
            progress=progress,
        )
    facts = (source, changed.changes, receipt)
    say(receipt_lines(*facts), quiet=target.quiet)
    if target.as_json:
        print_document(receipt_document(*facts))
    return receipt


def _chosen(source: str, target: Target) -> str | None:
    """The target, where the user has said which."""
    if target.output is not None and target.in_place:
        raise UsageError("--output and --in-place exclude each other", hint="give one of them")
    if target.in_place:
        _refuse_link(source, force=target.force)
        return source
    return target.output


def _refuse_link(path: str, *, force: bool) -> None:
    """Refuse to edit in place what other names lead to as well."""
    if force or not os.path.lexists(path):
        return
    if os.path.islink(path):
        raise TargetExists(
            f"is a link to {os.path.realpath(path)}",
            file=path,
            hint="--force edits what it leads to",
        )
    if os.stat(path).st_nlink > 1 and not os.path.isdir(path):
        raise TargetExists(
            "has several links, and the others would keep the old content",
            file=path,
            hint="--force replaces this one",
        )
