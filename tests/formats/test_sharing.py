"""New files whose bytes lie at the same place in a block as in the file that they come from."""

import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.files import atomic
from ckptool.files.source import SHARED

BLOCK = 4096


def offsets(path):
    """Where each record of `data/` begins, by the local headers; and the folder."""
    found = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<2H", file.read(4))
            found[info.filename] = info.header_offset + 30 + name + extra
        folder = archive.namelist()[0].partition("/")[0]
    return {name: at for name, at in found.items() if "/data/" in name}, folder


def state(count=30, size=20_000, wrapper="module."):
    torch.manual_seed(0)
    return {f"{wrapper}l.{i}.w": torch.randn(size + 16 * i) for i in range(count)}


def saved(path, content):
    torch.save(content, path)
    return path


def loaded_alike(path, expected):
    """Whether torch reads it in each of its ways."""
    for options in ({}, {"mmap": True}):
        found = torch.load(path, weights_only=True, **options)
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
    with torch.serialization.skip_data():
        assert torch.load(path).keys() == expected.keys()
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):
        found = torch.load(path, map_location="meta")
        mapped = torch.load(path, mmap=True)
    assert [one.shape for one in found.values()] == [one.shape for one in expected.values()]
    assert all(torch.equal(mapped[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "folder", ["model", "a", "archive", "a-name.of-many_letters-and-a-few-more"]
)
def test_a_torch_zip_keeps_its_folder_and_the_places_of_its_records(tmp_path, folder):
    source = saved(tmp_path / f"{folder}.pth", state())
    for verb in ("strip_module", "add_module"):
        target = tmp_path / f"{verb}.out"
        ckptool.open(source).__getattribute__(verb)().save(target, format="torch-zip")
        new, name = offsets(target)
        old, _ = offsets(source)
        assert name == folder
        assert new.keys() == old.keys()
        assert {(new[one] - old[one]) % BLOCK for one in new} == {0}
        assert max(new.values()) - max(old.values()) <= BLOCK
    loaded_alike(tmp_path / "strip_module.out", state(wrapper=""))


def test_a_change_of_devices_and_an_extract_keep_them_too(tmp_path):
    model = state(wrapper="")
    content = {"model": model, "optimizer": {"state": state(4, wrapper="o."), "param_groups": []}}
    source = saved(tmp_path / "run.pth", content)
    old, _ = offsets(source)
    ckptool.open(source).remap({"*": "cuda:1"}).save(tmp_path / "gpu.pth")
    new, _ = offsets(tmp_path / "gpu.pth")
    assert {(new[one] - old[one]) % BLOCK for one in new} == {0}
    ckptool.open(source).then(ckptool.Take(model_only=True)).save(tmp_path / "model.pth")
    new, _ = offsets(tmp_path / "model.pth")
    assert len(new) == 30
    assert {(new[one] - old[one]) % BLOCK for one in new} == {0}
    loaded_alike(tmp_path / "model.pth", model)


def test_what_is_small_or_computed_or_in_another_order_is_laid_out_as_torch_does(tmp_path):
    small = saved(tmp_path / "small.pth", state(3, 1000))
    ckptool.open(small).strip_module().save(tmp_path / "a.pth")
    large = saved(tmp_path / "large.pth", state())
    ckptool.open(large).then(ckptool.Cast("float16")).save(tmp_path / "b.pth")
    tensors = torch.load(large)
    mixed = dict(sorted(tensors.items(), key=lambda one: -one[1].numel()))
    with zipfile.ZipFile(large) as archive:
        order = [name for name in archive.namelist() if "/data/" in name]
    assert len(order) == 30
    reversed_names = {f"k{i}": name for i, name in enumerate(mixed)}
    checkpoint = ckptool.open(large)
    root = {new: checkpoint.root[old] for new, old in reversed_names.items()}
    checkpoint.with_root(root).save(tmp_path / "c.pth")
    for name in ("a.pth", "b.pth", "c.pth"):
        new, folder = offsets(tmp_path / name)
        assert folder == "archive"
        first = min(new.values())
        assert first % 64 == 0
        assert first < BLOCK + 64 * 30
    torch.load(tmp_path / "c.pth")


def test_a_name_of_a_folder_that_is_no_plain_one_is_not_kept(tmp_path):
    source = saved(tmp_path / "modèle é.pth", state())
    ckptool.open(source).strip_module().save(tmp_path / "new.pth")
    assert offsets(tmp_path / "new.pth")[1] == "archive"
    loaded_alike(tmp_path / "new.pth", state(wrapper=""))


def body_of(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_the_header_of_safetensors_is_padded_by_less_than_a_block(tmp_path):
    content, source, target = state(), tmp_path / "m.safetensors", tmp_path / "n.safetensors"
    save_file(content, source, metadata={"format": "pt"})
    ckptool.open(source).rename([r"^module\.=>net.backbone."]).save(target)
    assert (body_of(target) - body_of(source)) % BLOCK == 0
    assert abs(body_of(target) - body_of(source)) <= BLOCK
    found = load_file(target)
    assert all(torch.equal(found["net.backbone." + name[7:]], content[name]) for name in content)
    ckptool.open(source).then(ckptool.Cast("float16")).save(tmp_path / "half.safetensors")
    assert body_of(tmp_path / "half.safetensors") < 2 * BLOCK
    assert ckptool.open(tmp_path / "half.safetensors").details.notes == ()


@pytest.fixture
def disk(monkeypatch):
    """What is asked of the disk; it shares blocks where `shares` says so."""
    asked = {"reserved": [], "free": [], "shares": True}
    monkeypatch.setattr(atomic, "try_sharing_blocks", lambda run, fd: asked["shares"])
    monkeypatch.setattr(atomic, "reserve", lambda fd, size: asked["reserved"].append(size))
    monkeypatch.setattr(atomic, "check_space", lambda folder, size: asked["free"].append(size))
    return asked


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_only_what_is_not_shared_must_have_room(tmp_path, disk, ending):
    source, target = tmp_path / f"m.{ending}", tmp_path / f"n.{ending}"
    torch.save(state(), source) if ending == "pth" else save_file(state(), source)
    nbytes = sum(one.nbytes for one in state().values())
    ckptool.open(source).strip_module().save(target)
    size = target.stat().st_size
    assert disk["reserved"] == []
    assert disk["free"] == [size - nbytes]
    disk["shares"] = False
    ckptool.open(source).strip_module().save(target, overwrite=True)
    assert disk["reserved"] == [size]
    assert disk["free"][1:] == [size - nbytes, size]


def test_numpy_reads_what_is_padded(tmp_path):
    source = saved(tmp_path / "m.pth", state())
    ckptool.open(source).strip_module().save(tmp_path / "n.pth")
    new, _ = offsets(tmp_path / "n.pth")
    raw = (tmp_path / "n.pth").read_bytes()
    expected = state(wrapper="")["l.0.w"].numpy()
    assert np.array_equal(np.frombuffer(raw, "<f4", expected.size, new["m/data/0"]), expected)
    assert SHARED == BLOCK
