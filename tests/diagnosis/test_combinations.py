"""Any faults together: the plan, and the one command, give the weights back."""

import argparse
import tempfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ckptool
from ckptool.diagnosis import doctor
from tests.diagnosis.faults import Net, run, trained

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")


@st.composite
def faults(draw):
    return {
        "wrappers": draw(st.lists(st.sampled_from(WRAPPERS), max_size=3)),
        "device": draw(st.sampled_from(["cpu", "cuda:0", "cuda:3", "mps", "npu:1"])),
        "protocol": draw(st.sampled_from([2, 3, 4, 5])),
        "legacy": draw(st.booleans()),
        "level": draw(st.sampled_from([(), ("state_dict",), ("run", "net/work")])),
        "beside": draw(st.booleans()),
        "bloat": draw(st.booleans()),
    }


def saved_with(fault, folder):
    net, optimizer = trained()
    before = "".join(f"{wrapper}." for wrapper in fault["wrappers"])
    root = OrderedDict((before + name, value) for name, value in net.state_dict().items())
    if fault["bloat"]:
        wide = torch.zeros(5000)
        wide[:4] = net.head.bias.detach()
        root[f"{before}head.bias"] = wide[:4]
    for key in reversed(fault["level"]):
        root = {key: root}
    if fault["level"] and fault["beside"]:
        root.update(args=argparse.Namespace(lr=1), optimizer=optimizer.state_dict(), epoch=3)
    path = folder / "model.pth"
    with mock.patch("torch.serialization.location_tag", return_value=fault["device"]):
        torch.save(root, path, pickle_protocol=fault["protocol"],
                   _use_new_zipfile_serialization=not fault["legacy"])  # fmt: skip
    return path, net.state_dict()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=15)
@given(faults())
def test_any_faults_together_are_mended(fault):
    with tempfile.TemporaryDirectory() as folder:
        path, wanted = saved_with(fault, Path(folder))
        found = doctor(path, quick=True, devices=["cpu"])
        assert found.ok == (not any(one.severity != "note" for one in found.complaints))
        run(*found.commands)
        made = Path(found.target or path)
        state = torch.load(made, weights_only=True)
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
        Net().load_state_dict(state, strict=True)
        assert doctor(made, devices=["cpu"]).ok


def test_no_way_out_leaves_a_second_checkpoint_of_one_name_in_a_folder_of_shards(tmp_path):
    weight, alone = torch.ones(2), tmp_path / "model.pth"
    torch.save({"a.weight": weight, "b.weight": weight}, alone)
    index = tmp_path / "parts" / "pytorch_model.bin.index.json"
    index.parent.mkdir()
    ckptool.open(alone).save(index, max_shard_size=100)
    for path, target in ((index, "model.fixed.safetensors"), (alone, "model.safetensors")):
        (tied,) = (one for one in doctor(path).complaints if one.kind == "ties")
        (choice,) = tied.alternatives
        assert choice.endswith(f"{target} --ties copy")
