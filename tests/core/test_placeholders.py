"""Tensors without values: what DeepSpeed saves of a model under ZeRO-3, and the meta device."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import ckptool
from ckptool.cli import main
from ckptool.core.placeholders import find_placeholders
from ckptool.errors import MatchError, NotRepresentable
from tests.conversions import convert_by_options
from tests.sources import PROJECT

WRONG = PROJECT / "fixtures" / "wrong"
ZERO = [WRONG / "zero3_model_states.pt", WRONG / "zero3_whole_vectors.pth"]
KEYS = {"zero3_model_states": "module", "zero3_whole_vectors": "state_dict"}
CLAIMING = [
    {"model_only": True}, {"plain": True}, {"dtype": "bfloat16"}, {"format": "safetensors"},
    {"like": nn.Linear(2, 2), "allow_mismatched": True, "allow_missing": True,
     "allow_unexpected": True},
]  # fmt: skip
CARRYING = [
    "add-module -o {out}", "add-module --in-place", "rename --prefix =net. -o {out}",
    "rename --prefix =net. --in-place", "remap --to cuda:1 -o {out}",
    "remap --to cuda:1 --in-place",
    "convert --format torch-legacy -o {out}", "strip-module -o {out}", "strip-module --in-place",
]  # fmt: skip


@pytest.fixture(params=[*ZERO, "meta", "lazy"], ids=lambda one: Path(one).stem)
def file(request, tmp_path):
    """A file of DeepSpeed's, or one with a meta tensor or a lazy parameter; buffers are whole."""
    if request.param not in ("meta", "lazy"):
        return shutil.copy(request.param, tmp_path)
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    if request.param == "meta":
        state["0.weight"] = torch.empty(2, 2, device="meta")
    else:
        state["0.weight"] = nn.UninitializedParameter(device="cpu")
    torch.save({"model": state}, tmp_path / f"{request.param}.pth")
    return tmp_path / f"{request.param}.pth"


def tensors(path, key):
    return {
        name: "lazy"
        if is_lazy(one)
        else (tuple(one.shape), one.is_meta, None if one.is_meta else one.tolist())
        for name, one in torch.load(path, "cpu", weights_only=False)[key].items()
    }


def said(path):
    with ckptool.open(path) as checkpoint:
        found = find_placeholders(checkpoint)
    return found and found.text


@pytest.mark.parametrize("options", CLAIMING, ids=str)
def test_what_claims_weights_refuses(file, tmp_path, options):
    is_missing = "like" in options and "lazy" in Path(file).name
    with pytest.raises(MatchError if is_missing else NotRepresentable) as caught:
        convert_by_options(file, tmp_path / "out.pth", **options)
    assert is_missing or said(file) in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("kind", ["--model-only", "--key {key}"])
def test_no_part_is_extracted(file, tmp_path, capsys, kind):
    key, out = KEYS.get(Path(file).stem, "model"), tmp_path / "out.pth"
    assert main(["extract", str(file), *kind.format(key=key).split(), "-o", str(out)]) == 2
    assert said(file) in capsys.readouterr().err
    assert not out.exists()


def test_what_has_values_is_extracted_and_measured(tmp_path):
    state = {"a.weight": torch.empty(0), "a.bias": torch.ones(2)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer, "epoch": 3}, tmp_path / "f.pth")
    with ckptool.open(tmp_path / "f.pth") as checkpoint:
        assert len(list(checkpoint.then(ckptool.Take(key="optimizer")).tensors())) == 1
    (row,) = ckptool.stats(tmp_path / "f.pth", key="optimizer").tensors
    assert row.measures.mean == 1
    with pytest.raises(NotRepresentable, match="placeholders"):
        ckptool.stats(tmp_path / "f.pth")
    with pytest.raises(NotRepresentable, match="placeholders"):
        ckptool.stats(tmp_path / "f.pth", include=["*.weight"])


def test_no_mean_is_made(file, tmp_path):
    with pytest.raises(NotRepresentable) as caught:
        ckptool.average([file, file], tmp_path / "out.pth", key=KEYS.get(Path(file).stem, "model"))
    assert said(file) in str(caught.value)


def test_no_model_is_filled(file):
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    before = {name: one.clone() for name, one in net.state_dict().items()}
    is_lazy_one = "lazy" in Path(file).name  # a name that is missing, which may be allowed
    for options in ({}, {"strict": False, "allow_mismatched": True})[: 1 if is_lazy_one else 2]:
        with pytest.raises(MatchError) as caught:
            ckptool.load_into(net, file, key=KEYS.get(Path(file).stem, "model"), **options)
        assert ("never ran" if is_lazy_one else said(file)) in str(caught.value)
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())


@pytest.mark.parametrize("words", CARRYING)
def test_verbs_that_change_names_or_devices_carry_them_and_warn(file, tmp_path, capsys, words):
    key, out = KEYS.get(Path(file).stem, "model"), tmp_path / "out.pth"
    before = list(tensors(file, key).values())
    if "strip" in words:
        assert main(["add-module", str(file), "--in-place"]) == 0
    verb, *options = words.format(out=out).split()
    assert main([verb, str(file), *options]) == 0
    result = out if "-o" in options else file
    assert f"note: {said(result)}; " in capsys.readouterr().err
    assert list(tensors(result, key).values()) == before


def test_info_verify_and_doctor_say_so_without_a_command(file):
    text, found = said(file), ckptool.info(file)
    assert (found.part, found.commands) == (text, {})
    assert any(text in note for note in ckptool.verify(file).notes)
    diagnosis = ckptool.doctor(file, devices="cpu")
    (complaint,) = [one for one in diagnosis.complaints if one.text == text]
    assert complaint.severity == "fails"
    assert not any(one.commands or one.alternatives for one in diagnosis.complaints)
    assert (diagnosis.commands, diagnosis.all_at_once, diagnosis.resume) == ((), None, None)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"e": (0,)}, False),
        ({"a.weight": (0,)}, True),
        ({"a.weight": (0,), "a.bias": (3,)}, True),
        ({"attn.in_proj_weight": (0,), "attn.in_proj_bias": (9,)}, True),
        ({"a.bias": (0,), "bn.running_mean": (0,)}, False),
        ({"loss.weight": (0,), "a.weight": (2, 2)}, False),
        ({"a.weight": (0,), "b.weight": (0,)}, True),
        ({"a.weight": (0,), "b.weight": (0,), "bn.running_mean": (3,), "inv_freq": (9,)}, True),
        ({"a.weight": (0,), "b.weight": (0,), "c.weight": (2, 2)}, True),
        ({"a.weight": (0,), "b.weight": (0,), "c.weight": (2, 2), "d.weight": (1, 1)}, False),
        ({"a.weight": (0,), "b.weight": (0,), "n.weight": (2,), "m.weight": (2,)}, True),
        ({"a.bias": (0,), "b.bias": (0,), "a.weight": (0, 3), "b.weight": (0, 3)}, False),
    ],
)
def test_placeholders_are_most_of_the_weights_but_vectors(tmp_path, shapes, expected):
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    torch.save({"model": state}, tmp_path / "f.pth")
    assert bool(said(tmp_path / "f.pth")) == expected
    if not expected:
        ckptool.convert(tmp_path / "f.pth", tmp_path / "out.pth", ckptool.Take(model_only=True))
        loaded = torch.load(tmp_path / "out.pth", weights_only=True)
        assert {name: tuple(one.shape) for name, one in loaded.items()} == shapes


def test_one_placeholder_is_enough_where_the_file_states_another_shape(tmp_path):
    state = {"experts": torch.empty(0), "empty": torch.empty(0), "norm.weight": torch.ones(3)}
    for shape, expected in ((3, 4), True), ((0,), False):
        shapes = [{"experts": torch.Size(shape), "empty": torch.Size([0])}]
        torch.save({"module": state, "param_shapes": shapes}, tmp_path / "f.pth")
        assert bool(said(tmp_path / "f.pth")) == expected
