"""The options that rename keys: `--rename`, `--rename-file` and `--prefix`, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckptool.cli.group import BriefHelpCommand
from ckptool.cli.options import PATH, Decorator, gather_options, repeatable
from ckptool.transforms import Rule, prefix_rule, read_map_file, regex_rule, table_rule

_ORDER = "ckptool.rename.order"
"""The key in a context's `meta` of the names of all options, in the order of the command line."""


class RulesInOrder(BriefHelpCommand):
    """A command that keeps the order of different options, which click does not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words twice, the first time to find the order of the options."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


_RULE_MAKERS: dict[str, Callable[[str], Rule]] = {
    "rename": regex_rule,
    "rename_file": lambda path: table_rule(read_map_file(path), path),
    "prefix": prefix_rule,
}
"""By option, the function that makes a rule of its text."""


def _make_rules(arguments: dict[str, Any]) -> list[Rule]:
    """Remove the renaming options from the arguments, and return their rules as typed.

    Click collects the texts of each option; `RulesInOrder` stored the order of all options.
    """
    texts_by_option = {name: iter(arguments.pop(name)) for name in _RULE_MAKERS}
    options_in_order = click.get_current_context().meta.get(_ORDER, ())
    return [
        _RULE_MAKERS[name](next(texts_by_option[name]))
        for name in options_in_order
        if name in _RULE_MAKERS
    ]


def rename_options(subject: str) -> Decorator:
    """Return the renaming options, which a `RulesInOrder` verb receives as `rules`."""
    return gather_options(
        "rules",
        _make_rules,
        repeatable(
            "--rename",
            "REGEX=>REPL",
            rf"Replace the matching part of {subject}. Groups are \1 or \g<name>. Repeatable.",
        ),
        repeatable(
            "--rename-file",
            "FILE",
            "Read whole old and new keys from a JSON object or a two-column file. Repeatable.",
            type=PATH,
        ),
        repeatable(
            "--prefix",
            "OLD=NEW",
            "Replace whole components at the start; model.= removes, =model. adds. Repeatable.",
        ),
    )
