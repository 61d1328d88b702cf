"""Every real file has a diagnosis, and its plan gives one that torch loads, or says why not."""

import shlex
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckptool.cli import main
from ckptool.diagnosis import doctor
from ckptool.diagnosis.info import info
from ckptool.formats import open_checkpoint
from ckptool.render.info import info_lines

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
NAMES = [
    str(path.relative_to(FIXTURES)).removesuffix(".oracle.json")
    for path in sorted(FIXTURES.rglob("*.oracle.json"))
]
CHOICES = {"several-models", "values-inside"}
"""What fails for `load_state_dict` alone."""


def copied(name, folder):
    """A copy of a fixture, with all that belongs to it."""
    source = FIXTURES / name
    if source.is_dir():
        return Path(shutil.copytree(source, folder / source.name))
    if name.endswith(".index.json"):
        return Path(shutil.copytree(source.parent, folder / "parts")) / source.name
    return Path(shutil.copy(source, folder))


def loads(path):
    if str(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path) is not None
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@contextmanager
def nothing_left(folder):
    """Remove what is written below a folder."""
    before = {*folder.rglob("*")}
    yield
    for path in sorted({*folder.rglob("*")} - before, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def diagnosis(path):
    return doctor(path, quick=True, devices=["cpu"])


def kinds(found):
    return {one.kind for one in found.complaints}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_that_are_printed_do_what_they_are_for(memory_path, name):
    path = copied(name, memory_path)
    found = diagnosis(path)
    for check in (check_plan, check_alternatives, check_resume, check_commands_of_info):
        with nothing_left(memory_path):
            check(path, found)


def check_plan(path, found):
    """The plan gives a file that loads and is complained of no more, or there is a reason."""
    for command in found.commands:
        assert main(shlex.split(command)[1:]) == 0, command
    target = found.target or path
    left = [
        one
        for one in found.complaints
        if one.severity == "fails" and not one.commands and one.kind not in CHOICES
    ]
    assert all(one.hint for one in left)
    assert left or loads(target)  # some load in a process that has imported what they need
    if found.target is not None:
        found_again = kinds(diagnosis(target))
        assert not found_again & {one.kind for one in found.complaints if one.commands}
    else:
        assert not any(one.commands for one in found.complaints)


def check_alternatives(path, found):
    """Every other command cures what it is for."""
    done = {}
    for complaint in found.complaints:
        for command in complaint.alternatives:
            if command not in done:
                assert main(shlex.split(command)[1:]) == 0, command
                done[command] = kinds(diagnosis(shlex.split(command)[3]))
            assert complaint.kind not in done[command], command


def check_resume(path, found):
    if found.resume is not None:
        assert main(shlex.split(found.resume)[1:]) == 0, found.resume
        assert loads(shlex.split(found.resume)[3])


def check_commands_of_info(path, found):
    """`info` has the commands of `doctor`, and "loads as is" only where there is no warning."""
    with open_checkpoint(path) as checkpoint:
        told = info(checkpoint)
    expected = {"cpu": found.all_at_once, "resume": found.resume}
    assert {name: told.commands.get(name) for name in expected} == (
        dict.fromkeys(expected) if found.ok else expected
    )
    assert ("loads as is" in list(info_lines(told))) == (found.ok and not found.reader)
    assert not told.obstacle or not (found.ok or found.commands)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch-2.13.0/whole_dp.pth", "without the class net.Net"),
        ("modules/whole_tower.pth", "without the class nets.Tower"),
    ],
)
def test_a_module_fails_for_the_class_that_may_not_be_there(name, says):
    found = diagnosis(FIXTURES / name)
    (complaint,) = (one for one in found.complaints if one.kind == "module")
    assert says in complaint.why


def test_a_part_of_deepspeeds_names_what_gathers_it():
    path = FIXTURES / "foreign" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    found = diagnosis(path)
    command = f"ckptool convert {path.parent} OUT --model-only"
    assert any(command in (one.hint or "") for one in found.complaints)
