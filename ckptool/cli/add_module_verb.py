"""`ckptool add-module`."""

from __future__ import annotations

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.options import Target, file_argument, target_options, verb
from ckptool.transforms import add_module

__all__ = ["command"]


@verb(
    "add-module",
    "ckptool add-module model.pth",
)
@file_argument
@click.option("--at", metavar="PATH", help="Wrap only this submodule, as features.")
@target_options()
def command(file: str, at: str | None, target: Target) -> None:
    """Add the prefix "module." to names, as DataParallel does.

    Every state dict of the file is changed, with its _metadata and optimizer state that is keyed
    by name. The result of model.pth goes to model.wrapped.pth.
    """
    write_changed(file, lambda found: add_module(found, at=at), target, word="wrapped")
