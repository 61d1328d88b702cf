"""`docs/cli.md`: every command's help, as `--help` prints it."""

import click

from ckptool.cli.group import ALIASES, VERBS, cli
from ckptool.cli.options import EVERY_OPTION

WIDTH = 100
"""Columns, as on a wide terminal."""

COMPLETION = {
    "bash": (
        'eval "$(_CKPTOOL_COMPLETE=bash_source ckptool)"',
        "in ~/.bashrc; bash 4.4 or newer",
    ),
    "zsh": (
        'eval "$(_CKPTOOL_COMPLETE=zsh_source ckptool)"',
        "in ~/.zshrc, below compinit",
    ),
    "fish": (
        "_CKPTOOL_COMPLETE=fish_source ckptool | source",
        "in ~/.config/fish/config.fish",
    ),
}
"""By shell: the line that sets it up, and where it goes."""

HEAD = """# Every command

`python -m tests.pages` made this page from the help of the commands; a test compares the two.
For a fix by error message, see [the cookbook](cookbook.md); for the output of `--json`, see
[docs/json.md](json.md).

{table}

`ckptool FILE`, without a command, prints `info` with the verdict of `doctor --quick` and its first
command, and exits with 0. A command takes precedence over a file with the same name.

Aliases: {aliases}; `help VERB` for `VERB --help`. Every command accepts `-h` and `--help`.

| exit code | |
|---|---|
| 0 | success |
| 1 | problem found: the files differ, the checkpoint does not fit, or a file is damaged |
| 2 | error or wrong usage: nothing was written; with several files, 2 takes precedence over 1 |
| 130, 143 | interrupted: Ctrl-C, SIGTERM |

| environment | |
|---|---|
| `CKPTOOL_DEBUG=1` | show tracebacks |
| `NO_COLOR` | disable color |

## Completion

Complete commands, options, choices and file names with Tab:

```text
{completion}
```

Each line runs ckptool once per shell. To avoid that, write the script to a file:

```text
_CKPTOOL_COMPLETE=bash_source ckptool > ~/.local/share/bash-completion/completions/ckptool
_CKPTOOL_COMPLETE=zsh_source ckptool > ~/.zfunc/_ckptool          # a folder in $fpath
_CKPTOOL_COMPLETE=fish_source ckptool > ~/.config/fish/completions/ckptool.fish
```
"""


def help_of(name: str) -> str:
    """What `ckptool NAME --help` prints, with every option."""
    with click.Context(cli, info_name="ckptool", **cli.context_settings) as above:
        command = cli.get_command(above, name)
        with click.Context(command, above, info_name=name, terminal_width=WIDTH) as context:
            context.meta[EVERY_OPTION] = True
            return command.get_help(context)


def page() -> str:
    """Return the page."""
    rows = [
        f"| [{name}](#{name}) | {summary} |" if number else f"| **{kind}** | |"
        for kind, verbs in VERBS.items()
        for number, (name, summary) in enumerate([("", ""), *verbs.items()])
    ]
    head = HEAD.format(
        table="\n".join(["| command | |", "|---|---|", *rows]),
        aliases=", ".join(f"`{one}` for `{' '.join(words)}`" for one, words in ALIASES.items()),
        completion="\n".join(
            f"{line}  # {shell}: {where}" for shell, (line, where) in COMPLETION.items()
        ),
    )
    verbs = [name for verbs in VERBS.values() for name in verbs]
    parts = [f"## {name}\n\n```text\n{help_of(name).rstrip()}\n```\n" for name in verbs]
    return "\n".join([head, *parts])
