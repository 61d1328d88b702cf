"""What doctor says, fitted to a terminal."""

import shlex

from ckptool.diagnosis import Complaint, Diagnosis
from ckptool.render.text import PLAIN, Look
from ckptool.render.verdicts import diagnosis_lines

COMMANDS = ("ckptool convert 'a b.pth' 'a b.fixed.pth' --model-only --wrappers strip",)


WHY = "why it" + " why it" * 29


def diagnosis(**fields):
    complaint = Complaint(
        "wrappers",
        "what is \x1b[2J wrong",
        ("a", "b"),
        hint="help",
        effect=WHY,
        commands=COMMANDS[:1],
        alternatives=("ckptool x", "ckptool y"),
    )
    note = Complaint(
        "ties", "tied", severity="note", effect="torch keeps it", commands=COMMANDS[:1]
    )
    return Diagnosis("a b.pth", "torch-zip", ("cpu",), (complaint, note), **fields)


def lines(found, look=PLAIN, explain=True):
    return list(diagnosis_lines(found, look, explain=explain))


def test_the_verdict_comes_first_and_each_command_once_at_the_end():
    found = lines(diagnosis(commands=COMMANDS, all_at_once=COMMANDS[0], resume="ckptool r"))
    assert found[0] == "a b.pth does not load on this machine: 1 error, 1 note"
    assert found[2] == "1. error: what is \\x1b[2J wrong"
    assert "   where  a, b" in found
    assert "   hint   help" in found
    assert "2. note: tied" in found
    assert found[-8:] == [
        "",
        "To use the weights (fixes 1, 2):",
        f"  {COMMANDS[0]}",
        "To resume training, with the optimizer, epoch and schedule:",
        "  ckptool r",
        "Possible fixes for 1 (choose one):",
        "  ckptool x",
        "  ckptool y",
    ]


def test_each_complaint_has_torchs_error_below_it():
    wide = lines(diagnosis(commands=COMMANDS), explain=False)
    assert wide[2:4] == ["1. error: what is \\x1b[2J wrong", f"   {WHY}."]
    narrow = lines(diagnosis(commands=COMMANDS), Look(width=40), explain=False)
    end = narrow.index("2. note: tied") - 1
    assert " ".join(map(str.strip, narrow[3:end])) == f"{WHY}."
    assert max(map(len, narrow[3:end])) <= 40


def test_a_file_that_loads_is_said_to_load():
    misleads = Complaint("bloat", "what", severity="misleads", effect="why")
    for given, verdict in (
        ((misleads,), "torch.load opens it; 1 warning"),
        (
            (Complaint("ties", "tied", severity="note", effect="kept"),),
            "torch.load opens it; 1 note",
        ),
    ):
        found = Diagnosis("m.pth", "torch-zip", ("cpu",), given)
        assert lines(found)[0] == f"m.pth: {verdict}"


def test_what_is_piped_is_not_broken_and_what_is_seen_fits():
    assert any(line.count("why it") == 30 for line in lines(diagnosis()))
    narrow = lines(diagnosis(commands=COMMANDS), Look(width=60))
    assert max(map(len, narrow)) <= 60


def test_a_broken_command_is_one_to_a_shell():
    found = diagnosis(commands=COMMANDS, all_at_once=COMMANDS[0])
    narrow = lines(found, Look(width=40))
    start = narrow.index("To fix 1, 2:")
    end = narrow.index("Possible fixes for 1 (choose one):")
    text = "\n".join(narrow[start + 1 : end]).replace("\\\n", "")
    assert [shlex.split(line) for line in text.split("\n")] == [shlex.split(c) for c in COMMANDS]


def test_a_command_of_other_programs_stays_whole():
    command = "git lfs install && git -C /a/long/path lfs pull --include '**/model.pth'"
    found = Diagnosis("m.pth", None, ("cpu",), (
        Complaint("not-a-checkpoint", "a pointer", effect="why", commands=(command,)),
    ), commands=(command,))  # fmt: skip
    assert f"  {command}" in lines(found, Look(width=40))


def test_color_is_for_a_terminal():
    assert any("\x1b[31merror\x1b[0m" in line for line in lines(diagnosis(), Look(80, True)))


def test_a_refusal_of_several_lines_has_no_backslash():
    one = Complaint("renamed", "what", hint="no command: first\nsecond", effect="why")
    found = Diagnosis("m.pth", "torch-zip", ("cpu",), (one,))
    assert "   hint   no command: first; second" in lines(found)
