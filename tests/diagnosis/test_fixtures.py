"""Every real file has a diagnosis, and its plan gives one that torch loads, or says why not."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from ckptool.cli import main
from ckptool.diagnosis import doctor
from ckptool.formats import open_checkpoint
from ckptool.inspection.info import info
from ckptool.statedict import MODEL_KINDS

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_gives_a_file_that_loads_or_there_is_a_reason(memory_path, name):
    path = copied(name, memory_path)
    found = doctor(path, quick=True, devices=["cpu"])
    for command in found.commands:
        assert main(shlex.split(command)[1:]) == 0, command
    target = found.target or path
    left = [
        one.kind
        for one in found.complaints
        if one.severity == "fails" and not one.commands and one.kind not in CHOICES
    ]
    assert all(one.remedy for one in found.complaints if one.kind in left)
    assert left or loads(target)  # some load in a process that has imported what they need
    again = {one.kind for one in doctor(target, quick=True, devices=["cpu"]).complaints}
    assert not again & {one.kind for one in found.complaints if one.commands}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_every_other_command_that_is_printed_cures_what_it_is_for(memory_path, name):
    path = copied(name, memory_path)
    found = doctor(path, quick=True, devices=["cpu"])
    done = set()
    for complaint in found.complaints:
        for command in complaint.alternatives:
            assert command in done or main(shlex.split(command)[1:]) == 0, command
            done.add(command)
            again = doctor(shlex.split(command)[3], quick=True, devices=["cpu"])
            assert complaint.kind not in {one.kind for one in again.complaints}, command
    if found.resume is not None:
        assert main(shlex.split(found.resume)[1:]) == 0, found.resume
        assert loads(shlex.split(found.resume)[3])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_info_give_a_file_that_loads(memory_path, name):
    path = copied(name, memory_path)
    with open_checkpoint(path) as checkpoint:
        first = info(checkpoint)
    for command in dict.fromkeys(first.commands.values()):
        model = next((one.name for one in first.sections if one.kind in MODEL_KINDS), "")
        words = shlex.split(command.replace("--key NAME", f"--key {model}"))
        before = set(path.parent.iterdir())
        assert main(words[1:]) == 0, command
        made = set(path.parent.iterdir()) - before
        target = words[3] if words[1] == "convert" else next(iter(made), path)
        with open_checkpoint(target) as checkpoint:
            again = info(checkpoint)
        assert again.weights_only, (command, again.blockers)
        done = [name for name, one in first.commands.items() if one == command]
        assert not set(done) & set(again.commands), (command, again.commands)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch-2.13.0/whole_dp.pth", "without the class net.Net"),
        ("modules/whole_tower.pth", "without the class nets.Tower"),
    ],
)
def test_a_module_fails_for_the_class_that_may_not_be_there(name, says):
    found = doctor(FIXTURES / name, quick=True, devices=["cpu"])
    (complaint,) = (one for one in found.complaints if one.kind == "module")
    assert says in complaint.why


def test_a_part_of_deepspeeds_names_what_gathers_it():
    path = FIXTURES / "foreign" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    found = doctor(path, quick=True, devices=["cpu"])
    command = f"ckptool convert {path.parent} OUT --model-only"
    assert any(command in one.remedy for one in found.complaints)
