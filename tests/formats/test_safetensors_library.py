"""The second opinion on safetensors files, judged by the library itself."""

import json
import re
import sys

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import WriteError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16,
    torch.uint32, torch.uint64, torch.complex64,
]  # fmt: skip


def problems(path):
    return [(one.kind, one.text) for one in ckptool.verify(path).problems]


def test_both_read_every_type_and_shape_alike(tmp_path):
    tensors = {f"t{at} é": torch.zeros(2, 3).to(dtype) for at, dtype in enumerate(DTYPES)}
    tensors |= {"one": torch.tensor(1.0), "none": torch.zeros(0, 3), "long": torch.ones(1, 1, 2)}
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    assert problems(tmp_path / "m.safetensors") == []
    ckptool.convert(tmp_path / "m.safetensors", tmp_path / "n.safetensors", verify=True)


def test_every_fixture_that_ckptool_accepts_is_accepted(fixtures):
    for path in fixtures.rglob("*.safetensors"):
        assert not [one for one in problems(path) if one[0] == "library"], path


def header(path, text):
    raw = text.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    return path


def test_a_file_that_the_library_alone_rejects_is_a_problem(tmp_path, monkeypatch):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = header(tmp_path / "m.safetensors", json.dumps({"w": entry}))
    assert problems(path) == []

    def rejecting(*_, **__):
        raise safetensors.SafetensorError("Error while deserializing header: InvalidHeader")

    monkeypatch.setattr(safetensors, "safe_open", rejecting)
    ((kind, text),) = problems(path)
    assert kind == "library"
    assert text.startswith(f"the library safetensors {safetensors.__version__} rejects it: Error")
    with pytest.raises(WriteError, match="rejects it"):
        ckptool.convert(path, tmp_path / "n.safetensors", verify=True)
    assert not (tmp_path / "n.safetensors").exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["w"], r"reads w as F16 \[3\], and ckptool as F32 \[2\]"),
        (["w", "v"], r"reads v as F16 \[3\], and ckptool as missing"),
        ([], r"reads w as missing, and ckptool as F32 \[2\]"),
    ],
)
def test_another_reading_is_a_problem(tmp_path, monkeypatch, keys, says):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")

    class Other:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def keys(self):
            return keys

        def get_slice(self, name):
            return self

        def get_dtype(self):
            return "F16"

        def get_shape(self):
            return [3]

    monkeypatch.setattr(safetensors, "safe_open", Other)
    ((kind, text),) = problems(tmp_path / "m.safetensors")
    assert kind == "library"
    assert re.search(says, text)


def test_without_the_library_there_is_no_second_opinion(tmp_path, monkeypatch):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert ckptool.verify(tmp_path / "m.safetensors").ok
