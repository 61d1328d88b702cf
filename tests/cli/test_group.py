"""Help: every verb, its summary, its examples."""

import re
import shlex

import click
import pytest

from ckptool._version import __version__
from ckptool.cli.group import ALIASES, VERBS, cli

NAMES = [name for verbs in VERBS.values() for name in verbs]


def command_of(name):
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
    assert command is not None
    return command


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_verb_with_the_first_line_of_its_own(ckptool, flag):
    done = ckptool(flag)
    assert (done.code, done.err) == (0, "")
    for verbs in VERBS.values():
        for name, summary in verbs.items():
            assert f"  {name} " in done.out
            assert summary in done.out


@pytest.mark.parametrize("name", NAMES)
def test_every_help_has_a_summary_options_examples_that_parse_and_exit_codes(ckptool, name):
    command = command_of(name)
    summary = next(verbs[name] for verbs in VERBS.values() if name in verbs)
    assert command.name == name
    assert command.get_short_help_str(200).rstrip(".") == summary.rstrip(".")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
    assert {"--json", "-q", "--quiet"} <= options_of(command)
    for flag in ("-h", "--help"):
        done = ckptool(name, flag)
        assert (done.code, done.err) == (0, "")
        said = " ".join(done.out.split())
        assert re.search(r"Exit codes: 0 fine(, 1 .+)?, 2 an error or wrong usage", said)
    examples = [line for line in done.out.splitlines() if line.startswith("    ckptool ")]
    assert examples
    for example in examples:
        _, verb, *arguments = shlex.split(example)
        assert verb == name
        command.make_context(name, arguments)


def test_each_section_of_the_help_begins_with_an_option():
    for name in ("convert", "train"):
        command = command_of(name)
        options = [one.name for one in command.params if isinstance(one, click.Option)]
        assert options[0] in command.begins
        assert set(command.begins) <= set(options)


def options_of(command):
    return {word for parameter in command.params for word in parameter.opts}


def test_verbs_that_write_share_their_options():
    for name in VERBS["change"].keys() - {"recover"}:
        options = options_of(command_of(name))
        assert {"--force", "--dry-run", "--format"} <= options, name
        assert ({"-o", "--output", "--in-place"} <= options) is (
            name not in ("convert", "average", "merge-lora")
        )


def test_an_alias_is_the_verb_itself(ckptool, model):
    assert ALIASES == {"ls": "list"}
    assert ckptool("ls", model).out == ckptool("list", model).out


def test_options_that_do_not_exist(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "No such option '--to'.\n" in ckptool("cast", "--to").err
    assert "No such option '--dtipe'. Did you mean '--dtype'?\n" in ckptool("cast", "--dtipe").err
    assert "info --help" in ckptool("info", "-lead.pth").err
    tmp_path.joinpath("-lead.pth").touch()
    assert "hint: ./-lead.pth is the file of that name\n" in ckptool("info", "-lead.pth").err


def test_the_version(ckptool):
    assert ckptool("--version").out == f"ckptool {__version__}\n"
