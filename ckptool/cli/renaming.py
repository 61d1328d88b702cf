"""Rules for keys, as options: `--rename`, `--rename-file`, `--prefix`, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from ckptool.cli.options import PATH, Decorator, gathered, repeatable
from ckptool.transforms import Rule, prefix_rule, read_map_file, regex_rule, table_rule

_ORDER = "ckptool.rename.order"


class RulesInOrder(click.Command):
    """A command that keeps the order of options of different names, which click does not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words twice, the first time for the order."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


_MADE: dict[str, Callable[[str], Rule]] = {
    "rename": regex_rule,
    "rename_file": lambda path: table_rule(read_map_file(path), path),
    "prefix": prefix_rule,
}


def _rules(given: dict[str, Any]) -> list[Rule]:
    texts: dict[str, Iterable[str]] = {name: iter(given.pop(name)) for name in _MADE}
    order = click.get_current_context().meta.get(_ORDER, ())
    return [_MADE[name](next(iter(texts[name]))) for name in order if name in _MADE]


def rename_options(what: str) -> Decorator:
    """Return the options about new keys, which a verb that is `RulesInOrder` gets as `rules`."""
    return gathered(
        "rules",
        _rules,
        repeatable(
            "--rename",
            "REGEX=>REPL",
            rf"Replace the part of {what} that matches; groups are \1 or \g<name>. Repeatable.",
        ),
        repeatable(
            "--rename-file",
            "FILE",
            "Read old and new names, whole, from a JSON object or two columns. Repeatable.",
            type=PATH,
        ),
        repeatable(
            "--prefix",
            "OLD=NEW",
            "Replace whole components at the front; model.= removes, =model. adds. Repeatable.",
        ),
    )
