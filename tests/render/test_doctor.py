"""What doctor says, fitted to a terminal."""

import shlex

from ckptool.inspection.doctor import Complaint, Diagnosis
from ckptool.render.doctor import diagnosis_lines
from ckptool.render.terminal import PLAIN, Look

COMMANDS = (
    "ckptool extract --model-only 'a b.pth' -o 'a b.mended.pth'",
    "ckptool strip-module --in-place 'a b.mended.pth'",
)


def diagnosis(**fields):
    complaint = Complaint("wrappers", "fails", "what is \x1b[2J wrong", ("a", "b"), "why it " * 30,
                          commands=COMMANDS[:1], alternatives=("ckptool x", "ckptool y"),
                          remedy="help")  # fmt: skip
    note = Complaint("ties", "note", "tied", (), "torch keeps it")
    return Diagnosis("a b.pth", "torch-zip", ("cpu",), (complaint, note), **fields)


def lines(found, look=PLAIN):
    return list(diagnosis_lines(found, look))


def test_blocks_are_numbered_and_the_plan_comes_last():
    found = lines(diagnosis(commands=COMMANDS, all_at_once="ckptool convert a b"))
    assert found[0] == "a b.pth: 1 reason to fail, 1 note"
    assert found[2] == "1. fails: what is \\x1b[2J wrong"
    assert "   where  a, b" in found
    assert f"   run    {COMMANDS[0]}" in found
    assert "   one of ckptool x" in found
    assert "          ckptool y" in found
    assert "   helps  help" in found
    assert "2. note: tied" in found
    assert found[-5:] == [
        "to run, in this order",
        *(f"  {command}" for command in COMMANDS),
        "or all at once",
        "  ckptool convert a b",
    ]


def test_what_is_piped_is_not_broken_and_what_is_seen_fits():
    assert any(line.count("why it") == 30 for line in lines(diagnosis()))
    narrow = lines(diagnosis(commands=COMMANDS), Look(width=50))
    assert max(map(len, narrow)) <= 50


def test_a_broken_command_is_one_to_a_shell():
    narrow = lines(diagnosis(commands=COMMANDS), Look(width=40))
    start = narrow.index("to run, in this order")
    text = "\n".join(narrow[start + 1 :]).replace("\\\n", "")
    assert [shlex.split(line) for line in text.split("\n")] == [shlex.split(c) for c in COMMANDS]


def test_a_command_of_other_programs_stays_whole():
    command = "git lfs install && git -C /a/long/path lfs pull --include '**/model.pth'"
    found = Diagnosis("m.pth", None, ("cpu",), (
        Complaint("not-a-checkpoint", "fails", "a pointer", (), "why", commands=(command,)),
    ), commands=(command,))  # fmt: skip
    assert f"  {command}" in lines(found, Look(width=40))


def test_one_command_is_not_told_twice():
    found = lines(diagnosis(commands=COMMANDS[:1], all_at_once="ckptool convert"))
    assert "or all at once" not in found


def test_colour_is_for_a_terminal():
    assert any("\x1b[31mfails\x1b[0m" in line for line in lines(diagnosis(), Look(80, True)))
