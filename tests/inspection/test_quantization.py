"""What quantized a file, and who loads it, by configurations and metadata."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ckptool.diagnosis.info import info

STATE = {"l.codes": torch.ones(8, 8, dtype=torch.int8), "l.steps": torch.ones(8)}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "1 tensor is quantized: aqlm (according to config.json); aqlm loads it",
        ),
        (
            {"quantization_config": {"quant_method": "mine"}},
            "1 tensor is quantized: mine (according to config.json); load it with the "
            "library that wrote it",
        ),
        ({"quantization": {"bits": 4, "group_size": 64}},
         "1 tensor is quantized: MLX (according to config.json, 4 bits, groups of 64); mlx "
         "loads it"),
        ({"quantization_config": "?"}, None),
        ([], None),
        ("not JSON", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_method_is_that_of_the_configuration(tmp_path, config, text):
    save_file(STATE, tmp_path / "m.safetensors")
    if config is not None:
        raw = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(raw)
    shapes = (
        "1 tensor looks quantized, judging by shapes: l.codes with l.steps; "
        "load it with the library that wrote it"
    )
    found = [note for note in info(tmp_path / "m.safetensors").notes if "quantized" in note]
    assert found == [text or shapes]


def test_metadata_and_values_in_the_file_state_the_method_too(tmp_path):
    stated = {"quantization_config": {"quant_method": "hqq"}}
    save_file(STATE, tmp_path / "m.safetensors", {one: json.dumps(stated[one]) for one in stated})
    torch.save({"model": STATE, "config": stated}, tmp_path / "m.pth")
    for name, where in (("m.safetensors", "the metadata"), ("m.pth", "the file")):
        [note] = [note for note in info(tmp_path / name).notes if "quantized" in note]
        assert note == f"1 tensor is quantized: hqq (according to {where}); hqq loads it"


def test_a_method_of_another_name_than_the_tables_is_told_beside_it(tmp_path):
    state = {"l.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(8)}
    save_file(state, tmp_path / "m.safetensors")
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(
        "quantized: fp8 with scales (compressed-tensors according to config.json)" in note
        for note in info(tmp_path / "m.safetensors").notes
    )
