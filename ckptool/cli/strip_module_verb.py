"""`ckptool strip-module`."""

from __future__ import annotations

import click

from ckptool.checkpoint import Change, Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import Target, completed_by, file_argument, target_options, verb
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
@click.option(
    "--only",
    multiple=True,
    metavar="WRAPPER",
    shell_complete=completed_by(lambda: WRAPPERS),
    help="Only this wrapper (module, _orig_mod, ...); repeatable. Default: all of them.",
)
@click.option("--levels", type=click.IntRange(min=1), help="At most so many levels.")
@click.option("--at", metavar="PATH", help="A wrapper on this submodule: features.")
@target_options()
def command(
    file: str, only: tuple[str, ...], levels: int | None, at: str | None, target: Target
) -> None:
    """Take wrapper names such as module. off the names.

    DataParallel and DistributedDataParallel put module. there, torch.compile _orig_mod., FSDP and
    others their own, in any order; all go. Every state dict is treated, with its _metadata and the
    optimizer state that is keyed by name. The result goes to FILE with .stripped before its
    ending.
    """

    def change(checkpoint: Checkpoint) -> Checkpoint:
        changed = strip_module(checkpoint, only=only or None, levels=levels, at=at)
        none = Change("warning", f"no {listed(only or ['wrapper'])} in the names")
        return changed if changed.changes else changed.with_root(changed.root, none)

    write_changed(file, change, target, word="stripped")
