"""The group of verbs, which imports the module of a verb when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import click

from ckptool._version import __version__

VERBS = {
    "Inspect": {
        "list": "List the tensors, values and objects in a checkpoint.",
        "info": "Summarize a checkpoint and show how to load it.",
        "show": "Show one value, one object, or the start of a tensor.",
        "stats": "Show the range, mean, zeros and NaN of each tensor.",
        "diff": "Compare two checkpoints, in any formats.",
        "verify": "Check files for damage, even where torch does not look.",
        "scan": "Show what loading a file would run, without running it.",
        "doctor": "Explain why a checkpoint does not load, and how to fix it.",
        "match": "Check whether a checkpoint fits a model, and what to rename.",
        "report": "Write an HTML page that describes one checkpoint or compares two.",
        "recipes": "List the recipes for convert --recipe, or print one.",
    },
    "Change": {
        "strip-module": 'Remove wrapper prefixes such as "module." from keys.',
        "add-module": 'Add the prefix "module." to keys, as DataParallel does.',
        "rename": "Rename keys by regular expression, prefix or table.",
        "remap": "Change the devices that tensors load onto.",
        "cast": "Cast floating-point tensors to another dtype.",
        "extract": "Extract a section, some tensors, or only the weights.",
        "compact": "Drop bytes that no tensor uses.",
        "average": "Average several checkpoints.",
        "merge-lora": "Merge LoRA adapters into their base model.",
        "convert": "Convert to another format; rename, cast and move on the way.",
        "recover": "Roll back an interrupted in-place edit.",
    },
    "Train": {
        "train": "Train a model on one or more devices, and save checkpoints.",
    },
}
"""By group, the first help line of each verb. Listing them imports no verb."""

ALIASES: dict[str, tuple[str, ...]] = {
    "ls": ("list",),
    "cat": ("show",),
    "print": ("show",),
    "keys": ("list", "--names"),
    "inspect": ("info",),
}
"""Commands of other tools, which the help does not list, and the arguments that replace them."""
HELP = "help"
_FILES = {
    **dict.fromkeys(
        ("strip-module", "add-module", "rename", "remap", "compact", "recover"), "editing_verbs"
    ),
    **dict.fromkeys(("cast", "average", "merge-lora"), "computing_verbs"),
    **dict.fromkeys(("show", "stats"), "reading_verbs"),
}
"""The modules that implement several verbs; every other verb is alone in `NAME_verb`."""
_SYNONYMS = {
    "list": "contents dir tree names params parameters tensors layers index",
    "info": "summary summarize summarise describe about meta metadata header stat file what load "
    "open",
    "show": "view get head print dump peek read value tensor display",
    "stats": "statistics histogram hist norm norms range nan",
    "diff": "compare cmp changes delta versus",
    "verify": "validate check checksum hash test integrity fsck sha256 damage",
    "scan": "security safe safety malware virus audit pickle fickling",
    "doctor": "fix repair mend diagnose debug why explain error heal cure help-me",
    "match": "fit fits align keymap missing unexpected",
    "report": "html page web visualize visualise plot",
    "strip-module": "strip unwrap unprefix remove-module remove-prefix deparallel",
    "add-module": "wrap prefix add-prefix parallel",
    "rename": "mv replace sub sed regex map rekey",
    "remap": "move device devices cpu cuda gpu map-location to",
    "cast": "dtype type half fp16 bf16 bfloat16 float16 float32 quantize quantise dequantize "
    "precision",
    "extract": "select filter subset prune pick take weights model-only ema drop remove delete rm",
    "compact": "shrink trim compress optimize clean gc squeeze slim",
    "average": "mean avg soup swa mix ensemble blend",
    "merge-lora": "merge lora fuse adapter adapters peft bake",
    "convert": "export transform to-safetensors safetensors split shard join unshard concat "
    "consolidate save write copy cp salvage reshape resize",
    "recover": "rollback undo restore revert resume-edit",
    "train": "fit-model run launch learn finetune fine-tune",
}
"""Synonyms of each verb, used to propose a verb for an unknown command."""

EPILOG = """\b
Example: a DataParallel checkpoint from GPU 3, loadable anywhere
  ckptool info model.pth
  ckptool convert model.pth laptop.pth --wrappers strip --to cpu

\b
Exit codes: 0 success, 1 problem found, 2 error or wrong usage,
130 interrupted. CKPTOOL_DEBUG=1 shows tracebacks.
Completion for bash (zsh and fish: docs/cli.md):
  eval "$(_CKPTOOL_COMPLETE=bash_source ckptool)"
"""


class BriefHelpCommand(click.Command):
    """A command that describes `--help` in three words."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option, with our text."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = "Show this message."
        return option


class VerbGroup(BriefHelpCommand, click.Group):
    """A group that imports a verb when it is called, so that `--help` imports only click."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs, in the order of the help."""
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb with this name or alias, or None."""
        name, *_options = ALIASES.get(cmd_name, (cmd_name,))
        if name not in self.list_commands(ctx):
            return None
        file = _FILES.get(name, f"{name}_verb")
        return _import_command(file, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb in the first argument, or `info` if that is a file.

        `help VERB` becomes `VERB --help`; an alias is replaced by its arguments.

        Raises:
            FileMissing: if the first argument looks like a file that does not exist.
            click.UsageError: if the verb is unknown; the message proposes one.
        """
        word, *rest = args
        if word == HELP:
            verbs = [argument for argument in rest if not argument.startswith("-")][:1]
            if not verbs:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*verbs, "--help"]
            word, *rest = args
        if word in ALIASES:
            args = [*ALIASES[word], *rest]
        elif word not in self.list_commands(ctx) and not word.startswith("-"):
            if _is_file(word):
                command = _import_command("file_verb", "info")
                return command.name, command, args
            raise click.UsageError(_describe_unknown_verb(word, self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs, group by group, with the first lines of their help."""
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))


def _import_command(file: str, name: str) -> click.Command:
    """Import the module of a verb, and return its command."""
    members = vars(import_module(f"ckptool.cli.{file}")).values()
    commands = (member for member in members if isinstance(member, click.Command))
    return next(command for command in commands if command.name == name)


def _is_file(word: str) -> bool:
    """Return True if a word is a file or an address, False if it may be a mistyped verb.

    Raises:
        FileMissing: if the word looks like a file name, but the file does not exist.
    """
    if os.path.lexists(word) or "://" in word:
        return True
    if not {"/", os.sep, "."} & {*word}:
        return False
    from ckptool.errors import FileMissing

    raise FileMissing("no such file", file=word)


def _describe_unknown_verb(word: str, known: Sequence[str]) -> str:
    """Return the error about an unknown verb, with the closest known one."""
    from difflib import get_close_matches

    verb_by_word = {synonym: verb for verb, words in _SYNONYMS.items() for synonym in words.split()}
    verb_by_word |= {name: name for name in (*known, HELP)}
    verb_by_word |= {alias: verb for alias, (verb, *_) in ALIASES.items()}
    lower = word.lower().replace("_", "-")
    close = [lower] if lower in verb_by_word else []
    if not close and len(lower) > 1:
        close = [name for name in verb_by_word if name.startswith(lower)]
    if not close:
        close = get_close_matches(lower, verb_by_word, n=1, cutoff=0.6)
    advice = "'ckptool --help' lists the commands"
    if close:
        advice = f"did you mean {verb_by_word[close[0]]!r}?"
    return f"unknown command {word!r}: {advice}"


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, message="ckptool %(version)s", help="Show the version.")
@click.option("--local-rank", "--local_rank", type=int, hidden=True, expose_value=False)
def cli() -> None:
    """Inspect, fix and convert PyTorch checkpoints without running their code."""
