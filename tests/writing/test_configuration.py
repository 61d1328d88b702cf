"""The configuration next to a result follows what was changed in the weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.conversions import convert_by_options

TEXT = """{
   "quantization_config" : {"quant_method": "fp8", "l": [1, 2]},
 "eps":1E-05, "vocab_size":10, "name": "ü \\u00fc",
  "text_config": {"dtype":"float32",  "vocab_size": 10},
  "torch_dtype": "float32"
}
"""
TYPE = "torch_dtype"
EMBEDDING = {"embed.weight": torch.ones(10, 4), "norm.weight": torch.ones(4)}
FP8 = {"l.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(())}


@pytest.fixture
def converted(tmp_path):
    def convert(state, text=TEXT, **options):
        folder = tmp_path / "in"
        folder.mkdir()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
        receipt = convert_by_options(folder, f"{tmp_path}/out/", files_from=folder, **options)
        notes = [note for note in receipt.notes if note.startswith("config.json")]
        warnings = [one.text for one in receipt.changes if one.kind == "warning"]
        return (tmp_path / "out" / "config.json").read_bytes().decode(), notes, warnings

    return convert


@pytest.mark.parametrize(
    ("state", "options", "edits", "notes"),
    [
        (EMBEDDING, {}, [], []),
        (
            EMBEDDING, {"resize": ["embed.weight=12"]},
            [(f"size\":{space}10", f"size\":{space}12") for space in ("", " ")],
            ["config.json: vocab_size 10 -> 12", "config.json: text_config.vocab_size 10 -> 12"],
        ),
        (
            EMBEDDING, {"dtype": "bfloat16"}, [("float32", "bfloat16")],
            [f"config.json: {key} float32 -> bfloat16" for key in ("text_config.dtype", TYPE)],
        ),
        (
            FP8, {"dequantize": "float32"},
            [('"quantization_config" : {"quant_method": "fp8", "l": [1, 2]},\n ', "")],
            ["config.json: removed quantization_config"],
        ),
    ],
)  # fmt: skip
def test_only_what_changed_is_edited(converted, state, options, edits, notes):
    text, told, warnings = converted(state, **options)
    wanted = TEXT
    for old, new in edits:
        assert old in TEXT
        wanted = wanted.replace(old, new)
    assert text == wanted
    assert (told, warnings) == (notes, [])
    json.loads(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"quantization_config":{}}', "{}"),
        ('{"a":1,"quantization_config":{}}', '{"a":1}'),
        ('{"quantization":{},"quantization_config":{}}', "{}"),
        ('{"quantization":{}, "quantization_config":{}, "a":1}', '{"a":1}'),
        ('{"quantization":{}, "a":1 ,"quantization_config":{}}', '{"a":1}'),
        ('{"a":1 , "quantization_config":{}, "b":[]}', '{"a":1, "b":[]}'),
        ("{}", "{}"),
    ],
)
def test_the_rest_is_json_wherever_the_entry_was(converted, text, wanted):
    assert converted(FP8, text, dequantize="float32")[0] == wanted


def test_values_that_do_not_fit_the_file_are_warnings(converted):
    text, _, warnings = converted(
        EMBEDDING, '{"vocab_size": 11, "dtype": "float16", "torch_dtype": "auto"}',
        resize=["embed.weight=12"], dtype="bfloat16",
    )  # fmt: skip
    assert json.loads(text) == {"vocab_size": 11, "dtype": "bfloat16", "torch_dtype": "auto"}
    assert warnings == [
        "config.json: vocab_size is 11, but the resized tensors had 10 rows",
        "config.json: dtype was float16, but the file had float32",
    ]


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_configuration_that_cannot_be_read_is_copied_with_a_warning(converted, text):
    made, notes, [warning] = converted(EMBEDDING, text, dtype="float16")
    assert (made, notes) == (text, [])
    assert warning.startswith("config.json is not a valid JSON object")
