"""`ckptool compact`."""

from __future__ import annotations

import os

from ckptool.checkpoint import Change, Checkpoint
from ckptool.cli.changing import write_changed
from ckptool.cli.options import Target, file_argument, target_options, verb
from ckptool.render.text import size
from ckptool.transforms import compact
from ckptool.words import clean

__all__ = ["command"]

_NOTHING = Change("compact", "nothing to compact: tensors use every byte")


@verb(
    "compact",
    "ckptool compact model.pth",
    "ckptool compact --in-place model.pth",
    "ckptool compact --dry-run model.pth",
)
@file_argument
@target_options()
def command(file: str, target: Target) -> None:
    """Drop bytes that no tensor uses.

    torch.save writes the whole storage of a tensor, even if the tensor is a small view of it:
    big[:10] takes as much space as big. compact trims each storage to the part that tensors use,
    and drops the dead bytes that edits in place leave behind. Tensors that share bytes still share
    them. The result of model.pth goes to model.compact.pth.
    """
    before = 0

    def change(checkpoint: Checkpoint) -> Checkpoint:
        nonlocal before
        before = checkpoint.details.size
        found = compact(checkpoint)
        return checkpoint.with_root(found.root, _NOTHING) if found is checkpoint else found

    receipt = write_changed(file, change, target, word="compact", rewrite=True)
    after = f"{clean(os.path.basename(receipt.path))} {size(receipt.size)}"
    target.screen.say([f"{clean(os.path.basename(file))} {size(before)}, {after}"])
