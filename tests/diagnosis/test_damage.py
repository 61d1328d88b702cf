"""What takes reading the file: damage, NaN, contradictions of the container."""

import shutil
import zipfile
from collections import OrderedDict

import pytest
import torch

from ckptool.diagnosis import doctor
from tests.diagnosis.faults import Net, healthy, run, saved, wrapped


def flipped(path):
    """The file with one bit of one tensor turned over."""
    with zipfile.ZipFile(path) as archive:
        largest = max(
            archive.infolist(), key=lambda one: one.file_size * ("/data/" in one.filename)
        )
        content = archive.read(largest)
    whole = bytearray(path.read_bytes())
    whole[whole.index(content) + 5] ^= 4
    path.write_bytes(whole)
    return path


def kinds(diagnosis):
    return [one.kind for one in diagnosis.complaints]


def test_a_healthy_file_is_read_and_has_no_complaint(diagnosed):
    told = []
    assert diagnosed(healthy(), quick=False, progress=lambda *at: told.append(at)).complaints == ()
    assert told


def test_a_bit_that_torch_does_not_miss_is_found(tmp_path):
    path = flipped(saved(wrapped("module"))(tmp_path))
    torch.load(path)  # no error
    found = doctor(path, devices=["cpu"])
    assert (found.complaints[0].kind, found.complaints[0].severity) == ("damaged", "fails")
    assert (found.commands, found.all_at_once, found.target) == ((), None, None)
    assert all(one.hint for one in found.complaints)
    assert "damaged" not in kinds(doctor(path, quick=True))


@pytest.mark.parametrize(
    ("value", "kind"),
    [(float("nan"), "nan"), (float("inf"), "infinite"), (-float("inf"), "infinite")],
)
def test_numbers_that_are_none_are_found(complaint, value, kind):
    root = healthy()
    root["head.bias"][1] = value
    found = complaint(kind, {"model": root}, quick=False)
    assert (found.severity, found.where, found.commands) == ("misleads", ("model/head.bias",), ())
    assert complaint(kind, {"model": root}, quick=True) is None


def test_an_infinite_score_or_mask_is_nothing_wrong(diagnosed):
    root = {
        "model": healthy(),
        "best": torch.tensor(float("inf")),
        "loss": torch.tensor(float("nan")),
    }
    root["model"]["attn_mask"] = torch.full((2, 2), -float("inf"))
    assert not {"nan", "infinite"} & set(kinds(diagnosed(root, quick=False)))


def test_a_fresh_observer_and_masks_by_any_name_are_nothing_wrong(complaint):
    observer = torch.ao.quantization.MinMaxObserver()
    causal = torch.full((8, 8), -float("inf")).triu(1)
    root = {
        **torch.nn.ModuleDict({"o": observer}).state_dict(),
        "h.causal": causal.half(),
        "l.w": torch.ones(3, 3),
    }
    assert complaint("infinite", {"model": root}, quick=False) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l.weight", [float("inf"), 0.0]),
        ("n.running_var", [float("inf")]),
        ("l.causal", [float("inf"), 0.0, 1e-30]),
        ("mask_conv.weight", [float("inf"), 1.0]),
        ("logit_scale", float("inf")),
    ],
)
def test_infinities_that_nobody_means_mislead(complaint, name, value):
    root = {name: torch.tensor(value), "a.w": torch.ones(2, 2)}
    assert complaint("infinite", root, quick=False).severity == "misleads"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("archives/unaligned.pth", "offsets"),
        ("archives/trailing.pth", "remains"),
        ("safetensors/spaces.safetensors", "container"),
    ],
)
def test_a_rewrite_mends_what_is_wrong_around_the_tensors(fixtures, tmp_path, name, kind):
    path = shutil.copy(fixtures / name, tmp_path)
    found = doctor(path)
    (complaint,) = [one for one in found.complaints if one.kind == kind]
    assert complaint.commands
    run(*found.commands)
    assert kind not in kinds(doctor(found.target))


def test_what_a_plan_writes_is_whole(tmp_path):
    root = OrderedDict(wrapped("module")())
    root["module.head.bias"] = torch.arange(100_000.0)[:4]
    path = saved({"model": root, "epoch": 1}, pickle_protocol=4)(tmp_path)
    found = doctor(path)
    run(*found.commands)
    assert kinds(doctor(found.target)) == ["metadata"]
    Net().load_state_dict(torch.load(found.target))
