"""Advice about files as they lie in public repositories: what they are, and who reads them."""

import argparse
import pickle
import random
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

from ckptool.diagnosis import doctor
from ckptool.errors import CheckpointError
from ckptool.formats import open_checkpoint
from ckptool.inspection.blockers import summarize_calls


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


KERAS = field(1, b"\x10\x01" + field(3, b"root") + field(5, b'{"name": "sequential"}' * 20))


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("keras_metadata.pb", KERAS * 3, "is a protocol buffer", "give the checkpoint"),
        ("tokenizer.model", field(1, field(1, b"<unk>") + b"\x18\x02") * 9, "is a protocol buffer",
         "give the checkpoint"),
        ("x.txt", b"0.1 0.2 -3e-5\n1 2 3\n", "is a text file with numbers", "numpy.loadtxt"),
        ("x.csv", b"1,2,nan\n4,5,6\n", "is a text file with numbers", "numpy.loadtxt"),
        ("glove.txt", b"the 0.418 0.249\nof 1 2\n", "is a text file that begins with",
         "give the checkpoint"),
        ("model.t7", b"\4\0\0\0\1\0\0\0\3\0\0\0V 1\x0d\0\0\0nn.Sequential" + bytes(40), "Torch7",
         "torchfile.load"),
        ("table.t7", b"\3\0\0\0\1\0\0\0\5\0\0\0\2\0\0\0\1\0\0\0a" + bytes(40), "Torch7",
         "torchfile.load"),
        ("ascii.t7", b"4\n1\n3\nV 1\n17\ntorch.FloatTensor\n", "Torch7", "torchfile.load"),
        ("x.msgpack", b"\x82\xa7weights\1\xa3cfg\x81\xa1a\x93\1\2\3", "without an array",
         "msgpack.unpackb"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_not_called_an_answer_of_a_server(
    tmp_path, name, content, what, hint
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=what) as caught:
        open_checkpoint(tmp_path / name)
    assert hint in caught.value.hint
    assert "download" not in caught.value.hint


@pytest.mark.parametrize("content", [b"<html><title>No</title>", b'{"error": "not found"}'])
def test_a_page_and_an_error_in_json_are_answers_of_a_server(tmp_path, content):
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "m.pth")
    assert "download it again" in caught.value.hint


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_pickle_of_an_unzipped_file_lacks_its_data(tmp_path, protocol):
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pth", pickle_protocol=protocol)
    with zipfile.ZipFile(tmp_path / "m.pth") as archive:
        archive.extractall(tmp_path)
    alone = tmp_path / "data.pkl"
    alone.write_bytes((tmp_path / "m" / "data.pkl").read_bytes())
    (found,) = doctor(alone).complaints
    assert "without its folder data/" in found.text
    assert "download" not in found.hint
    (beside,) = doctor(tmp_path / "m" / "data.pkl").complaints
    assert "data/" not in beside.text
    assert beside.hint.endswith(f"ckptool list {tmp_path / 'm'}")
    assert [name for name, _ in open_checkpoint(tmp_path / "m").tensors()] == [("w",)]


@pytest.mark.parametrize("root", ["s", 3, None, torch.ones(3), [torch.ones(3)], (1, torch.ones(2))])
def test_what_is_no_state_dict_and_loads_is_a_note(tmp_path, root):
    torch.save(root, tmp_path / "m.pt")
    torch.load(tmp_path / "m.pt")
    found = doctor(tmp_path / "m.pt")
    assert found.ok
    assert [one.kind for one in found.complaints] == ["no-model"]


@pytest.mark.filterwarnings(
    "ignore:.*unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_bare_pickle_is_loaded_by_pickle(tmp_path):
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps(argparse.Namespace(lr=1)))
    with pytest.raises(RuntimeError, match="Invalid magic number"):
        torch.load(path, weights_only=False)
    (found,) = [one for one in doctor(path).complaints if one.kind == "no-model"]
    code, _, rest = found.hint.partition(" loads it")
    assert rest
    assert eval(code) == argparse.Namespace(lr=1)


def random_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.random.get_rng_state(),
    }


def accelerate_state():
    found = {"step": 3, "random_state": random.getstate()}
    found |= {"numpy_random_seed": np.random.get_state()}
    return found | {"torch_manual_seed": torch.get_rng_state(), "torch_cuda_manual_seed": []}


def training_arguments():
    module = sys.modules["transformers.training_args"]
    return vars(module)["TrainingArguments"]()


@pytest.fixture
def transformers(monkeypatch):
    module = types.ModuleType("transformers.training_args")
    kind = type("TrainingArguments", (), {"__module__": module.__name__})
    vars(module)["TrainingArguments"] = kind
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("make", "what", "reader"),
    [
        (random_state, "random number generators", "transformers.Trainer.train"),
        (
            accelerate_state,
            "random number generators",
            "accelerate.Accelerator.load_state",
        ),
        (training_arguments, "training arguments", "with transformers installed"),
    ],
)
def test_what_a_trainer_saves_is_named_with_its_reader(tmp_path, make, what, reader):
    torch.save(make(), tmp_path / "m.bin")
    found = doctor(tmp_path / "m.bin")
    (one,) = found.complaints
    assert what in one.text
    assert reader in one.hint
    assert reader in found.reader
    assert (found.ok, found.commands) == (True, ())
    assert "calls" not in one.hint


def test_a_dict_with_another_key_is_no_random_state(tmp_path):
    torch.save({**random_state(), "model": {"w": torch.ones(2)}}, tmp_path / "m.pt")
    found = doctor(tmp_path / "m.pt")
    assert (found.ok, found.reader) == (False, "")


def test_each_callable_is_named_once_and_five_at_most():
    runs = [f"os.system({at})" for at in range(9)]
    assert summarize_calls(runs) == ["os.system(0)"]
    several = [f"m.f{at}({'x' * 200})" for at in range(7)]
    shown = summarize_calls(several)
    assert [text.partition("(")[0] for text in shown[:5]] == [f"m.f{at}" for at in range(5)]
    assert shown[5:] == ["and 2 more"]
    assert max(map(len, shown)) <= 80
    assert summarize_calls(several[:5])[-1].startswith("m.f4(")
