"""Help: every verb, its summary, its examples."""

import re
import shlex

import click
import pytest
import torch

from ckptool._version import __version__
from ckptool.cli.group import VERBS, cli

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
        assert re.search(r"Exit codes: 0 success(, 1 .+)?, 2 error or wrong usage", said)
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
    for name in VERBS["Change"].keys() - {"recover"}:
        options = options_of(command_of(name))
        assert {"--force", "--dry-run", "--format"} <= options, name
        assert ({"-o", "--output", "--in-place"} <= options) is (
            name not in ("average", "merge-lora")
        )


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["ls", "FILE"], ["list", "FILE"]),
        (["keys", "FILE", "--include", "*s"], ["list", "FILE", "--names", "--include", "*s"]),
        (["cat", "FILE", "epoch"], ["show", "FILE", "epoch"]),
        (["print", "FILE", "epoch"], ["show", "FILE", "epoch"]),
        (["inspect", "FILE"], ["info", "FILE"]),
        (["help", "cast"], ["cast", "--help"]),
        (["help", "ls"], ["list", "--help"]),
        (["help"], ["--help"]),
    ],
)  # fmt: skip
def test_a_word_of_another_tool_leads_to_the_verb(ckptool, model, words, same):
    given, expected = (
        ckptool(*(model if word == "FILE" else word for word in line)) for line in (words, same)
    )
    assert (given.code, given.out, given.err) == (0, expected.out, expected.err)
    assert given.out
    assert not {words[0]} & {*NAMES}


def test_names_are_the_keys_one_a_line(ckptool, model):
    rows = ckptool("list", model, "--json").document
    every = [row["name"] for kind in ("tensors", "values", "objects") for row in rows[kind]]
    assert ckptool("list", model, "--names").out.splitlines() == every
    for other in ("--json", "--tree", "--hash", "--fmt=csv"):
        done = ckptool("list", model, "--names", other)
        assert (done.code, done.out) == (2, "")
        assert "--names and --" in done.err


def test_a_file_without_a_verb_is_info_with_the_verdict_of_doctor(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"module.a": torch.ones(2), "module.b": torch.ones(2)}, "model.pth")
    doctor = ckptool("doctor", "--quick", "model.pth")
    done = ckptool("model.pth")
    assert (doctor.code, done.code, done.err) == (1, 0, "")
    verdict = doctor.out.partition("\n")[0].removeprefix("model.pth ")
    command = ckptool("doctor", "--quick", "model.pth", "--json").document["commands"][0]
    facts = ckptool("info", "model.pth").out.partition("\n\n")[0]
    assert done.out.startswith(facts)
    assert done.out.endswith(f"\ndoctor        {verdict}\n  {command}\n")
    document = ckptool("model.pth", "--json").document
    info = ckptool("info", "model.pth", "--json").document
    assert document == {**info, "ok": False, "verdict": verdict, "command": command}
    torch.save({"a": torch.ones(2)}, "well.pth")
    assert ckptool("well.pth").out.endswith("\ndoctor        " + ckptool(
        "doctor", "--quick", "well.pth").out.removeprefix("well.pth: "))  # fmt: skip


def test_a_verb_wins_over_a_file_of_that_name(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2)}, "list")
    assert "Missing argument" in ckptool("list").err
    torch.save({"a": torch.ones(2)}, "weights")
    assert ckptool("weights").out.startswith("weights\nformat ")
    for word in ("gone.pth", "runs/gone", "./list2"):
        done = ckptool(word)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"ckptool: {word}: no such file\n")


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("fix", "doctor"), ("compare", "diff"), ("view", "show"), ("to_safetensors", "convert"),
        ("merge", "merge-lora"), ("fp16", "cast"), ("Quantize", "cast"), ("unwrap", "strip-module"),
        ("conv", "convert"), ("lst", "list"), ("doctr", "doctor"), ("checksum", "verify"),
        ("summary", "info"), ("remove", "extract"), ("qqqq", None), ("x", None),
    ],
)  # fmt: skip
def test_an_unknown_verb_proposes_the_nearest_by_meaning(ckptool, word, verb):
    done = ckptool(word)
    assert (done.code, done.out) == (2, "")
    tail = f"did you mean {verb!r}?" if verb else "'ckptool --help' lists the commands"
    assert done.err.startswith(f"ckptool: unknown command {word!r}: {tail}\n")
    assert sum(name in done.err.split() for name in NAMES) <= 1


def test_options_that_do_not_exist(ckptool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "No such option '--to'.\n" in ckptool("cast", "--to").err
    assert "No such option '--dtipe'. Did you mean '--dtype'?\n" in ckptool("cast", "--dtipe").err
    assert "info --help" in ckptool("info", "-lead.pth").err
    tmp_path.joinpath("-lead.pth").touch()
    assert (
        "hint: write ./-lead.pth for the file with that name\n" in ckptool("info", "-lead.pth").err
    )


def test_the_version(ckptool):
    assert ckptool("--version").out == f"ckptool {__version__}\n"


@pytest.mark.parametrize("verb", ["convert", "diff", "match", "train"])
def test_the_help_is_short_and_help_all_has_every_option(ckptool, verb):
    short, full = ckptool(verb, "--help"), ckptool(verb, "--help-all")
    assert short.code == full.code == 0
    options = [
        re.findall(r"^  (?:-\w, )?(--[\w-]+)", one.out, re.MULTILINE) for one in (short, full)
    ]
    assert 9 <= len(options[0]) <= 20 < len(options[1]) + 5
    assert {*options[0]} < {*options[1]}
    assert {"--help-all", "--help"} <= {*options[0]}
