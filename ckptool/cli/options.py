"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from ckptool.cli.console import Screen
from ckptool.cli.group import BriefHelpCommand
from ckptool.errors import UsageError
from ckptool.formats import WRITABLE
from ckptool.render.table import list_formats, resolve_format

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH = click.Path(readable=False)
"""The type of a file name. The code that opens the file checks that it can be read."""
file_argument = click.argument("file", type=PATH)


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A tuple of comma-separated words or numbers."""

    def __init__(self, kind: type[int] | type[float] | type[str]) -> None:
        """Convert each part to `kind`."""
        self._kind = kind
        self.name, self._example = {
            int: ("integers", "0,1"),
            float: ("numbers", "0.7,0.3"),
            str: ("words", "cuda:0,cuda:1"),
        }[kind]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Return the parts of a text. A default is already a tuple."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")] if value.strip() else []
        try:
            if "" in words:
                raise ValueError
            return tuple(map(self._kind, words))
        except ValueError:
            self.fail(f"{value!r} is not a list such as {self._example}", param, ctx)


def flag(option: str, help: str, *names: str) -> Decorator:
    """Return an option without a value."""
    return click.option(option, *names, is_flag=True, help=help)


def repeatable(option: str, metavar: str, help: str, *names: str, **more: Any) -> Decorator:
    """Return an option that can be repeated."""
    return click.option(option, *names, multiple=True, metavar=metavar, help=help, **more)


def complete_with(words: Callable[[], Iterable[str]]) -> Any:
    """Return a `shell_complete` that offers `words()`, called only when Tab is pressed."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        """Return the words that begin with the text that was typed so far."""
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _list_floating_types() -> Iterable[str]:
    """Return the floating-point dtypes; imported only when Tab is pressed."""
    from ckptool.transforms.casting import FLOATING

    return FLOATING


def dtype_option(option: str, help: str) -> Decorator:
    """Return an option with a floating-point dtype as its value."""
    complete = complete_with(_list_floating_types)
    return click.option(option, metavar="DTYPE", shell_complete=complete, help=help)


def verb(
    name: str,
    *examples: str,
    problem: str = "",
    interrupted: str = "130 interrupted",
    cls: type[click.Command] = BriefHelpCommand,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator for a command with examples and exit codes in its help.

    `problem` is the meaning of exit code 1, `interrupted` the exit codes after a signal, `cls` the
    class of the command.
    """
    title = "Examples" if len(examples) > 1 else "Example"
    shown = "\n".join(f"  {example}" for example in examples)
    code_1 = f", 1 {problem}" if problem else ""
    codes = f"Exit codes: 0 success{code_1}, 2 error or wrong usage, {interrupted}."
    epilog = f"\b\n{title}:\n{shown}\n\n{codes}"  # click does not wrap a paragraph after \b
    return click.command(name, cls=cls, epilog=epilog)


EVERY_OPTION = "ckptool.help_all"
"""The key in a context's `meta` that makes the help list every option."""


def _show_all_help(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    """Print the help with all options, and exit."""
    if is_given and not context.resilient_parsing:  # True while a shell completes a word
        context.meta[EVERY_OPTION] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class Brief(BriefHelpCommand):
    """A command with many options: `--help` lists the common ones, `--help-all` every one."""

    most_used: frozenset[str] = frozenset()
    """The names of the options in the short help."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with --help-all before --help."""
        params = super().get_params(ctx)
        params.insert(
            -1,
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all_help,
                help="Show every option.",
            ),
        )
        return params

    def list_shown_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters that the help lists."""
        params = self.get_params(ctx)
        if ctx.meta.get(EVERY_OPTION) or not self.most_used:
            return params
        names = {*self.most_used, "help_all", params[-1].name}  # click's --help is last
        return [param for param in params if param.name in names]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options."""
        rows = [
            row
            for param in self.list_shown_params(ctx)
            if (row := param.get_help_record(ctx)) is not None
        ]
        with formatter.section("Options"):
            formatter.write_dl(rows)


class Sectioned(Brief):
    """A command with sections in its help."""

    begins: Mapping[str, str]
    """The title of the section that starts, or continues, at the option with this name."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options, section by section.

        An option in `begins` begins the section of that title; any other stays in the current one.
        """
        title, sections = "", dict[str, list[tuple[str, str]]]()
        shown = {option.name for option in self.list_shown_params(ctx)}
        for option in self.get_params(ctx):
            title = self.begins.get(option.name or "", title)
            row = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if row is not None and option.name in shown:
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options of the file to write."""

    output: str | None
    force: bool
    dry_run: bool
    format: str | None
    verify: bool | None
    screen: Screen
    in_place: bool = False


def combine_options(*options: Callable[[Any], Any]) -> Decorator:
    """Return one decorator for several options, in the order of the help."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the options, the last one first."""
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_fmt_option = click.option(
    "--fmt",
    metavar="FORMAT",
    callback=lambda ctx, _, word: (
        None if word is None or ctx.resilient_parsing else resolve_format(word)
    ),
    shell_complete=complete_with(list_formats),
    help="Print only the tables, in full, as markdown, csv, html, latex, rst or another tabulate "
    "format.",
)


_SCREEN_OPTIONS = (
    flag("--json", "Print the result as JSON (docs/json.md).", "as_json"),
    flag("-q", "Hide messages and the progress bar.", "--quiet"),
)


def gather_options(
    name: str, make: Callable[[dict[str, Any]], Any], *options: Callable[[Any], Any]
) -> Decorator:
    """Return a decorator that passes several options to the verb as one argument `name`.

    `make` removes them from the arguments, and returns the value to pass.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        """Add the options, and replace them by one argument when the verb is called."""

        @wraps(function)
        def call(**arguments: Any) -> Any:
            """Call the verb with the value, and with the other arguments."""
            value = make(arguments)  # which removes its options
            return function(**{name: value}, **arguments)

        return combine_options(*options)(call)

    return decorate


def _make_screen(arguments: dict[str, Any]) -> Screen:
    """Remove the output options from the arguments, and return them as a `Screen`."""
    screen = Screen(arguments.pop("as_json"), arguments.pop("quiet"), arguments.pop("fmt", None))
    if screen.fmt and screen.as_json:
        raise UsageError("--fmt and --json cannot be combined")
    return screen


def screen_options(*, fmt: bool = False) -> Decorator:
    """Return the output options, which the verb receives as one `screen`."""
    return gather_options("screen", _make_screen, *([_fmt_option] if fmt else []), *_SCREEN_OPTIONS)


def _make_glob_options(include: str, exclude: str, patterns: str) -> Decorator:
    """Return --include and --exclude, with these words in their help."""
    return combine_options(
        repeatable(
            "--include",
            "NAME",
            f"{include} that match NAME: {patterns} or a glob. A glob matches whole keys, or "
            "whole paths if it contains a /. Wrapper prefixes are ignored. Repeatable.",
        ),
        repeatable("--exclude", "NAME", f"{exclude} that match NAME. Repeatable."),
    )


filter_options = _make_glob_options(
    "Show only entries", "Hide entries", "a path, a key, the end of a path"
)

glob_options = combine_options(
    _make_glob_options("Take only tensors", "Leave out tensors", "a path, a key"),
    flag(
        "--model-only",
        "Take only the model's state dict; convert a pickled module to one.",
    ),
)

output_option = click.option("-o", "--output", type=PATH, required=True, help="Write to this file.")

shard_option = click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Split the result into shards of at most SIZE, for example 5GB, and an index.",
)

visible_option = click.option(
    "--visible-devices",
    metavar="LIST",
    type=Listed(int),
    help="Renumber GPUs as CUDA_VISIBLE_DEVICES=LIST does: with 0,2, GPU 2 becomes cuda:1.",
)

quantized_options = combine_options(
    dtype_option("--dequantize", "Convert quantized weights to plain DTYPE tensors."),
    flag("--raw", "Cast quantized values without applying their scales."),
)

master_option = flag("--master", "Take the fp32 master weights from a DeepSpeed optimizer.")

plain_options = combine_options(
    flag(
        "--plain",
        "Convert objects to data that weights_only=True accepts; stop if one cannot be converted.",
    ),
    flag(
        "--drop-objects",
        "Drop all objects; with --plain, only the ones that cannot be converted.",
    ),
)

_TARGET_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    flag("--force", "Replace an existing target, or edit through a link."),
    flag("--dry-run", "Show what would be written without writing it."),
    click.option(
        "--format",
        type=click.Choice(WRITABLE),
        help="Write this format, regardless of the extension.",
    ),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Read the result back and compare it. [default: only if tensors are computed]",
    ),
    screen_options(),
)
_PLACE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("-o", "--output", type=PATH, help="Write to this file. [default: next to FILE]"),
    flag("--in-place", "Change FILE itself; recover undoes an interrupted edit."),
)
_DESTINATION = click.argument("destination", type=PATH, required=False)


def _require_new_file(destination: str, output: str | None, in_place: bool) -> str:
    """Return the second file as the target, unless the user may have meant to change it too.

    Raises:
        UsageError: if another target is given, or the file exists.
    """
    if output is not None or in_place:
        raise UsageError(
            f"two targets are given: {destination}, and -o or --in-place",
            hint="give one target; each command changes one file",
        )
    if os.path.lexists(destination):
        raise UsageError(
            f"the target {destination} already exists",
            hint=f"use -o {destination} --force to replace it; each command changes one file",
        )
    return destination


def _make_output_options(arguments: dict[str, Any]) -> OutputOptions:
    """Remove the target options from the arguments, and return them as `OutputOptions`."""
    if (destination := arguments.pop("destination", None)) is not None:  # a target without -o
        arguments["output"] = _require_new_file(
            destination, arguments["output"], arguments["in_place"]
        )
    names = arguments.keys() & OutputOptions.__dataclass_fields__
    return OutputOptions(**{name: arguments.pop(name) for name in names})


def target_options(*, place: bool = True) -> Decorator:
    """Return the options of a verb that writes, which the verb receives as one `target`.

    `place` adds -o, --in-place and a second argument, a file to write that does not exist yet.
    """
    options = (_DESTINATION, *_PLACE_OPTIONS, *_TARGET_OPTIONS) if place else _TARGET_OPTIONS
    return gather_options("target", _make_output_options, *options)


def parse_device_rules(rules: Sequence[str]) -> dict[str, str]:
    """Return rules `A=B` as a mapping.

    Raises:
        UsageError: if a rule is not `A=B`, or a device has two rules.
    """
    mapping: dict[str, str] = {}
    for rule in rules:
        source, _, target = (part.strip() for part in rule.partition("="))
        if not (source and target):
            raise UsageError(
                f"{rule!r} is not a rule A=B", hint="give a rule such as cuda:3=cuda:0"
            )
        if mapping.setdefault(source, target) != target:
            raise UsageError(
                f"{source!r} has two rules: to {mapping[source]!r} and to {target!r}",
                hint="keep one of them",
            )
    return mapping
