"""The verbs that edit a file: its names, device tags and unused bytes; and `recover`."""

from __future__ import annotations

import os

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.console import Screen
from ckptool.cli.options import (
    OutputOptions,
    completed_by,
    file_argument,
    flag,
    parsed_rules,
    repeatable,
    screen_options,
    target_options,
    verb,
    visible_option,
)
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.names import WRAPPERS
from ckptool.errors import UsageError
from ckptool.files.recovery import recover
from ckptool.render.receipt import recovery_lines
from ckptool.render.text import size
from ckptool.transforms import (
    Compact,
    Remap,
    Rename,
    Rule,
    Strip,
    Wrap,
)
from ckptool.words import clean, listed, shell


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
def strip_module_command(
    file: str, only: tuple[str, ...], levels: int | None, at: str | None, target: OutputOptions
) -> None:
    """Remove wrapper prefixes such as "module." from names.

    DataParallel and DistributedDataParallel add "module.", torch.compile adds "_orig_mod.", FSDP
    and others add their own. All are removed, in whatever order, from every state dict of the
    file, its _metadata, and optimizer state that is keyed by name. The result of model.pth goes to
    model.stripped.pth.
    """

    def change(checkpoint: Checkpoint) -> Checkpoint:
        changed = checkpoint.then(Strip(only or None, levels, at))
        if changed.changes:
            return changed
        prefixes = listed(f'"{one}."' for one in only)
        text = f"no key has the prefix {prefixes}" if only else "no key has a wrapper prefix"
        if at is None and "module" in (only or WRAPPERS) and (paths := _wrapped_parts(changed)):
            text += f'; "module." is inside {listed(paths, most=3)}, to remove it: '
            text += f"ckptool strip-module {shell(file)} --at {shell(paths[0])}"
        return changed.with_root(changed.root, Change("warning", text))

    write_changed(file, change, target, word="stripped")


def _wrapped_parts(checkpoint: Checkpoint) -> list[str]:
    """Return the submodules below which a wrapper of their own is in every key."""
    from ckptool.matching.align import wrapped_submodules  # only for a file without other wrappers

    models = (one for one in checkpoint.sections if one.kind == "state_dict")
    keys = (key for one in models for key in one.node if isinstance(key, str))
    return wrapped_submodules(keys)


@verb(
    "add-module",
    "ckptool add-module model.pth",
)
@file_argument
@click.option("--at", metavar="PATH", help="Wrap only this submodule, as features.")
@target_options()
def add_module_command(file: str, at: str | None, target: OutputOptions) -> None:
    """Add the prefix "module." to names, as DataParallel does.

    Every state dict of the file is changed, with its _metadata and optimizer state that is keyed
    by name. The result of model.pth goes to model.wrapped.pth.
    """
    write_changed(file, Wrap(at=at), target, word="wrapped")


@verb(
    "rename",
    "ckptool rename model.pth --prefix backbone=encoder",
    "ckptool rename model.pth --prefix model.=",
    r"ckptool rename model.pth --rename '\.gamma$=>.weight' --rename '\.beta$=>.bias'",
    "ckptool rename model.pth --rename-file names.json -o renamed.pth",
    cls=RulesInOrder,
)
@file_argument
@rename_options("a name")
@click.option("--key", metavar="NAME", help="Change only this state dict. Default: all of them.")
@target_options()
def rename_command(file: str, key: str | None, rules: list[Rule], target: OutputOptions) -> None:
    """Rename tensors by regular expressions, prefixes or a table.

    Rules are applied in the order in which they are given, each to the result of the one before.
    _metadata and optimizer state that is keyed by name follow. The result of model.pth goes to
    model.renamed.pth.
    """
    if not rules:
        raise UsageError(
            "rename takes at least one of --rename, --rename-file and --prefix",
            hint="ckptool rename FILE --prefix backbone=encoder",
        )
    write_changed(file, Rename(rules, key=key), target, word="renamed")


@verb(
    "remap",
    "ckptool remap --to cpu model.pth",
    "ckptool remap --map cuda:3=cuda:0 model.pth",
    "ckptool remap --map cuda:0=cuda:1 --map cuda:1=cuda:0 model.pth -o swapped.pth",
    "ckptool remap --visible-devices 0,2 model.pth",
)
@file_argument
@click.option("--to", "device", metavar="DEVICE", help="Move all tensors to it: cpu, cuda:0.")
@repeatable(
    "--map",
    "A=B",
    "Move tensors on device A to device B; cuda:* is any index. Repeatable, all at once.",
    "rules",
)
@visible_option
@target_options()
def remap_command(
    file: str,
    device: str | None,
    rules: tuple[str, ...],
    visible_devices: tuple[int, ...] | None,
    target: OutputOptions,
) -> None:
    """Change the devices that tensors are tagged with.

    Optimizer state and torch.device values are changed as well; the bytes of the tensors stay. The
    result loads with torch.load without map_location. With --to cpu the result of model.pth goes
    to model.cpu.pth, with --map to model.remapped.pth.
    """
    if sum(map(bool, (device is not None, rules, visible_devices is not None))) != 1:
        raise UsageError(
            "remap takes exactly one of --to, --map and --visible-devices",
            hint="ckptool remap --to cpu FILE",
        )
    step = Remap(device, parsed_rules(rules), visible_devices)
    write_changed(file, step, target, word=device.replace(":", "") if device else "remapped")


_NOTHING = Change("compact", "nothing to compact: tensors use every byte")


@verb(
    "compact",
    "ckptool compact model.pth",
    "ckptool compact --in-place model.pth",
    "ckptool compact --dry-run model.pth",
)
@file_argument
@target_options()
def compact_command(file: str, target: OutputOptions) -> None:
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
        found = checkpoint.then(Compact())
        return checkpoint.with_root(found.root, _NOTHING) if found is checkpoint else found

    receipt = write_changed(file, change, target, word="compact", rewrite=True)
    after = f"{clean(os.path.basename(receipt.path))} {size(receipt.size)}"
    target.screen.say([f"{clean(os.path.basename(file))} {size(before)}, {after}"])


@verb(
    "recover",
    "ckptool recover model.pth",
    "ckptool recover --discard model.pth",
)
@file_argument
@flag("--discard", "Only remove the journal; leave FILE as it is now.")
@flag("--force", "Roll back a file that was copied or moved together with its journal.")
@screen_options()
def recover_command(file: str, discard: bool, force: bool, screen: Screen) -> None:
    """Roll back an edit in place that was killed.

    An edit in place first saves the old bytes in a journal next to the file,
    .FILE.ckptool-journal. If the edit was cut short, recover writes them back; if it was complete,
    the file stays. Every ckptool command that opens the file does the same first. If FILE is not
    the file that the journal belongs to, recover stops with an error and changes nothing;
    --discard then removes the journal.
    """
    done = recover(file, discard=discard, force=force)
    screen.tell(done, recovery_lines(done))
