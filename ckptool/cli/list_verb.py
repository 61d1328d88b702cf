"""`ckptool list`."""

from __future__ import annotations

import os

from ckptool.cli.console import Screen, print_document, print_lines
from ckptool.cli.options import file_argument, filter_options, flag, screen_options, verb
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import build_tree, list_tensors
from ckptool.render.listing import listing_lines, name_lines, tree_lines
from ckptool.words import clean


@verb(
    "list",
    "ckptool list model.pth",
    "ckptool list model.pth --tree",
    "ckptool list model.pth --names",
    "ckptool list model.pth --include '*.weight' --json",
    "ckptool list model.pth --fmt markdown",
    problem="a NAME matches nothing",
)
@file_argument
@flag("--tree", "Show the module tree, with repeated layers folded.", "as_tree")
@flag("--names", "Print only the keys, one per line.")
@flag("--hash", "Show the SHA-256 of each tensor.", "hashed")
@filter_options
@screen_options(fmt=True)
def command(
    file: str,
    as_tree: bool,
    names: bool,
    hashed: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    screen: Screen,
) -> None:
    """List the tensors, values and objects in a checkpoint.

    Reads only the header, regardless of the size of the file. --hash reads the tensors as well.
    """
    if screen.fmt and as_tree:
        raise UsageError("--fmt and --tree cannot be combined")
    others = {"--tree": as_tree, "--hash": hashed, "--fmt": screen.fmt, "--json": screen.as_json}
    if names and (other := next((option for option, is_given in others.items() if is_given), None)):
        raise UsageError(f"--names and {other} cannot be combined")
    with open_checkpoint(file) as checkpoint, screen.progress() as progress:
        if os.path.isdir(file):
            from ckptool.inspection.neighbors import describe_neighbors  # slow

            screen.say(f"note: {clean(text)}" for text in describe_neighbors(checkpoint))
        listing = list_tensors(
            checkpoint, include=include, exclude=exclude, hash=hashed, progress=progress
        )
    screen.report_unmatched(listing.unmatched)
    if not (listing.tensors or listing.values or listing.objects or listing.unmatched):
        screen.note_if_filtered("no entry", include, exclude)
    if names:
        print_lines(name_lines(listing))
        return
    if not as_tree:
        screen.print(listing, listing_lines(listing, screen.look))
        return
    root = build_tree(listing)
    if screen.as_json:
        head = {"schema": "ckptool.tree/1", "file": listing.file, "format": listing.format}
        print_document({**head, "root": root.to_dict()})
    else:
        print_lines(tree_lines(root, screen.look))
