"""The group of verbs: each one's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["VERBS", "cli"]

VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "read": {
        "list": ("list_verb", "List the tensors, values and objects of a checkpoint."),
        "info": ("info_verb", "Say on one screen what a checkpoint is and what makes it load."),
        "show": ("show_verb", "Show one value, one object or the head of one tensor."),
        "stats": ("stats_verb", "Say what the numbers of each tensor are like."),
        "diff": ("diff_verb", "Say what differs between two checkpoints, of any formats."),
        "verify": ("verify_verb", "Check that files are intact: all that torch does not check."),
        "scan": ("scan_verb", "Say what loading a file would run, without running it."),
        "doctor": ("doctor_verb", "Say why a checkpoint does not load, and what mends it."),
        "match": ("match_verb", "Say whether a checkpoint fits a model, and under which names."),
        "report": ("report_verb", "Write a page about a checkpoint, or about two compared."),
    },
    "change": {
        "strip-module": ("strip_module_verb", "Take wrapper names such as module. off the names."),
        "add-module": ("add_module_verb", "Put module. before the names, as DataParallel does."),
        "rename": ("rename_verb", "Rewrite names by regular expressions, prefixes or a table."),
        "remap": ("remap_verb", "Rewrite the devices that the tensors are tagged with."),
        "cast": ("cast_verb", "Cast the floating tensors to another type."),
        "extract": ("extract_verb", "Take out a section, some tensors, or the weights alone."),
        "compact": ("compact_verb", "Leave out the bytes that no tensor sees, and dead ones."),
        "average": ("average_verb", "Write the mean of several checkpoints' weights."),
        "convert": ("convert_verb", "Write another format, with any of the changes on the way."),
        "recover": ("recover_verb", "Undo what a killed edit in place left of a file."),
    },
    "make": {
        "train": ("train_verb", "Train a model on one device or many, and save as each way does."),
    },
}
"""Every verb with its module and the first line of its help, which is not imported for a list."""

ALIASES = {"ls": "list"}
_MEANT = {"inspect": "info"}
"""Verbs of other tools that are spelled in no way like ours."""

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
    """Verbs by name, imported late, so that `--help` costs no more than click itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of the help."""
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb of that name or alias, None where there is none."""
        name = ALIASES.get(cmd_name, cmd_name)
        for verbs in VERBS.values():
            if name in verbs:
                command = import_module(f"ckptool.cli.{verbs[name][0]}").command
                return command if isinstance(command, click.Command) else None
        return None

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
        """List the verbs with their first lines, those that read before those that write."""
        for title, verbs in VERBS.items():
            with formatter.section(f"Commands that {title}"):
                formatter.write_dl([(name, summary) for name, (_, summary) in verbs.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ckptool._version import __version__

        click.echo(f"ckptool {__version__}")
        ctx.exit()


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.option("--local-rank", "--local_rank", type=int, hidden=True, expose_value=False)
def cli() -> None:
    """Read, explain and rewrite PyTorch checkpoints, without torch and without running them."""
