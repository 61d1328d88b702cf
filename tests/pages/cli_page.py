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

`python -m tests.pages` made this page from the help of the commands; a test holds it against them.
[The cookbook](cookbook.md) goes from an error's text to the command, [docs/json.md](json.md) says
what `--json` prints.

{table}

`ckptool FILE`, without a command, prints `info` with the verdict of `doctor --quick` and its first
command, and exits with 0. A command wins over a file of its name.

Aliases: {aliases}; `help VERB` for `VERB --help`. Every command takes `-h` and `--help`.

| exit code | |
|---|---|
| 0 | fine |
| 1 | a finding: the files differ, it does not fit, something is damaged |
| 2 | an error or wrong usage: nothing was written, or told; of several files it outranks 1 |
| 130, 143 | interrupted: Ctrl-C, SIGTERM |

| environment | |
|---|---|
| `CKPTOOL_DEBUG=1` | the traceback of an error |
| `NO_COLOR` | no color, as everywhere |

## Completion

Commands, options, their choices and file names, by Tab:

```text
{completion}
```

Each starts ckptool once per shell. A file in its place costs nothing at the start of one:

```text
_CKPTOOL_COMPLETE=bash_source ckptool > ~/.local/share/bash-completion/completions/ckptool
_CKPTOOL_COMPLETE=zsh_source ckptool > ~/.zfunc/_ckptool          # a folder of fpath
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
    """The whole of it."""
    rows = [
        f"| [{name}](#{name}) | {summary} |" if number else f"| **to {kind}** | |"
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
