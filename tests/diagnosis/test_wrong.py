"""Files of real libraries that do not load as their owners try, and the words of those libraries.

`fixtures/make/wrong.py` makes the files.
"""

import functools
import json
import os
import random
import re
import shlex
import shutil
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckptool import verify
from ckptool.cli import main
from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import Global, Opaque
from ckptool.diagnosis import doctor
from ckptool.diagnosis.complaint import Subject
from ckptool.diagnosis.diagnose import Planner
from ckptool.diagnosis.info import info
from ckptool.diagnosis.models import check_objects
from ckptool.formats import open_checkpoint
from ckptool.inspection.blockers import find_called_names
from tests.diagnosis.faults import CPU, MENDED, Net, Options, healthy, run

WRONG = Path(__file__).parent.parent.parent / "fixtures" / "wrong"


def examined(path, **options):
    return doctor(path, quick=True, devices=["cpu"], **options)


def summary(path):
    with open_checkpoint(path) as checkpoint:
        return info(checkpoint)


def loaded(path):
    return load_file(path) if str(path).endswith(".safetensors") else torch.load(path)


def state():
    return loaded(WRONG / "consolidated.00.pth")


@pytest.mark.parametrize("name", ["safetensors.pth", "torch.safetensors"])
def test_content_and_name_agree_after_the_command(tmp_path, name):
    path = shutil.copy(WRONG / name, tmp_path)
    with pytest.raises((SafetensorError, Exception), match=r"header too large|Unsupported operand"):
        loaded(path)
    found = examined(path)
    assert [(one.kind, one.severity) for one in found.complaints] == [("misnamed", "fails")]
    run(found.all_at_once)
    assert loaded(found.target).keys() == state().keys()
    assert examined(found.target).complaints == ()
    command = summary(path).commands["cpu"]
    run(command)
    assert loaded(shlex.split(command)[3]).keys() == state().keys()


def test_the_error_of_a_safetensors_file_with_another_name_has_its_first_byte(tmp_path):
    path = tmp_path / "model.pth"
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(88)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")  # 88 is the letter X
    (complaint,) = [one for one in examined(path).complaints if one.kind == "misnamed"]
    assert "invalid load key, 'X'. weights_only" in complaint.effect


def test_a_safetensors_file_gets_the_format_that_transformers_asks_for(tmp_path):
    path = shutil.copy(WRONG / "unnamed.safetensors", tmp_path)
    found = examined(path)
    assert [(one.kind, one.severity) for one in found.complaints] == [("format-unnamed", "note")]
    (note,) = [note for note in summary(path).notes if "format: pt" in note]
    for command in (found.all_at_once, re.search(r"ckptool .*(?= adds it)", note)[0]):
        run(command)
        assert examined(shlex.split(command)[3]).complaints == ()


PARTS = {
    "zero3_model_states.pt": "8 of 11 tensors have the shape",
    "mp_rank_00_model_states.pt": "one of 2 parts of each matrix: its mp_world_size is 2",
    "rank_0_of_8.pt": "judging by its name, it is one of 8 parts",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_called_one_and_no_command_makes_a_model_of_it(name):
    found = examined(WRONG / name)
    (part,) = [one for one in found.complaints if one.kind == "part"]
    assert re.search(PARTS[name], part.text)
    assert (part.severity, bool(part.hint)) == ("fails", True)
    assert not any(one.commands or one.alternatives for one in found.complaints)
    assert (found.commands, found.all_at_once, found.resume) == ((), None, None)
    said = summary(WRONG / name)
    assert said.commands == {}
    assert said.part == part.text
    assert any(part.text in note for note in said.notes)
    assert any(part.text in note for note in verify(WRONG / name).notes)


def test_a_counted_name_is_a_part_where_the_next_lies_beside_it(tmp_path):
    path = shutil.copy(WRONG / "consolidated.00.pth", tmp_path)
    (found,) = examined(path).complaints
    assert (found.kind, found.severity) == ("part", "note")
    shutil.copy(path, tmp_path / "consolidated.01.pth")
    (found,) = examined(path).complaints
    assert (found.severity, "consolidated.01.pth is next to it" in found.text) == ("fails", True)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "training.pth"])
def test_what_a_healthy_training_saved_is_no_failure(name):
    assert examined(WRONG / name).ok
    said = summary(WRONG / name)
    assert (said.weights_only, said.commands) == (True, {})


def test_a_training_has_a_command_to_resume_and_one_for_the_weights(tmp_path):
    path = shutil.copy(WRONG / "resumed.pth", tmp_path)
    found = examined(path)
    before = torch.load(path, weights_only=False)
    run(found.all_at_once)
    assert torch.load(found.target).keys() == state().keys()
    for command in (found.resume, summary(path).commands["resume"]):
        Path(shlex.split(command)[3]).unlink(missing_ok=True)
        run(command)
        after = torch.load(shlex.split(command)[3])
        assert (after.keys(), after["epoch"], after["best"]) == (before.keys(), 3, 0.5)
        assert after["model"].keys() == before["model"].keys()  # those of the wrapped model
        moments = after["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(moments, before["optimizer"]["state"][0]["exp_avg"])


def test_an_average_loads_into_the_model_after_either_command(tmp_path):
    path = shutil.copy(WRONG / "averaged.pth", tmp_path)
    command = examined(path).all_at_once
    assert summary(path).commands["cpu"] == command
    run(command)
    assert torch.load(shlex.split(command)[3]).keys() == state().keys()


def test_a_counter_that_is_left_without_wrappers_is_left_out(tmp_path):
    path = shutil.copy(WRONG / "averaged.pth", tmp_path)
    bare = tmp_path / "bare.pth"
    run(f"ckptool strip-module {path} -o {bare}")
    command = summary(bare).commands["cpu"]
    assert "--exclude n_averaged" in command
    run(command)
    assert torch.load(shlex.split(command)[3]).keys() == state().keys()
    assert summary(shlex.split(command)[3]).commands == {}


@pytest.mark.parametrize("name", ["ao_dynamic_whole.pth", "ao_static_whole.pth"])
def test_no_plan_makes_a_state_dict_without_its_packed_weights(name):
    found = examined(WRONG.parent / "quantised" / name)
    assert (found.commands, found.all_at_once) == ((), None)
    assert not any(one.kind == "metadata" for one in found.complaints)
    (whole,) = [one for one in found.complaints if one.kind == "module"]
    assert "cannot contain data that only the class itself can save" in whole.hint


def find_quantized(folder, finish):
    """A TorchScript of a quantized model."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
    net = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)
    torch.jit.save(finish(torch.jit.script(net)), folder / "quantized.pt")
    return folder / "quantized.pt"


def optimized(folder):
    """A TorchScript without the weights of its convolution, which torch itself cannot load."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch packs nothing for mkldnn")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    path = folder / "optimized.pt"
    torch.jit.save(torch.jit.optimize_for_inference(torch.jit.script(net.eval())), path)
    return path


def frozen(folder):
    """A TorchScript whose weights are constants of its program."""
    net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 4)).eval())
    torch.jit.freeze(net).save(folder / "frozen.pt")
    return folder / "frozen.pt"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: find_quantized(folder, lambda net: net), "its weights are packed"),
        (lambda folder: find_quantized(folder, torch.jit.freeze), "its weights are packed"),
        (optimized, "weights are missing"),
        (frozen, "torch.jit.freeze removed the keys of 2 tensors"),
    ],
    ids=["scripted", "frozen packed", "optimized", "frozen"],
)
def test_a_program_that_alone_reads_its_weights_gets_no_command(tmp_path, make, says):
    path = make(tmp_path)
    found = examined(path)
    assert found.complaints[0].text.startswith(says)
    assert (found.commands, found.resume) == ((), None)
    assert not any(one.commands or one.alternatives for one in found.complaints)
    said = summary(path)
    assert (said.commands, said.part) == ({}, found.complaints[0].text)
    if found.complaints[0].kind != "part":  # the file itself is as it was written
        assert not any("intact file" in (one.hint or "") for one in found.complaints)
        assert not any(one.kind == "state_dict" for one in said.sections)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_constants_without_a_value_are_counted(tmp_path):
    path = optimized(tmp_path)
    with pytest.raises(RuntimeError):
        torch.jit.load(path)
    assert any(note.startswith("2 weights: its code uses") for note in summary(path).notes)


def test_only_the_weights_that_go_with_objects_are_counted():
    with open_checkpoint(WRONG.parent / "quantised" / "torchao_state.pth") as checkpoint:
        subject = Subject(checkpoint)
        plan = Planner(subject, check_objects(subject)).plan()
    assert plan.command is None
    assert plan.obstacle == (
        "dropping the objects would drop 2 tensors of the weights: 0.weight, 2.weight"
    )


def random_states():
    numpy_state = np.random.RandomState(0).get_state()
    return {"python": random.getstate(), "numpy": numpy_state, "cpu": torch.random.get_rng_state()}


@pytest.mark.parametrize("make", [random_states, Options])
def test_what_a_trainer_saves_beside_the_model_is_not_called_a_failed_model(tmp_path, make):
    torch.save(make(), tmp_path / "beside.pth")
    found = examined(tmp_path / "beside.pth")
    (none,) = [one for one in found.complaints if one.kind == "no-model"]
    is_known = make is random_states  # and Options are of nobody known
    assert (none.severity, found.ok) == ("note", is_known)
    assert ("weights_only=False" in none.hint) != is_known
    assert ("transformers.Trainer.train" in none.hint) == is_known == bool(found.reader)
    assert torch.load(tmp_path / "beside.pth", weights_only=False)
    if is_known:
        assert found.commands == ()
        return
    run(found.all_at_once)
    assert torch.load(found.target).keys()


class Store:
    def __init__(self):
        self._mapping = {"x": torch.ones(4, 3), "edge_index": torch.ones(2, 5)}


class Graph:
    """A graph as PyG saves it."""

    def __init__(self):
        self._store = Store()


def tensors_in(path):
    with open_checkpoint(path) as checkpoint:
        return len(list(checkpoint.tensors()))


GRAPHS = [Graph, lambda: {"train": Graph(), "val": Graph()},
          lambda: ({"x": torch.ones(3, 2)}, {"x": torch.ones(2)}, Graph)]  # fmt: skip


@pytest.mark.parametrize("make", GRAPHS, ids=["graph", "graphs", "collated"])
def test_the_tensors_of_a_graph_are_no_weights(tmp_path, make):
    torch.save(make(), tmp_path / "graph.pt")
    found = examined(tmp_path / "graph.pt")
    assert [one.kind for one in found.complaints] == ["objects", "no-model"]
    said = summary(tmp_path / "graph.pt")
    assert not any("several state dicts" in note for note in said.notes)
    command = found.all_at_once
    assert said.commands["cpu"] == command
    assert "--model-only" not in command
    run(command)
    assert tensors_in(shlex.split(command)[3]) == tensors_in(tmp_path / "graph.pt")


def test_weights_that_an_object_keeps_are_weights(tmp_path):
    average = Graph()
    average._store._mapping = {f"module.{name}": value for name, value in healthy().items()}
    torch.save(average, tmp_path / "ema.pt")
    run(examined(tmp_path / "ema.pt").all_at_once)
    assert torch.load(tmp_path / "ema.fixed.pth").keys() == healthy().keys()


def test_torchaos_tensors_load_after_its_import():
    path = WRONG.parent / "quantised" / "torchao_state.pth"
    needed = "import torchao first; it allows its own classes, so that torch.load(FILE) works"
    assert needed in summary(path).notes
    needed = needed.replace("FILE", repr(str(path)))
    assert [(one.hint or "") for one in examined(path).complaints if one.hint] == [needed]


@pytest.mark.parametrize("key", [None, "opt"])
def test_an_optimizer_is_loaded_from_where_it_is(tmp_path, key):
    net = Net()
    state = torch.optim.SGD(net.parameters(), momentum=0.9).state_dict()
    torch.save(state if key is None else {key: state}, tmp_path / "opt.pt")
    (found,) = examined(tmp_path / "opt.pt").complaints
    way = "" if key is None else "['opt']"
    assert found.hint == (
        f"optimizer.load_state_dict(torch.load({str(tmp_path / 'opt.pt')!r}){way}) loads it"
    )


def test_a_pickle_that_runs_a_program_is_never_to_be_trusted():
    said = [(one.hint or "") for one in examined(WRONG / "malicious.pth").complaints]
    assert not any("weights_only=False" in text for text in said)


class Download:
    def __reduce__(self):
        return urllib.request.urlopen, ("http://localhost:1/",)


CALLING = {
    "function": lambda: {"n": 1, "u": Download()},
    "root": Download,
    "argument": lambda: {"u": functools.partial(Download, 1)},
    "method": lambda: {"u": "text".join},
}


@pytest.mark.parametrize("made", CALLING.values(), ids=list(CALLING))
def test_no_sentence_offers_to_unpickle_what_is_called(capsys, tmp_path, made):
    path = os.fspath(tmp_path / "made.pth")
    torch.save(made(), path)
    for verb in ("doctor", "info"):
        main([verb, path])
        said = capsys.readouterr().out
        assert "weights_only=False) takes it" not in said
    main(["doctor", path])
    assert "unpickling the file calls" in capsys.readouterr().out


def test_what_is_called_and_what_is_only_named(tmp_path):
    thing, fn = Global("net", "Thing"), Global("net", "fn")
    made = Opaque(thing, (), maker="newobj")
    for root, expected in (
        ({"a": thing, "b": made}, ()),
        ({"a": Opaque(thing, (1,), maker="newobj")}, ("net.Thing",)),  # builtins.map calls so
        ({"a": fn, "b": Opaque(fn, ())}, ("net.fn",)),
        ({"a": made, "b": Opaque(Opaque(Global("builtins", "getattr"), (fn, "x")), ())},
         ("net.fn.x", "builtins.getattr")),
    ):  # fmt: skip
        assert find_called_names(Checkpoint(root, "torch-zip", "made.pth")) == expected
    dropped = Checkpoint({}, "torch-zip", "made.pth", Details(globals=("net.fn", "torch.Size")))
    assert find_called_names(dropped) == ("net.fn",)


def test_a_safetensors_file_is_for_its_own_loader(capsys, tmp_path):
    unnamed, named = WRONG / "unnamed.safetensors", tmp_path / "named.safetensors"
    save_file(dict(state()), named, metadata={"format": "pt"})
    for path in (unnamed, named):
        assert load_file(path)
        main(["doctor", os.fspath(path)])
        first = capsys.readouterr().out.splitlines()[0]
        assert "safetensors.torch.load_file" in first
        assert not re.search(r"torch\.load\b", first)


def test_a_model_with_its_adapters_is_for_peft():
    (found,) = examined(WRONG / "peft.pth").complaints
    assert (found.kind, found.severity, found.commands) == ("adapter", "fails", ())
    assert f"ckptool merge-lora {WRONG / 'peft.pth'} -o OUT --alpha N" in found.hint


def test_a_pickle_that_runs_a_program_is_called_that_first(capsys, tmp_path):
    path = shutil.copy(WRONG / "malicious.pth", tmp_path)
    for verb in ("info", "doctor"):
        main([verb, str(path)])
        line = capsys.readouterr().out.splitlines()[1]
        assert re.fullmatch(r"would run +os\.system\('true'\)", line)
        main([verb, "--json", str(path)])
        assert json.loads(capsys.readouterr().out)["would_run"] == ["os.system('true')"]
    found = examined(path)
    run(found.all_at_once)
    assert examined(found.target).ok


def test_what_a_file_that_does_not_open_would_run_is_said_too(capsys, tmp_path):
    path = tmp_path / "cut.pkl"
    path.write_bytes(b"\x80\x02cos\nsystem\nU\x04true\x85R0]")
    main(["doctor", "--json", os.fspath(path)])
    document = json.loads(capsys.readouterr().out)
    assert document["would_run"] == ["os.system('true')"]
    assert [one["kind"] for one in document["complaints"]] == ["truncated", "malicious"]


def quoted(complaint):
    """What a complaint quotes of each library, in pieces between which something is left out."""
    said = complaint.quote
    if said is not None and said.call in ("torch.load", "safetensors.torch.load_file"):
        yield said.call, [piece.strip() for piece in said.text.split("...") if piece.strip()]


def refusal(path, who):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is looked at
        load_file(path) if who.startswith("safetensors") else torch.load(path)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fault",
    [fault for fault in MENDED if fault.options in ((), CPU)],
    ids=lambda fault: fault.id,
)
def test_quoted_words_are_torchs_own(tmp_path, fault):
    path = fault.make(tmp_path)
    for complaint in examined(path).complaints:
        for who, pieces in quoted(complaint):
            said = refusal(path, who)
            assert all(piece in said for piece in pieces), (pieces, said)


@pytest.mark.parametrize("name", ["malicious.pth", "resumed.pth", "safetensors.pth"])
def test_quoted_words_about_a_pickle_are_torchs_own(name):
    said = [pair for one in examined(WRONG / name).complaints for pair in quoted(one)]
    assert said
    for who, pieces in said:
        assert all(piece in refusal(WRONG / name, who) for piece in pieces)


@pytest.mark.parametrize("cut", [0, 4, 20, -4])
def test_a_damaged_safetensors_file_has_the_message_of_safetensors(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file(dict(state()), path)
    path.write_bytes(path.read_bytes()[:cut])
    (found,) = doctor(path).complaints
    ((who, pieces),) = quoted(found)
    assert who == "safetensors.torch.load_file"
    assert all(piece in refusal(path, who) for piece in pieces)


def test_names_that_do_not_fit_have_the_words_of_load_state_dict(tmp_path):
    wrapped = {f"module.{name}": value for name, value in healthy().items()}
    torch.save(wrapped, tmp_path / "model.pth")
    with pytest.raises(RuntimeError) as caught:
        Net().load_state_dict(wrapped)
    (found,) = [
        one for one in examined(tmp_path / "model.pth").complaints if one.kind == "wrappers"
    ]
    assert all(piece.strip() in str(caught.value) for piece in found.quote.text.split("..."))


def test_torch_jit_says_of_a_state_dict_what_is_explained(capsys, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(healthy(), path)
    with pytest.raises(RuntimeError) as caught:
        torch.jit.load(path)
    main(["doctor", os.fspath(path), "--explain"])
    said = capsys.readouterr().out.partition("torch.jit.load fails: ")[2].strip()
    assert said
    assert said in str(caught.value)
