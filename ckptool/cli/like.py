"""The options that describe a model: `--like module:factory`, `--allow-missing` and so on.

Only the command line accepts `module:factory`; the library functions do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptool.cli.group import BriefHelpCommand
from ckptool.cli.options import Decorator, combine_options, repeatable
from ckptool.errors import FileMissing, MatchError, UsageError
from ckptool.factories import (
    FACTORY,
    HINT,
    import_object,
    is_model,
    run_user_code,
    use_working_directory,
)
from ckptool.loading.target import on_meta
from ckptool.remedies import Remedy
from ckptool.transforms import regex_rule
from ckptool.words import a_class, printable

_ALL_KEYS = "*"
_GLOB_CHARACTERS = "*?["
_ALLOWANCES = {
    "allow_missing": "Allow model tensors to be missing from the file.",
    "allow_unexpected": "Allow file tensors to be left out.",
    "allow_mismatched": "Allow tensors to differ in shape; the model keeps its own.",
    "allow_lossy_cast": "Allow a cast to change the values of tensors.",
}
"""The help of each `--allow-` option, by its argument."""


class Allowing(BriefHelpCommand):
    """A command with `--allow-` options, which use the next word as a glob if it is not a file.

    `--allow-missing model.pth` allows all keys, `--allow-missing 'head.*' model.pth` some.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Join an option and the word after it if that is a glob, then parse the words.

        First the words are parsed with each option as `--allow-missing=*`. If that leaves more
        positional arguments than the command has, as many words after options are globs, and are
        joined to these: `--allow-missing=head.*`. The likeliest globs are taken.
        """
        options = {f"--{name.replace('_', '-')}" for name in _ALLOWANCES}
        end = args.index("--") if "--" in args else len(args)
        option_positions = [index for index, word in enumerate(args[:end]) if word in options]
        expanded = [
            f"{word}={_ALL_KEYS}" if index in option_positions else word
            for index, word in enumerate(args)
        ]
        values, surplus, _ = self.make_parser(ctx).parse_args(args=list(expanded))
        word_after = {index: args[index + 1] for index in option_positions if index + 1 < len(args)}
        files = values.get("sources")
        if isinstance(files, tuple):
            # `convert` takes any number of files: those after a source and a target may be globs,
            # unless they exist.
            surplus = list(files)[1 if values.get("output") else 2 :]
            word_after = {
                index: word for index, word in word_after.items() if not os.path.lexists(word)
            }
        candidates = [index for index, word in word_after.items() if not word.startswith("-")]

        def rate(index: int) -> tuple[bool, bool]:
            """Return the sort key of a word after an option: globs, then keys, then files."""
            word = word_after[index]
            return not set(_GLOB_CHARACTERS) & set(word), os.path.lexists(word)

        for index in sorted(sorted(candidates, key=rate)[: len(surplus)], reverse=True):
            expanded[index : index + 2] = [f"{args[index]}={word_after[index]}"]
        return super().parse_args(ctx, expanded)


def allowance_options(*, casts: bool = True) -> Decorator:
    """Return the options for allowed differences from the model, for an `Allowing` command.

    The verb receives `allow_missing` and so on, each a tuple of globs, True for all keys, or False.
    Without `casts`, `--allow-lossy-cast` is left out.
    """
    return combine_options(
        repeatable(
            "--transpose",
            "GLOB[=AXES]",
            "Transpose these TensorFlow, Keras or Flax tensors if their module type does not "
            "decide "
            "it: 'fc.weight', 'depthwise.*=2,3,0,1'. Repeatable.",
        ),
        repeatable("--no-transpose", "GLOB", "Do not transpose these model tensors. Repeatable."),
        *(
            repeatable(
                f"--{name.replace('_', '-')}",
                "[GLOB]",
                f"{text} Repeatable. [default GLOB: all]",
                callback=lambda _, __, globs: True if _ALL_KEYS in globs else globs or False,
            )
            for name, text in _ALLOWANCES.items()
            if casts or name != "allow_lossy_cast"
        ),
        click.option(
            "--min-coverage",
            type=click.FloatRange(0, 1),
            metavar="SHARE",
            help="Require this share of the model's parameters to match, for example 0.9.",
        ),
    )


@contextmanager
def hint_with_options() -> Iterator[None]:
    """Give a `MatchError` in the block one sentence, and options of `convert` as its hint."""
    try:
        yield
    except MatchError as error:
        error.message = error.message.replace("\n", "; ")
        if error.remedy is not None:
            error.advise(_rename_allowed_keys(error.remedy))
        raise


def _rename_allowed_keys(remedy: Remedy) -> Remedy:
    """Return the remedy with its rules applied to its allowed keys.

    In `convert`, the keys are renamed before they are compared with the model.
    """
    arguments = dict(remedy.arguments)
    rules, keys = arguments.get("rename"), arguments.get("allow_unexpected")
    if isinstance(rules, tuple) and isinstance(keys, tuple):
        for rule in map(regex_rule, rules):
            keys = tuple(rule.apply(key) or key for key in keys)
        arguments["allow_unexpected"] = keys
    alternatives = tuple(map(_rename_allowed_keys, remedy.instead))
    return remedy._replace(arguments=tuple(arguments.items()), instead=alternatives)


_HINT_REFERENCE = (
    "give a checkpoint, or code that builds the model: module:factory, for example net:build"
)


def resolve_reference(text: str) -> Any:
    """Return the model that `module:factory` builds, or the path if the text is a file.

    Raises:
        TorchMissing, UsageError: as `build_model`, or if the text is a script without a factory.
        FileMissing: if the file does not exist.
    """
    is_file = os.path.lexists(text)
    if FACTORY.fullmatch(text) and not is_file:
        return build_model(text)
    if text.endswith(".py") and os.path.isfile(text):
        stem = os.path.basename(text).removesuffix(".py")
        raise UsageError(
            f"{printable(text)} is a Python script",
            hint=f"give {stem}:factory; {HINT}",
        )
    if not is_file:
        raise FileMissing("no such file", file=text, hint=_HINT_REFERENCE)
    return text


def build_model(text: str) -> Any:
    """Return the model or state dict that `module:factory` is or returns.

    The working directory is on the path, and the output of the code goes to stderr. A class or
    function is called without arguments, on the meta device if possible.

    Raises:
        TorchMissing: if torch is not installed.
        UsageError: if the code raises an error, or does not return a model.
    """
    with use_working_directory():
        node = import_object(text)
        if is_model(node):
            return node
        if not callable(node):
            raise UsageError(
                f"{text} is {a_class(node)}, expected a model or a callable that returns one",
                hint=HINT,
            )
        model = on_meta(node)
        if model is None:
            model = run_user_code(node, f"{text} raised", HINT)
    if not is_model(model):
        raise UsageError(f"{text} returned {a_class(model)}, expected a model", hint=HINT)
    return model
