"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from ckptool.cli.console import Screen
from ckptool.errors import UsageError
from ckptool.formats import WRITABLE
from ckptool.render.table import known_format, known_formats

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH = click.Path(readable=False)
"""The type of a file name; the code that opens the file reports whether it can be read."""
file_argument = click.argument("file", type=PATH)


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A tuple of words or numbers, which are separated by commas."""

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
        """Return the parts of a text; a default is a tuple already."""
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
    """Return an option that may be given several times."""
    return click.option(option, *names, multiple=True, metavar=metavar, help=help, **more)


def completed_by(words: Callable[[], Iterable[str]]) -> Any:
    """Return a `shell_complete` that offers `words()`, which is called only for the Tab key."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _floating_types() -> Iterable[str]:
    from ckptool.transforms.casting import FLOATING

    return FLOATING


def dtype_option(option: str, help: str) -> Decorator:
    """Return an option whose value is a floating-point type."""
    complete = completed_by(_floating_types)
    return click.option(option, metavar="DTYPE", shell_complete=complete, help=help)


def verb(
    name: str,
    *examples: str,
    finding: str = "",
    ended: str = "130 interrupted",
    cls: type[click.Command] = click.Command,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator for a command whose help ends with examples and exit codes.

    `finding` is the meaning of exit code 1, `ended` the exit codes after a signal.
    """
    title = "Examples" if len(examples) > 1 else "Example"
    shown = "\n".join(f"  {example}" for example in examples)
    found = f", 1 {finding}" if finding else ""
    codes = f"Exit codes: 0 fine{found}, 2 an error or wrong usage, {ended}."
    epilog = f"\b\n{title}:\n{shown}\n\n{codes}"  # click wraps no paragraph that \b begins
    return click.command(name, cls=cls, epilog=epilog)


EVERY_OPTION = "ckptool.help_all"
"""In the meta of a context: the help has every option."""


def _help_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        context.meta[EVERY_OPTION] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class Brief(click.Command):
    """A command with many options: `--help` lists those that people use, `--help-all` each."""

    most_used: frozenset[str] = frozenset()
    """The names of the options on the short page."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; while the short help is made, without the options that wait."""
        params = super().get_params(ctx)
        params.insert(
            -1,
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="Show every option and exit.",
            ),
        )
        return params

    def shown(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters that the help lists."""
        every = self.get_params(ctx)
        if ctx.meta.get(EVERY_OPTION) or not self.most_used:
            return every
        names = {*self.most_used, "help_all", every[-1].name}  # click's own --help is the last
        return [one for one in every if one.name in names]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options."""
        rows = [row for one in self.shown(ctx) if (row := one.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(rows)


class Sectioned(Brief):
    """A command with sections in its help."""

    begins: Mapping[str, str]
    """The section that begins, or continues, with an option of this name."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options, section by section."""
        title, sections = "", dict[str, list[tuple[str, str]]]()
        shown = {option.name for option in self.shown(ctx)}
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
    """The options about the file to write."""

    output: str | None
    force: bool
    dry_run: bool
    format: str | None
    verify: bool | None
    screen: Screen
    in_place: bool = False


def together(*options: Callable[[Any], Any]) -> Decorator:
    """Return one decorator for several options, in the order of the help."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_fmt_option = click.option(
    "--fmt",
    metavar="FORMAT",
    callback=lambda ctx, _, word: (
        None if word is None or ctx.resilient_parsing else known_format(word)
    ),
    shell_complete=completed_by(known_formats),
    help="Print only the tables, unshortened, as markdown, csv, html, latex, rst or another "
    "format of tabulate.",
)


_SCREEN_OPTIONS = (
    flag("--json", "Print one JSON document (docs/json.md).", "as_json"),
    flag("-q", "No messages and no progress on stderr.", "--quiet"),
)


def gathered(
    name: str, make: Callable[[dict[str, Any]], Any], *options: Callable[[Any], Any]
) -> Decorator:
    """Return a decorator for options that the verb gets as one argument `name`.

    `make` takes them out of all arguments, and returns the value of the one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(**given: Any) -> Any:
            return function(**{name: make(given)}, **given)  # the rest, after `make`

        return together(*options)(call)

    return decorate


def _screen(given: dict[str, Any]) -> Screen:
    screen = Screen(given.pop("as_json"), given.pop("quiet"), given.pop("fmt", None))
    if screen.fmt and screen.as_json:
        raise UsageError("--fmt and --json cannot be combined")
    return screen


def screen_options(*, fmt: bool = False) -> Decorator:
    """Return the options about output, which the verb gets as one `screen`."""
    return gathered("screen", _screen, *([_fmt_option] if fmt else []), *_SCREEN_OPTIONS)


def _globs(include: str, exclude: str, names: str) -> Decorator:
    return together(
        repeatable(
            "--include",
            "NAME",
            f"{include}. NAME is {names}, or a glob of whole keys (with a /: of whole paths); "
            "wrapper prefixes are ignored. Repeatable.",
        ),
        repeatable("--exclude", "NAME", f"{exclude} Repeatable."),
    )


filter_options = _globs(
    "Show only what matches", "Hide what matches.", "a path, a key or the end of a path"
)

glob_options = together(
    _globs("Take only tensors that match", "Leave out tensors that match.", "a path or a key"),
    flag(
        "--model-only",
        "Take only the state dict of the model; a pickled module becomes a state dict.",
    ),
)

output_option = click.option("-o", "--output", type=PATH, required=True, help="File to write.")

shard_option = click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Split a larger result into files of SIZE (5GB) and an index.",
)

visible_option = click.option(
    "--visible-devices",
    metavar="LIST",
    type=Listed(int),
    help="Renumber as CUDA_VISIBLE_DEVICES=LIST does: with 0,2 the GPU 2 becomes cuda:1.",
)

quantized_options = together(
    dtype_option("--dequantize", "Make plain numbers of type DTYPE of quantized weights."),
    flag("--raw", "Cast quantized values without their scales."),
)

master_option = flag("--master", "Take the fp32 master weights of DeepSpeed's optimizer.")

plain_options = together(
    flag(
        "--plain",
        "Turn objects into data that weights_only=True loads; where that is not possible, "
        "stop with an error.",
    ),
    flag(
        "--drop-objects",
        "Drop all objects; with --plain, only those that cannot be turned into data.",
    ),
)

_TARGET_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    flag("--force", "Overwrite an existing target, or edit through a link."),
    flag("--dry-run", "Print what would be written, write nothing."),
    click.option(
        "--format",
        type=click.Choice(WRITABLE),
        help="Format to write, whatever the name ends in.",
    ),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Read the result back and compare it [default: only if tensors are computed].",
    ),
    screen_options(),
)
_PLACE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("-o", "--output", type=PATH, help="File to write (default: beside the source)."),
    flag("--in-place", "Change FILE itself, under a journal."),
)
_DESTINATION = click.argument("destination", type=PATH, required=False)


def _new_file(destination: str, output: str | None, in_place: bool) -> str:
    """Return the second file, unless the user may want to change it as well."""
    if output is not None or in_place:
        raise UsageError(
            f"the result has two targets: {destination}, and that of -o or --in-place",
            hint="give one of them; a command changes one file",
        )
    if os.path.lexists(destination):
        raise UsageError(
            f"the file to write, {destination}, already exists",
            hint=f"-o {destination} --force overwrites it; a command changes one file",
        )
    return destination


def _target(given: dict[str, Any]) -> OutputOptions:
    if (destination := given.pop("destination", None)) is not None:
        given["output"] = _new_file(destination, given["output"], given["in_place"])
    names = given.keys() & OutputOptions.__dataclass_fields__
    return OutputOptions(**{name: given.pop(name) for name in names})


def target_options(*, place: bool = True) -> Decorator:
    """Return the options of a verb that writes, which the verb gets as one `target`.

    `place` adds -o, --in-place and a second argument, a file to write that does not exist.
    """
    chosen = (_DESTINATION, *_PLACE_OPTIONS, *_TARGET_OPTIONS) if place else _TARGET_OPTIONS
    return gathered("target", _target, *chosen)


def parsed_rules(rules: Sequence[str]) -> dict[str, str]:
    """Return a mapping of A to B for rules `A=B`.

    Raises:
        UsageError: a rule is not `A=B`, or a device has two rules.
    """
    mapping: dict[str, str] = {}
    for rule in rules:
        source, _, target = (part.strip() for part in rule.partition("="))
        if not (source and target):
            raise UsageError(f"{rule!r} is not a rule A=B", hint="for example cuda:3=cuda:0")
        if mapping.setdefault(source, target) != target:
            raise UsageError(
                f"there are two rules for {source!r}: to {mapping[source]!r} and to {target!r}",
                hint="keep one of them",
            )
    return mapping
