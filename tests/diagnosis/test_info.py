"""The summary: sections, what is reachable, what blocks weights_only, what to do."""

import argparse
import json
import os
import pickle
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptool.cli import main
from ckptool.core.model import Opaque, OrderedMap, StorageRef
from ckptool.diagnosis.complaint import Subject
from ckptool.diagnosis.diagnose import diagnose
from ckptool.diagnosis.info import info
from ckptool.files import FileSource
from ckptool.formats import open_checkpoint
from ckptool.inspection.commands import describe_waste
from tests.inspection.handmade import checkpoint, floats, storage, tensor


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.fc = torch.nn.Linear(8, 10)


@pytest.fixture
def saved(tmp_path):
    def info_of(root, name="model.pth", **options):
        torch.save(root, tmp_path / name, **options)
        with open_checkpoint(tmp_path / name) as opened:
            return info(opened)

    return info_of


def learnable(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_sections_count_what_torch_counts(saved):
    net = torch.nn.DataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = saved({"epoch": 3, "model": net.state_dict(), "optim": optimizer.state_dict()})
    model, optim, values = found.sections
    assert (model.path, model.kind, model.wrappers) == (("model",), "state_dict", ("module",))
    assert model.tensors == len(net.state_dict())
    assert model.parameters == learnable(net)
    assert model.nbytes == sum(t.nbytes for t in net.state_dict().values())
    assert (optim.kind, optim.parameters) == ("optimizer", 0)
    assert (values.kind, values.tensors) == ("values", 0)


def test_a_pickled_module_tells_parameters_from_buffers(saved):
    net = Net()
    net.register_buffer("table", torch.zeros(100))
    (section,) = saved(net).sections
    assert (section.kind, section.parameters) == ("module", learnable(net))


def test_a_tied_parameter_counts_once(saved):
    weight = torch.zeros(4, 4)
    found = saved({"emb.weight": weight, "head.weight": weight, "head.bias": torch.zeros(4)})
    (section,) = found.sections
    assert (section.tensors, section.parameters, section.nbytes) == (3, 20, 80)
    assert found.ties == (("emb.weight", "head.weight"),)


def test_devices_and_dtypes_are_counted_by_tensor():
    root = {
        "a": tensor(floats(1.0, device="cuda:3"), [1]),
        "b": tensor(floats(1.0, device="cuda:3"), [1]),
        "c": tensor(storage(b"\0" * 8, device="cpu"), [1], dtype="int64"),
    }
    found = info(checkpoint(root))
    assert found.devices == {"cuda:3": 2, "cpu": 1}
    assert found.dtypes == {"float32": 2, "int64": 1}


def test_reachable_bytes_are_the_union_of_what_tensors_reach(saved):
    big = torch.zeros(1000)
    views = {"a": big[10:20], "b": big[15:30], "c": big[500:700:2], "d": big[0:0]}
    found = saved(views)
    assert found.storage_bytes == 4000
    assert found.reachable_bytes == 4 * (20 + 199)


FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


@pytest.mark.parametrize("name", ["arrays_protocol0.pkl", "arrays_protocol5.pkl"])
def test_what_lies_in_a_bare_pickle_is_reachable(name):
    with open_checkpoint(FIXTURES / "streams" / name) as checkpoint:
        found = info(checkpoint)
    assert found.reachable_bytes == found.storage_bytes > 0


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("dtensor_0_of_1", 196), ("dtensor_0_of_2", 132), ("sharded_tensor_1_of_2", 16)],
)
def test_of_a_tensor_that_is_spread_the_bytes_here_count(name, nbytes):
    with open_checkpoint(FIXTURES / "distributed" / f"{name}.pth") as checkpoint:
        parts = info(checkpoint).sections
    assert sum(part.nbytes for part in parts) == nbytes


def test_reachable_bytes_include_parts_objects_and_whole_storages(saved):
    holder = argparse.Namespace(weight=torch.ones(10))
    sparse = torch.eye(4).to_sparse()
    found = saved({"args": holder, "sparse": sparse, "raw": torch.ones(5).untyped_storage()})
    assert found.reachable_bytes == found.storage_bytes == 40 + 4 * (16 + 4) + 20


def test_a_payload_inside_the_pickle_is_not_counted():
    assert info(checkpoint({"w": tensor(floats(1.0), [1])})).reachable_bytes == 0


def test_weights_only_is_what_torch_says(saved, tmp_path):
    for root, loads in (({"w": torch.ones(1)}, True), ({"a": argparse.Namespace()}, False)):
        found = saved(root)
        assert found.weights_only is loads
        assert bool(found.blockers) is not loads
        if loads:
            assert torch.load(tmp_path / "model.pth", weights_only=True)
        else:
            with pytest.raises(Exception, match=r"argparse\.Namespace"):
                torch.load(tmp_path / "model.pth", weights_only=True)
            assert any("argparse.Namespace" in text for text in found.blockers)


def test_a_protocol_that_weights_only_refuses_is_named_and_needs_a_rewrite(saved, tmp_path):
    found = saved({"w": torch.ones(1)}, pickle_protocol=4)
    assert not found.weights_only
    assert any("opcode" in text for text in found.blockers)
    command = f"ckptool convert {tmp_path}/model.pth {tmp_path}/model.fixed.pth"
    assert set(found.commands.values()) == {command}


@pytest.mark.parametrize("format", ["torch-tar", "pickle", "torchscript", "pt2"])
def test_a_format_that_torch_load_does_not_take_is_named(format):
    found = info(checkpoint({"w": tensor(floats(1.0), [1])}, format=format))
    assert not found.weights_only
    assert found.commands["cpu"].startswith("ckptool convert made.pth")


def test_a_folder_is_nothing_for_torch_load(tmp_path):
    made = checkpoint({"w": tensor(floats(1.0), [1])})
    object.__setattr__(made, "path", str(tmp_path))
    assert any("folder" in text for text in info(made).blockers)


def test_what_is_in_the_way_of_weights_only_can_be_left_behind(saved):
    found = saved({"model": Net().state_dict(), "args": argparse.Namespace(lr=1)})
    assert found.commands["cpu"].endswith(" --model-only")


def test_several_models_need_a_key(saved):
    state = Net().state_dict()
    copy = {name: value.clone() for name, value in state.items()}
    found = saved({"model": state, "ema": copy, "args": argparse.Namespace(lr=1)})
    assert found.commands["cpu"].endswith(" --plain")
    assert [line.split(" --key ")[1].split()[0] for line in found.alternatives] == ["model", "ema"]


def test_nothing_is_advised_that_leaves_the_model_itself_blocked(fixtures):
    with open_checkpoint(fixtures / "distributed" / "dtensor_0_of_2.pth") as made:
        assert not any("--model-only" in command for command in info(made).commands.values())


def test_the_command_for_weights_among_objects_makes_them_load(fixtures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("dtensor_0_of_1", "fsdp2_0_of_1"):
        shutil.copy(fixtures / "distributed" / f"{name}.pth", "whole.pth")
        assert loaded_by_its_command("whole.pth")
    state = {"fc.weight": np.ones((2, 3)), "fc.bias": np.ones(2), "fn": os.path.join}
    with open("arrays.pkl", "wb") as file:
        pickle.dump(state, file)
    assert list(loaded_by_its_command("arrays.pkl")) == ["fc.weight", "fc.bias"]
    with open_checkpoint(fixtures / "values" / "objects.pth") as made:
        assert "--drop-objects" in info(made).commands["cpu"]


def loaded_by_its_command(path):
    """What torch loads after the command of `info` for a machine without a GPU."""
    with open_checkpoint(path) as opened:
        _, *words = shlex.split(info(opened).commands["cpu"])
    assert main([*words, "--force"]) == 0
    return torch.load(words[2], weights_only=True)


def test_legacy_streams_that_no_torch_loads_are_told(fixtures, tmp_path):
    torch.save({"a": torch.ones(2).to(torch.uint16)}, tmp_path / "u16.pth",
               _use_new_zipfile_serialization=False)  # fmt: skip
    with open_checkpoint(tmp_path / "u16.pth") as made:
        assert "no torch loads uint16 from a legacy stream" in info(made).blockers
    torch.save(None, tmp_path / "p5.pth", pickle_protocol=5,
               _use_new_zipfile_serialization=False)  # fmt: skip
    with open_checkpoint(tmp_path / "p5.pth") as made:
        assert info(made).blockers == ("pickle protocol 5",)


def test_where_there_is_no_model_objects_are_made_plain_or_dropped(saved):
    found = saved({"args": argparse.Namespace(lr=1)})
    assert not found.weights_only
    assert found.commands["cpu"].endswith(" --plain")


def test_a_storage_alone_has_a_device_too():
    raw = StorageRef(storage(b"\0" * 4, device="cuda:1"), "uint8", untyped=True)
    assert info(checkpoint({"raw": raw})).commands["one_gpu"].endswith(" --to cpu")


def test_the_document_has_the_keys_of_the_schema():
    document = info(checkpoint(OrderedMap(w=tensor(floats(1.0), [1])))).to_dict()
    assert document["schema"] == "ckptool.info/1"
    assert "torch_version" not in document
    wanted = {
        "file", "format", "size", "byteorder", "sections", "devices", "dtypes", "globals",
        "weights_only", "storage_bytes", "reachable_bytes", "ties",
    }  # fmt: skip
    assert wanted <= document.keys()
    assert list(document["sections"][0]) == [
        "path", "kind", "wrappers", "tensors", "parameters", "nbytes",
    ]  # fmt: skip
    assert json.loads(json.dumps(document, allow_nan=False))["weights_only"] is True


def test_the_version_is_told_where_the_file_states_it():
    document = info(checkpoint({}, torch_version="2.1.0")).to_dict()
    assert document["torch_version"] == "2.1.0"


def test_a_cycle_ends():
    loop: list[object] = []
    loop.append(loop)
    made = Opaque("x", steps=[("append", loop)])
    assert info(checkpoint({"loop": loop, "object": made})).reachable_bytes == 0


def test_what_would_run_is_told_without_the_bytes_of_tensors(tmp_path, monkeypatch):
    """Also of a file that was edited in place, between whose records dead bytes lie."""
    path = tmp_path / "model.pth"
    torch.save({"module.w": torch.ones(4_000_000), "best": np.float64(1.5)}, path)
    assert main(["strip-module", "--in-place", str(path)]) == 0
    read = []
    fill, plain = FileSource.fill, FileSource.read

    def filled(self, offset, buffer):
        read.append(len(buffer))
        fill(self, offset, buffer)

    def taken(self, offset, length):
        read.append(length)
        return plain(self, offset, length)

    monkeypatch.setattr(FileSource, "fill", filled)
    monkeypatch.setattr(FileSource, "read", taken)
    found = info(path)
    assert found.dead_bytes
    assert found.would_run == ()
    assert sum(read) < 4_000_000  # windows of a mebibyte, in which pickles are looked for


TAGGED = {
    "another GPU": (["cuda:3"], {"one_gpu", "cpu"}),
    "the first GPU, which every rank would load": (["cuda:0"], {"one_gpu", "cpu"}),
    "several GPUs": (["cuda:0", "cuda:1"], {"one_gpu", "cpu"}),
    "the current GPU, and the first": (["cuda", "cuda:0"], {"cpu"}),
    "no GPU": (["cpu"], set()),
}


def held(devices, name="model.pth", wrapper=""):
    root = OrderedMap(
        (f"{wrapper}t{at}", tensor(floats(1.0, key=str(at), device=device), [1]))
        for at, device in enumerate(devices)
    )
    return replace(checkpoint(root), path=name)


@pytest.mark.parametrize(("devices", "machines"), TAGGED.values(), ids=list(TAGGED))
def test_each_machine_has_the_command_of_doctor(devices, machines):
    for wrapper in ("", "module."):
        file = held(devices, wrapper=wrapper)
        expected = {
            machine: diagnose(Subject(file, devices=there))
            for machine, there in (("one_gpu", ("cpu", "cuda:0")), ("cpu", ("cpu",)))
        }
        found = info(file)
        wrong = {machine for machine, one in expected.items() if not one.ok}
        assert wrong == (machines if not wrapper else {"one_gpu", "cpu"})
        assert found.commands == {machine: expected[machine].all_at_once for machine in wrong}


@pytest.mark.parametrize("name", ["a b;rm.pth", "-m.pth", "unzipped/"])
def test_names_are_quoted_as_doctor_quotes_them(name):
    file = held(["cuda:3"], name, "module.")
    command = diagnose(Subject(file)).all_at_once
    assert command is not None
    assert info(file).commands["cpu"] == command


@pytest.mark.parametrize(
    ("unused", "dead", "facts"),
    [
        (4000, 0, "4,000 bytes of tensor data are unused"),
        (0, 17, "17 bytes are dead"),
        (1, 2, "1 byte of tensor data is unused and 2 bytes are dead"),
    ],
)
def test_waste_is_told_with_what_removes_it(unused, dead, facts):
    assert describe_waste("a b.pth", unused, dead) == (
        f"{facts}; ckptool compact 'a b.pth' drops them",
    )


def test_without_waste_there_is_no_note():
    assert describe_waste("m.pth", 0, 0) == ()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_called_config_json_is_not_waited_for(tmp_path):
    codes = {"a._data": torch.ones(8, 8, dtype=torch.int8), "a._scale": torch.rand(8, 1)}
    torch.save(codes, tmp_path / "model.pth")
    os.mkfifo(tmp_path / "config.json")
    assert any("quantized" in note for note in info(tmp_path / "model.pth").notes)
