"""`ckptool rename`."""

from __future__ import annotations

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.options import PATH, Target, file_argument, repeatable, target_options, verb
from ckptool.errors import UsageError
from ckptool.transforms import prefix_rule, read_map_file, regex_rule, rename, table_rule

__all__ = ["command"]

_ORDER = "ckptool.rename.order"


class _InOrder(click.Command):
    """A command that keeps the order of options of different names, which click does not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words twice, the first time for the order."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


@verb(
    "rename",
    "ckptool rename model.pth --prefix backbone=encoder",
    "ckptool rename model.pth --prefix model.=",
    r"ckptool rename model.pth --map '\.gamma$=>.weight' --map '\.beta$=>.bias'",
    "ckptool rename model.pth --map-file names.json -o renamed.pth",
    cls=_InOrder,
)
@file_argument
@repeatable(
    "--map",
    "REGEX=>REPL",
    r"Replace the part of a name that matches; groups are \1 or \g<name>. Repeatable.",
    "regexes",
)
@repeatable(
    "--map-file",
    "FILE",
    "Read old and new names, whole, from a JSON object or two columns. Repeatable.",
    "files",
    type=PATH,
)
@repeatable(
    "--prefix",
    "OLD=NEW",
    "Replace whole components at the front; model.= removes, =model. adds. Repeatable.",
    "prefixes",
)
@click.option("--key", metavar="NAME", help="Change only this state dict. Default: all of them.")
@target_options()
@click.pass_context
def command(
    context: click.Context,
    file: str,
    regexes: tuple[str, ...],
    files: tuple[str, ...],
    prefixes: tuple[str, ...],
    key: str | None,
    target: Target,
) -> None:
    """Rename tensors by regular expressions, prefixes or a table.

    Rules are applied in the order in which they are given, each to the result of the one before.
    _metadata and optimizer state that is keyed by name follow. The result of model.pth goes to
    model.renamed.pth.
    """
    rules = {
        "regexes": map(regex_rule, regexes),
        "files": (table_rule(read_map_file(path), path) for path in files),
        "prefixes": map(prefix_rule, prefixes),
    }
    ordered = [next(rules[name]) for name in context.meta[_ORDER] if name in rules]
    if not ordered:
        raise UsageError(
            "rename takes at least one of --map, --map-file and --prefix",
            hint="ckptool rename FILE --prefix backbone=encoder",
        )
    write_changed(file, lambda found: rename(found, ordered, key=key), target, word="renamed")
