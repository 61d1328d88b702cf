"""The verbs that edit the keys, devices and unused bytes of a file; and `recover`."""

from __future__ import annotations

import os

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.console import Screen
from ckptool.cli.options import (
    OutputOptions,
    complete_with,
    file_argument,
    flag,
    parse_device_rules,
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
from ckptool.render.text import format_size
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
    "Remove only this wrapper, for example module or _orig_mod. Repeatable. [default: all]",
    shell_complete=complete_with(lambda: WRAPPERS),
)
@click.option(
    "--levels", type=click.IntRange(min=1), help="Remove at most this many wrapper prefixes."
)
@click.option(
    "--at",
    metavar="PATH",
    help="Remove the wrapper prefix inside this submodule, for example features.",
)
@target_options()
def strip_module_command(
    file: str, only: tuple[str, ...], levels: int | None, at: str | None, target: OutputOptions
) -> None:
    """Remove wrapper prefixes such as "module." from keys.

    DataParallel and DistributedDataParallel add "module.", torch.compile adds "_orig_mod.", and
    FSDP and others add their own. All are removed, in any order, from every state dict in the file,
    from its _metadata and from optimizer state keyed by parameter. Writes model.stripped.pth.
    """

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Remove the prefixes; warn if no key has one."""
        changed = checkpoint.then(Strip(only or None, levels, at))
        if changed.changes:
            return changed
        prefixes = listed(f'"{wrapper}."' for wrapper in only)
        text = f"no key has the prefix {prefixes}" if only else "no key has a wrapper prefix"
        if (
            at is None
            and "module" in (only or WRAPPERS)
            and (paths := _find_wrapped_submodules(changed))
        ):
            text += f'; "module." is inside {listed(paths, most=3)}, to remove it: '
            text += f"ckptool strip-module {shell(file)} --at {shell(paths[0])}"
        return changed.with_root(changed.root, Change("warning", text))

    write_changed(file, change, target, word="stripped")


def _find_wrapped_submodules(checkpoint: Checkpoint) -> list[str]:
    """Return the submodules with a wrapper prefix of their own in every key."""
    from ckptool.matching.align import find_wrapped_submodules  # rarely needed

    models = (section for section in checkpoint.sections if section.kind == "state_dict")
    keys = (key for model in models for key in model.node if isinstance(key, str))
    return find_wrapped_submodules(keys)


@verb(
    "add-module",
    "ckptool add-module model.pth",
)
@file_argument
@click.option(
    "--at", metavar="PATH", help="Add the prefix inside this submodule only, for example features."
)
@target_options()
def add_module_command(file: str, at: str | None, target: OutputOptions) -> None:
    """Add the prefix "module." to keys, as DataParallel does.

    Changes every state dict in the file, its _metadata and optimizer state keyed by parameter.
    Writes model.wrapped.pth.
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
@rename_options("a key")
@click.option("--key", metavar="NAME", help="Change only this state dict. [default: all]")
@target_options()
def rename_command(file: str, key: str | None, rules: list[Rule], target: OutputOptions) -> None:
    """Rename keys by regular expression, prefix or table.

    Rules apply in the given order, each to the result of the previous one. _metadata and optimizer
    state keyed by parameter are renamed as well. Writes model.renamed.pth.
    """
    if not rules:
        raise UsageError(
            "rename needs --rename, --rename-file or --prefix",
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
@click.option(
    "--to", "device", metavar="DEVICE", help="Move every tensor to DEVICE, for example cpu."
)
@repeatable(
    "--map",
    "A=B",
    "Move tensors from device A to B; cuda:* matches every index. Repeatable; all moves happen at "
    "once.",
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
    """Change the devices that tensors load onto.

    Optimizer state and torch.device values change as well; tensor data does not. The result loads
    with torch.load without map_location. --to cpu writes model.cpu.pth; --map writes
    model.remapped.pth.
    """
    if sum(map(bool, (device is not None, rules, visible_devices is not None))) != 1:
        raise UsageError(
            "remap needs exactly one of --to, --map and --visible-devices",
            hint="ckptool remap --to cpu FILE",
        )
    step = Remap(device, parse_device_rules(rules), visible_devices)
    write_changed(file, step, target, word=device.replace(":", "") if device else "remapped")


_ALL_USED = Change("compact", "nothing to compact: every byte is used")


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

    torch.save writes the whole storage of a tensor, even for a small view: big[:10] takes as much
    space as big. compact trims each storage to the bytes that tensors use, and drops bytes left
    over from in-place edits. Tensors that share a storage still share it. Writes model.compact.pth.
    """
    before = 0

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Remember the old size, and drop unused bytes."""
        nonlocal before
        before = checkpoint.details.size
        changed = checkpoint.then(Compact())
        return checkpoint.with_root(changed.root, _ALL_USED) if changed is checkpoint else changed

    receipt = write_changed(file, change, target, word="compact", rewrite=True)
    after = f"{clean(os.path.basename(receipt.path))} {format_size(receipt.size)}"
    target.screen.say([f"{clean(os.path.basename(file))} {format_size(before)}, {after}"])


@verb(
    "recover",
    "ckptool recover model.pth",
    "ckptool recover --discard model.pth",
)
@file_argument
@flag("--discard", "Remove the journal without changing FILE.")
@flag("--force", "Roll back even if the file was copied or moved together with its journal.")
@screen_options()
def recover_command(file: str, discard: bool, force: bool, screen: Screen) -> None:
    """Roll back an interrupted in-place edit.

    An in-place edit first saves the old bytes in a journal next to the file,
    .FILE.ckptool-journal. If the edit was interrupted, recover writes them back; if it was
    complete, the file is unchanged. Every ckptool command that opens the file does this first. If
    the journal belongs to another file, recover stops with an error and changes nothing; remove
    the journal with --discard.
    """
    recovery = recover(file, discard=discard, force=force)
    screen.print_receipt(recovery, recovery_lines(recovery))
