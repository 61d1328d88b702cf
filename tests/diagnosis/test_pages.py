"""Pages about common files, and that the commands on them do what they are for."""

import re
import shlex
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptool.cli import main
from ckptool.diagnosis import doctor
from tests.diagnosis.faults import Net, healthy, run, training_run
from tests.diagnosis.test_fixtures import NAMES, copied, diagnosis, nothing_left

COMMAND = re.compile(r"ckptool (?:(?! (?:lists|shows|counts|writes|merges|makes)\b)[^;])+")
"""A command in a hint, up to the word that says what it does."""


def prefixed(state, prefix):
    return OrderedDict((prefix + name, value) for name, value in state.items())


def of_kind(found, kind):
    (complaint,) = [one for one in found.complaints if one.kind == kind]
    return complaint


def test_a_header_without_format_is_the_last_note(tmp_path):
    path = tmp_path / "a.safetensors"
    tied = torch.ones(2)
    save_file({"module.w": tied, "module.v": tied.clone()}, path)
    found = doctor(path, quick=True, devices=["cpu"])
    assert [one.kind for one in found.complaints] == ["wrappers", "format-unnamed"]
    run(*found.commands)
    assert [*load_file(found.target)] == ["v", "w"]


def test_the_page_names_what_its_commands_leave(diagnosed):
    root = training_run()
    root["state_dict"] = dict(root["state_dict"])  # without _metadata
    page = str(diagnosed(root | {"args": Net}))
    number = re.search(r"(\d)\. note: the state dict lost its _metadata", page)[1]
    assert page.splitlines()[-1] == f"Not fixed: {number}"
    assert "Not fixed" not in str(diagnosed(dict(healthy())))
    assert "Not fixed" not in str(diagnosed(prefixed(healthy(), "module.")).complaints[0])


def test_a_wrapper_inside_the_model_comes_off_with_at(diagnosed):
    net = Net()
    net.features = torch.nn.DataParallel(net.features)
    found = diagnosed(net.state_dict())
    assert found.commands[0].endswith(" --at features")
    run(*found.commands)
    Net().load_state_dict(torch.load(found.target), strict=True)


def test_wrappers_around_and_inside_the_model_come_off_together(diagnosed):
    net = Net()
    net.features = torch.nn.DataParallel(net.features)
    found = diagnosed(torch.nn.DataParallel(net).state_dict())
    run(*found.commands)
    Net().load_state_dict(torch.load(found.target), strict=True)


def ip_adapter():
    return {
        "image_proj": {"proj.weight": torch.ones(2, 3), "norm.weight": torch.ones(2)},
        "ip_adapter": {"1.to_k_ip.weight": torch.ones(2, 3)},
    }


def test_dicts_that_one_library_reads_together_become_flat(diagnosed):
    """As diffusers reads an IP-Adapter: from a .safetensors file by these prefixes."""
    found = of_kind(diagnosed(ip_adapter()), "several-models")
    first = found.alternatives[0]
    assert first.endswith(" --flatten")
    run(first)
    assert load_file(shlex.split(first)[3]).keys() == {
        "image_proj.proj.weight",
        "image_proj.norm.weight",
        "ip_adapter.1.to_k_ip.weight",
    }


@pytest.mark.parametrize(
    "root",
    [{"a": healthy(), "b": healthy()}, ip_adapter() | {"epoch": 3}],
    ids=["same keys", "values"],
)
def test_other_dicts_stay_apart(diagnosed, root):
    found = of_kind(diagnosed(root), "several-models")
    assert not any("--flatten" in command for command in found.alternatives)


@pytest.mark.parametrize("key", [None, "ema"])
def test_averages_alone_become_the_state_dict_of_the_model(diagnosed, key):
    root = prefixed(healthy(), "ema_model.")
    root.update(initted=torch.tensor(True), step=torch.tensor(3))
    found = diagnosed(root if key is None else {key: root})
    averages = of_kind(found, "averages")
    assert averages.severity == "fails"
    assert averages.text.startswith('every key except initted, step starts with "ema_model."')
    run(*found.commands)
    Net().load_state_dict(torch.load(found.target), strict=True)
    assert "averages" not in {one.kind for one in doctor(found.target).complaints}


@pytest.mark.parametrize(
    ("before", "own", "severity"),
    [("ema_model.", "online_model.", "fails"), ("model_ema.module.", "", "note")],
    ids=["ema-pytorch", "timm"],
)
def test_averages_next_to_the_model_are_a_choice(diagnosed, before, own, severity):
    root = prefixed(healthy(), own) | prefixed(
        {name: value + 1 for name, value in healthy().items()}, before
    )
    found = diagnosed(root)
    averages = of_kind(found, "averages")
    assert (averages.severity, averages.commands) == (severity, ())
    assert not any(one.kind == "submodule-wrapper" for one in found.complaints)
    (command,) = averages.alternatives
    run(command)
    net = Net()
    net.load_state_dict(torch.load(shlex.split(command)[3]), strict=True)
    assert torch.equal(net.head.weight, healthy()["head.weight"] + 1)


@pytest.mark.parametrize("front", ["", "base_model.model."])
def test_the_name_of_an_adapter_in_the_keys_comes_off(diagnosed, front):
    """`get_peft_model_state_dict` of PEFT leaves it out, and what reads the file puts it in."""
    root = OrderedDict((f"{front}q.lora_{part}.default.weight", torch.ones(2, 2)) for part in "AB")
    named = of_kind(diagnosed(root), "adapter-name")
    assert '"default"' in named.text
    (command,) = named.alternatives
    run(command)
    made = load_file(shlex.split(command)[3])
    assert made.keys() == {f"{front}q.lora_{part}.weight" for part in "AB"}


def test_a_whole_peft_model_is_merged_into_one_file(diagnosed):
    held = OrderedDict(
        {
            "q.base_layer.weight": torch.zeros(3, 3),
            "q.lora_A.default.weight": torch.ones(2, 3),
            "q.lora_B.default.weight": torch.ones(3, 2),
        }
    )
    found = diagnosed(held)
    assert "adapter-name" not in {one.kind for one in found.complaints}
    hint = of_kind(found, "adapter").hint
    command = re.match(r"ckptool merge-lora .* --alpha N", hint)[0]
    run(command.replace("OUT", shlex.quote(f"{found.file}.out.pth")).replace("N", "2"))
    assert torch.equal(torch.load(f"{found.file}.out.pth")["q.weight"], torch.full((3, 3), 2.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_hints_run(memory_path, name):
    """Those without words to fill in."""
    path = copied(name, memory_path)
    texts = [one.hint or "" for one in diagnosis(path).complaints]
    commands = [found.strip() for text in texts for found in COMMAND.findall(text)]
    with nothing_left(memory_path):
        for command in commands:
            words = shlex.split(command)
            if not {"OUT", "BASE", "FOLDER", "REFERENCE"} & {*words}:
                assert main(words[1:]) in (0, 1), command
