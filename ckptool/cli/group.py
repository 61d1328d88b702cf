"""The group of verbs, which imports the module of a verb when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import click

from ckptool._version import __version__

VERBS = {
    "read": {
        "list": "List the tensors, values and objects of a checkpoint.",
        "info": "Summarize a checkpoint and show how to load it.",
        "show": "Show one value, one object or the head of one tensor.",
        "stats": "Show the range, mean, zeros and NaN of each tensor.",
        "diff": "Show what differs between two checkpoints of any formats.",
        "verify": "Check files for damage, also where torch does not look.",
        "scan": "Show what loading a file would run, without running it.",
        "doctor": "Explain why a checkpoint does not load, and how to fix it.",
        "match": "Check whether a checkpoint fits a model, and with which renames.",
        "report": "Write an HTML page about a checkpoint, or to compare two.",
        "recipes": "List the recipes of convert --recipe, or print one.",
    },
    "change": {
        "strip-module": 'Remove wrapper prefixes such as "module." from names.',
        "add-module": 'Add the prefix "module." to names, as DataParallel does.',
        "rename": "Rename tensors by regular expressions, prefixes or a table.",
        "remap": "Change the devices that tensors are tagged with.",
        "cast": "Cast floating-point tensors to another type.",
        "extract": "Extract a section, some tensors, or only the weights.",
        "compact": "Drop bytes that no tensor uses.",
        "average": "Average the weights of several checkpoints.",
        "merge-lora": "Merge LoRA adapters into the weights of their base model.",
        "convert": "Convert to another format; rename, cast and move on the way.",
        "recover": "Roll back an edit in place that was killed.",
    },
    "make": {
        "train": "Train a model on one or many devices, and save checkpoints.",
    },
}
"""The first line of the help of each verb, so that the list imports nothing."""

ALIASES: dict[str, tuple[str, ...]] = {
    "ls": ("list",),
    "cat": ("show",),
    "print": ("show",),
    "keys": ("list", "--names"),
    "inspect": ("info",),
}
"""Words of other tools, which are not in the list of commands, and the words that they lead to."""
HELP = "help"
_FILES = {
    **dict.fromkeys(
        ("strip-module", "add-module", "rename", "remap", "compact", "recover"), "editing_verbs"
    ),
    **dict.fromkeys(("cast", "average", "merge-lora"), "computing_verbs"),
    **dict.fromkeys(("show", "stats"), "reading_verbs"),
}
"""The module of a verb that shares one with others; `list` is alone in `list_verb`."""
_MEANT = {
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
"""Words that people say for a verb, next to what its name is similar to."""

EPILOG = """\b
Example, from a DataParallel file tagged cuda:3 to one that loads anywhere:
  ckptool info model.pth
  ckptool convert model.pth laptop.pth --wrappers strip --to cpu

\b
ckptool FILE, without a command, prints info and the verdict of doctor.

\b
Exit codes: 0 fine, 1 a finding, 2 an error or wrong usage, 130 interrupted.
CKPTOOL_DEBUG=1 shows the traceback of an error.
Completion for bash (docs/cli.md has zsh and fish):
  eval "$(_CKPTOOL_COMPLETE=bash_source ckptool)"
"""


class VerbGroup(click.Group):
    """A group that imports a verb by its name, so that `--help` imports nothing but click."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs, in the order of the help."""
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb of this name or alias, None if there is none."""
        name, *_ = ALIASES.get(cmd_name, (cmd_name,))
        if name not in self.list_commands(ctx):
            return None
        return _command_in(_FILES.get(name, f"{name}_verb"), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that the first argument names; a file is what `info` is about.

        Raises:
            FileMissing: the first argument can only be a file, and there is none.
            click.UsageError: there is no such verb; the message proposes one.
        """
        word, *rest = args
        if word == HELP:
            wanted = [one for one in rest if not one.startswith("-")][:1]
            if not wanted:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*wanted, "--help"]
            word, *rest = args
        if word in ALIASES:
            args = [*ALIASES[word], *rest]
        elif word not in self.list_commands(ctx) and not word.startswith("-"):
            if _is_file(word):
                command = _command_in("file_verb", "info")
                return command.name, command, args
            raise click.UsageError(_unknown(word, self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the first lines of their help, verbs that read first."""
        for title, verbs in VERBS.items():
            with formatter.section(f"Commands that {title}"):
                formatter.write_dl(list(verbs.items()))


def _command_in(file: str, name: str) -> click.Command:
    found = vars(import_module(f"ckptool.cli.{file}")).values()
    return next(one for one in found if isinstance(one, click.Command) and one.name == name)


def _is_file(word: str) -> bool:
    """Return whether a word is a file's name or an address, and not a verb that does not exist.

    Raises:
        FileMissing: only a file's name has such characters, and no such file.
    """
    if os.path.lexists(word) or "://" in word:
        return True
    if not {"/", os.sep, "."} & {*word}:
        return False
    from ckptool.errors import FileMissing

    raise FileMissing("no such file", file=word)


def _unknown(word: str, known: Sequence[str]) -> str:
    """Return the error about a verb that does not exist, with the nearest that does."""
    from difflib import get_close_matches

    said = {one: verb for verb, words in _MEANT.items() for one in words.split()}
    said |= {name: name for name in (*known, HELP)} | {one: to[0] for one, to in ALIASES.items()}
    lower = word.lower().replace("_", "-")
    begun = [name for name in said if len(lower) > 1 and name.startswith(lower)]
    near = [lower] if lower in said else begun or get_close_matches(lower, said, n=1, cutoff=0.6)
    tail = f"did you mean {said[near[0]]!r}?" if near else "'ckptool --help' lists the commands"
    return f"unknown command {word!r}: {tail}"


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, message="ckptool %(version)s", help="Print the version.")
@click.option("--local-rank", "--local_rank", type=int, hidden=True, expose_value=False)
def cli() -> None:
    """Read, explain and rewrite PyTorch checkpoints, without running their code."""
