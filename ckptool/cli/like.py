"""Options about a model: `--like module:factory`, `--allow-missing` and its like.

Only the command line takes `module:factory`; the functions of the library do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptool.cli.options import Decorator, repeatable, together
from ckptool.errors import FileMissing, MatchError, UsageError
from ckptool.factories import FACTORY, HINT, at_home, is_model, named, run
from ckptool.loading.target import on_meta
from ckptool.remedies import Remedy
from ckptool.transforms import regex_rule
from ckptool.words import a_class, printable

_EVERY = "*"
_GLOB = "*?["
_WORDS = {
    "allow_missing": "Tensors of the model that may be missing from the file.",
    "allow_unexpected": "Tensors of the file that may be left out.",
    "allow_mismatched": "Tensors that may differ in shape; the model keeps its own.",
    "allow_lossy_cast": "Tensors whose values a cast may change.",
}
"""The help of each option."""


class Allowing(click.Command):
    """A command whose `--allow-` options take the next word as a glob only if it is not a file.

    `--allow-missing model.pth` allows all names, `--allow-missing 'head.*' model.pth` some.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words twice: the first time to count those that are left over."""
        options = {f"--{name.replace('_', '-')}" for name in _WORDS}
        end = args.index("--") if "--" in args else len(args)
        bare = [at for at, word in enumerate(args[:end]) if word in options]
        every = [f"{word}={_EVERY}" if at in bare else word for at, word in enumerate(args)]
        given, left_over, _ = self.make_parser(ctx).parse_args(args=list(every))
        files = given.get("sources")
        if isinstance(files, tuple):  # of convert, which takes any number
            left_over = list(files)[1 if given.get("output") else 2 :]
            bare = [at for at in bare if not os.path.lexists("".join(args[at + 1 : at + 2]))]
        likely = [at for at in bare if args[at + 1 : at + 2] and not args[at + 1].startswith("-")]
        # globs come before names, and names before files
        likely.sort(
            key=lambda at: (not set(_GLOB) & set(args[at + 1]), os.path.lexists(args[at + 1]))
        )
        for at in sorted(likely[: len(left_over)], reverse=True):
            every[at : at + 2] = [f"{args[at]}={args[at + 1]}"]
        return super().parse_args(ctx, every)


def allowance_options(*, casts: bool = True) -> Decorator:
    """Return the options about what may differ from the model, for a command that is `Allowing`.

    The verb gets `allow_missing` and so on, each a tuple of globs, True for all names, or False.
    Without `casts` there is no `--allow-lossy-cast`.
    """
    return together(
        repeatable(
            "--transpose",
            "GLOB[=AXES]",
            "Transpose these tensors of a TensorFlow, Keras or Flax file, if the type of the "
            "module does not decide it: 'fc.weight', 'depthwise.*=2,3,0,1'; repeatable.",
        ),
        repeatable(
            "--no-transpose", "GLOB", "Do not transpose these tensors of the model; repeatable."
        ),
        *(
            repeatable(
                f"--{name.replace('_', '-')}",
                "[GLOB]",
                f"{text} Repeatable; all without GLOB.",
                callback=lambda _, __, globs: True if _EVERY in globs else globs or False,
            )
            for name, text in _WORDS.items()
            if casts or name != "allow_lossy_cast"
        ),
        click.option(
            "--min-coverage",
            type=click.FloatRange(0, 1),
            metavar="SHARE",
            help="The smallest share of the model's parameters that must match: 0.9.",
        ),
    )


@contextmanager
def in_options() -> Iterator[None]:
    """Make a refusal one sentence, whose advice is options of `convert`."""
    try:
        yield
    except MatchError as error:
        error.message = error.message.replace("\n", "; ")
        if error.remedy is not None:
            error.advise(_for_new_names(error.remedy))
        raise


def _for_new_names(remedy: Remedy) -> Remedy:
    """Return the remedy with the names that the rules give to what is allowed."""
    given = dict(remedy.arguments)
    rules, names = given.get("rename"), given.get("allow_unexpected")
    if isinstance(rules, tuple) and isinstance(names, tuple):
        for rule in map(regex_rule, rules):
            names = tuple(rule.apply(name) or name for name in names)
        given["allow_unexpected"] = names
    ways = tuple(map(_for_new_names, remedy.instead))
    return remedy._replace(arguments=tuple(given.items()), instead=ways)


_FORMS = "a checkpoint, or code of yours that builds the model: module:factory, as in net:build"


def referred(text: str) -> Any:
    """Return the model that `module:factory` builds, or the path of a file of that name.

    Raises:
        TorchMissing, UsageError: as `built`; or the text names a script without a factory.
        FileMissing: no such file.
    """
    is_file = os.path.lexists(text)
    if FACTORY.fullmatch(text) and not is_file:
        return built(text)
    if text.endswith(".py") and os.path.isfile(text):
        stem = os.path.basename(text).removesuffix(".py")
        raise UsageError(f"{printable(text)} is a Python script", hint=f"{stem}:factory; {HINT}")
    if not is_file:
        raise FileMissing("no such file", file=text, hint=_FORMS)
    return text


def built(text: str) -> Any:
    """Return the model, or state dict, that `module:factory` names or makes.

    The working directory is on the path, and what the code prints goes to stderr. A class or
    function is called without arguments, on the meta device if possible.

    Raises:
        TorchMissing: torch is not installed.
        UsageError: the code raised an error, or returned no model.
    """
    with at_home():
        node = named(text)
        if is_model(node):
            return node
        if not callable(node):
            raise UsageError(
                f"{text} is {a_class(node)}, and neither a model nor what makes one", hint=HINT
            )
        made = on_meta(node)
        if made is None:
            made = run(node, f"{text} raised", HINT)
    if not is_model(made):
        raise UsageError(f"{text} returned {a_class(made)}, and no model", hint=HINT)
    return made
