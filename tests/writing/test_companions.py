"""Configuration and tokenizer beside the weights: copied, found, and never written over."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import FileMissing, TargetExists, TruncatedFile, UsageError
from ckptool.writing import companions

CONFIG = {"architectures": ["Net"], "model_type": "net"}


@pytest.fixture
def beside(tmp_path):
    """A folder as the hub has it, with weights and code."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_bytes(b"t" * 100_000)
    (folder / "modeling_net.py").write_text("raise SystemExit")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    return folder


@pytest.fixture
def ranks(fixtures, tmp_path):
    """A folder of rank files, as verl writes it."""
    return Path(shutil.copytree(fixtures / "ranks" / "fsdp2-2.13.0", tmp_path / "actor"))


def weights(tmp_path):
    torch.save({"w": torch.ones(6, 2), "b": torch.ones(3)}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


@pytest.mark.parametrize("size", [None, 30])
def test_the_files_of_a_folder_are_copied_and_no_weights_or_code(beside, tmp_path, size):
    out = tmp_path / "out"
    receipt = ckptool.convert(
        weights(tmp_path), f"{out}/", files_from=beside, max_shard_size=size, verify=True
    )
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "tokenizer.json"}
    assert {name for name in names if "model" not in name} == {"config.json", "tokenizer.json"}
    assert (out / "tokenizer.json").read_bytes() == b"t" * 100_000
    assert [Path(path).name for path, _ in receipt.files][:2] == ["config.json", "tokenizer.json"]
    assert receipt.path.endswith("model.safetensors.index.json" if size else "model.safetensors")
    assert f"skipped code of {beside}: modeling_net.py" in receipt.notes
    assert torch.equal(ckptool.load(out)["w"], torch.ones(6, 2))


def test_what_is_there_is_refused_before_anything_is_written(beside, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    with pytest.raises(TargetExists, match=r"out/config\.json"):
        ckptool.convert(weights(tmp_path), out, files_from=beside)
    assert [path.name for path in out.iterdir()] == ["config.json"]
    ckptool.convert(weights(tmp_path), out, files_from=beside, overwrite=True)
    assert json.loads((out / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("where", ["", "huggingface", "hf"])
def test_a_folder_of_many_processes_has_them_itself(ranks, beside, tmp_path, where):
    (ranks / where).mkdir(exist_ok=True)
    shutil.copy(beside / "config.json", ranks / where)
    shutil.copy(beside / "tokenizer.json", ranks / where)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    receipt = ckptool.convert(ranks, out)
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert (out / "tokenizer.json").read_text() == "mine"
    assert "of the target (not copied from" in receipt.notes[-1]
    ckptool.convert(ranks, out, overwrite=True)
    assert (out / "tokenizer.json").read_bytes() == b"t" * 100_000
    ckptool.convert(ranks, tmp_path / "single.safetensors")
    assert not (tmp_path / "config.json").exists()


def test_a_folder_without_them_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileMissing, match="has no configuration or tokenizer file") as caught:
        ckptool.convert(weights(tmp_path), f"{tmp_path}/out/", files_from=tmp_path / "empty")
    assert "config.json" in caught.value.hint
    with pytest.raises(FileMissing, match="is not a readable folder"):
        ckptool.convert(weights(tmp_path), f"{tmp_path}/out/", files_from=tmp_path / "none")
    with pytest.raises(UsageError, match="needs a folder as the target"):
        ckptool.convert(weights(tmp_path), tmp_path / "out.pth", files_from=tmp_path / "empty")
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_meanwhile_leaves_nothing(beside, tmp_path, monkeypatch):
    size = companions.os.path.getsize
    monkeypatch.setattr(companions.os.path, "getsize", lambda path: size(path) + 1)
    with pytest.raises(TruncatedFile, match=r"tokenizer|config"):
        ckptool.convert(weights(tmp_path), f"{tmp_path}/out/", files_from=beside)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_how_much_and_how_much_is_free(beside, ranks, tmp_path):
    source = weights(tmp_path)
    receipt = ckptool.convert(
        source, f"{tmp_path}/out/", files_from=beside, max_shard_size=30, dry_run=True
    )
    assert receipt.notes[-1].startswith(f"5 files of {receipt.size:,} bytes; the disk has ")
    assert not (tmp_path / "out").exists()
    alone = ckptool.convert(ranks, tmp_path / "new" / "out.pth", dry_run=True)
    assert alone.notes[-1].startswith(f"1 file of {alone.size:,} bytes")


@pytest.mark.parametrize("dequantize", [None, "bfloat16"])
def test_a_configuration_that_still_says_quantized_is_named(beside, fixtures, tmp_path, dequantize):
    config = {**CONFIG, "quantization_config": {"load_in_4bit": True}}
    (beside / "config.json").write_text(json.dumps(config))
    notes = ckptool.convert(
        fixtures / "quantised" / "bnb4.safetensors",
        f"{tmp_path}/out/",
        *([ckptool.Cast(dequantize=dequantize)] if dequantize else []),
        files_from=beside,
    ).notes
    told = [note for note in notes if "quantization_config" in note]
    assert len(told) == (dequantize is not None)


def model_folder(beside, name):
    """The folder with true weights under a library's name; other files of weights are gone."""
    for path in beside.glob("model.*"):
        path.unlink()
    source = weights(beside.parent)
    ckptool.convert(source, beside / name, max_shard_size=30 if "index" in name else None)
    return beside


@pytest.mark.parametrize(
    ("name", "format", "written"),
    [
        ("model.safetensors", None, "model.safetensors"),
        ("pytorch_model.bin", None, "model.safetensors"),
        ("model.safetensors", "torch-zip", "pytorch_model.bin"),
        ("model.safetensors.index.json", None, "model.safetensors"),
        ("diffusion_pytorch_model.bin", None, "diffusion_pytorch_model.safetensors"),
        ("adapter_model.bin", None, "adapter_model.safetensors"),
        ("adapter_model.safetensors", "torch-legacy", "adapter_model.bin"),
        ("model.safetensors", "dcp", ".metadata"),
    ],
)
@pytest.mark.parametrize("target", ["out", "v1.5", "out/"])
def test_a_folder_becomes_a_folder_that_its_library_reads(
    beside, tmp_path, name, format, written, target
):
    (beside / "adapter_config.json").write_text("{}")
    folder = model_folder(beside, name)
    receipt = ckptool.convert(folder, f"{tmp_path}/{target}", format=format)
    assert Path(receipt.path) == tmp_path / target / written
    names = {path.name for path in (tmp_path / target).iterdir() if "model" not in path.name}
    beside_weights = {one for one in names if one.endswith(".json")}
    assert beside_weights - {"adapter_config.json"} == {"config.json", "tokenizer.json"}
    assert ("adapter_config.json" in beside_weights) == name.startswith("adapter")
    assert torch.equal(ckptool.load(tmp_path / target)["w"], torch.ones(6, 2))


@pytest.mark.parametrize(
    ("file", "library"),
    [("adapter_config.json", "adapter_model"), ("config.json", "diffusion_pytorch_model")],
)
def test_files_from_say_which_library_reads_a_file(tmp_path, file, library):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / file).write_text('{"_diffusers_version": "0.30"}')
    receipt = ckptool.convert(weights(tmp_path), tmp_path / "out", files_from=tmp_path / "from")
    assert receipt.path == str(tmp_path / "out" / f"{library}.safetensors")
    assert (tmp_path / "out" / file).exists()


def test_the_file_that_opens_a_folder_brings_its_companions_and_another_none(beside, tmp_path):
    folder = model_folder(beside, "pytorch_model.bin")
    shutil.copy(folder / "pytorch_model.bin", folder / "other.bin")
    for name, brings in [("pytorch_model.bin", True), ("other.bin", False)]:
        ckptool.convert(folder / name, f"{tmp_path}/{name}.out/")
        assert (tmp_path / f"{name}.out" / "config.json").exists() == brings
    receipt = ckptool.convert(folder, folder)  # its own folder: they are there
    assert receipt.path == str(folder / "model.safetensors")
    assert not [note for note in receipt.notes if "config.json" in note]


@pytest.mark.parametrize("text", ["3", "null", "[1]", '"_diffusers_version"', "{", "[" * 100_000])
def test_a_configuration_that_is_no_object_is_copied_and_not_read(beside, tmp_path, text):
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json"):
        (beside / name).unlink()
    torch.save({"w": torch.ones(2)}, beside / "weights.pth")
    (beside / "config.json").write_text(text)
    ckptool.convert(beside / "weights.pth", f"{tmp_path / 'out'}/", files_from=beside)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_weights_that_a_library_may_read_instead_are_named(tmp_path):
    out, source = f"{tmp_path / 'out'}/", weights(tmp_path)
    assert not any("instead" in note for note in ckptool.convert(source, out).notes)
    receipt = ckptool.convert(source, out, max_shard_size=30, overwrite=True)
    said = "kept model.safetensors in the folder: transformers may read that instead"
    assert said in receipt.notes
    receipt = ckptool.convert(source, out, overwrite=True)
    assert any("kept model.safetensors.index.json in" in note for note in receipt.notes)
