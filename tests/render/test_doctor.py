"""What doctor says, fitted to a terminal."""

import shlex

from ckptool.diagnosis import Complaint, Diagnosis
from ckptool.render.doctor import diagnosis_lines
from ckptool.render.terminal import PLAIN, Look

COMMANDS = ("ckptool convert 'a b.pth' 'a b.mended.pth' --model-only --wrappers strip",)


def diagnosis(**fields):
    complaint = Complaint("wrappers", "fails", "what is \x1b[2J wrong", ("a", "b"), "why it " * 30,
                          commands=COMMANDS[:1], alternatives=("ckptool x", "ckptool y"),
                          remedy="help")  # fmt: skip
    note = Complaint("ties", "note", "tied", (), "torch keeps it", commands=COMMANDS[:1])
    return Diagnosis("a b.pth", "torch-zip", ("cpu",), (complaint, note), **fields)


def lines(found, look=PLAIN, explain=True):
    return list(diagnosis_lines(found, look, explain=explain))


def test_blocks_are_numbered_and_the_plan_comes_last():
    found = lines(diagnosis(commands=COMMANDS, all_at_once=COMMANDS[0], resume="ckptool r"))
    assert found[0] == "a b.pth: 1 reason to fail, 1 note"
    assert found[2] == "1. fails: what is \\x1b[2J wrong"
    assert "   where  a, b" in found
    assert found.count("   run    the command below") == 2
    assert "   one of ckptool x" in found
    assert "          ckptool y" in found
    assert "   helps  help" in found
    assert "2. note: tied" in found
    assert found[-5:] == [
        "",
        "to use the weights",
        f"  {COMMANDS[0]}",
        "to resume the training, with optimizer, epoch and schedule",
        "  ckptool r",
    ]


def test_each_complaint_is_two_lines_what_and_run():
    found = lines(diagnosis(commands=COMMANDS, all_at_once=COMMANDS[0]), explain=False)
    assert found[2:4] == ["1. fails: what is \\x1b[2J wrong", "   run    the command below"]
    assert found[4:7] == ["", "2. note: tied", "   run    the command below"]
    assert found[7:] == ["", "to run", f"  {COMMANDS[0]}"]


def test_what_is_piped_is_not_broken_and_what_is_seen_fits():
    assert any(line.count("why it") == 30 for line in lines(diagnosis()))
    narrow = lines(diagnosis(commands=COMMANDS), Look(width=50))
    assert max(map(len, narrow)) <= 50


def test_a_broken_command_is_one_to_a_shell():
    found = diagnosis(commands=COMMANDS, all_at_once=COMMANDS[0])
    narrow = lines(found, Look(width=40))
    start = narrow.index("to run")
    text = "\n".join(narrow[start + 1 :]).replace("\\\n", "")
    assert [shlex.split(line) for line in text.split("\n")] == [shlex.split(c) for c in COMMANDS]


def test_a_command_of_other_programs_stays_whole():
    command = "git lfs install && git -C /a/long/path lfs pull --include '**/model.pth'"
    found = Diagnosis("m.pth", None, ("cpu",), (
        Complaint("not-a-checkpoint", "fails", "a pointer", (), "why", commands=(command,)),
    ), commands=(command,))  # fmt: skip
    assert f"   run    {command}" in lines(found, Look(width=40))


def test_colour_is_for_a_terminal():
    assert any("\x1b[31mfails\x1b[0m" in line for line in lines(diagnosis(), Look(80, True)))
