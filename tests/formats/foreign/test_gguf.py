"""GGUF: read as its own package reads it, and refused where the header lies."""

import random
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "gguf"
    sample = "gguf/plain.gguf"


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(name="w", sizes=(2,), type=0, offset=0):
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, type, offset)


def file(path, *entries, facts=(), version=3, data=bytes(64), tensors=None):
    head = struct.pack("<4sIQQ", b"GGUF", version, len(entries), len(facts))
    if tensors is not None:
        head = struct.pack("<4sIQQ", b"GGUF", version, tensors, len(facts))
    raw = head + b"".join(facts) + b"".join(entries)
    path.write_bytes(raw + bytes(-len(raw) % 32) + data)
    return path


@pytest.fixture
def made(tmp_path):
    return lambda *entries, **options: file(tmp_path / "m.gguf", *entries, **options)


@pytest.fixture
def find_quantized(fixtures):
    return fixtures / "gguf/quantised.gguf"


def test_quantized_tensors_are_converted_to_what_they_mean(find_quantized, tmp_path):
    state = ckptool.load_state_dict(find_quantized)
    assert main(["convert", str(find_quantized), str(tmp_path / "m.safetensors")]) == 0
    assert main(["convert", str(find_quantized), str(tmp_path / "m.pth")]) == 0
    for found in (load_file(tmp_path / "m.safetensors"), torch.load(tmp_path / "m.pth")):
        assert found.keys() == state.keys()
        assert all(found[name].equal(state[name]) for name in state)


def test_any_run_of_a_quantized_tensor_is_that_of_the_whole(find_quantized):
    chance = random.Random(3)
    with open_checkpoint(find_quantized) as checkpoint:
        for _, tensor in checkpoint.tensors():
            whole = tensor.data.read()
            for _ in range(20):
                start = chance.randrange(len(whole))
                length = chance.randrange(len(whole) - start + 1)
                assert tensor.data.read(start, length) == whole[start : start + length]


def test_without_the_package_the_names_are_there(find_quantized, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["list", str(find_quantized)]) == 0
    assert main(["info", str(find_quantized)]) == 0
    assert "13 tensors are quantized (Q8_0 (1)" in capfd.readouterr().out
    assert main(["convert", str(find_quantized), str(tmp_path / "m.pth")]) == 2
    assert "pip install gguf" in capfd.readouterr().err


def test_shapes_are_those_of_torch(made):
    with open_checkpoint(made(entry(sizes=(4, 3)))) as checkpoint:
        assert checkpoint.root["w"].shape == (3, 4)
    with open_checkpoint(made(entry(sizes=()))) as checkpoint:
        assert checkpoint.root["w"].shape == ()


def test_the_alignment_that_the_file_states(made):
    stated = text("general.alignment") + struct.pack("<II", 4, 8)
    raw = made(entry(), facts=[stated]).read_bytes()
    header = len(raw) - 64
    with open_checkpoint(made(entry(), facts=[stated])) as checkpoint:
        offset = checkpoint.root["w"].storage.data.offset
    assert offset % 8 == 0
    assert header - 32 < offset <= header


def test_a_header_that_lies(made):
    for entries, options, words in [
        ([entry(), entry()], {}, "tensor 'w' occurs twice"),
        ([entry(sizes=(99,))], {}, "'w': cannot read 396 bytes"),
        ([entry(offset=1 << 62)], {}, "'w': cannot read 8 bytes"),
        ([entry(sizes=(1 << 62, 1 << 62))], {}, "'w': cannot read .* bytes"),
        ([entry(sizes=(33,), type=8)], {}, "rows of 33 elements, in blocks of 32"),
        ([entry()], {"tensors": 1 << 60}, "ends within a value"),
        ([], {"facts": [text("a") + struct.pack("<I", 77)]}, "type 77"),
        ([], {"facts": [text("a") + struct.pack("<IIQ", 9, 4, 1 << 60)]}, "ends within a value"),
        ([], {"facts": [text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)]}, "ends within a value"),
        ([], {"facts": [text("a") + struct.pack("<IIQIQIQ", 9, 9, 1, 9, 1, 9, 1)]}, "type 9"),
        ([], {"facts": [text("general.alignment") + struct.pack("<II", 4, 0)]}, "alignment is 0"),
        ([], {"facts": [struct.pack("<Q", 1 << 63)]}, "ends within a value"),
    ]:
        with pytest.raises(CorruptFile, match=words):
            open_checkpoint(made(*entries, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"version": 1}, "version 1"), ({"version": 3 << 24}, "is big-endian")],
)
def test_versions_that_are_not_read(made, options, words):
    with pytest.raises(UnsupportedFormat, match=words):
        open_checkpoint(made(entry(), **options))


def test_a_tensor_of_an_unknown_type_is_listed_and_only_it_is_refused(made, tmp_path):
    path = made(entry("a"), entry("b", (64,), type=4, offset=32))
    with open_checkpoint(path) as checkpoint:
        assert [name for (name,), _ in checkpoint.tensors()] == ["a", "b"]
        assert "cannot read 1 tensor of GGUF type 4: b" in checkpoint.details.notes[0]
    out = tmp_path / "out.safetensors"
    with pytest.raises(UnsupportedFormat, match="'b' has GGUF type 4, which ckptool does not know"):
        ckptool.convert(path, out)
    assert not out.exists()
    ckptool.convert(path, out, ckptool.Take(exclude=["b"]))
    assert load_file(out)["a"].tolist() == [0, 0]


def test_an_unknown_type_does_not_hide_a_shape_that_cannot_be(made):
    with pytest.raises(CorruptFile, match="too small for its shape"):
        open_checkpoint(made(entry(sizes=(1 << 40,), type=4)))


def test_a_header_beyond_the_limit(made):
    path = made(entry(name="n" * 500))
    with pytest.raises(LimitExceeded, match="the header has 532 bytes, more than the limit of 400"):
        open_checkpoint(path, limits=Limits(max_header_bytes=400))
    with pytest.raises(LimitExceeded, match="'w' has 65 dimensions"):
        open_checkpoint(made(entry(sizes=(1,) * 65)))


def test_entries_are_counted(made):
    texts = struct.pack("<IIQ", 9, 8, 100) + text("") * 100
    facts, limits = [text("tokens") + texts], Limits(max_records=50)
    with open_checkpoint(made(entry(), facts=facts)) as checkpoint:
        assert list(checkpoint.root) == ["w"]
    for entries, more in (([entry()], facts), ([entry(str(at)) for at in range(9)], [])):
        with pytest.raises(LimitExceeded, match="too many"):
            open_checkpoint(made(*entries, facts=more), limits=limits)
