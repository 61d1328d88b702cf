"""`ckptool strip-module`."""

from __future__ import annotations

import click

from ckptool.checkpoint import Change, Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import (
    Target,
    completed_by,
    file_argument,
    repeatable,
    target_options,
    verb,
)
from ckptool.names import WRAPPERS
from ckptool.transforms import strip_module
from ckptool.words import listed

__all__ = ["command"]


@verb(
    "strip-module",
    "ckptool strip-module model.pth",
    "ckptool strip-module model.pth -o plain.pth",
    "ckptool strip-module vgg.pth --at features",
)
@file_argument
@repeatable(
    "--only",
    "WRAPPER",
    "Remove only this wrapper (module, _orig_mod, ...); repeatable. Default: all.",
    shell_complete=completed_by(lambda: WRAPPERS),
)
@click.option("--levels", type=click.IntRange(min=1), help="Remove at most this many wrappers.")
@click.option("--at", metavar="PATH", help="Remove the wrapper of this submodule, as features.")
@target_options()
def command(
    file: str, only: tuple[str, ...], levels: int | None, at: str | None, target: Target
) -> None:
    """Remove wrapper prefixes such as "module." from names.

    DataParallel and DistributedDataParallel add "module.", torch.compile adds "_orig_mod.", FSDP
    and others add their own. All are removed, in whatever order, from every state dict of the
    file, its _metadata, and optimizer state that is keyed by name. The result of model.pth goes to
    model.stripped.pth.
    """

    def change(checkpoint: Checkpoint) -> Checkpoint:
        changed = strip_module(checkpoint, only=only or None, levels=levels, at=at)
        none = Change("warning", f"no name has the prefix {listed(only or ['of a wrapper'])}")
        return changed if changed.changes else changed.with_root(changed.root, none)

    write_changed(file, change, target, word="stripped")
