"""Files that a transfer broke: copied as text, begun again, with bytes of no tensor."""

import io
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import ckptool
from ckptool.errors import CheckpointError, CorruptFile, UnsupportedFormat
from ckptool.formats import open_checkpoint

TENSORS = {f"l{i}.weight": torch.arange(i, i + 1024.0) for i in range(3)}


def torch_bytes(**how):
    file = io.BytesIO()
    torch.save(TENSORS, file, **how)
    return file.getvalue()


FILES = {
    "zip.pth": torch_bytes(),
    "legacy.pth": torch_bytes(_use_new_zipfile_serialization=False),
    "flat.safetensors": save({**TENSORS, "n": torch.full((64,), 0x0A0A, dtype=torch.int16)}),
}
AS_TEXT = {
    "crlf": lambda raw: raw.replace(b"\n", b"\r\n"),
    "utf8": lambda raw: raw.decode("utf-8", "replace").encode(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", AS_TEXT)
@pytest.mark.parametrize("salvage", [False, True])
def test_a_file_transferred_as_text_is_told_in_one_sentence(tmp_path, name, how, salvage):
    path = tmp_path / name
    path.write_bytes(AS_TEXT[how](FILES[name]))
    with pytest.raises(CorruptFile, match="transferred as text") as caught:
        open_checkpoint(path, salvage=salvage)
    assert "binary mode" in caught.value.hint


@pytest.mark.parametrize("name", FILES)
def test_intact_and_truncated_files_are_not_taken_for_text(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with open_checkpoint(path) as checkpoint:
        assert sum(1 for _ in checkpoint.tensors()) >= 3
    path.write_bytes(FILES[name][:-700])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "as text" not in caught.value.message


def with_gap(raw):
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [at + 64 for at in entry["data_offsets"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\1" * 64 + raw[8 + length :]


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        (with_gap, 64),
        (lambda raw: raw + b"\2" * 100, 100),
        (lambda raw: raw[: len(raw) // 2] + raw, None),
        (lambda raw: raw[:-9000] + raw[:-8500] + raw, None),
    ],
    ids=["gap", "behind", "again", "twice again"],
)
def test_every_tensor_of_a_safetensors_file_with_other_bytes_is_salvaged(tmp_path, broken, lost):
    path, out = tmp_path / "a b.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(broken(save(TENSORS)))
    with pytest.raises(CorruptFile) as caught:
        ckptool.convert(path, out)
    target = tmp_path / "a b.salvaged.safetensors"
    assert f"ckptool convert --salvage '{path}' '{target}'" in caught.value.hint
    receipt = ckptool.convert(path, out, ckptool.Salvage())
    loaded = load_file(out)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    (left,) = receipt.left_out
    count = path.stat().st_size - len(save(TENSORS)) if lost is None else lost
    assert f"{count:,} bytes" in left


def test_tensors_that_overlap_are_not_salvaged(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    text = json.dumps({"a": entry, "b": {**entry, "data_offsets": [4, 12]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    for salvage in (False, True):
        with pytest.raises(CorruptFile, match="'b' begins at 4") as caught:
            open_checkpoint(path, salvage=salvage)
        assert "--salvage" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "part"),
    [*((name, part) for name in ("zip.pth", "legacy.pth") for part in (0.3, 0.5, 0.95, 0.99)),
     ("zip.pth", 1)],
)  # fmt: skip
def test_a_download_of_torch_that_began_again_gives_its_second_copy(tmp_path, name, part):
    path, out, raw = tmp_path / "again.pth", tmp_path / "out.pth", FILES[name]
    path.write_bytes(raw[: int(len(raw) * part)] + raw)
    with pytest.raises(
        CorruptFile, match="the download restarted: a second copy of the file begins at offset"
    ) as caught:
        open_checkpoint(path)
    assert "distcp" not in str(caught.value)
    receipt = ckptool.convert(path, out, ckptool.Salvage())
    assert all(change.count == 0 for change in receipt.changes if change.kind == "salvage")
    loaded = torch.load(out)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_two_archives_of_other_tensors_are_no_second_copy(tmp_path):
    with open(tmp_path / "two.pth", "wb") as file:
        for fill in (0.0, 1.0):
            torch.save(torch.full((4,), fill), one := io.BytesIO())
            file.write(one.getvalue())
    with pytest.raises(UnsupportedFormat, match="distcp"):
        open_checkpoint(tmp_path / "two.pth")


def test_two_objects_in_one_stream_are_no_second_copy(tmp_path):
    path, raw = tmp_path / "two.pth", FILES["legacy.pth"]
    path.write_bytes(raw + raw)
    with open_checkpoint(path) as checkpoint:
        assert "(not read): another torch.save stream" in checkpoint.details.left_behind[0]
    inner = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    torch.save({"blob": inner}, path, _use_new_zipfile_serialization=False)
    with open(path, "ab") as file:
        file.write(b"more")
    assert torch.equal(ckptool.load_state_dict(path)["blob"], inner)


def test_a_whole_file_beside_complete_shards_without_an_index_is_asked_about(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:  # one shard is missing: no set
        assert sum(1 for _ in checkpoint.tensors()) == 3
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_checkpoint(tmp_path)
