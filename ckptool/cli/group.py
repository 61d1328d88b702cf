"""The group of verbs, which imports the module of a verb when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from ckptool._version import __version__

VERBS = {
    "read": {
        "list": "List the tensors, values and objects of a checkpoint.",
        "info": "Summarise a checkpoint and show how to load it.",
        "show": "Show one value, one object or the head of one tensor.",
        "stats": "Show the range, mean, zeros and NaN of each tensor.",
        "diff": "Show what differs between two checkpoints of any formats.",
        "verify": "Check files for damage, also where torch does not look.",
        "scan": "Show what loading a file would run, without running it.",
        "doctor": "Explain why a checkpoint does not load, and how to fix it.",
        "match": "Check whether a checkpoint fits a model, and with which renames.",
        "report": "Write an HTML page about a checkpoint, or to compare two.",
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

ALIASES = {"ls": "list"}
_FILES = {
    **dict.fromkeys(
        ("strip-module", "add-module", "rename", "remap", "compact", "recover"), "editing_verbs"
    ),
    **dict.fromkeys(("cast", "average", "merge-lora"), "computing_verbs"),
    **dict.fromkeys(("show", "stats"), "reading_verbs"),
}
"""The module of a verb that shares one with others; `list` is alone in `list_verb`."""
_MEANT = {"inspect": "info"}
"""Verbs of other tools, for which no similar name can be found."""

EPILOG = """\b
Example, from a DataParallel file tagged cuda:3 to one that loads anywhere:
  ckptool info model.pth
  ckptool convert model.pth laptop.pth --wrappers strip --to cpu

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
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in self.list_commands(ctx):
            return None
        file = _FILES.get(name, f"{name}_verb")
        found = vars(import_module(f"ckptool.cli.{file}")).values()
        return next(one for one in found if isinstance(one, click.Command) and one.name == name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that the first argument names.

        Raises:
            click.UsageError: there is no such verb; the message proposes one.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in (*known, *ALIASES) and not args[0].startswith("-"):
            from difflib import get_close_matches

            word = _MEANT.get(args[0], args[0])
            near = [name for name in known if word and name.startswith(word)]
            near = near or get_close_matches(word, known, n=1, cutoff=0.5)
            tail = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(known)}."
            raise click.UsageError(f"There is no command {args[0]!r}.{tail}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the first lines of their help, verbs that read first."""
        for title, verbs in VERBS.items():
            with formatter.section(f"Commands that {title}"):
                formatter.write_dl(list(verbs.items()))


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, message="ckptool %(version)s", help="Print the version.")
@click.option("--local-rank", "--local_rank", type=int, hidden=True, expose_value=False)
def cli() -> None:
    """Read, explain and rewrite PyTorch checkpoints, without running their code."""
