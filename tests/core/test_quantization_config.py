"""What configurations and headers state about quantization."""

import json

import pytest

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.quantization_config import plain_header, quantization_config


def stated(tmp_path, config=None, **header):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(tmp_path / "model.safetensors")
    return quantization_config(Checkpoint({}, "safetensors", path, Details(header=header)))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        (GPTQ, ("4 bits", "groups of 128")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, ("4 bits", "groups of 64")),
        ({**GPTQ, "group_size": -1}, ("4 bits",)),
        ({**GPTQ, "bits": True, "group_size": "128"}, ()),
        ({"quant_method": "c", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
         ("8 bits",)),
        ({"quant_method": "c", "config_groups": {"group_0": {"weights": None}}}, ()),
    ],
)  # fmt: skip
def test_bits_and_group_sizes_are_known_by_the_words_of_each_method(tmp_path, entries, sizes):
    found = stated(tmp_path, {"model_type": "llama", "quantization_config": entries})
    assert (found.method, found.where) == (entries["quant_method"], "config.json")
    assert found.sizes == sizes
    assert found.model_type == "llama"


def test_mlx_comes_before_the_configuration_of_its_source(tmp_path):
    own = {"bits": 8, "group_size": 32}
    found = stated(tmp_path, {"quantization_config": GPTQ, "quantization": own})
    assert (found.method, found.entries) == ("MLX", own)


def test_the_header_of_a_file_states_what_torchao_needs(tmp_path):
    entry = {"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}
    found = stated(tmp_path, tensor_names='["a.weight"]', **{"a.weight": json.dumps(entry)})
    assert found.method == ""
    assert found.header == {"tensor_names": ["a.weight"], "a.weight": entry}


def test_a_plain_header_keeps_what_marks_nothing_as_quantized():
    kept = {"format": "pt", "note": '{"type": 1}', "text": "mlx", "list": "[1"}
    marks = {
        "tensor_names": '["a.weight"]',
        "a.weight": '{"_type": "Tensor"}',
        "quantization_config": "{}",
        "quantization": "{}",
    }
    assert plain_header({**kept, **marks}) == kept
    assert plain_header({"format": "mlx"}) == {}
